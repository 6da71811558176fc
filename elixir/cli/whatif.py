"""``elixir sweep | fit | explain | timeline``: what people ask before they buy a machine or wait for a run."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from elixir.artifact import write_atomically
from elixir.cli import INTERRUPTED_STATUS, files, from_flags, output
from elixir.errors import InputError, unknown_name
from elixir.hardware.profile import HardwareProfile, preset, preset_names
from elixir.models.model_shape import find
from elixir.plan.plan import Plan
from elixir.search.question import StepQuestion
from elixir.search.simulator.simulation import simulate_step
from elixir.search.whatif.explanation import explain
from elixir.search.whatif.prices import Prices
from elixir.search.whatif.settings import FEWER_BITS
from elixir.search.whatif.sweep import (
    HOST_PER_DEVICE_BYTE,
    METHODS,
    Choices,
    Fit,
    SweepInterrupted,
    SweepRow,
    fit,
    sweep,
    with_network,
)
from elixir.show.explanation_tables import explanation_record, explanation_shown
from elixir.show.page import plan_view
from elixir.show.style import FORMATS, RESOURCE_LABELS
from elixir.show.sweep import cost_text, fit_table, plot_sweep, reasons, row_text, settings_text, sweep_table, to_frame
from elixir.show.tables import plan_levers_table
from elixir.show.timeline import plot_timeline, save_chrome_trace
from elixir.show.what_to_write import YOURS, code_text, what_to_write
from elixir.step_trace import StepTrace
from elixir.units import format_bytes, format_seconds

UNSOLVED_STATUS = 2
"""No known machine can do it: as for a plan that cannot fit."""


def run_sweep(args: argparse.Namespace) -> Iterator[output.Said]:
    """Every combination of models, machines, world sizes and batches on paper."""
    for model in args.models:
        files.refuse_artifact(model)
    if args.runtime:
        from elixir.cli import peers

        yield from peers.run_sweep(args)
        return
    prices, machines = _prices(args), _machines(args, args.hardware)
    rows, interrupted = _tried(args, partial(sweep, args.models, machines, args.world_sizes, args.batches))
    written = files.written(
        (args.csv, lambda path: write_atomically(path, to_frame(rows).to_csv(index=False))),
        (args.plot, lambda path: plot_sweep(rows, path)),
    )
    yield _rows_record(rows, prices)
    yield _rows_shown(rows, "on paper", prices)
    yield from _conclusion(args, rows, machines, prices)
    yield from written
    if interrupted is not None:
        yield _cut_short(args, interrupted)


def run_fit(args: argparse.Namespace) -> Iterator[output.Said]:
    """The best settings of each method on the machines that were named, or the smallest that can train a model."""
    files.refuse_artifact(args.model)
    if args.runtime:
        from elixir.cli import peers

        yield from peers.run_fit(args)
        return
    prices, names, methods = _prices(args), args.hardware, _methods(args)
    if names is None and args.devices_per_host is not None:
        names = [name for name in preset_names() if preset(name).device_kind == "cuda"]
    machines = None if names is None else _machines(args, names)
    asked = partial(
        fit,
        args.model,
        machines,
        batch=args.batch or 1,
        counts=args.world_sizes or ([1] if args.hardware else None),
        methods=methods,
        choices=_choices(args),
        each_machine=bool(args.hardware) or len(methods) == 1,
    )
    found, interrupted = _tried(args, asked)
    assumed = ("host_budget",) if args.host_budget is None else ()  # of the host's memory only what was given
    kind = "" if find(args.model) is not None else type(from_flags.step_asked(args, model=args.model).build()).__name__
    written = [{} if each is None else what_to_write(each, kind, without=assumed) for each in found.answers]
    record = _rows_record(found.rows, prices)
    for row, code in zip(record["rows"], written, strict=True):
        row["what_to_write"] = code
    best = None if found.best is None else record["rows"][0]
    yield {"model": found.model, "best": best, **record}
    yield from _fit_shown(args, found, prices)
    if found.best is not None:
        yield from _cost(found.best, prices, args.tokens)
    yield from _conclusion(args, found.rows, machines, prices)
    if not args.brief:
        yield from _code_shown(found.rows, written, each=bool(args.hardware))
    if interrupted is not None:
        yield _cut_short(args, interrupted)
    elif best is None:
        print(
            f"elixir fit: {found.model} fits no machine that was tried; `elixir plan {args.model}` with --hardware and "
            "the flags of the step lists all that would help",
            file=sys.stderr,
        )
        yield UNSOLVED_STATUS


def _methods(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The methods that are asked for, with rank and form as flags say.

    Raises:
        InputError: a method is unknown.
    """
    only = "qlora" if args.quantised else "lora"
    names = args.methods or ([only] if args.quantised or args.lora else METHODS)
    unknown = next((name for name in names if name not in METHODS), None)
    if unknown is not None:
        raise unknown_name("method", unknown, METHODS)
    flags = {"lora": args.lora, "quantised": args.quantised}
    return {name: {key: flags[key] or value for key, value in METHODS[name].items()} for name in names}


def _choices(args: argparse.Namespace) -> Choices:
    """The settings that no flag has settled."""
    settled = any(value is not None for value in (args.accumulation, args.pass_size, args.inp)) or not args.hardware
    return Choices(
        micro_batch="given" if settled else "any" if args.batch is None else "of a step",
        moments=args.moments is None,
        activations=args.checkpoint is None,
        exact=bool(args.hardware),
    )


def _code_shown(rows: Sequence[SweepRow], codes: Sequence[dict[str, str]], *, each: bool) -> Iterator[str]:
    """Shows the code for each row that fits, or for the smallest machine of each method."""
    seen = set[str | None]()
    for row, code in zip(rows, codes, strict=True):
        if code and (each or row.method not in seen):
            if not seen:
                yield YOURS
            seen.add(row.method)
            yield code_text(f"{row.method} on {row.world_size} x {row.machine}: {settings_text(row)}", code)


def _fit_shown(args: argparse.Namespace, found: Fit, prices: Prices | None) -> Iterator[output.Shown]:
    """The rows, why some do not fit, and what the settings leave open."""
    rows = found.rows
    seq = next((row.seq for row in rows if row.seq), None)
    yield fit_table(rows, f"{found.model}{f', {seq:,} tokens a sample' if seq else ''}", prices)
    for number, reason in enumerate(reasons(rows), 1):
        enough = next((row.enough for row in rows if row.reason == reason and row.enough), "")
        name, _, value = enough.partition("=")
        advice = f"; --{name.replace('_', '-')} {value} suffices" if enough else ""
        yield f"[{number}] {reason}{advice}"
    fitting = [row for row in rows if row.fits]
    if any(row.moments == FEWER_BITS for row in fitting) and args.moments is None:
        yield "moments in 8 bits change numbers a little; --moments float32 goes without"
    if fitting and args.batch is None and args.accumulation is None:
        chosen = "is the fastest" if args.hardware else "is 1; --hardware NAME chooses it"
        yield f"the micro-batch {chosen}; accumulate as many as a step is to have (--batch says how many samples)"


def _tried(args: argparse.Namespace, ask: Callable[..., Any]) -> tuple[Any, SweepInterrupted | None]:
    """The outcome of a sweep or a fit, of whose rows standard error tells as they come; and the interrupt that ended
    it, if one did."""
    asked = from_flags.asked(args, from_flags.optimizer_asked(args.optimizer))
    lines: list[str] = []

    def tell(row: SweepRow) -> None:
        lines.append(row_text(row))
        if not sys.stderr.isatty():  # on a terminal the rows so far go when the table comes
            print(lines[-1], file=sys.stderr, flush=True)

    try:
        with output.progress() as progress:

            def say(text: str, done: int, count: int) -> None:
                progress("\n".join((*lines, text)), done, count)

            step = from_flags.step_asked(args)
            if args.command == "fit":  # methods say which adapters, and a model without fused kernels runs as it is
                step = replace(step, lora=None, quantised=None, use_fused_kernels=True)
            more: dict[str, Any] = {"network_bytes_per_s": args.network, "progress": say, "each": tell}
            return ask(step=step, asked=asked, **more), None
    except SweepInterrupted as stop:
        return stop.found, stop


def _cut_short(args: argparse.Namespace, interrupted: SweepInterrupted) -> int:
    """Says that an interrupt ended a command whose rows so far are printed; the exit status."""
    print(f"elixir {args.command}: {interrupted}; all rows so far are printed", file=sys.stderr)
    return INTERRUPTED_STATUS


def _machines(args: argparse.Namespace, names: Sequence[str]) -> list[HardwareProfile]:
    return [with_network(files.find_timed_hardware(name), None, args.devices_per_host) for name in names]


def run_explain(args: argparse.Namespace) -> Iterator[output.Said]:
    """Explains why every chunk of a plan is where it is."""
    plan, trace, hardware = _planned(args)
    with output.progress() as progress:
        found = explain(plan, trace, hardware, levers=not args.no_levers, progress=progress)
    view = partial(plan_view, plan, trace, hardware, explanation=found, levers=found.changes)
    written = files.written(files.plotted(args.plot, lambda: [view()]))
    yield {"plan": plan.fingerprint, "hardware": hardware.name, **explanation_record(found)}
    yield f"plan {plan.fingerprint}: {plan.model_name} on {plan.world_size} x {hardware.name}"
    yield explanation_shown(found, 0 if args.brief else args.top)
    if found.changes and not args.brief:
        yield plan_levers_table(plan, found.changes)
    yield from written


def run_timeline(args: argparse.Namespace) -> Iterator[output.Said]:
    """A simulated step as a picture, or as a Chrome trace."""
    chrome = args.out.lower().endswith(".json")
    if not chrome and Path(args.out).suffix.lower().removeprefix(".") not in FORMATS:
        raise InputError(f"{args.out!r}: end it in .png, .pdf or .svg for a picture, in .json for a Chrome trace")
    plan, trace, hardware = _planned(args)
    simulated = simulate_step(plan, trace, hardware, accumulation=args.accumulation)
    title = f"{plan.model_name} on {plan.world_size} x {hardware.name}"
    picture = partial(plot_timeline, simulated, title=title)
    save = partial(save_chrome_trace, simulated, plan=plan, trace=trace)
    written = files.written((args.out, save if chrome else picture))
    names = ("step_s", "bound_by", "phases_s", "busy_s", "critical_s")
    yield {**{name: getattr(simulated, name) for name in names}, "written": args.out}
    phases = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in simulated.phases_s.items())
    yield f"{format_seconds(simulated.step_s)} a step ({phases}), bound by {RESOURCE_LABELS[simulated.bound_by]}"
    yield from written


def _planned(args: argparse.Namespace) -> tuple[Plan, StepTrace, HardwareProfile]:
    """The plan of a question, the trace it was made from, and the machine that was named, or the preset that the plan
    was made for.

    Without a trace, the step of a named model is traced again as it was, but for the flags given. A plan file runs no
    code: other models need their trace.
    """
    plan = files.load(args.plan, Plan)
    planned_for = preset(plan.hardware_name) if plan.hardware_name in preset_names() else None
    named = planned_for if args.hardware is None else files.find_timed_hardware(args.hardware)
    if named is None:
        raise InputError(
            f"{args.plan} was planned for {plan.hardware_name!r}, which is no preset; give its profile with --hardware"
        )
    hardware = with_network(named, args.network, args.devices_per_host)
    if hardware.fingerprint != plan.hardware_fingerprint:
        if args.hardware is None:
            raise InputError(
                f"{args.plan} was planned for a {plan.hardware_name!r} with other numbers than the preset has now; "
                "give --hardware, or --network and --devices-per-host as it was planned with, or plan again"
            )
        other = "" if hardware.name != plan.hardware_name else " with other numbers"
        output.note(f"{args.plan} was planned for {plan.hardware_name}{other}; times here are those of {hardware.name}")
    step = ("batch", "seq", "positions", "checkpoint", "fused_kernels", "compile")
    if args.trace is not None:
        from_flags.refuse_settled(args, args.trace, step)
        return plan, files.load(args.trace, StepTrace), hardware
    if find(plan.model_name) is None or plan.step.checkpoint is None:
        why = "which is none of the models known by name"
        if find(plan.model_name) is not None:
            why = "with an input or a step that the plan does not hold"
        raise InputError(
            f"{args.plan} is for {plan.model_name!r}, {why}; give the trace it was made from as well, which "
            "`elixir profile --out trace.json` saves"
        )
    given = {name: getattr(args, name) for name in step if getattr(args, name) is not None}
    if "fused_kernels" in given:
        given["use_fused_kernels"] = given.pop("fused_kernels")
    # The kernels of a step are those of the card that was planned for.
    return plan, replace(StepQuestion.again(plan), **given).trace(planned_for or hardware), hardware


def _prices(args: argparse.Namespace) -> Prices | None:
    """The user's price file, read before anything is traced; None without one."""
    return None if args.prices is None else Prices.read(args.prices)


def _rows_record(rows: Sequence[SweepRow], prices: Prices | None) -> dict[str, Any]:
    """The rows for JSON, each with its cost if there is a price file."""
    records = [dataclasses.asdict(row) for row in rows]
    if prices is None:
        return {"rows": records}
    for row, record in zip(rows, records, strict=True):
        cost = prices.cost(row)
        record["cost"] = cost and {"per_hour": cost.per_hour, f"per_million_{cost.unit}": cost.per_million}
    return {"currency": prices.currency, "rows": records}


def _cost(row: SweepRow, prices: Prices | None, amount: float | None) -> Iterator[str]:
    """The cost of a row, if there is a price file; notes that it does not name the machine."""
    cost = None if prices is None else prices.cost(row)
    if cost is not None and prices is not None:
        yield cost_text(row, cost, prices.currency, amount)
    elif prices is not None:
        enough = "" if row.must_be_free_bytes is None else format_bytes(row.must_be_free_bytes)
        needs = f" with {enough} of host memory, which must be free" if prices.names(row.machine) else ""
        output.note(f"the price file has no offer of {row.machine}{needs}")


def _conclusion(
    args: argparse.Namespace,
    rows: Sequence[SweepRow],
    machines: list[HardwareProfile] | None,
    prices: Prices | None,
) -> Iterator[str]:
    """The row that costs least per token, if there are prices of several; and what the presets leave open and every
    plan here rests on."""
    costs = (
        [] if prices is None else [(cost.per_million, at) for at, row in enumerate(rows) if (cost := prices.cost(row))]
    )
    if len(costs) > 1:
        yield "the cheapest of these for a run:"
        yield from _cost(rows[min(costs)[1]], prices, args.tokens)
    given = args.host_memory is not None or args.host_budget is not None
    if not given and (machines is None or any(m.host_memory_bytes is None for m in machines)):
        yield (
            f"host memory is assumed to be {HOST_PER_DEVICE_BYTE} x that of the devices in use; --host-memory says "
            "what a machine really has"
        )


def _rows_shown(rows: Sequence[SweepRow], title: str, prices: Prices | None = None) -> Iterator[output.Shown]:
    yield sweep_table(rows, title, prices)
    yield from (f"[{number}] {reason}" for number, reason in enumerate(reasons(rows), 1))
