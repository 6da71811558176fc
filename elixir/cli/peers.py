"""``--runtime`` of ``plan``, ``fit`` and ``sweep``: the same step in FSDP2, DeepSpeed or DDP, next to Elixir's."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from elixir.artifact import write_atomically
from elixir.cli import files, from_flags, output
from elixir.errors import ElixirError, InputError
from elixir.hardware.profile import HardwareProfile, preset, preset_names
from elixir.models.layer_units import layer_units
from elixir.runtimes import RUNTIMES, Choice, Prediction, Work, choices, config_text
from elixir.search import plan_from_trace
from elixir.search.searches import profile_for
from elixir.search.simulator.rates import Rates, main_dtype
from elixir.search.whatif.sweep import HOST_PER_DEVICE_BYTE, doublings, with_network
from elixir.show.tables import list_table
from elixir.step_trace import StepTrace
from elixir.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from torch import nn

ELIXIR = "elixir"
SHOWN = 3
"""Settings of each runtime that are shown."""
COLUMNS = ("setting", "step", "tokens/s", "of each device", "of each host", "")


def train(model: nn.Module, inp: Any) -> None:
    """A step as Trainer takes it: the output is let go before backward."""
    model(**inp).loss.backward()


def train_under_autocast(kind: str, step: Any, model: nn.Module, inp: Any) -> None:
    """A step over float32 weights as Trainer takes it with ``bf16=True``."""
    import torch

    if step is not train:
        with torch.autocast(kind, dtype=torch.bfloat16):
            step(model, inp)
        return
    with torch.autocast(kind, dtype=torch.bfloat16):
        loss = model(**inp).loss
    loss.backward()


@dataclass
class Steps:
    """The step of a command line, traced as each runtime computes it; each trace is made once."""

    args: argparse.Namespace
    hardware: HardwareProfile
    world_size: int
    _traces: dict[tuple[bool, int, bool, object], StepTrace] = field(default_factory=dict)
    layer: str = ""
    """Class of the repeated layers."""

    def work(self, runtime: str, micro: int, checkpoint: bool) -> Work:
        """The step of a micro-batch on this machine, as a runtime computes it."""
        trace = self.trace(runtime == "ddp", micro, checkpoint)
        dtype = "bfloat16" if runtime == "ddp" and "bfloat16" in self.hardware.flops_per_s else main_dtype(trace)
        rates = Rates(self.hardware, dtype, self.world_size, self.hardware.ranks_per_host(self.world_size))
        return Work(trace, self.hardware, self.world_size, [float(each) for each in rates.accesses_s(trace)])

    def trace(self, autocast: bool, micro: int, checkpoint: bool) -> StepTrace:
        """The step under autocast over float32 weights, or over weights in the dtype that was asked for."""
        key = (autocast, micro, checkpoint, self.hardware.compute_capability)
        if key not in self._traces:
            asked = from_flags.step_asked(self.args, model=self.args.model)
            step = asked.step_fn or train
            dtype = asked.dtype
            if autocast:
                step, dtype = partial(train_under_autocast, self.hardware.device_kind, step), "float32"
            form = "non-reentrant" if checkpoint else asked.checkpoint
            question = replace(asked, batch=micro, checkpoint=form, step_fn=step, dtype=dtype)
            model = question.build()
            self.layer = next((type(layer).__name__ for layer in layer_units(model)), type(model).__name__)
            self._traces[key] = question.trace(self.hardware, model)
        return self._traces[key]


@dataclass(frozen=True)
class Row:
    """One runtime on one machine."""

    machine: str
    world_size: int
    runtime: str
    setting: str
    fits: bool
    step_s: float | None
    tokens_per_s: float | None
    device_bytes: int | None
    host_bytes: int | None
    why: str = ""
    """The memory that lacks if it does not fit."""
    times_elixir: float | None = None
    """Its seconds over those of Elixir's plan, if both fit."""

    def cells(self) -> list[str]:
        """The cells of a table under `COLUMNS`."""
        if self.step_s is None:
            return [self.setting, "-", "-", "-", "-", self.why]
        slower = "" if self.times_elixir is None else f"Elixir is {self.times_elixir:.2f} times as fast"
        return [
            self.setting,
            format_seconds(self.step_s),
            "-" if self.tokens_per_s is None else f"{self.tokens_per_s:,.0f}",
            format_bytes(self.device_bytes or 0),
            format_bytes(self.host_bytes or 0),
            self.why or slower,
        ]


def check(args: argparse.Namespace) -> list[str]:
    """The runtimes that ``--runtime`` names.

    Raises:
        InputError: another flag cannot be combined with it.
    """
    if files.trace_in(args.model) is not None:
        raise InputError(
            f"--runtime traces the step as each runtime computes it; name the model instead of {args.model}"
        )
    if getattr(args, "write_config", None) and args.runtime in ("all", ELIXIR):
        raise InputError("--write-config writes for one of ddp, fsdp2 and deepspeed; name it with --runtime")
    return [*RUNTIMES, ELIXIR] if args.runtime == "all" else [args.runtime]


def run_plan(args: argparse.Namespace) -> Iterator[output.Said]:
    """The settings of a runtime that fit one machine, the fastest first."""
    runtimes = check(args)
    hardware = profile_for(None) if args.hardware is None else files.find_timed_hardware(args.hardware)
    hardware = with_network(hardware, args.network, args.devices_per_host)
    ranks = args.world_size or 1
    steps = Steps(args, hardware, ranks)
    found = {runtime: _choices(steps, runtime) for runtime in runtimes if runtime != ELIXIR}
    ours = _elixir_row(steps)
    rows = [row for runtime in found for row in _rows(steps, found[runtime], ours)[:SHOWN]]
    rows += [ours] if ELIXIR in runtimes or ours.fits else []
    written: list[str] = []
    if args.write_config:
        best = found[args.runtime][0]
        if not best.fits:
            raise InputError(
                f"no setting of {args.runtime} fits, so {args.write_config} is not written: {_lacks(best)}"
            )
        hosts = -(-ranks // hardware.ranks_per_host(ranks))
        text = config_text(best.prediction, args.write_config, layer=steps.layer, world_size=ranks, hosts=hosts)
        write_atomically(args.write_config, text)
        written = [f"written: {args.write_config}, for {best.prediction.setting}"]
    yield {"rows": [dataclasses.asdict(row) for row in rows]}
    title = f"{args.model}, batch {args.batch or 1} a rank, on {ranks} x {hardware.name}"
    yield list_table(title, COLUMNS, [row.cells() for row in rows])
    if not args.brief:
        yield from _details(found)
    yield from written


def run_fit(args: argparse.Namespace) -> Iterator[output.Said]:
    """The fewest devices of each machine with which a runtime fits, and Elixir's seconds there."""
    runtimes = check(args)
    names = args.hardware or [name for name in preset_names() if preset(name).device_kind == "cuda"]
    rows: list[Row] = []
    with output.progress() as progress:
        for number, hardware in enumerate(_machines(args, names)):
            progress(hardware.name, number, len(names))
            counts = args.world_sizes or doublings(hardware.devices_per_host)
            rows += [_fewest(args, hardware, runtime, counts) for runtime in runtimes]
    yield from _rows_shown(f"{args.model}, batch {args.batch or 1} a rank", sorted(rows, key=lambda row: not row.fits))


def run_sweep(args: argparse.Namespace) -> Iterator[output.Said]:
    """The best settings of each runtime for every model, batch, machine and number of ranks."""
    rows: list[Row] = []
    combinations = [*product(args.models, args.batches, _machines(args, args.hardware), args.world_sizes)]
    with output.progress() as progress:
        for number, (model, batch, hardware, count) in enumerate(combinations):
            progress(f"{model}, batch {batch}, {count} x {hardware.name}", number, len(combinations))
            asked = argparse.Namespace(**{**vars(args), "model": model, "batch": batch})
            found = [_fewest(asked, hardware, runtime, [count]) for runtime in check(asked)]
            rows += [replace(row, setting=f"{model}: {row.setting}") for row in found]
    yield from _rows_shown("on paper", rows)


def _machines(args: argparse.Namespace, names: Sequence[str]) -> list[HardwareProfile]:
    return [with_network(files.find_timed_hardware(name), args.network, args.devices_per_host) for name in names]


def _rows_shown(title: str, rows: Sequence[Row]) -> Iterator[output.Said]:
    yield {"rows": [dataclasses.asdict(row) for row in rows]}
    yield list_table(
        title, ("machine", *COLUMNS), [[f"{row.world_size} x {row.machine}", *row.cells()] for row in rows]
    )


def _fewest(args: argparse.Namespace, hardware: HardwareProfile, runtime: str, counts: Sequence[int]) -> Row:
    """The best row of the fewest devices that suffice, or of the most."""
    row = Row(hardware.name, max(counts), runtime, runtime, False, None, None, None, None, "cannot be traced")
    for count in sorted(counts):
        steps = Steps(args, hardware, count)
        try:
            ours = _elixir_row(steps)
            row = ours if runtime == ELIXIR else _rows(steps, _choices(steps, runtime), ours)[0]
        except ElixirError as error:
            return replace(row, why=str(error).splitlines()[0])
        if row.fits:
            break
    return row


def _choices(steps: Steps, runtime: str) -> list[Choice]:
    device, host = _memory(steps)
    samples = steps.args.batch or 1
    return choices(
        runtime, steps.work, samples=samples, world_size=steps.world_size, device_bytes=device, host_bytes=host
    )


def _memory(steps: Steps) -> tuple[int, int]:
    """Bytes of one device, and of one machine's host, as given or as the profile has them."""
    args, hardware = steps.args, steps.hardware
    device = parse_bytes(args.device_memory or hardware.device_memory_bytes)
    ranks = hardware.ranks_per_host(steps.world_size)
    known = hardware.host_memory_bytes or HOST_PER_DEVICE_BYTE * hardware.device_memory_bytes * ranks
    return device, parse_bytes(args.host_memory or args.host_budget or known)


def _rows(steps: Steps, found: Sequence[Choice], ours: Row) -> list[Row]:
    rows = [_row(steps, choice, ours) for choice in found]
    return [row for row in rows if row.fits] or rows[:1]


def _row(steps: Steps, choice: Choice, ours: Row) -> Row:
    prediction = choice.prediction
    gain = prediction.step_s / ours.step_s if choice.fits and ours.fits and ours.step_s else None
    return Row(
        steps.hardware.name,
        steps.world_size,
        prediction.setting.runtime,
        str(prediction.setting),
        choice.fits,
        prediction.step_s,
        _tokens_per_s(steps, prediction),
        prediction.device_bytes,
        prediction.host_bytes,
        "" if choice.fits else _lacks(choice),
        gain,
    )


def _lacks(choice: Choice) -> str:
    short = [("a device", choice.device_short), ("a host", choice.host_short)]
    return "; ".join(f"{where} lacks {format_bytes(size)}" for where, size in short if size > 0)


def _tokens_per_s(steps: Steps, prediction: Prediction) -> float | None:
    setting = prediction.setting
    trace = steps.trace(setting.runtime == "ddp", setting.micro, setting.checkpoint)
    tokens = (trace.step.tokens or 0) * setting.accumulation * steps.world_size
    return tokens / prediction.step_s if tokens and prediction.step_s else None


def _elixir_row(steps: Steps) -> Row:
    """Elixir's fastest plan of the same step, with all layers checkpointed or none."""
    device, host = _memory(steps)
    row = Row(steps.hardware.name, steps.world_size, ELIXIR, "Elixir", False, None, None, None, None, "does not fit")
    request = from_flags.asked(steps.args, from_flags.optimizer_class(steps.args.optimizer))
    for checkpoint in (False, True):
        trace = steps.trace(False, steps.args.batch or 1, checkpoint)
        asked = replace(request, world_size=steps.world_size, device_memory=device, activations=None)
        if asked.host_memory is None and asked.host_budget is None:
            asked = replace(asked, host_budget=host)
        try:
            plan = plan_from_trace(trace, steps.hardware, asked).plan
        except ElixirError as error:
            row = row if row.fits else replace(row, why=str(error).splitlines()[0])
            continue
        seconds = plan.predicted.step_s
        if seconds and (row.step_s is None or seconds < row.step_s):
            tokens = (trace.step.tokens or 0) * steps.world_size
            peaks = plan.predicted.device_peak_bytes, plan.predicted.host_peak_bytes
            name = "Elixir, checkpointed" if checkpoint else "Elixir"
            row = replace(
                row, setting=name, fits=True, step_s=seconds, tokens_per_s=tokens / seconds, why="",
                device_bytes=peaks[0], host_bytes=peaks[1],
            )  # fmt: skip
    return row


def _details(found: dict[str, list[Choice]]) -> Iterator[str]:
    """Parts of the best of each runtime, and where its arithmetic comes from."""
    for each in found.values():
        yield str(each[0].prediction)
        yield from (f"  from {source}" for source in each[0].prediction.sources)
