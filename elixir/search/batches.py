"""How to cut a step's samples into batches, and how much to checkpoint: ways are traced, planned, and compared."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from elixir.errors import InputError, InputTypeError, PlanError
from elixir.hardware.profile import HardwareProfile
from elixir.plan.plan import Plan
from elixir.search.advise.answer import Answer
from elixir.search.advise.infeasible import with_levers
from elixir.search.planner import plan_or_shortage
from elixir.search.propose.judge import DECIMALS
from elixir.search.question import Question, StepQuestion
from elixir.search.request import Progress, SearchRequest, check_count
from elixir.search.searches import with_exact_moves
from elixir.search.simulator.rates import Rates, main_dtype
from elixir.step_trace import StepTrace

BATCHES_REFINED = 2
"""The number of batches for which numbers of checkpointed layers are tried."""
TraceOf = Callable[[int, str], StepTrace]
"""Traces a batch of so many samples with so much checkpointing, such as ``trace_of(4, "non-reentrant")``."""


@dataclass(frozen=True)
class BatchOption:
    """One way to run a step. What is not known is None."""

    batch: int
    """Samples of one rank that are computed at once."""
    accumulation: int
    """Batches per optimizer step."""
    checkpoint: str
    """Form of activation checkpointing, as the tracer gets it."""
    reason: str = ""
    """The reason why it was not taken further, in one sentence; empty if there is a plan."""
    step_s: float | None = None
    """Seconds of the optimizer step, all its batches together."""
    device_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    """Peak of one machine."""


@dataclass(frozen=True)
class BatchChoice:
    """The fastest way, its plan with what can be asked of it, and what else there was."""

    answer: Answer
    option: BatchOption
    options: tuple[BatchOption, ...]
    """All of them, in the order in which they were tried."""

    @property
    def plan(self) -> Plan:
        """Its plan."""
        return self.answer.plan


def search_batches(
    trace_of: TraceOf,
    hardware: HardwareProfile,
    asked: SearchRequest | int,
    *,
    samples: int,
    checkpoints: Sequence[str] = ("none",),
    micro_batches: bool = True,
    layers: int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> BatchChoice:
    """The fastest plan for `samples` samples of a rank per optimizer step.

    A step's samples are one batch, or 2, 4, 8, ... as long as they can be halved, whose gradients are added up. Of
    plans that take equally long the first is chosen: the one with fewer batches, then what comes first in
    `checkpoints`.

    Checkpointing fewer layers takes less compute and more memory. Where `layers` says how many there are, numbers
    between none and all are tried for the two batches whose steps were the fastest: from the better end in steps of a
    half, a quarter, ... of all, for as long as that helps. The best number need not be found where time falls and rises
    twice.

    Args:
        trace_of: called at most once per batch and entry of `checkpoints`.
        hardware: the machine.
        asked: a request, or the number of ranks.
        samples: of one rank, per optimizer step.
        checkpoints: forms of activation checkpointing to choose from, as `trace_of` knows them.
        micro_batches: False: one batch only.
        layers: how many can be checkpointed one by one
            (`elixir.models.activation_checkpointing.checkpointable_layers`), of which `trace_of` checkpoints the first
            12 where it is given ``"non-reentrant:12"``; 0: all or none.
        progress: called before each way; of how many is the most that there can be.
        options: fields of `SearchRequest`, such as ``device_memory`` and ``host_memory``.

    Raises:
        InputError, InputTypeError: an argument makes no sense.
        PlanError: no way fits; of the one that was nearest.
    """
    _check(samples, checkpoints, layers)
    request = SearchRequest.of(asked, **options)
    if "accumulation" in options or request.accumulation != 1:
        raise InputError("accumulation follows from samples and the batch; leave it out")
    forms = [checkpoint for checkpoint in checkpoints if checkpoint != "none"]
    ways = list(_ways(samples, checkpoints, micro_batches=micro_batches))
    most = len(ways)
    if layers and forms:
        batches = len({batch for batch, _ in ways})
        most += min(BATCHES_REFINED, batches) * min(2 * layers.bit_length(), layers + 1)

    def before(way: str, done: int) -> None:
        if progress is not None:
            progress(way, done, max(most, done + 1))

    trials = _Trials(trace_of, hardware, request, samples, before)
    for batch, checkpoint in ways:
        trials.step_s(batch, checkpoint)
    if layers and forms:
        for batch in trials.fastest_batches()[:BATCHES_REFINED]:
            trials.refine(batch, forms[0], layers)
    return trials.choice()


class _Way(NamedTuple):
    """A way that may win."""

    least_s: float
    """Rounded seconds of its step; without a plan, those of its compute alone."""
    place: int
    """Among those that were tried."""
    option: BatchOption
    question: Question
    plan: Plan | None = None


class _Trials:
    """Ways that were tried."""

    def __init__(
        self,
        trace_of: TraceOf,
        hardware: HardwareProfile,
        request: SearchRequest,
        samples: int,
        before: Callable[[str, int], None],
    ) -> None:
        self._trace_of, self._hardware, self._request, self._samples = trace_of, hardware, request, samples
        self._before = before
        self._tried: dict[tuple[int, str], BatchOption] = {}
        self._fastest_s = math.inf
        self._ways: list[_Way] = []
        """A heap, the fastest first."""
        self._missed: list[tuple[PlanError, Question]] = []

    def step_s(self, batch: int, checkpoint: str) -> float:
        """Seconds of one way; infinite without a plan, or without one that could win."""
        key = (batch, checkpoint)
        if key not in self._tried:
            count = self._samples // batch
            self._before(f"{count} x {batch} samples, activation checkpointing {checkpoint}", len(self._tried))
            self._tried[key] = self._try(BatchOption(batch, count, checkpoint))
        step_s = self._tried[key].step_s
        return math.inf if step_s is None else step_s

    def fastest_batches(self) -> list[int]:
        """Batches with a plan, the one with the fastest step first."""
        found: dict[int, float] = {}
        for (batch, _), option in self._tried.items():
            if option.step_s is not None:
                found[batch] = min(found.get(batch, math.inf), option.step_s)
        return sorted(found, key=lambda batch: found[batch])

    def refine(self, batch: int, form: str, layers: int) -> None:
        """Tries numbers of layers between none and all."""

        def step_s(count: int) -> float:
            ends = {0: "none", layers: form}
            return self.step_s(batch, ends.get(count, f"{form}:{count}"))

        here = min((layers, 0), key=step_s)
        step = layers // 2
        while step:
            around = [count for count in (here - step, here + step) if 0 <= count <= layers]
            best = min([here, *around], key=step_s)
            if best == here:
                step //= 2
            here = best

    def choice(self) -> BatchChoice:
        """The fastest once it is known which inputs of layers move: then it may be slower than another, or not fit."""
        found, fastest_s = None, math.inf
        while self._ways and self._ways[0].least_s < fastest_s:
            way = heapq.heappop(self._ways)
            option = way.option
            if way.plan is None:
                self._tried[option.batch, option.checkpoint] = self._planned(way)
                continue
            try:
                answer = with_exact_moves(Answer(way.plan, way.question), StepQuestion(model=way.question.trace))
            except PlanError as error:
                option = self._not_fitting(option, error, way.question)
            else:
                option, step_s = _measured(option, answer.plan), round(answer.plan.predicted.step_s, DECIMALS)
                if step_s < fastest_s:
                    found, fastest_s = (answer, option), step_s
            self._tried[option.batch, option.checkpoint] = option
        if found is None:
            raise with_levers(*min(self._missed, key=lambda missed: _lacking(missed[0])))
        return BatchChoice(*found, tuple(self._tried.values()))

    def _try(self, option: BatchOption) -> BatchOption:
        trace = self._trace_of(option.batch, option.checkpoint)
        least_s = option.accumulation * _compute_s(trace, self._hardware, self._request.world_size)
        question = Question(trace, self._hardware, replace(self._request, accumulation=option.accumulation))
        way = _Way(round(least_s, DECIMALS), len(self._tried), option, question)
        if least_s <= self._fastest_s:
            return self._planned(way)
        heapq.heappush(self._ways, way)
        return replace(option, reason=f"compute alone takes {least_s:.4g} s, longer than another way's step")

    def _planned(self, way: _Way) -> BatchOption:
        try:
            plan = plan_or_shortage(*way.question)
        except PlanError as error:
            return self._not_fitting(way.option, error, way.question)
        step_s, option = plan.predicted.step_s, _measured(way.option, plan)
        self._fastest_s = min(self._fastest_s, step_s)
        heapq.heappush(self._ways, way._replace(least_s=round(step_s, DECIMALS), option=option, plan=plan))
        return option

    def _not_fitting(self, option: BatchOption, error: PlanError, question: Question) -> BatchOption:
        self._missed.append((error, question))
        reason = str(error).splitlines()[0]
        return BatchOption(option.batch, option.accumulation, option.checkpoint, reason)


def _measured(option: BatchOption, plan: Plan) -> BatchOption:
    predicted = plan.predicted
    return replace(
        option,
        step_s=predicted.seconds["total"],
        device_peak_bytes=predicted.device_peak_bytes,
        host_peak_bytes=predicted.host_peak_bytes,
    )


def _ways(samples: int, checkpoints: Sequence[str], *, micro_batches: bool) -> Iterator[tuple[int, str]]:
    """Batch and checkpointing, the largest batch first."""
    batch = samples
    while True:
        for checkpoint in checkpoints:
            yield batch, checkpoint
        if not micro_batches or batch % 2:
            return
        batch //= 2


def _compute_s(trace: StepTrace, hardware: HardwareProfile, world_size: int) -> float:
    """Computes of one batch; no plan of it is faster."""
    ranks = hardware.ranks_per_host(world_size)
    return float(Rates(hardware, main_dtype(trace), world_size, ranks).accesses_s(trace).sum())


def _lacking(error: PlanError) -> int:
    return error.needed_bytes - error.available_bytes


def _check(samples: object, checkpoints: object, layers: object) -> None:
    if isinstance(layers, bool) or not isinstance(layers, int):
        raise InputTypeError(f"layers must be a whole number, got {layers!r}")
    if layers < 0:
        raise InputError(f"layers must be 0 or larger, got {layers}")
    check_count("samples", samples)
    if isinstance(checkpoints, str) or not isinstance(checkpoints, Sequence) or not checkpoints:
        raise InputTypeError(
            f"checkpoints must be a list of forms such as ['none', 'non-reentrant'], got {checkpoints!r}"
        )
