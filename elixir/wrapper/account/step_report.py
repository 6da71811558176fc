"""`StepReport`: a step, as `StepClock` has timed it, compared with the prediction of its plan."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import torch

from elixir.hardware.profile import preset_names
from elixir.kernels.adam.eager import IN_PIECES, PLAIN
from elixir.kernels.adam.step import COMPILED, COPIED, ONE_PASS
from elixir.plan.plan import Plan
from elixir.plan.prediction import CHECKPOINT_PART, DISK_LINKS
from elixir.plan.step_traffic import Backwards, step_traffic
from elixir.schedule import Schedule
from elixir.units import format_bytes, format_seconds
from elixir.wrapper.account.plan_promise import PlanPromise, rank_host_bytes
from elixir.wrapper.engine import Engine

# --- step clock ------------------------------------------------------------------------------------------------------
# `StepClock`: times a training step, without the caller's work between steps.


@dataclass(frozen=True)
class Span:
    """A time span, on the host's clock or between two events of a CUDA stream."""

    started: float | torch.cuda.Event
    ended: float | torch.cuda.Event

    @property
    def over(self) -> bool:
        """Whether the span is over on the device, so that `seconds` returns at once."""
        return isinstance(self.ended, float) or self.ended.query()

    def seconds(self) -> float:
        """The length of the span; on CUDA this waits for its end."""
        if isinstance(self.ended, float):
            return self.ended - cast(float, self.started)
        self.ended.synchronize()  # protects nothing: an event has no time before it is over
        return float(cast(torch.cuda.Event, self.started).elapsed_time(self.ended)) / 1e3


class StepClock:
    """Runs from the first forward of a step to the end of its optimizer step.

    On CUDA it times the compute stream, since the host finishes a step long before the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started: float | torch.cuda.Event | None = None

    @property
    def running(self) -> bool:
        """Whether a step has begun."""
        return self._started is not None

    def start(self) -> None:
        """Starts the clock, at the first forward of a step."""
        self._started = self._now()

    def stop(self) -> Span | None:
        """Stops the clock; None if it was not running."""
        started, self._started = self._started, None
        return None if started is None else Span(started, self._now())

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


# --- step report -----------------------------------------------------------------------------------------------------


TOLERANCE = 0.05
"""A step whose figures differ from the prediction by more than this share is reported."""
_LINKS = ("host_to_device", "device_to_host", "network", "replicas", *DISK_LINKS)
MUCH_SLOWER = 2.0
"""A step that takes this many times the upper end of its predicted range is reported: rates alone do not explain it."""
SHOWN_S = 0.0005
"""Shorter waits are not shown."""
SHORT_S = 0.02
"""In shorter steps Python's work is noticeable: about 20 us for each of some hundred operators."""
PAUSED = "no chunk is updated early any more, until a step is not clipped: those before discarded all early updates"
"""The remark on a step whose plan has early updates, but which began none."""
_FORMS = {
    COMPILED: "by the C++ kernel",
    ONE_PASS: "by the C++ kernel, early",
    COPIED: "in place on a copy, early",
    IN_PIECES: "by torch's fused Adam",
    PLAIN: "by PyTorch's operators",
}
"""Form of a step on the host (`StepReport.host_forms`) -> words."""
_PEAKS = ("device_peak", "device_buffers", "host_peak", "process_peak", "disk_peak")
_COME_LATER = ("device_peak", "host_peak", "process_peak", "disk_peak", *DISK_LINKS)
"""Figures that may be lower than predicted: states come with the first step."""


@dataclass(frozen=True)
class Course:
    """The course of one step: everything but the plan that determines its loads and bytes."""

    backwards: Backwards
    held: tuple[int, ...]
    """The chunks in blocks when it began, as after an evaluation."""
    rank: int
    skipped: bool
    """Whether the optimizer skipped it after an overflow."""
    untraced: frozenset[int]
    """Chunks that ranks reduce although they got no gradient in the traced step."""
    odd: str
    """The reason why no plan predicts its loads and bytes; empty if one does."""


@dataclass(frozen=True)
class Expected:
    """The prediction of a plan for a step with a certain course."""

    counts: dict[str, int]
    """Loads, hits and bytes by link."""
    micro_batches: int
    not_compared: str


@dataclass(frozen=True)
class EarlyCounts:
    """Counts chunks whose new states the host makes during backward, on one rank in one step or several."""

    planned: int = 0
    """Chunks that the plan updates early; 0 if several optimizers share the chunks, which excludes early updates."""
    made: int = 0
    """Chunks with an early update when the optimizer's step began; 0 while the last steps were clipped."""
    kept: int = 0
    """The chunks whose new states were kept; others were updated after the norm, or not in a skipped step."""

    def __add__(self, other: EarlyCounts) -> EarlyCounts:
        return EarlyCounts(self.planned + other.planned, self.made + other.made, self.kept + other.kept)

    def __str__(self) -> str:
        return f"{self.kept} of {self.planned} chunks kept, {self.made - self.kept} discarded"

    def to_dict(self, prefix: str = "") -> dict[str, float]:
        """Flat numbers by name, as in `StepReport.to_dict`."""
        return {f"{prefix}early_{name}_chunks": value for name, value in vars(self).items()}


@dataclass(frozen=True)
class StepReport:
    """One optimizer step of one rank, from its first forward to the end of `ElixirOptimizer.step`.

    Counts cover all its micro-batches, and predictions are made for their number, whatever the plan assumed. `observed`
    and `predicted` have the same keys: ``loads``, ``hits``, ``host_to_device``, ``device_to_host``, ``network``,
    ``device_peak``, ``device_buffers`` and ``host_peak`` (bytes). ``device_peak`` is the whole peak, as in the plan;
    torch's allocator observes it on CUDA, and `observed` lacks it elsewhere, or where the process has taken more before
    the plan's first step or has another plan. ``device_buffers`` and ``host_peak`` are
    bytes of the runtime's buffers so far, and of the plan's share for them, without activations and gradients that
    autograd holds; on the host, this rank's part. ``process_peak`` is the resident memory of the process so far, its
    program and libraries included, if Linux tells it (``VmHWM``) and the process has no other plan. With states on a
    disk also ``disk_read`` and ``disk_write`` (bytes of updates) and ``disk_peak`` (this rank's part).
    """

    observed: dict[str, int]
    predicted: dict[str, int]
    demand_loads: int
    """Loads that were not prefetched, so that the use waited for the whole load."""
    deviations: int
    """Uses that left the recorded order."""
    waited_s: dict[str, float]
    """Seconds that compute waited for each lane; for CUDA see `elixir.chunk.lanes.Lane`."""
    busy_s: dict[str, float]
    """Seconds that each lane worked, delays of an emulated link included; on CUDA, of work that is known to be over."""
    refreshed_bytes: int
    """The part of ``host_to_device`` for weights on the device that CPU Adam has updated."""
    span: Span | None
    """The time from the first forward with gradients to the end of the optimizer's step; None without such a forward.
    """
    predicted_step_s: float | None
    """None if the step had not the planned number of micro-batches."""
    slowest_s: float | None = None
    """The upper end of the predicted range; None if `predicted_step_s` is."""
    first: bool = False
    """Whether no step of this module came before."""
    hardware_name: str = ""
    """The name of the profile with whose rates the step was planned."""
    micro_batches: int = 1
    """Backwards of the step."""
    tokens: int | None = None
    """Token ids in this rank's forwards, as ``input_ids`` or first argument; None if any forward had none."""
    grad_norm: torch.Tensor | None = field(default=None, compare=False)
    """See `ElixirOptimizer.grad_norm`; None if several optimizers step the module."""
    world_size: int = 1
    early: EarlyCounts = EarlyCounts()
    """Counts of this step."""
    early_so_far: EarlyCounts = EarlyCounts()
    """Counts of all steps of this module together."""
    host_forms: dict[str, int] = field(default_factory=dict)
    """The number of shards by form of CPU Adam's step since the last report. Steps in place are ``compiled``, ``in
    pieces``, ``plain`` or ``by its class``; early updates are ``one pass`` or ``copied``."""
    stream_waited_s: dict[str, float] = field(default_factory=dict)
    """Seconds that compute on CUDA stood still for each lane, by events around its waits; `waited_s` are waits of the
    host. Waits that are not over when a step is reported count for the next."""
    process_parts: dict[str, int] = field(default_factory=dict)
    """The predicted ``process_peak`` by what holds it; less than that if the process once held more."""
    outgrown: str = ""
    """A sentence about a micro-batch with more tokens than were planned; empty for most steps."""
    not_compared: str = ""
    """The reason why this step's loads and bytes have no prediction; empty for most steps.

    `predicted` then repeats the plan.
    """

    @cached_property
    def step_s(self) -> float | None:
        """Seconds of `span`; on CUDA this waits for the device."""
        return None if self.span is None else self.span.seconds()

    @property
    def times_slowest(self) -> float | None:
        """The step's seconds over `slowest_s` if at least `MUCH_SLOWER`, otherwise None. Waits as `step_s` does."""
        times = self.step_s / self.slowest_s if self.step_s and self.slowest_s else 0.0
        return times if times >= MUCH_SLOWER else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all ranks, if each had as many as this one. Waits as `step_s` does."""
        return None if not self.tokens or not self.step_s else self.world_size * self.tokens / self.step_s

    def to_dict(self) -> dict[str, float]:
        """Flat numbers by name, for loggers: names end in their unit, and predictions begin with ``predicted_``.

        Unknown figures are left out. On CUDA this waits for the device.
        """
        numbers: dict[str, float] = {}
        for prefix, found in (("", self.observed), ("predicted_", self.predicted)):
            for name, value in found.items():
                numbers[f"{prefix}{name}" if name in ("loads", "hits") else f"{prefix}{name}_bytes"] = value
        numbers |= {"demand_loads": self.demand_loads, "deviations": self.deviations}
        numbers |= {"micro_batches": self.micro_batches, "refreshed_bytes": self.refreshed_bytes}
        numbers["world_size"] = self.world_size
        numbers |= self.early.to_dict() | self.early_so_far.to_dict("run_")
        numbers |= {f"waited_for_{lane}_s": seconds for lane, seconds in self.waited_s.items()}
        numbers |= {f"busy_{lane}_s": seconds for lane, seconds in self.busy_s.items()}
        numbers |= {f"stream_waited_for_{lane}_s": seconds for lane, seconds in self.stream_waited_s.items()}
        known = {
            "step_s": self.step_s,
            "predicted_step_s": self.predicted_step_s,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "grad_norm": None if self.grad_norm is None else float(self.grad_norm),
        }
        return numbers | {name: value for name, value in known.items() if value is not None}

    def surprises(self) -> dict[str, tuple[int, int]]:
        """(observed, predicted) of figures that differ by more than `TOLERANCE`, and of memory above the plan's peak.

        Hits are ignored: they cost nothing, and a run counts consecutive uses of one chunk as one.
        """
        found = {}
        for name, expected in self.predicted.items():
            if name == "hits" or name not in self.observed or (self.not_compared and name not in _PEAKS):
                continue
            seen = self.observed[name]
            if name == "device_buffers":
                # The plan's parts belong to the moment of its peak; at other moments buffers may take more, and the
                # rest less.
                if seen > self.predicted["device_peak"]:
                    found[name] = (seen, self.predicted["device_peak"])
            elif name in _COME_LATER:
                if seen > (1 + TOLERANCE) * expected:
                    found[name] = (seen, expected)
            elif abs(seen - expected) > TOLERANCE * max(expected, 1):
                found[name] = (seen, expected)
        return found

    def __str__(self) -> str:
        lines = [f"{'':16}{'observed':>14}{'predicted':>14}"]
        if self.micro_batches != 1:
            lines[0] += f"  per optimizer step of {self.micro_batches} micro-batches"
        for name, expected in self.predicted.items():
            show = str if name in ("loads", "hits") else format_bytes
            seen = show(self.observed[name]) if name in self.observed else "not measured"
            lines.append(f"{name:16}{seen:>14}{show(expected):>14}")
        if self.step_s is not None:
            predicted = "" if self.predicted_step_s is None else format_seconds(self.predicted_step_s)
            lines.append(f"{'step':16}{format_seconds(self.step_s):>14}{predicted:>14}".rstrip())
        lines.append(f"demand loads {self.demand_loads}, deviations from the recorded order {self.deviations}")
        if self.early.planned:
            lines.append(f"early updates: {self.early}; in all steps so far {self.early_so_far}")
            if not self.early.made and self.early_so_far.made:
                lines.append(PAUSED)
        waits = ", ".join(f"{lane} {seconds:.3f} s" for lane, seconds in self.waited_s.items() if seconds >= SHOWN_S)
        lines.append(f"compute waited for {waits or 'no lane'}")
        if self.host_forms:
            forms = (f"{count} {_FORMS.get(form, form)}" for form, count in self.host_forms.items())
            lines.append(f"shards stepped on the host: {', '.join(forms)}")
        if self.times_slowest is not None:
            lines.append(self.slow_text())
        if self.not_compared:
            lines.append(f"loads and bytes cannot be compared with the plan: {self.not_compared}")
        return "\n".join(lines)

    def slow_text(self) -> str:
        """A sentence about `times_slowest`, with the likeliest causes on the machine as it is now."""
        causes, cores = [], os.cpu_count() or 1
        if self.first:
            causes.append("a first step also makes states, compiles kernels and touches memory")
        if (self.slowest_s or 0.0) < SHORT_S:
            causes.append("Python's own work, which is not predicted, is most of so short a step")
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        if load > cores:
            causes.append(f"the machine is busy (load {load:.0f} on {cores} cores)")
        if self.early.kept < self.early.planned:
            causes.append(f"of {self.early.planned} chunks that the plan updates early, {self.early.kept} were kept")
        lane = max(self.waited_s, key=lambda name: self.waited_s[name], default="")
        if self.waited_s.get(lane):
            causes.append(f"compute waited longest for {lane} ({format_seconds(self.waited_s[lane])})")
        wrong = f"the rates of {self.hardware_name} are not this machine's"
        causes.append(f"{wrong}: plan with those that `elixir hardware --measure --out hw.json` finds here")
        if self.hardware_name in preset_names():  # nobody measured them here
            causes.insert(0, causes.pop())
        if self.outgrown:
            causes.insert(0, self.outgrown)
        times, slowest = self.times_slowest or 0.0, format_seconds(self.slowest_s or 0.0)
        return (
            f"the step took {times:.1f} times the {slowest} at which its prediction ends; likely causes: "
            f"{'; '.join(causes)}"
        )


def differences(surprises: dict[str, tuple[int, int]]) -> str:
    """The text of `StepReport.surprises`."""
    words = []
    for name, pair in surprises.items():
        seen, expected = (str(value) if name == "loads" else format_bytes(value) for value in pair)
        words.append(f"{name} {seen} instead of {expected}")
    return ", ".join(words)


def expected_of(plan: Plan, schedule: Schedule, course: Course) -> Expected:
    """Predicts the loads and bytes of a step.

    Args:
        plan: the plan of the step.
        schedule: the schedule of the run, with or without prefetch.
        course: the course of the step.
    """
    predicted, count = plan.predicted, course.backwards.count
    unused: tuple[str, ...] = () if plan.uses_disk or plan.reads_files else DISK_LINKS
    unused = unused if plan.replicas > 1 else (*unused, "replicas")
    links = [link for link in _LINKS if link not in unused]
    if course.odd:
        counts = {"loads": predicted.loads, "hits": predicted.hits} | {
            link: predicted.moved_bytes[link] for link in links
        }
        return Expected(counts, count, course.odd)
    known = {chunk for chunks in schedule.policy.required for chunk in chunks}
    held = tuple(chunk for chunk in course.held if chunk in known)
    loads = schedule.step(plan.block_count, count, held)
    routes = (
        route._replace(gradient=route.gradient or index in course.untraced)
        for index, route in enumerate(plan.routes(course.rank))
    )
    moved = step_traffic(
        tuple(routes),
        loads.by_chunk,
        course.backwards,
        stepped=not course.skipped,
        replicas=plan.replicas,
        swap_bytes=plan.step.swap_bytes,
    )
    on_disk = 0 if course.skipped else plan.disk_bytes(course.rank)
    over_links = (moved.host_to_device_bytes, moved.device_to_host_bytes, moved.network_bytes, moved.replicas_bytes)
    by_link = dict(zip(_LINKS, (*over_links, on_disk + moved.file_bytes, on_disk), strict=True))
    counts = {"loads": loads.loads, "hits": loads.hits, **{link: by_link[link] for link in links}}
    return Expected(counts, count, "")


def make_report(
    engine: Engine,
    promise: PlanPromise,
    expected: Expected,
    span: Span | None,
    tokens: int | None,
    *,
    first: bool,
) -> StepReport:
    """Creates the report of the last step, and resets the engine's counts.

    Args:
        engine: the engine that ran the step.
        promise: the memory that the plan may take.
        expected: the prediction for the step.
        span: the time span of the step.
        tokens: the tokens of its forwards.
        first: whether it is the first step of this module.
    """
    plan, arena, lanes, counts = engine.plan, engine.arena, engine.lanes, engine.lanes.counts
    predicted, parts = plan.predicted, plan.predicted.device_parts
    ours = ["rcache", "resident_weights", "weight_shards", "optimizer_states", "gradient_blocks", "matrix_room"]
    if plan.world_size > 1:
        ours.append("gradients")
    seen_on_disk = {"disk_read": counts.disk_read_bytes, "disk_write": counts.disk_written_bytes}
    seen_on_disk["disk_peak"] = arena.peak_bytes["disk"]
    on_disk = {"disk_peak": sum(plan.extent_bytes(chunk) for chunk in plan.chunks if chunk.state_home == "disk")}
    has_disk = plan.uses_disk or plan.reads_files
    as_planned = expected.micro_batches == plan.passes
    host_bytes = rank_host_bytes(plan, arena.device.type, max(expected.micro_batches, plan.passes))
    host_bytes += arena.most_bytes[CHECKPOINT_PART]  # once a checkpoint was saved
    need = promise.need(plan, host_bytes)
    process, device_peak = promise.peaks(need), promise.device_peak()
    report = StepReport(
        observed={
            "loads": counts.loads,
            "hits": counts.hits,
            "host_to_device": counts.host_to_device_bytes,
            "device_to_host": counts.device_to_host_bytes,
            "network": counts.network_bytes,
            **({"replicas": counts.replicas_bytes} if plan.replicas > 1 else {}),
            **({} if device_peak is None else {"device_peak": device_peak}),
            "device_buffers": arena.peak_bytes["device"],
            "host_peak": arena.peak_bytes["host"],
            **({} if process is None else {"process_peak": process[0]}),
            **(seen_on_disk if has_disk else {}),
        },
        predicted={
            **expected.counts,
            "device_peak": predicted.device_peak_bytes,
            "device_buffers": sum(parts.get(name, 0) for name in ours),
            "host_peak": host_bytes,
            **({} if process is None else {"process_peak": process[1]}),
            **(on_disk if has_disk else {}),
        },
        demand_loads=counts.demand_loads,
        deviations=counts.deviations,
        waited_s={name: lane.waited_s for name, lane in lanes.by_name().items()},
        busy_s={name: lane.take_busy_s() for name, lane in lanes.by_name().items()},
        stream_waited_s={name: lane.take_stream_waited_s() for name, lane in lanes.by_name().items()},
        refreshed_bytes=counts.refreshed_bytes,
        span=span,
        predicted_step_s=predicted.step_s if as_planned else None,
        slowest_s=predicted.range_s[1] if as_planned and predicted.range_s is not None else None,
        first=first,
        hardware_name=plan.hardware_name,
        micro_batches=expected.micro_batches,
        early=EarlyCounts(
            _planned_early(plan, engine.group.rank) if expected.micro_batches and len(engine.steppers) == 1 else 0,
            counts.early_chunks,
            counts.kept_chunks,
        ),
        host_forms=dict(Counter(engine.host_forms.popleft() for _ in range(len(engine.host_forms)))),
        not_compared=expected.not_compared,
        tokens=tokens,
        grad_norm=engine.steppers[0].grad_norm if len(engine.steppers) == 1 else None,
        world_size=plan.world_size,
        process_parts=need.parts,
    )
    lanes.count_anew()
    return report


def _planned_early(plan: Plan, rank: int) -> int:
    """The number of chunks that a rank updates early under the plan."""
    return sum(chunk.home.early and chunk.has_parameters_on(rank % plan.shards, plan.shards) for chunk in plan.chunks)
