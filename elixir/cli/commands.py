"""What the commands do. Each checks everything the user gave before the work starts, then works, then prints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elixir.cli import batches, files
from elixir.errors import InputError
from elixir.search import report
from elixir.units import format_bytes

if TYPE_CHECKING:
    from elixir.hardware import HardwareProfile
    from elixir.plan import Plan
    from elixir.tracer.step_trace import StepTrace

DEFAULT_HARDWARE = "h200"
NARROWEST_TABLE = 80
"""Characters."""
_STEP_DEFAULTS = {
    "batch": 1, "seq": None, "dtype": "bf16", "checkpoint": "none", "optimizer": "adamw", "optimizer_kernel": "default",
    "inp": None, "step": None, "fused_kernels": False,
}  # fmt: skip


def run_profile(args: argparse.Namespace) -> int:
    """Trace one training step and say what it needs."""
    files.check_outputs(pictures=[args.plot], data=[args.out])
    files.refuse_artifact(args.model)
    hardware = files.find_hardware(args.device)
    trace = _trace(args, hardware)
    written = [trace.save(args.out)] if args.out else []
    if args.plot:
        from elixir.search.plots import plot_memory

        plot_memory(trace, args.plot)
        written.append(Path(args.plot))
    if args.json:
        _print_json(report.trace_record(trace))
        return 0
    _print_trace(trace, brief=args.brief)
    _print_written(written)
    return 0


def run_hardware(args: argparse.Namespace) -> int:
    """List presets, show one, or measure this machine."""
    for option in ("quick", "no_spawn", "disk_folder"):
        if getattr(args, option) and not args.measure:
            raise InputError(f"--{option.replace('_', '-')} goes with --measure")
    for option in ("out", "plot"):
        if getattr(args, option) and not (args.measure or args.show):
            raise InputError(f"--{option} goes with --show NAME or --measure")
    files.check_outputs(pictures=[args.plot], data=[args.out])
    if not (args.measure or args.show):
        return _list_hardware(as_json=args.json)
    if args.measure:
        from elixir.microbench import joined

        if args.disk_folder:
            from elixir.microbench.disk import check_folder

            check_folder(args.disk_folder, quick=args.quick)
        with joined() as ranks:
            profile = _measure(args, ranks)
        if ranks.rank != 0:
            return 0  # all ranks have the same profile; one writes it
    else:
        profile = files.find_hardware(args.show)
    written = [profile.save(args.out)] if args.out else []
    if args.plot:
        from elixir.microbench import plot_profile

        plot_profile(profile, args.plot)
        written.append(Path(args.plot))
    if args.json:
        _print_json(profile.to_dict())
        return 0
    _print_hardware(profile)
    _print_written(written)
    return 0


def run_plan(args: argparse.Namespace) -> int:
    """Trace (or read a trace), search, and say what goes where."""
    files.check_outputs(pictures=[args.plot], data=[args.out])
    hardware = None if args.hardware is None else files.find_timed_hardware(args.hardware)
    trace = files.trace_in(args.model)
    if args.search_batch:
        batches.check(args, trace)
    if trace is None:
        hardware = hardware or files.find_hardware(DEFAULT_HARDWARE)
        if not args.search_batch:
            trace = _trace(args, hardware)
    else:
        _refuse_step_options(args)
        hardware = hardware or _traced_hardware(trace, args.model)
        if hardware.name != trace.device:
            _note(f"{args.model} was traced for {trace.device}; on {hardware.name} activations may take another size")
    from elixir.search.budgets import host_memory_here, warn_if_disk_full

    warn_if_disk_full(hardware, args.disk_memory)
    host_memory = args.host_memory
    if host_memory is None and args.hardware is None:
        host_memory = host_memory_here(hardware)
    options: dict[str, Any] = {
        "overlap": not args.no_overlap,
        "device_memory": args.device_memory,
        "host_memory": host_memory,
        "disk_memory": args.disk_memory,
        "placement": args.placement,
        "moments": args.moments,
        "step_in_backward": args.step_in_backward,
    }
    choice = None
    if trace is None:
        choice = batches.search(args, hardware, options, _trace)
        plan = choice.plan
    else:
        from elixir.search import plan_from_trace

        optimizer = trace.optimizer.split(" ")[0]
        plan = plan_from_trace(trace, hardware, args.world_size, optimizer_type=optimizer, **options)
    written = [plan.save(args.out)] if args.out else []
    if args.plot:
        from elixir.search.plots import plot_plan

        plot_plan(plan, args.plot)
        written.append(Path(args.plot))
    if args.json:
        _print_json(plan.to_dict())
        return 0
    if choice is not None:
        _print_tables(report.batch_table(choice))
    _print_plan(plan, brief=args.brief)
    _print_written(written)
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Show any saved artifact."""
    from elixir.hardware import HardwareProfile
    from elixir.plan import Plan
    from elixir.tracer.step_trace import StepTrace

    artifact = files.load(args.file)
    if args.json:
        _print_json(report.record_of(artifact))
    elif isinstance(artifact, StepTrace):
        _print_trace(artifact)
    elif isinstance(artifact, HardwareProfile):
        _print_hardware(artifact)
    elif isinstance(artifact, Plan):
        _print_plan(artifact)
    return 0


def run_compare(args: argparse.Namespace) -> int:
    """Two artifacts of one kind side by side."""
    from elixir.plan import Plan

    a, b = files.load(args.a), files.load(args.b)
    rows = report.compare(a, b)
    moved = report.moved_parameters(a, b) if isinstance(a, Plan) and isinstance(b, Plan) else None
    if args.json:
        fields = {row.name: {"a": row.a, "b": row.b, "differs": row.differs} for row in rows}
        extra = {} if moved is None else {"placed_differently": list(moved)}
        _print_json({"a": args.a, "b": args.b, "fields": fields, **extra})
        return 0
    _print_tables(report.comparison_table(f"{args.a} and {args.b}", "a", "b", rows))
    differing = sum(row.differs for row in rows)
    _print(f"{differing} of {len(rows)} fields differ" + ("" if moved is None else _moved_line(moved)))
    return 0


def run_models(args: argparse.Namespace) -> int:
    """The models known by name."""
    from elixir.models import describe, model_names

    shapes = [describe(name) for name in model_names()]
    if args.json:
        import dataclasses

        _print_json({shape.name: {**dataclasses.asdict(shape), "parameters": shape.parameters} for shape in shapes})
        return 0
    columns = ("name", "family", "parameters", "layers", "hidden", "heads", "ffn", "positions")
    rows = [[report.show_value(key, getattr(shape, key)) for key in columns] for shape in shapes]
    _print_tables(report.list_table("models known by name", columns, rows))
    return 0


def _trace(args: argparse.Namespace, hardware: HardwareProfile) -> StepTrace:
    """One step of the model the user named, traced for `hardware`."""
    from elixir.units import parse_dtype

    if args.inp and (args.batch or args.seq):
        raise InputError("--inp settles the input; leave out --batch and --seq")
    step: dict[str, Any] = dict(_STEP_DEFAULTS)
    step.update({key: getattr(args, key) for key in step if getattr(args, key) is not None})
    optimizer = _optimizer(step["optimizer"])
    dtype = None if step["dtype"] == "as-built" else parse_dtype(step["dtype"])
    step_fn = files.load_function(step["step"]) if step["step"] else None
    from elixir.model_shapes import find
    from elixir.models import build, default_step

    shape = find(args.model)
    model = build(args.model, dtype=dtype, checkpoint=step["checkpoint"])
    inp = _input(model, step)
    from elixir.tracer import trace_step

    return trace_step(
        model,
        inp,
        step_fn or default_step,
        dtype=dtype,
        hardware=hardware,
        optimizer=optimizer,
        optimizer_kernel=None if step["optimizer_kernel"] == "default" else step["optimizer_kernel"],
        model_name=shape.name if shape else args.model,
        use_fused_kernels=step["fused_kernels"],
    )


def _traced_hardware(trace: StepTrace, path: str) -> HardwareProfile:
    """The machine a saved trace was made for, if that is a preset."""
    from elixir.hardware import preset, preset_names

    if trace.device not in preset_names():
        raise InputError(f"{path} was traced for {trace.device!r}, which is no preset; give --hardware")
    return preset(trace.device)


def _input(model: Any, step: dict[str, Any]) -> dict[str, Any]:
    """What the step is fed with: from the caller's function, or the default of a Hugging Face model."""
    from elixir.models import default_input

    if step["inp"] is None:
        try:
            return default_input(model, batch=step["batch"], seq=step["seq"])
        except InputError as error:
            raise InputError(
                f"{error} (here: --inp module:function)" if "pass inp" in str(error) else str(error)
            ) from None
    function = files.load_function(step["inp"])
    try:
        inp: dict[str, Any] = function()
    except Exception as error:  # the caller's code, which may raise anything
        raise InputError(f"{step['inp']}: the function failed: {type(error).__name__}: {error}") from error
    return inp


def _optimizer(name: str) -> str:
    """The class of `torch.optim` that is named, in any case."""
    import torch

    from elixir.errors import unknown_name

    classes = {
        found.lower(): found
        for found, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name.lower() not in classes:
        raise unknown_name("optimizer", name, classes)
    return classes[name.lower()]


def _refuse_step_options(args: argparse.Namespace) -> None:
    given = [f"--{key.replace('_', '-')}" for key in _STEP_DEFAULTS if getattr(args, key) is not None]
    if given:
        raise InputError(f"{args.model} is a trace, which has settled {', '.join(given)}; leave out, or name the model")


def _measure(args: argparse.Namespace, ranks: Any) -> HardwareProfile:
    """Measure this machine: a progress bar on a terminal, else a line per measurement; only rank 0 tells."""
    from elixir.microbench import measure

    def run(progress: Callable[[str, int, int], None]) -> HardwareProfile:
        return measure(
            progress, quick=args.quick, ranks=ranks, start_ranks=not args.no_spawn, disk_folder=args.disk_folder
        )

    if not sys.stderr.isatty() or ranks.rank != 0:
        return run(lambda text, done, count: print(f"{done + 1}/{count} {text}", file=sys.stderr, flush=True))
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        return run(lambda text, done, count: bar.update(task, description=text, completed=done, total=count))


def _list_hardware(*, as_json: bool) -> int:
    from elixir.hardware import preset, preset_names

    profiles = [preset(name) for name in preset_names()]
    if as_json:
        _print_json({profile.name: report.hardware_record(profile) for profile in profiles})
        return 0
    columns = ("name", "device", "memory", "bandwidth", "bf16 peak", "host link")
    rows = [
        [
            profile.name,
            profile.device_name,
            format_bytes(profile.device_memory_bytes),
            report.show_value("_bytes_per_s", profile.device_memory_bytes_per_s),
            report.show_value("_flops_per_s", profile.flops_per_s.get("bfloat16")),
            report.show_value("_bytes_per_s", profile.host_to_device_bytes_per_s),
        ]
        for profile in profiles
    ]
    _print_tables(report.list_table("hardware presets", columns, rows))
    _print("elixir hardware --show NAME gives every number with its source; --measure fills in this machine")
    return 0


def _print_plan(plan: Plan, *, brief: bool = False) -> None:
    _print(str(plan))
    if not brief:
        _print_tables(report.parts_table(plan), report.homes_table(plan))


def _print_trace(trace: StepTrace, *, brief: bool = False) -> None:
    """The memory profile of a step: totals, where the peak is, what is alive there, and what was supposed."""
    _print(report.trace_summary(trace))
    if not brief:
        _print_tables(report.memory_table(trace), report.contributors_table(trace))
    for label, names in (
        ("unused parameters", trace.unused_parameters),
        ("modules that never ran", trace.unused_modules),
    ):
        if names:
            _print(f"{label}: {len(names)}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}")
    for assumption in trace.assumptions:
        _print(f"supposed: {assumption}")


def _print_hardware(profile: HardwareProfile) -> None:
    from elixir.hardware import IF_DOUBTFUL, doubtful_rates

    record = report.hardware_record(profile)
    _print_tables(report.record_table(f"{profile.name}: {profile.device_name}", record))
    if profile.sources:
        rows = [[name, source] for name, source in profile.sources.items()]
        _print_tables(report.list_table("sources", ("number", "source"), rows))
    doubtful = doubtful_rates(profile)
    for name, why in doubtful.items():
        _print(f"doubtful: {name}: {why}")
    if doubtful:
        _print(IF_DOUBTFUL)


def _moved_line(moved: tuple[str, ...]) -> str:
    if not moved:
        return "; every parameter has the same homes in both"
    names = ", ".join(moved[:5]) + (", ..." if len(moved) > 5 else "")
    return f"; {len(moved)} parameters are placed differently: {names}"


def _note(text: str) -> None:
    print(f"elixir: note: {text}", file=sys.stderr)


def _print_written(paths: list[Path]) -> None:
    if paths:
        _print(f"written: {', '.join(str(path) for path in paths)}")


def _print(text: str) -> None:
    print(text)


def _print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record, indent=1, allow_nan=False))


def _print_tables(*tables: Any) -> None:
    from rich.console import Console

    # Without a terminal (a file, a pipe, a test) lines must not be cut to a width nobody sees. Captured, because rich
    # pads lines with spaces and turns a reader that stops early (head) into a failure.
    # A narrow terminal wraps the lines itself: columns squeezed to a few characters could not be read.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.width = max(console.width, NARROWEST_TABLE)
    for table in tables:
        with console.capture() as capture:
            console.print(table)
        _print("\n".join(line.rstrip() for line in capture.get().rstrip().splitlines()) + "\n")
