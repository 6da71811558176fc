"""What a step did, beside what the plan predicted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from elixir.chunk.buffers import Arena
from elixir.chunk.cache import CacheCounts
from elixir.chunk.gradients import GradientFlow
from elixir.chunk.lanes import Lanes
from elixir.plan import MASTER_BYTES, STAGING_BUFFERS, Plan, master_bytes
from elixir.units import dtype_bytes, format_bytes, format_seconds
from elixir.wrapper.clock import Span

TOLERANCE = 0.05
"""Where observed and predicted differ by more than this share, the run says so."""


@dataclass(frozen=True)
class StepReport:
    """One training step of one rank, from its first forward to its optimizer step.

    `observed` and `predicted` have the same keys: ``loads``, ``hits``, ``host_to_device``, ``device_to_host``,
    ``network`` (bytes), ``device_peak`` and ``host_peak`` (bytes that the runtime's own buffers took so far, and what the
    plan allots them: activations and gradients that autograd holds are in neither; of the host, this rank's part).
    """

    observed: dict[str, int]
    predicted: dict[str, int]
    device_limit_bytes: int
    """The plan's whole device peak. Its parts are those of one moment; at others ours may be more and the rest less."""
    demand_loads: int
    """Loads that nothing had foreseen, for which the use had to wait from beginning to end."""
    deviations: int
    """Uses that left the recorded order."""
    waited_s: dict[str, float]
    """How long compute stood still for each lane; on CUDA, where nobody stands still, 0."""
    busy_s: dict[str, float]
    """How long each lane worked, delays of an emulated link included; on CUDA, of what is known to be over."""
    refreshed_bytes: int
    """Of ``host_to_device``: weights on the device that the host's optimizer has updated."""
    span: Span | None
    """From the beginning of the first forward with gradients on to the end of the optimizer's step; None without one."""
    predicted_step_s: float

    @cached_property
    def step_s(self) -> float | None:
        """Seconds of `span`; on CUDA, asking waits for the device."""
        return None if self.span is None else self.span.seconds()

    def surprises(self) -> dict[str, tuple[int, int]]:
        """(observed, predicted) of what differs by more than `TOLERANCE`, and of memory beyond the plan's peak.

        Hits do not count: they cost nothing, and uses of one chunk in a row are one use to a run.
        """
        found = {}
        for name, expected in self.predicted.items():
            if name == "hits":
                continue
            seen = self.observed[name]
            if name == "device_peak":
                if seen > self.device_limit_bytes:
                    found[name] = (seen, self.device_limit_bytes)
            elif name == "host_peak":  # less is no surprise: states come with the first step
                if seen > (1 + TOLERANCE) * expected:
                    found[name] = (seen, expected)
            elif abs(seen - expected) > TOLERANCE * max(expected, 1):
                found[name] = (seen, expected)
        return found

    def __str__(self) -> str:
        lines = [f"{'':16}{'observed':>14}{'predicted':>14}"]
        for name, expected in self.predicted.items():
            show = str if name in ("loads", "hits") else format_bytes
            lines.append(f"{name:16}{show(self.observed[name]):>14}{show(expected):>14}")
        if self.step_s is not None:
            lines.append(f"{'step':16}{format_seconds(self.step_s):>14}{format_seconds(self.predicted_step_s):>14}")
        lines.append(f"demand loads {self.demand_loads}, deviations from the recorded order {self.deviations}")
        waits = ", ".join(f"{lane} {seconds:.3f} s" for lane, seconds in self.waited_s.items())
        lines.append(f"compute waited for {waits}")
        return "\n".join(lines)


def differences(surprises: dict[str, tuple[int, int]]) -> str:
    """`StepReport.surprises` in words."""
    words = []
    for name, pair in surprises.items():
        seen, expected = (str(value) if name == "loads" else format_bytes(value) for value in pair)
        words.append(f"{name} {seen} instead of {expected}")
    return ", ".join(words)


def make_report(
    plan: Plan,
    counts: CacheCounts,
    flow: GradientFlow,
    arena: Arena,
    lanes: Lanes,
    *,
    refreshed_bytes: int,
    regathered_bytes: int,
    span: Span | None,
) -> StepReport:
    """The report of the step that is just over; counts of `flow` and `lanes` start anew.

    Args:
        refreshed_bytes: host to device, of weights on the device that the host has updated.
        regathered_bytes: network, of resident weights whose shards have been updated.
        span: when it began and ended.
    """
    predicted, parts = plan.predicted, plan.predicted.device_parts
    ours = ["rcache", "resident_weights", "weight_shards", "optimizer_states", "gradient_blocks"]
    if plan.world_size > 1:
        ours.append("gradients")
    report = StepReport(
        observed={
            "loads": counts.loads,
            "hits": counts.hits,
            "host_to_device": counts.host_to_device_bytes + refreshed_bytes,
            "device_to_host": flow.offloaded_bytes,
            "network": counts.network_bytes + flow.network_bytes + regathered_bytes,
            "device_peak": arena.peak_bytes["device"],
            "host_peak": arena.peak_bytes["host"],
        },
        predicted={
            "loads": predicted.loads,
            "hits": predicted.hits,
            **{link: predicted.moved_bytes[link] for link in ("host_to_device", "device_to_host", "network")},
            "device_peak": sum(parts.get(name, 0) for name in ours),
            "host_peak": _host_bytes(plan, arena.device.type),
        },
        device_limit_bytes=predicted.device_peak_bytes,
        demand_loads=counts.demand_loads,
        deviations=counts.deviations,
        waited_s={name: lane.waited_s for name, lane in lanes.by_name().items()},
        busy_s={name: lane.take_busy_s() for name, lane in lanes.by_name().items()},
        refreshed_bytes=refreshed_bytes,
        span=span,
        predicted_step_s=predicted.seconds["total"],
    )
    flow.offloaded_bytes = flow.network_bytes = 0
    for lane in lanes.all():
        lane.waited_s = 0.0
    return report


def _host_bytes(plan: Plan, device_type: str) -> int:
    """What one rank keeps in host memory: weights, gradients, masters and states, and what new weights and gradients that are
    added to others pass through; the latter beside a device only."""
    staged = [chunk.weight_bytes // plan.world_size for chunk in plan.chunks if chunk.returns_rounded]
    total = min(len(staged), STAGING_BUFFERS) * max(staged, default=0)
    if plan.accumulation > 1 and device_type != "cpu":
        at_home = [chunk for chunk in plan.chunks if chunk.trainable and chunk.state_home == "host"]
        total += max((chunk.weight_bytes // plan.world_size for chunk in at_home), default=0)
    for chunk in plan.chunks:
        numel, itemsize = chunk.numel // plan.world_size, dtype_bytes(chunk.dtype)
        if chunk.weight_home == "host":
            total += numel * itemsize
        if chunk.trainable and chunk.state_home == "host":
            kept = itemsize < MASTER_BYTES or chunk.weight_home == "device"
            gradients = 0 if chunk.grad_rank is None else itemsize
            total += numel * (gradients + master_bytes(itemsize) * kept) + plan.state_size.nbytes(numel, itemsize)
    return total
