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
from elixir.runtimes import RUNTIMES, Choice, Prediction, Setting, Work, by_hand, choices, config_text
from elixir.runtimes.estimate import without_margin
from elixir.search import plan_from_trace
from elixir.search.searches import profile_for
from elixir.search.simulator.rates import Rates
from elixir.search.whatif.sweep import HOST_PER_DEVICE_BYTE, doublings, with_network
from elixir.show.tables import list_table
from elixir.step_trace import StepTrace
from elixir.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from torch import nn

ELIXIR = "elixir"
KNOWN = frozenset(
    """command debug model models hardware world_size world_sizes network devices_per_host device_memory host_memory
    host_budget batch batches seq packed positions dtype checkpoint optimizer lora inp step accumulation json brief
    runtime write_config""".split()
)
"""Arguments that count for other runtimes; a plan of Elixir has more."""
ADAMS = (None, "adam", "adamw")
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
    _traces: dict[tuple[object, ...], StepTrace] = field(default_factory=dict)
    layer: str = ""
    """Class of the repeated layers."""

    @property
    def batch(self) -> int:
        """Samples of a micro-batch as it was asked for; a given input is one."""
        return 1 if getattr(self.args, "inp", None) else self.args.batch or 1

    @property
    def samples(self) -> int:
        """Samples of one rank and optimizer step; of a given input its own are one."""
        accumulation: int = getattr(self.args, "accumulation", None) or 1
        return self.batch * accumulation

    @property
    def checkpoints(self) -> tuple[bool, ...]:
        """Whether layers run again in backward: both are tried, unless ``--activation-checkpointing`` says."""
        form = self.args.checkpoint
        if form not in (None, "none", "non-reentrant"):
            raise InputError("--runtime checkpoints all layers or none: --activation-checkpointing, or none")
        return (False, True) if form is None else (form != "none",)

    def work(self, runtime: str, micro: int, checkpoint: bool) -> Work:
        """The step of a micro-batch on this machine, as a runtime computes it."""
        trace = self.trace(runtime == "ddp", micro, checkpoint)
        rates = Rates(self.hardware, "bfloat16", self.world_size, self.hardware.ranks_per_host(self.world_size))
        seconds = [float(each) for each in rates.accesses_s(trace)]
        return Work(trace, self.hardware, self.world_size, seconds, gather_s=lambda nbytes: float(rates.gather(nbytes)))

    def trace(self, autocast: bool, micro: int, checkpoint: bool) -> StepTrace:
        """The step under autocast over float32 weights, or over weights in the dtype that was asked for."""
        key = (autocast, micro, checkpoint, self.hardware.device_kind, self.hardware.compute_capability)
        if key not in self._traces:
            asked = from_flags.step_asked(self.args, model=self.args.model)
            step = asked.step_fn or train
            dtype = asked.dtype
            if autocast:
                step, dtype = partial(train_under_autocast, self.hardware.device_kind, step), "float32"
            form = "non-reentrant" if checkpoint else "none"
            question = replace(asked, batch=micro, checkpoint=form, step_fn=step, dtype=dtype)
            model = question.build()
            classes = dict.fromkeys(type(layer).__name__ for layer in layer_units(model))
            self.layer = ",".join(classes) or type(model).__name__
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
    asked: dict[str, Any] = field(default_factory=dict)
    """The fields of `elixir.runtimes.Setting`; empty for Elixir."""
    times_elixir: float | None = None
    """Its seconds over those of Elixir's plan, if both fit."""

    def cells(self) -> list[str]:
        """The cells of a table under `COLUMNS`."""
        if self.step_s is None:
            return [self.setting, "-", "-", "-", "-", self.why]
        slower = "" if self.times_elixir is None else f"{self.times_elixir:.2f} times the seconds of Elixir's plan"
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
    for name, value in vars(args).items():
        if value is not None and name not in KNOWN:
            flag = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
            raise InputError(f"{flag} is for a plan of Elixir; leave it out, or --runtime")
    if (args.dtype or "bf16") not in ("bf16", "bfloat16") or (args.optimizer or "adamw").lower() not in ADAMS:
        raise InputError("--runtime predicts Adam or AdamW and steps that compute in bf16; leave out other choices")
    if getattr(args, "write_config", None) and args.runtime in ("all", ELIXIR):
        raise InputError("--write-config writes for one of ddp, fsdp2 and deepspeed; name it with --runtime")
    if getattr(args, "write_config", None):  # a name that says no kind is refused before any work
        made = Prediction(Setting(runtime=args.runtime), 0, {}, 0, {})
        config_text(made, args.write_config, layer="", world_size=1, hosts=1)
    return [*RUNTIMES, ELIXIR] if args.runtime == "all" else [args.runtime]


def run_plan(args: argparse.Namespace) -> Iterator[output.Said]:
    """The settings of a runtime that fit one machine, the fastest first."""
    runtimes = check(args)
    hardware = profile_for(None) if args.hardware is None else files.find_timed_hardware(args.hardware)
    hardware = with_network(hardware, args.network, args.devices_per_host)
    _refuse_without_bfloat16(hardware)
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
        said = by_hand(best.prediction.setting, args.write_config)
        written = [f"written: {args.write_config}, for {best.prediction.setting}{said}"]
    yield {"rows": [dataclasses.asdict(row) for row in rows]}
    device, host = map(format_bytes, _memory(steps))
    where = f"on {ranks} x {hardware.name}: {device} a device, {host} a host"
    title = f"{args.model}, {steps.samples} samples a rank and step, {where}"
    yield list_table(title, COLUMNS, [row.cells() for row in rows])
    yield _legend(steps)
    if not args.brief:
        yield from _details(found)
    yield from written


def run_fit(args: argparse.Namespace) -> Iterator[output.Said]:
    """The fewest devices of each machine with which a runtime fits, and Elixir's seconds there."""
    runtimes = check(args)
    names = args.hardware or [name for name in preset_names() if preset(name).device_kind == "cuda"]
    rows, traces = list[Row](), dict[tuple[object, ...], StepTrace]()
    with output.progress(lines=True) as progress:
        for number, hardware in enumerate(_machines(args, names)):
            progress(hardware.name, number, len(names))
            counts = args.world_sizes or doublings(hardware.devices_per_host)
            rows += _fewest(args, hardware, runtimes, counts, traces)
    yield from _rows_shown(f"{args.model}, batch {args.batch or 1} a rank", sorted(rows, key=lambda row: not row.fits))


def run_sweep(args: argparse.Namespace) -> Iterator[output.Said]:
    """The best settings of each runtime for every model, batch, machine and number of ranks."""
    rows, traces = list[Row](), dict[str, dict[tuple[object, ...], StepTrace]]()
    combinations = [*product(args.models, args.batches, _machines(args, args.hardware), args.world_sizes)]
    with output.progress(lines=True) as progress:
        for number, (model, batch, hardware, count) in enumerate(combinations):
            progress(f"{model}, batch {batch}, {count} x {hardware.name}", number, len(combinations))
            asked = argparse.Namespace(**{**vars(args), "model": model, "batch": batch})
            found = _fewest(asked, hardware, check(asked), [count], traces.setdefault(model, {}))
            rows += [replace(row, setting=f"{model}: {row.setting}") for row in found]
    yield from _rows_shown("on paper", rows)


def _refuse_without_bfloat16(hardware: HardwareProfile) -> None:
    if "bfloat16" not in hardware.flops_per_s:
        raise InputError(f"--runtime predicts steps in bfloat16, of which the profile of {hardware.name} has no rate")


def _machines(args: argparse.Namespace, names: Sequence[str]) -> list[HardwareProfile]:
    return [with_network(files.find_timed_hardware(name), args.network, args.devices_per_host) for name in names]


def _rows_shown(title: str, rows: Sequence[Row]) -> Iterator[output.Said]:
    yield {"rows": [dataclasses.asdict(row) for row in rows]}
    yield list_table(
        title, ("machine", *COLUMNS), [[f"{row.world_size} x {row.machine}", *row.cells()] for row in rows]
    )


def _fewest(
    args: argparse.Namespace,
    hardware: HardwareProfile,
    runtimes: Sequence[str],
    counts: Sequence[int],
    traces: dict[tuple[object, ...], StepTrace],
) -> list[Row]:
    """The best row of each runtime on the fewest devices that suffice, or on the most."""
    rows: dict[str, Row] = {}
    for count in sorted(counts):
        steps = Steps(args, hardware, count, traces)
        try:
            _refuse_without_bfloat16(hardware)
            ours = _elixir_row(steps)
            for runtime in runtimes:
                if runtime not in rows or not rows[runtime].fits:
                    found = [ours] if runtime == ELIXIR else _rows(steps, _choices(steps, runtime), ours)
                    rows[runtime] = found[0]
        except ElixirError as error:
            why = str(error).splitlines()[0]
            failed = Row(hardware.name, count, "", "", False, None, None, None, None, why)
            return [rows.get(each) or replace(failed, runtime=each, setting=each) for each in runtimes]
        if all(row.fits for row in rows.values()):
            break
    return list(rows.values())


def _choices(steps: Steps, runtime: str) -> list[Choice]:
    device, host = _memory(steps)
    return choices(
        runtime,
        steps.work,
        samples=steps.samples,
        micro=steps.batch,
        world_size=steps.world_size,
        device_bytes=device,
        host_bytes=host,
        checkpoints=steps.checkpoints,
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
        dataclasses.asdict(prediction.setting),
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
    device = without_margin(device, steps.hardware.device_kind, steps.world_size)
    row = Row(steps.hardware.name, steps.world_size, ELIXIR, "Elixir", False, None, None, None, None, "does not fit")
    request = from_flags.asked(steps.args, from_flags.optimizer_asked(steps.args.optimizer))
    for checkpoint in steps.checkpoints:
        try:
            trace = steps.trace(False, steps.batch, checkpoint)
        except InputError as error:  # a model that cannot checkpoint
            if not checkpoint:
                raise
            row = row if row.fits else replace(row, why=row.why or str(error))
            continue
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
            tokens = (trace.step.tokens or 0) * steps.world_size * asked.accumulation
            peaks = plan.predicted.device_peak_bytes, plan.predicted.host_peak_bytes
            name = "Elixir, checkpointed" if checkpoint else "Elixir"
            row = replace(
                row, setting=name, fits=True, step_s=seconds, tokens_per_s=tokens / seconds if tokens else None, why="",
                device_bytes=peaks[0], host_bytes=peaks[1],
            )  # fmt: skip
    return row


def _legend(steps: Steps) -> str:
    """The meaning of words and numbers in the table, and how sure they are."""
    sure = "On one H200 peaks were within 2 %, seconds within 16 %."
    if steps.world_size > 1:
        sure = "Seconds of several GPUs rest on bandwidths and were never measured; peaks of FSDP2 were, on CPUs."
    kinds = [
        "1 x 4: one micro-batch of 4 samples; keep: gathered weights stay from forward to backward. Weights and Adam "
        "are float32, compute is bfloat16; tokens/s of all ranks.",
        "Memory is the predicted peak; a device needs 1.3 % and 1.3 GiB more, with several ranks 0.5 GiB for NCCL.",
        sure,
    ]
    if steps.args.host_memory is None and steps.args.host_budget is None and not steps.hardware.host_memory_bytes:
        kinds.append("Host memory is assumed to be twice that of the devices; --host-memory says what there is.")
    return "\n".join(kinds)


def _details(found: dict[str, list[Choice]]) -> Iterator[str]:
    """Parts of the best of each runtime, and where its arithmetic comes from."""
    for each in found.values():
        yield str(each[0].prediction)
        yield from (f"  from {source}" for source in each[0].prediction.sources)
