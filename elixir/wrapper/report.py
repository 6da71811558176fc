"""What a step did, beside what the plan predicted."""

from __future__ import annotations

from dataclasses import dataclass

from elixir.units import format_bytes

TOLERANCE = 0.05
"""Where observed and predicted differ by more than this share, the run says so."""


@dataclass(frozen=True)
class StepReport:
    """One training step of one rank, from its first forward to its optimizer step.

    `observed` and `predicted` have the same keys: ``loads``, ``hits``, ``host_to_device``, ``device_to_host``,
    ``network`` (bytes) and ``device_peak`` (bytes that the runtime's own buffers took, and what the plan allots them:
    activations and gradients that autograd holds are in neither).
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
            elif abs(seen - expected) > TOLERANCE * max(expected, 1):
                found[name] = (seen, expected)
        return found

    def __str__(self) -> str:
        lines = [f"{'':16}{'observed':>14}{'predicted':>14}"]
        for name, expected in self.predicted.items():
            show = str if name in ("loads", "hits") else format_bytes
            lines.append(f"{name:16}{show(self.observed[name]):>14}{show(expected):>14}")
        lines.append(f"demand loads {self.demand_loads}, deviations from the recorded order {self.deviations}")
        waits = ", ".join(f"{lane} {seconds:.3f} s" for lane, seconds in self.waited_s.items())
        lines.append(f"compute waited for {waits}")
        return "\n".join(lines)
