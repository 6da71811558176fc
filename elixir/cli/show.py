"""``elixir show | compare | models | hardware``: what is known already, or this machine, measured.

None imports torch, which takes seconds, unless it measures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from elixir.artifact import Artifact, read_json
from elixir.cli import files, output
from elixir.errors import ArtifactError, InputError
from elixir.hardware.learning import learn
from elixir.hardware.profile import HardwareProfile, load_hardware, preset, preset_names
from elixir.models.model_shape import ModelShape, describe, model_names, unknown_model
from elixir.plan.plan import Plan
from elixir.show import tables
from elixir.step_trace import StepTrace


def run_show(args: argparse.Namespace) -> Iterator[output.Said]:
    """Shows any saved artifact, or a trial."""
    trial = files.trial_in(args.file)
    if trial is not None:
        yield from _trial_shown(args, trial)
        return
    artifact = files.load(args.file, Artifact)
    written = files.written(_page(args, artifact))
    yield tables.record_of(artifact)
    if isinstance(artifact, StepTrace):
        yield tables.trace_shown(artifact)
    elif isinstance(artifact, HardwareProfile):
        yield tables.hardware_shown(artifact)
    elif isinstance(artifact, Plan):
        yield str(artifact)
        yield tables.plan_tables(artifact)
    yield from written


def _page(
    args: argparse.Namespace, *artifacts: Artifact, rows: Iterable[tables.Row] = (), **more: Any
) -> tuple[str | None, Callable[[str], object]]:
    """The page of ``--plot``, if there is one, with a view of each artifact, and what is compared above them."""

    def views() -> list[dict[str, Any]]:
        from elixir.cli.pages import view_of

        return [view_of(each, **more) for each in artifacts]

    return files.plotted(args.plot, views, rows=rows)


def _trial_shown(args: argparse.Namespace, trial: dict[str, Any]) -> Iterator[output.Said]:
    plan = Plan.from_dict(trial.get("plan"), source=args.file)
    machine = HardwareProfile.from_dict(trial.get("hardware"), source=args.file)
    figures = trial.get("compared")
    if not (isinstance(figures, list) and all(map(tables.is_figure, figures))):
        raise ArtifactError(f"{args.file}: field 'compared' must list figures, each predicted and measured")
    written = files.written(_page(args, plan, hardware=machine, measured=figures))
    yield trial
    yield str(plan)
    yield tables.measured_table(f"{trial.get('model', plan.model_name)} on {machine.device_name}", figures)
    yield from written


def run_compare(args: argparse.Namespace) -> Iterator[output.Said]:
    """Two artifacts of one kind side by side, their speeds and prices first; or a plan, and what a run has reported."""
    a, report = files.load(args.a, Artifact), files.report_in(args.b)
    if report is not None:
        if not isinstance(a, Plan):
            raise InputError(f"{args.b} is a step's report, which goes with a plan; {args.a} is none")
        figures = tables.report_figures(report)
        if not figures:
            raise ArtifactError(f"{args.b}: no figure of this report is there as predicted and as measured")
        if report.get("predicted_device_peak_bytes", a.predicted.device_peak_bytes) != a.predicted.device_peak_bytes:
            output.note(f"{args.b} is of a run under another plan than {args.a}")
        written = files.written(_page(args, a, measured=figures))
        yield {"a": args.a, "b": args.b, "measured": figures}
        yield tables.measured_table(f"{args.a}, and measured in {args.b}", figures)
        yield from written
        return
    b = files.load(args.b, Artifact)
    rows = tables.compare(a, b, [_costs(each, args.prices) for each in (a, b)])
    written = files.written(_page(args, a, b, rows=rows))
    moved = tables.moved_parameters(a, b) if isinstance(a, Plan) and isinstance(b, Plan) else None
    fields = {name: {"a": left, "b": right, "differs": left != right} for name, left, right in rows}
    yield {"a": args.a, "b": args.b, "fields": fields, **({} if moved is None else {"placed_differently": moved})}
    yield tables.comparison_table(f"{args.a} and {args.b}", rows)
    text = f"{sum(left != right for _, left, right in rows)} of {len(rows)} fields differ"
    if moved is not None:
        names = ", ".join(moved[:5]) + (", ..." if len(moved) > 5 else "")
        same = "every parameter has the same homes in both"
        text += "; " + (f"{len(moved)} parameters are placed differently: {names}" if moved else same)
    yield text
    yield from written


def _costs(artifact: Artifact, path: str | None) -> dict[str, Any]:
    """The cost of a plan by a price file; empty without one."""
    if path is None:
        return {}
    from elixir.search.whatif.prices import Prices
    from elixir.search.whatif.sweep import SweepRow

    if not isinstance(artifact, Plan):
        raise InputError("--prices goes with two plans")
    prices, size = Prices.read(path), (artifact.step.samples or 1, artifact.step.seq, artifact.dtype)
    budgets = artifact.device_budget_bytes, artifact.host_budget_bytes
    row = SweepRow(artifact.model_name, artifact.hardware_name, artifact.world_size, *size, True, "", *budgets)
    cost = prices.cost(replace(row, tokens_per_s=artifact.tokens_per_s))
    names = (f"{prices.currency} an hour", f"{prices.currency} a million tokens")
    return dict(zip(names, (None, None) if cost is None else (cost.per_hour, cost.per_million), strict=True))


def run_models(args: argparse.Namespace) -> Iterator[output.Said]:
    """The models known by name, or those whose names have all words."""
    shapes = [shape for shape in map(describe, model_names()) if _named(shape, args.words)]
    if not shapes:
        raise unknown_model(" ".join(args.words))
    sizes = ("layers", "hidden", "heads", "ffn", "positions")
    more = ("parameters", "source", "hub", "family", "kv_heads", "vocabulary", "config")
    yield {shape.name: {key: getattr(shape, key) for key in (*more, *sizes)} for shape in shapes}
    rows = []
    for shape in shapes:
        shown = [tables.show_value(key, getattr(shape, key)) for key in sizes]
        rows.append([shape.name, f"{(shape.parameters or 0) / 1e9:,.3f} B", *shown])
    yield tables.list_table("models known by name", ("name", "parameters", *sizes), rows)
    if args.words:
        yield "\n".join(f"{shape.name}: {', '.join(shape.hub) or 'not on the hub'}" for shape in shapes)


def _named(shape: ModelShape, words: Iterable[str]) -> bool:
    """Whether each word is a part of one of the model's names, in any case."""
    names = " ".join((shape.name, *shape.hub)).lower()
    return all(word.lower() in names for word in words)


def run_hardware(args: argparse.Namespace) -> Iterator[output.Said]:
    """Lists presets, shows one, or measures this machine."""
    if not (args.measure or args.learn or args.show is not None):
        profiles = [preset(name) for name in preset_names()]
        yield {profile.name: tables.record_of(profile) for profile in profiles}
        yield tables.presets_table(profiles)
        yield "elixir hardware --show NAME gives every number with its source; --measure fills in this machine"
        return
    profile = _measured(args) if args.measure else _learned(args.show, args.learn)
    if profile is None:
        return
    written = files.written((args.out, profile.save))
    yield profile.to_dict()
    yield tables.hardware_shown(profile)
    yield from written


def _learned(name: str | None, path: str | None) -> HardwareProfile:
    """The profile that was named, after the steps in a file, if there is one: of one report, of a list of them, or of a
    trial, which has its profile."""
    if path is None:
        return load_hardware(str(name))
    found = read_json(path)
    trial = found if isinstance(found, dict) and {"hardware", "steps"} <= found.keys() else None
    if name is None and trial is None:
        raise InputError(
            "--learn goes with --show NAME, the profile that the run was planned with, unless FILE is of `elixir try`"
        )
    reports = trial["steps"] if trial else found if isinstance(found, list) else [found]
    if not (isinstance(reports, list) and all(isinstance(report, dict) for report in reports)):
        raise ArtifactError(f"{path}: expected the numbers of a step's report, or a list of such, found neither")
    if trial and name is None:
        return learn(HardwareProfile.from_dict(trial["hardware"], source=path), reports)
    return learn(load_hardware(str(name)), reports)


def _measured(args: argparse.Namespace) -> HardwareProfile | None:
    """This machine. All ranks measure the same profile; None for all but the first, which alone has a bar and says
    it."""
    from elixir.microbench import measure
    from elixir.microbench.disk import check_folder
    from elixir.microbench.ranks import joined

    for folder in args.disk_folder or ():
        check_folder(folder, quick=bool(args.quick))
    with joined() as ranks, output.progress(lines=True, bar=ranks.rank == 0) as progress:
        profile = measure(progress, quick=bool(args.quick), ranks=ranks, disk_folder=args.disk_folder)
    return profile if ranks.rank == 0 else None
