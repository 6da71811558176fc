"""`StepClock`: times a training step, without the caller's work between steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import cast

import torch


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
