"""`StepAccount`: counts a training step, from its first forward to its optimizer step, and reports it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from elixir.plan.step_traffic import Backwards
from elixir.wrapper.account.plan_promise import PlanPromise
from elixir.wrapper.account.step_report import (
    Course,
    EarlyCounts,
    Expected,
    StepClock,
    StepReport,
    differences,
    expected_of,
    make_report,
)
from elixir.wrapper.engine import Engine

logger = logging.getLogger(__name__)


class StepAccount:
    """Counts and times the steps of one module, one after the other.

    Args:
        engine: of the module.
        promise: what its plan may take.
    """

    def __init__(self, engine: Engine, promise: PlanPromise) -> None:
        self._engine, self._promise = engine, promise
        self._clock = StepClock(engine.device)
        self._warned = self._said_slow = False
        self._known: dict[Course, Expected] = {}  # the prediction per course of a step; most steps have the same
        self._early = EarlyCounts()  # of all steps
        self._skipped: bool | None = None  # whether the step that is not reported yet was, if there is one
        self._start()
        self.last_report: StepReport | None = None
        """The last step, compared with its prediction; None before the first."""

    def _start(self, held: tuple[int, ...] = ()) -> None:
        self._held = held  # chunks in blocks at the beginning of the step
        self._trained = 0  # passes of this step with gradients; outside of `accumulate` each forward is one
        self._tokens: int | None = 0  # their tokens
        self._most_tokens = 0  # of one of them
        self._settled = self._engine.settled  # how often blocks had been emptied at its last forward
        self._odd = ""  # the reason why no plan predicts its loads
        self._in_parts = False  # whether it consists of calls of several models

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], part: nn.Module | None = None) -> bool:
        """Counts a forward with these arguments; returns whether a step begins with it.

        Args:
            args, kwargs: of the forward.
            part: one of several models under the plan, whose calls make up a step together. Those without gradients
                belong to it, too. A step begins with the call with which the traced one began.
        """
        engine = self._engine
        if self._skipped is not None:
            self._report(self._skipped, in_part=bool(self._engine.unstepped))
        training = torch.is_grad_enabled()
        first = part is not None and not self._trained and engine.cache.begins_with(engine.uses.streamed_of(part))
        begins = first or (training and not self._clock.running)
        if begins:
            self._begin(in_parts=part is not None)
        elif self._clock.running and not training and part is None:
            self._odd = "the model was evaluated between its first forward and step()"
        elif engine.settled > self._settled and engine.schedule.min_blocks:
            self._odd = "weights were shown or saved between two micro-batches, which empties the blocks"
        self._settled = engine.settled
        if training:
            # Of several models, or several calls of one, before a backward, the first counts.
            first = part is None or engine.lanes.counts.backwards == self._trained
            self._trained += first and not engine.joins_pass
            tokens = _tokens(args, kwargs)
            self._tokens = None if tokens is None or self._tokens is None else self._tokens + tokens
            self._most_tokens = max(self._most_tokens, tokens or 0)
        return begins

    def _begin(self, *, in_parts: bool) -> None:
        engine = self._engine
        self._promise.note_device_peak()
        if in_parts:
            engine.cache.begin(announce=False)
        # Counts since the last step, as from an evaluation, do not belong to this one.
        engine.lanes.count_anew()
        engine.lanes.fetch.take_busy_s()  # other lanes may still work for the last step
        self._clock.start()
        self._start(engine.cache.held)
        self._in_parts = in_parts

    def begin_anew(self) -> None:
        """Stops the clock, since the first forward of a step has raised; the step begins with the next."""
        self._clock.stop()

    def another_plan(self) -> None:
        """Starts anew for another plan: its first deviation is reported again."""
        self._warned = self._said_slow = False
        self._promise.forget_device_peak()
        self._known.clear()

    def step_over(self, skipped: bool) -> None:
        """Writes the step's report, and warns if the plan was wrong; of several optimizers, after the last, or before
        the next forward.

        Args:
            skipped: whether the step was skipped after an overflow, so that no weights have moved.
        """
        if len(self._engine.unstepped) > 1:  # the optimizer that has stepped is still among them
            self._skipped = skipped
        else:
            self._report(skipped)

    def spare_host_bytes(self) -> int:
        """See `PlanPromise.spare_host_bytes`."""
        return self._promise.spare_host_bytes()

    def _report(self, skipped: bool, *, in_part: bool = False) -> None:
        engine, self._skipped = self._engine, None
        counts = engine.lanes.counts
        backwards = counts.backwards
        odd = self._odd
        if self._in_parts and engine.schedule.min_blocks and counts.begun_anew != max(backwards - 1, 0):
            odd = odd or "its models were called more often than in the traced step, or in another order"
        if backwards != self._trained or not backwards:
            odd = f"{self._trained} forwards to train and {backwards} backwards came before step()"
        elif in_part:
            odd = "not all optimizers of this module have stepped"
        untraced = engine.gradients.untraced
        course = Course(
            Backwards.of(backwards, engine.plan.passes), self._held, engine.group.rank, skipped, untraced, odd
        )
        if course not in self._known:
            self._known[course] = expected_of(engine.plan, engine.schedule, course)
        before = self.last_report
        report = make_report(
            engine, self._promise, self._known[course], self._clock.stop(), self._tokens, first=before is None
        )
        self._early += report.early
        self.last_report = replace(report, early_so_far=self._early, outgrown=self._outgrown())
        self._start()
        self._say_if_slow(before, self.last_report)
        surprises = {} if skipped else self.last_report.surprises()
        if surprises and not self._warned:
            self._warned = True
            causes = [*self._causes(self.last_report, untraced)]
            if "process_peak" in surprises:
                causes.append("the program has grown since its model was wrapped: say by how much with reserve=")
            logger.warning("this step differs from its plan: %s", "; ".join([differences(surprises), *causes]))

    def _say_if_slow(self, *reports: StepReport | None) -> None:
        """Logs the first step, except the very first, that takes much longer than predicted.

        On CUDA it does so one step later, so that the host does not wait for the device.
        """
        for report in reports:
            if self._said_slow or report is None or report.first or report.span is None or not report.span.over:
                continue
            if report.times_slowest is not None:
                self._said_slow = True
                logger.log(logging.DEBUG if self._engine.group.rank else logging.WARNING, "%s", report.slow_text())

    def _outgrown(self) -> str:
        """The sentence that names a micro-batch larger than planned; empty if there is none."""
        planned = self._engine.plan.step.tokens
        if planned is None or self._most_tokens <= planned:
            return ""
        return f"batches of {planned:,} tokens were planned, this one has {self._most_tokens:,}: plan with the largest"

    def explain(self, error: BaseException) -> None:
        """Adds that a micro-batch is larger than planned to an error of torch that the device's memory ran out."""
        outgrown = self._outgrown()
        if outgrown and isinstance(error, torch.OutOfMemoryError):
            error.add_note(outgrown)

    def _causes(self, report: StepReport, untraced: frozenset[int]) -> Iterator[str]:
        """The known reasons why a step needs more than its plan says."""
        engine = self._engine
        planned, micro_batches = engine.plan.passes, report.micro_batches
        if report.outgrown:
            yield report.outgrown
        if micro_batches != planned:
            kind = "micro-batches" if engine.plan.pass_size == 1 else "passes"
            yield f"it had {micro_batches} {kind}, planned were {planned}: see accumulation="
        if untraced:
            slot = engine.chunks[min(untraced)].slots[0]
            yield (
                f"gradients came to {len(untraced)} chunks ({slot.name}, ...) that got none in the traced step, for "
                "which the plan has no memory: plan with a step that trains them"
            )


def _tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The number of token ids among a forward's arguments; None if there are none."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.is_complex():
        return None
    return ids.numel()
