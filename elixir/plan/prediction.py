"""`Prediction`: what a plan is expected to take, in memory, bytes and seconds, and how it was judged."""

from __future__ import annotations

from dataclasses import dataclass, field

from elixir.artifact import check_bounds
from elixir.hardware.scenario import Scenario
from elixir.plan.chunk_plan import Amount, Count, must
from elixir.units import format_seconds

DISK_LINKS = ("disk_read", "disk_write")
CHECKPOINT_PART = "checkpoint"
"""Its name in `Prediction.host_parts`."""
LINKS = ("host_to_device", "device_to_host", "network", "replicas", *DISK_LINKS)


NOTICEABLE_SHARE = 0.001
"""Share of a step by which another plan must be faster to be worth a change."""
NOTICEABLE_REGRET = 0.01
"""A smaller regret is called none, and a measurement that removes less of it is not named."""

MEASURING = dict.fromkeys(("host_adam", "link"), "measuring the machine (`elixir hardware --measure`)")
LEARNING = {
    "host_adam": "a run that uses CPU Adam (`elixir hardware --learn`)",
    "link": "a run that uses the links (`elixir hardware --learn`)",
    "clipped": "a run, which tells how often its norm is clipped (`elixir hardware --learn`),",
}
"""Field of `Scenario` -> the measurement, or the run, that makes it known."""


@dataclass(frozen=True)
class Judgement:
    """A plan in one scenario."""

    scenario: Scenario
    step_s: Amount
    """Seconds of its step there."""
    best_s: Amount
    """The least that are known of any plan."""

    @property
    def regret(self) -> float:
        """The share by which it is slower than the best."""
        return self.step_s / self.best_s - 1 if self.best_s else 0.0

    def __post_init__(self) -> None:
        check_bounds(self, "field 'judgements.{}'")
        # Only a step without anything to compute takes none.
        must(self.best_s or not self.step_s, "judgements.best_s", f"must be above 0, found {self.best_s!r}")


@dataclass(frozen=True)
class Prediction:
    """The expectation of the planner for one steady optimizer step, with which a run compares itself.

    All counts and times are of all `Plan.accumulation` micro-batches of the step together, each of which reduces its
    gradients.
    """

    device_peak_bytes: int
    device_parts: dict[str, Count]
    """The device peak by what holds it; sums to `device_peak_bytes`."""
    host_peak_bytes: int
    """Bytes of all ranks of one machine together."""
    host_parts: dict[str, Count]
    """The host peak by what holds it; sums to `host_peak_bytes`."""
    moved_bytes: dict[str, Count]
    """Bytes per rank and optimizer step over each of `LINKS`."""
    loads: Count
    """Gathers into rCache blocks per optimizer step."""
    hits: Count
    """Uses of streamed chunks that found them in a block already."""
    seconds: dict[str, Amount]
    """Predicted time by part; ``total`` is the step."""
    fastest_s: Amount | None = None
    """Seconds of the fastest plan that was found, which may depend more on the host than this one does; None where
    there was no choice."""
    range_s: tuple[float, float] | None = None
    """The least and the most that a step may take, as far as a preset, a measurement or runs leave rates uncertain."""
    flops: Count = 0
    """FLOPs of one rank and optimizer step, recomputed ones included, the optimizer's not."""
    peak_flops_per_s: Amount | None = None
    """Peak of one device, dense, in the dtype of most parameters."""
    disk_peak_bytes: Count = 0
    """Master weights and optimizer states on the disk of one machine, of all its ranks together."""
    judgements: tuple[Judgement, ...] = ()
    """The plan in each scenario that the hardware profile thinks possible, the nominal one first; empty where only that
    one was planned for."""
    regret_if_known: dict[str, Amount] = field(default_factory=dict)
    """The worst regret that is left if one of the fields of `Scenario` is known, by its name."""
    activation_bytes: Count = 0
    """The most that inputs, activations and workspace take at once, which is not always at the device peak."""

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of copies while a checkpoint is written; the plan runs without them, too."""
        return self.host_parts.get(CHECKPOINT_PART, 0)

    @property
    def host_step_bytes(self) -> int:
        """The host peak while no checkpoint is written."""
        return self.host_peak_bytes - self.checkpoint_bytes

    def __post_init__(self) -> None:
        check_bounds(self)
        for name, parts, peak in (
            ("device_parts", self.device_parts, self.device_peak_bytes),
            ("host_parts", self.host_parts, self.host_peak_bytes),
        ):
            total = sum(parts.values())
            must(total == peak, name, f"must sum to the peak of {peak} bytes", total)
        links, unknowns = sorted(self.moved_bytes), list(Scenario.__dataclass_fields__)
        must(links == sorted(LINKS), "moved_bytes", f"must have the links {list(LINKS)}, found {links}")
        must("total" in self.seconds, "seconds", f"must have the step's 'total', found {sorted(self.seconds)}")
        known = self.regret_if_known.keys() <= set(unknowns)
        must(known, "regret_if_known", f"must name some of {unknowns}, found {list(self.regret_if_known)}")

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step."""
        return self.seconds["total"]

    @property
    def flops_per_s(self) -> float:
        """FLOP/s of one device, over the whole step."""
        return self.flops / self.step_s if self.step_s else 0.0

    @property
    def peak_share(self) -> float | None:
        """Share of a device's peak that the step reaches, recomputed work included; None where it is not known."""
        return self.flops_per_s / self.peak_flops_per_s if self.peak_flops_per_s and self.flops else None

    def regret_text(self, measured: bool) -> str:
        """How much slower than the best plan it may be, and what would tell most; empty if nothing was judged.

        Args:
            measured: whether the machine's rates were measured, so that only runs tell more of them.
        """
        judged = self.judgements
        if not judged:
            return ""
        worst = max(judged, key=lambda each: each.regret)
        if worst.regret < NOTICEABLE_REGRET:
            return f"costs less than 1 % against the best plan in all of {len(judged)} scenarios"
        most = f"{100 * worst.regret:.0f} %"
        text = f"costs at most {most} against the plan you would pick if you knew that {worst.scenario}"
        # Each other scenario that differs from the profile in one thing.
        others = [it for it in judged if it is not worst and it.scenario.differences(judged[0].scenario) == 1]
        if others:
            text += f" ({', '.join(f'{100 * each.regret:.0f} % if {each.scenario}' for each in others)})"
        known = self.regret_if_known
        name = min(known, key=lambda each: known[each], default="")
        if name and known[name] < worst.regret - NOTICEABLE_REGRET:
            telling = LEARNING if measured or name == "clipped" else MEASURING
            text += f"; {telling[name]} would leave {100 * known[name]:.0f} %"
        return text

    def time_text(self) -> str:
        """The step's seconds, with their range if one is known."""
        text = f"{format_seconds(self.step_s)} predicted"
        if self.range_s is None:
            return text
        low, high = map(format_seconds, self.range_s)
        return f"{text} ({low} if compute, links and CPU are fast, {high} if all are slow)"


def range_text(seconds: float, between: tuple[float, float] | None) -> str:
    """Seconds with the range in which they may be, such as ``1.60 s (1.28 to 2.05)``."""
    text = format_seconds(seconds)
    return text if between is None else f"{text} ({format_seconds(between[0])} to {format_seconds(between[1])})"
