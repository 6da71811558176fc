"""``elixir sweep | fit | explain | timeline``: what people ask before they buy a machine or wait for a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elixir.cli import files
from elixir.cli.commands import _note, _optimizer, _print, _print_json, _print_tables, _print_written
from elixir.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from elixir.hardware import HardwareProfile
    from elixir.plan import Plan
    from elixir.search.sweep import SweepRow, TrainingStep
    from elixir.tracer.step_trace import StepTrace

Progress = Callable[[str, int, int], None]

UNSOLVED_STATUS = 2
"""No known machine can do it: as for a plan that cannot fit."""


def run_sweep(args: argparse.Namespace) -> int:
    """Every combination of models, machines, world sizes and batches on paper."""
    files.check_outputs(pictures=[args.plot], data=[args.csv])
    for model in args.models:
        files.refuse_artifact(model)
    from elixir.search.sweep import sweep
    from elixir.search.sweep_report import plot_sweep, to_frame

    machines = [files.find_timed_hardware(name) for name in args.hardware]
    with _progress() as progress:
        rows = sweep(
            args.models,
            machines,
            args.world_sizes,
            args.batches,
            step=_step(args),
            **_memory(args),
            progress=progress,
        )
    written = []
    if args.csv:
        from elixir.artifact import write_atomically

        written.append(write_atomically(args.csv, to_frame(rows).to_csv(index=False)))
    if args.plot:
        plot_sweep(rows, args.plot)
        written.append(Path(args.plot))
    if args.json:
        import dataclasses

        _print_json({"rows": [dataclasses.asdict(row) for row in rows]})
        return 0
    _print_rows(rows, "on paper")
    _say_host_memory(args, machines)
    _print_written(written)
    return 0


def run_fit(args: argparse.Namespace) -> int:
    """The smallest known machine that can train a model, and what comes next."""
    files.refuse_artifact(args.model)
    if args.inp and (args.batch or args.seq):
        raise InputError("--inp settles the input; leave out --batch and --seq")
    from elixir.search.sweep import fit

    machines = None if args.hardware is None else [files.find_timed_hardware(name) for name in args.hardware]
    with _progress() as progress:
        found = fit(
            args.model,
            machines,
            batch=args.batch or 1,
            counts=args.world_sizes,
            step=_step(args),
            **_memory(args),
            progress=progress,
        )
    if args.json:
        import dataclasses

        _print_json(dataclasses.asdict(found))
    elif found.best is None:
        _print_rows(found.rows, f"{found.model}: the most devices of each machine")
    else:
        best = found.best
        from elixir.units import format_bytes, format_seconds

        speed = "" if best.tokens_per_s is None else f", {best.tokens_per_s:,.0f} tokens/s"
        _print(
            f"{found.model} (batch {best.batch} a rank, {best.dtype}) fits {best.world_size} x {best.machine}: "
            f"{format_seconds(best.step_s or 0.0)} a step{speed}, "
            f"{format_bytes(best.device_peak_bytes or 0)} of each device and {format_bytes(best.host_peak_bytes or 0)} "
            f"of host memory"
        )
        _print_rows(found.rows, "the fewest devices of each machine, smallest first")
        _say_host_memory(args, machines)
    if found.best is None:
        print(
            f"elixir fit: {found.model} fits none of the {len(found.rows)} machines tried; give a smaller --batch, "
            "--checkpoint, more --host-memory, or more --world-sizes with --network",
            file=sys.stderr,
        )
        return UNSOLVED_STATUS
    return 0


def run_explain(args: argparse.Namespace) -> int:
    """Why every chunk of a plan is where it is."""
    plan, trace, hardware = _planned(args)
    from elixir.search.explain import explain
    from elixir.search.explain_report import (
        blocks_table,
        elsewhere_table,
        explanation_record,
        levers_table,
        summary_text,
    )

    with _progress() as progress:
        found = explain(plan, trace, hardware, levers=not args.no_levers, progress=progress)
    if args.json:
        _print_json({"plan": plan.fingerprint, "hardware": hardware.name, **explanation_record(found)})
        return 0
    _print(f"plan {plan.fingerprint}: {plan.model_name} on {plan.world_size} x {hardware.name}")
    _print(summary_text(found))
    if args.brief:
        return 0
    _print("")
    tables = [elsewhere_table(found, args.top)]
    tables += [blocks_table(found)] if found.blocks else []
    tables += [levers_table(found)] if found.levers else []
    _print_tables(*tables)
    return 0


def run_timeline(args: argparse.Namespace) -> int:
    """A simulated step as a picture, or as a Chrome trace."""
    from elixir.search.look import FORMATS

    chrome = args.out.lower().endswith(".json")
    if not chrome and Path(args.out).suffix.lower().removeprefix(".") not in FORMATS:
        raise InputError(f"{args.out!r}: end it in .png, .pdf or .svg for a picture, in .json for a Chrome trace")
    files.check_outputs(pictures=[] if chrome else [args.out], data=[args.out] if chrome else [])
    plan, trace, hardware = _planned(args)
    from elixir.search.simulator import simulate_step
    from elixir.search.timeline import plot_timeline, save_chrome_trace

    step = simulate_step(plan, trace, hardware, accumulation=args.accumulation)
    if chrome:
        save_chrome_trace(step, args.out)
    else:
        plot_timeline(step, args.out, title=f"{plan.model_name} on {plan.world_size} x {hardware.name}")
    record: dict[str, Any] = {
        "step_s": step.step_s,
        "bound_by": step.bound_by,
        "phases_s": step.phases_s,
        "busy_s": step.busy_s,
        "critical_s": step.critical_s,
    }
    if args.json:
        _print_json({**record, "written": args.out})
        return 0
    from elixir.units import format_seconds

    phases = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in step.phases_s.items())
    _print(f"{format_seconds(step.step_s)} a step ({phases}), bound by {step.bound_by.replace('_', ' ')}")
    _print_written([Path(args.out)])
    return 0


def _planned(args: argparse.Namespace) -> tuple[Plan, StepTrace, HardwareProfile]:
    """The plan of a question, the trace it was made from, and the machine it is asked for."""
    from elixir.plan import Plan
    from elixir.search.trial import with_network
    from elixir.tracer.step_trace import StepTrace

    plan = files.load(args.plan)
    if not isinstance(plan, Plan):
        raise ArtifactError(f"{args.plan}: expected a plan, found a {plan.artifact.replace('_', ' ')}")
    hardware = _hardware_of(plan, args)
    if args.trace is None:
        trace = _retrace(plan, args, hardware)
    else:
        given = [
            f"--{key.replace('_', '-')}"
            for key in ("batch", "seq", "checkpoint", "fused_kernels")
            if getattr(args, key) is not None
        ]
        if given:
            raise InputError(
                f"{args.trace} is a trace, which has settled {', '.join(given)}; leave out one or the other"
            )
        found = files.load(args.trace)
        if not isinstance(found, StepTrace):
            raise ArtifactError(f"{args.trace}: expected a trace, found a {found.artifact.replace('_', ' ')}")
        trace = found
    return plan, trace, with_network(hardware, args.network)


def _hardware_of(plan: Plan, args: argparse.Namespace) -> HardwareProfile:
    """The machine that was named, or the preset that the plan was made for."""
    from elixir.hardware import preset, preset_names

    if args.hardware is not None:
        hardware = files.find_timed_hardware(args.hardware)
        if hardware.fingerprint != plan.hardware_fingerprint:
            other = "" if hardware.name != plan.hardware_name else " with other numbers"
            _note(f"{args.plan} was planned for {plan.hardware_name}{other}; times here are those of {hardware.name}")
        return hardware
    if plan.hardware_name not in preset_names():
        raise InputError(
            f"{args.plan} was planned for {plan.hardware_name!r}, which is no preset; give its profile with --hardware"
        )
    hardware = preset(plan.hardware_name)
    if hardware.fingerprint != plan.hardware_fingerprint:
        raise InputError(
            f"{args.plan} was planned for a {plan.hardware_name!r} with other numbers than the preset has now; "
            "give --hardware, or plan again"
        )
    return hardware


def _retrace(plan: Plan, args: argparse.Namespace, hardware: HardwareProfile) -> StepTrace:
    """The step of a plan for a named model, traced again. A plan file runs no code: other models need their trace."""
    from elixir.model_shapes import find

    if find(plan.model_name) is None:
        raise InputError(
            f"{args.plan} is for {plan.model_name!r}, which is none of the models known by name; give the trace it was "
            f"made from as well, which `elixir profile --out trace.json` saves"
        )
    from elixir.models import build, default_input, default_step
    from elixir.tracer import trace_step
    from elixir.units import parse_dtype

    dtype = None if plan.dtype == "as built" else parse_dtype(plan.dtype)
    model = build(plan.model_name, dtype=dtype, checkpoint=args.checkpoint or "none")
    inp = default_input(model, batch=args.batch or 1, seq=args.seq)
    trace = trace_step(
        model,
        inp,
        default_step,
        dtype=dtype,
        hardware=hardware,
        optimizer=None,
        model_name=plan.model_name,
        use_fused_kernels=bool(args.fused_kernels),
    )
    if args.checkpoint is None and trace.model_fingerprint == plan.model_fingerprint:
        recomputed = any(use.phase == "recompute" for use in plan.order)
        if recomputed and not trace.checkpointed_modules:
            raise InputError(f"{args.plan} was planned with activation checkpointing; give --checkpoint, or its trace")
    return trace


def _step(args: argparse.Namespace) -> TrainingStep:
    from elixir.search.sweep import TrainingStep

    inp, step = getattr(args, "inp", None), getattr(args, "step", None)
    return TrainingStep(
        seq=args.seq,
        dtype=args.dtype or "bf16",
        checkpoint=args.checkpoint or "none",
        optimizer=_optimizer(args.optimizer or "adamw"),
        moments=args.moments,
        step_in_backward=args.step_in_backward,
        use_fused_kernels=bool(args.fused_kernels),
        inp=_called(inp) if inp else None,
        step_fn=files.load_function(step) if step else None,
    )


def _called(text: str) -> Callable[[], dict[str, Any]]:
    """The caller's input function, what goes wrong in it being the caller's mistake."""
    function = files.load_function(text)

    def call() -> dict[str, Any]:
        try:
            inp: dict[str, Any] = function()
        except Exception as error:  # the caller's code, which may raise anything
            raise InputError(f"{text}: the function failed: {type(error).__name__}: {error}") from error
        return inp

    return call


def _memory(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "device_memory": args.device_memory,
        "host_memory": args.host_memory,
        "disk_memory": args.disk_memory,
        "network_bytes_per_s": args.network,
        "overlap": not args.no_overlap,
    }


def _print_rows(rows: list[SweepRow] | tuple[SweepRow, ...], title: str) -> None:
    from elixir.search.sweep_report import reasons, sweep_table

    _print_tables(sweep_table(rows, title))
    for number, reason in enumerate(reasons(rows), 1):
        _print(f"[{number}] {reason}")


def _say_host_memory(args: argparse.Namespace, machines: list[HardwareProfile] | None) -> None:
    """What the presets leave open, and every plan here rests on."""
    from elixir.search.sweep import HOST_PER_DEVICE_BYTE

    if args.host_memory is None and (machines is None or any(m.host_memory_bytes is None for m in machines)):
        _note(
            f"host memory supposed to be {HOST_PER_DEVICE_BYTE} x that of the devices in use; --host-memory says "
            "what a machine really has"
        )


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar on standard error where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda text, done, count: bar.update(task, description=text, completed=done, total=count)
