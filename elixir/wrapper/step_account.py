"""What a training step has done, from its first forward to the end of its optimizer step, and its report."""

from __future__ import annotations

import logging

import torch

from elixir.chunk.lanes import Lanes
from elixir.wrapper.clock import StepClock
from elixir.wrapper.report import StepReport, differences, make_report
from elixir.wrapper.running import RunningPlan

logger = logging.getLogger(__name__)


class StepAccount:
    """Counts and times the steps of one module, one after the other.

    Args:
        lanes: of the module.
        device: where compute runs.
    """

    def __init__(self, lanes: Lanes, device: torch.device) -> None:
        self._lanes = lanes
        self._clock = StepClock(device)
        self._warned = False
        self._forwards = {True: 0, False: 0}  # since the last step, by whether gradients were on
        self.refreshed_bytes = 0
        """Host to device since the last report, for weights on the device that the host has updated."""
        self.regathered_bytes = 0
        """Network, likewise, for resident weights whose shards have been updated."""
        self.last_report: StepReport | None = None
        """What the last step did, beside what the plan predicted; None before the first."""

    def forward(self, running: RunningPlan) -> bool:
        """A forward begins; whether a step begins with it."""
        self._forwards[torch.is_grad_enabled()] += 1
        if self._clock.running or not torch.is_grad_enabled():
            return False
        # What has been counted since the last step, as of an evaluation, is not of this one.
        running.cache.take_counts()
        self._lanes.fetch.take_busy_s()  # other lanes may still be at work for the last step
        for lane in self._lanes.all():
            lane.waited_s = 0.0
        self._clock.start()
        return True

    def begin_anew(self) -> None:
        """The forward with which a step began has raised; the step begins with the next."""
        self._clock.stop()

    def another_plan(self) -> None:
        """Steps run under another plan from here on, of which nobody has been told yet that it is wrong."""
        self._warned = False

    def step_over(self, running: RunningPlan, *, skipped: bool = False) -> None:
        """Write the step's report, and say so where the plan was wrong.

        Args:
            running: under which the step ran.
            skipped: the step was left out after an overflow, so that no weights have moved.
        """
        self.last_report = make_report(
            running.plan,
            running.cache.take_counts(),
            running.gradients,
            running.arena,
            self._lanes,
            refreshed_bytes=self.refreshed_bytes,
            regathered_bytes=self.regathered_bytes,
            span=self._clock.stop(),
        )
        self.refreshed_bytes = self.regathered_bytes = 0
        surprises = {} if skipped else self.last_report.surprises()
        if surprises and not self._warned:
            self._warned = True
            others = self._other_forwards(running.plan.accumulation)
            logger.warning("this step differs from its plan: %s%s", differences(surprises), others)
        self._forwards = {True: 0, False: 0}

    def _other_forwards(self, planned: int) -> str:
        """What of a difference is the caller's doing: forwards since the last step that the plan has not foreseen."""
        trained, other = self._forwards[True], self._forwards[False]
        if trained == planned and not other:
            return ""
        return f"; forwards of the step: {trained} to train (planned {planned}, see accumulation=), {other} to evaluate"
