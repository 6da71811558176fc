"""``elixir sweep | fit | explain | timeline``: what people ask before they buy a machine or wait for a run."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elixir.artifact import write_atomically
from elixir.cli import INTERRUPTED_STATUS, files, from_flags, output
from elixir.errors import ArtifactError, InputError
from elixir.hardware.profile import HardwareProfile, preset, preset_names
from elixir.models.model_shape import find
from elixir.plan.plan import Plan
from elixir.plan.prediction import range_text
from elixir.search.question import StepQuestion
from elixir.search.simulator.simulation import simulate_step
from elixir.search.whatif.explanation import explain
from elixir.search.whatif.prices import Prices
from elixir.search.whatif.sweep import FitInterrupted, fit, sweep
from elixir.search.whatif.sweep_row import HOST_PER_DEVICE_BYTE, SweepRow, with_network
from elixir.show.explanation_tables import blocks_table, elsewhere_table, explanation_record, levers_table, summary_text
from elixir.show.perfetto import save_chrome_trace
from elixir.show.style import FORMATS, RESOURCE_LABELS
from elixir.show.sweep import cost_text, plot_sweep, reasons, speed_of_device, sweep_table, to_frame
from elixir.show.tables import plan_levers_table
from elixir.show.timeline import plot_timeline
from elixir.step_trace import StepTrace
from elixir.units import format_bytes, format_seconds

UNSOLVED_STATUS = 2
"""No known machine can do it: as for a plan that cannot fit."""


def run_sweep(args: argparse.Namespace) -> int:
    """Every combination of models, machines, world sizes and batches on paper."""
    files.check_outputs(pictures=[args.plot], data=[args.csv])
    for model in args.models:
        files.refuse_artifact(model)

    prices = _prices(args)
    machines = _machines(args.hardware, args.devices_per_host)
    with output.progress() as progress:
        rows = sweep(
            args.models,
            machines,
            args.world_sizes,
            args.batches,
            step=from_flags.step_asked(args),
            asked=from_flags.asked(args, from_flags.optimizer_class(args.optimizer)),
            network_bytes_per_s=args.network,
            progress=progress,
        )
    written = []
    if args.csv:
        written.append(write_atomically(args.csv, to_frame(rows).to_csv(index=False)))
    if args.plot:
        plot_sweep(rows, args.plot)
        written.append(Path(args.plot))
    if args.json:
        output.say_json(_rows_record(rows, prices))
        return 0
    _print_rows(rows, "on paper", prices)
    _say_cheapest(rows, prices, args.tokens)
    _say_host_memory(args, machines)
    output.say_written(written)
    return 0


def run_fit(args: argparse.Namespace) -> int:
    """The smallest known machine that can train a model, and what comes next."""
    files.refuse_artifact(args.model)

    prices = _prices(args)
    names = args.hardware
    if names is None and args.devices_per_host is not None:
        names = [name for name in preset_names() if preset(name).device_kind == "cuda"]
    machines = None if names is None else _machines(names, args.devices_per_host)
    interrupted: FitInterrupted | None = None
    try:
        with output.progress() as progress:
            found = fit(
                args.model,
                machines,
                batch=args.batch or 1,
                counts=args.world_sizes,
                step=from_flags.step_asked(args),
                asked=from_flags.asked(args, from_flags.optimizer_class(args.optimizer)),
                network_bytes_per_s=args.network,
                progress=progress,
            )
    except FitInterrupted as stop:
        interrupted, found = stop, stop.found
    if args.json:
        output.say_json({**dataclasses.asdict(found), **_rows_record(found.rows, prices)})
    elif found.best is None:
        _print_rows(found.rows, f"{found.model}: the most devices of each machine")
    else:
        best = found.best

        speed = "" if best.tokens_per_s is None else f", {best.tokens_per_s:,.0f} tokens/s"
        speed += f", {speed_of_device(best)} TFLOP/s a device"
        between = None if best.fastest_s is None or best.slowest_s is None else (best.fastest_s, best.slowest_s)
        output.say(
            f"{found.model} (batch {best.batch} a rank, {best.dtype}) fits {best.world_size} x {best.machine}: "
            f"{range_text(best.step_s or 0.0, between)} a step{speed}, "
            f"{format_bytes(best.device_peak_bytes or 0)} of each device and {format_bytes(best.host_peak_bytes or 0)} "
            f"of host memory; {format_bytes(best.must_be_free_bytes or 0)} of each machine's memory must be free"
        )
        _say_cost(best, prices, args.tokens)
        if not args.brief:
            _print_rows(found.rows, "the fewest devices of each machine, smallest first", prices)
        _say_cheapest(found.rows, prices, args.tokens)
        _say_host_memory(args, machines)
    if interrupted is not None:
        print(f"elixir fit: {interrupted}; all rows so far are printed", file=sys.stderr)
        return INTERRUPTED_STATUS
    if found.best is None:
        last = found.rows[-1]
        given = zip(names or (), machines or (), strict=True)
        name = next((text for text, machine in given if machine.name == last.machine), last.machine)
        boxes = "" if args.devices_per_host is None else f" --devices-per-host {args.devices_per_host}"
        print(
            f"elixir fit: {found.model} fits no machine that was tried; `elixir plan {args.model} --hardware "
            f"{name} --world-size {last.world_size}{boxes}`, with --host-memory and the flags of the step, lists what "
            "would help there; or try more --world-sizes with --network",
            file=sys.stderr,
        )
        return UNSOLVED_STATUS
    return 0


def _machines(names: Sequence[str], devices_per_host: int | None) -> list[HardwareProfile]:
    return [with_network(files.find_timed_hardware(name), None, devices_per_host) for name in names]


def run_explain(args: argparse.Namespace) -> int:
    """Explains why every chunk of a plan is where it is."""
    plan, trace, hardware = _planned(args)

    with output.progress() as progress:
        found = explain(plan, trace, hardware, levers=not args.no_levers, progress=progress)
    if args.json:
        output.say_json({"plan": plan.fingerprint, "hardware": hardware.name, **explanation_record(found)})
        return 0
    output.say(f"plan {plan.fingerprint}: {plan.model_name} on {plan.world_size} x {hardware.name}")
    output.say(summary_text(found))
    if args.brief:
        return 0
    output.say("")
    tables = [elsewhere_table(found, args.top)]
    tables += [blocks_table(found)] if found.blocks else []
    tables += [levers_table(found)] if found.levers else []
    tables += [plan_levers_table(plan, found.changes)] if found.changes else []
    output.say_tables(*tables)
    return 0


def run_timeline(args: argparse.Namespace) -> int:
    """A simulated step as a picture, or as a Chrome trace."""

    chrome = args.out.lower().endswith(".json")
    if not chrome and Path(args.out).suffix.lower().removeprefix(".") not in FORMATS:
        raise InputError(f"{args.out!r}: end it in .png, .pdf or .svg for a picture, in .json for a Chrome trace")
    files.check_outputs(pictures=[] if chrome else [args.out], data=[args.out] if chrome else [])
    plan, trace, hardware = _planned(args)

    simulated = simulate_step(plan, trace, hardware, accumulation=args.accumulation)
    if chrome:
        save_chrome_trace(simulated, args.out, plan, trace)
    else:
        plot_timeline(simulated, args.out, title=f"{plan.model_name} on {plan.world_size} x {hardware.name}")
    record: dict[str, Any] = {
        "step_s": simulated.step_s,
        "bound_by": simulated.bound_by,
        "phases_s": simulated.phases_s,
        "busy_s": simulated.busy_s,
        "critical_s": simulated.critical_s,
    }
    if args.json:
        output.say_json({**record, "written": args.out})
        return 0

    phases = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in simulated.phases_s.items())
    output.say(f"{format_seconds(simulated.step_s)} a step ({phases}), bound by {RESOURCE_LABELS[simulated.bound_by]}")
    output.say_written([Path(args.out)])
    return 0


def _planned(args: argparse.Namespace) -> tuple[Plan, StepTrace, HardwareProfile]:
    """The plan of a question, the trace it was made from, and the machine it is asked for."""

    plan = files.load(args.plan)
    if not isinstance(plan, Plan):
        raise ArtifactError(f"{args.plan}: expected a plan, found a {plan.artifact.replace('_', ' ')}")
    hardware = _hardware_of(plan, args)
    if args.trace is None:
        trace = _retrace(plan, args, _planned_hardware(plan) or hardware)
    else:
        from_flags.refuse_settled(
            args, args.trace, ("batch", "seq", "positions", "checkpoint", "fused_kernels", "compile")
        )
        found = files.load(args.trace)
        if not isinstance(found, StepTrace):
            raise ArtifactError(f"{args.trace}: expected a trace, found a {found.artifact.replace('_', ' ')}")
        trace = found
    return plan, trace, hardware


def _hardware_of(plan: Plan, args: argparse.Namespace) -> HardwareProfile:
    """The machine that was named, or the preset that the plan was made for."""
    if args.hardware is not None:
        hardware = with_network(files.find_timed_hardware(args.hardware), args.network, args.devices_per_host)
        if hardware.fingerprint != plan.hardware_fingerprint:
            other = "" if hardware.name != plan.hardware_name else " with other numbers"
            output.note(
                f"{args.plan} was planned for {plan.hardware_name}{other}; times here are those of {hardware.name}"
            )
        return hardware
    planned = _planned_hardware(plan)
    if planned is None:
        raise InputError(
            f"{args.plan} was planned for {plan.hardware_name!r}, which is no preset; give its profile with --hardware"
        )
    planned = with_network(planned, args.network, args.devices_per_host)
    if planned.fingerprint != plan.hardware_fingerprint:
        raise InputError(
            f"{args.plan} was planned for a {plan.hardware_name!r} with other numbers than the preset has now; give "
            "--hardware, or --network and --devices-per-host as it was planned with, or plan again"
        )
    return planned


def _planned_hardware(plan: Plan) -> HardwareProfile | None:
    """The preset that the plan was made for, whose kernels its step has; None if it was made for a file."""

    return preset(plan.hardware_name) if plan.hardware_name in preset_names() else None


def _retrace(plan: Plan, args: argparse.Namespace, hardware: HardwareProfile) -> StepTrace:
    """The step of a plan for a named model, traced again as it was, but for the flags given.

    A plan file runs no code: other models need their trace.
    """

    step = plan.step
    if find(plan.model_name) is None or step.checkpoint is None:
        why = "which is none of the models known by name"
        if find(plan.model_name) is not None:
            why = "with an input or a step that the plan does not hold"
        raise InputError(
            f"{args.plan} is for {plan.model_name!r}, {why}; give the trace it was made from as well, which "
            "`elixir profile --out trace.json` saves"
        )

    asked = {name: getattr(args, name) for name in ("batch", "seq", "positions", "checkpoint")}
    asked |= {"use_fused_kernels": args.fused_kernels, "compile": args.compile}
    given = {name: value for name, value in asked.items() if value is not None}
    return replace(StepQuestion.again(plan), **given).trace(hardware)


def _prices(args: argparse.Namespace) -> Prices | None:
    """The user's price file, read before anything is traced; None without one."""
    if args.prices is None:
        if args.tokens is not None:
            raise InputError("--tokens needs --prices FILE")
        return None

    return Prices.read(args.prices)


def _rows_record(rows: Sequence[SweepRow], prices: Prices | None) -> dict[str, Any]:
    """The rows for JSON, each with its cost if there is a price file."""
    records = [dataclasses.asdict(row) for row in rows]
    if prices is None:
        return {"rows": records}
    for row, record in zip(rows, records, strict=True):
        cost = prices.cost(row)
        record["cost"] = cost and {"per_hour": cost.per_hour, f"per_million_{cost.unit}": cost.per_million}
    return {"currency": prices.currency, "rows": records}


def _say_cost(row: SweepRow, prices: Prices | None, amount: float | None) -> None:
    """Says what a row costs, or that the price file does not name its machine."""
    if prices is None:
        return

    cost = prices.cost(row)
    if cost is None:
        enough = "" if row.must_be_free_bytes is None else format_bytes(row.must_be_free_bytes)
        needs = f" with {enough} of host memory, which must be free" if prices.names(row.machine) else ""
        output.note(f"the price file has no offer of {row.machine}{needs}")
    else:
        output.say(cost_text(row, cost, prices.currency, amount))


def _say_cheapest(rows: Sequence[SweepRow], prices: Prices | None, amount: float | None) -> None:
    """Says which of the rows costs least per token, if there are prices of several."""
    if prices is None:
        return
    priced = [(cost.per_million, at) for at, row in enumerate(rows) if (cost := prices.cost(row)) is not None]
    if len(priced) > 1:
        output.say("the cheapest of these for a run:")
        _say_cost(rows[min(priced)[1]], prices, amount)


def _print_rows(rows: Sequence[SweepRow], title: str, prices: Prices | None = None) -> None:

    output.say_tables(sweep_table(rows, title, prices))
    for number, reason in enumerate(reasons(rows), 1):
        output.say(f"[{number}] {reason}")


def _say_host_memory(args: argparse.Namespace, machines: list[HardwareProfile] | None) -> None:
    """Says what the presets leave open and every plan here rests on."""

    given = args.host_memory is not None or args.host_budget is not None
    if not given and (machines is None or any(m.host_memory_bytes is None for m in machines)):
        output.note(
            f"host memory assumed to be {HOST_PER_DEVICE_BYTE} x that of the devices in use; --host-memory says "
            "what a machine really has"
        )
