"""How to cut a step's samples into batches, and how much to checkpoint: floors rank all ways, and few are planned."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

from elixir.errors import InputError, InputTypeError, PlanError
from elixir.garbage import garbage_collection_paused
from elixir.hardware.profile import HardwareProfile
from elixir.plan.plan import Plan
from elixir.search.advise.answer import Answer
from elixir.search.advise.infeasible import with_levers
from elixir.search.planner import Planning, packing_floors
from elixir.search.problem.activation_trace import kept_trace
from elixir.search.propose.judge import DECIMALS
from elixir.search.propose.variants import fastest
from elixir.search.question import Question, StepQuestion
from elixir.search.request import Progress, SearchRequest, check_count
from elixir.search.searches import with_exact_moves
from elixir.step_trace import StepTrace, UnitActivations

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


@garbage_collection_paused()
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
    ways that take about as long (`elixir.search.propose.variants.WORTHWHILE`) the one with fewer batches is chosen,
    then what comes first in `checkpoints`.

    Checkpointing fewer layers takes less compute and more memory. Where `layers` says how many there are, numbers
    between none and all are looked at for the two batches with the least floors: from the better end in steps of a
    half, a quarter, ... of all, for as long as that helps. The best number need not be found where time falls and rises
    twice.

    Floors (`elixir.search.planner.packing_floors`) rank the ways, those of one batch by the packing that is best for
    the first. What may be the fastest is searched at the rates of the machine, and only the fastest of these is planned
    in full. Of ways that have no floor, since nothing with overlap and chunks of a sensible size fits, the first with a
    plan is taken if no other has one.

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
    cuts = _cuts(samples, checkpoints, micro_batches=micro_batches)
    most = len(cuts)
    if layers and forms:
        most += min(BATCHES_REFINED, len(dict(cuts))) * min(2 * layers.bit_length(), layers + 1)
    ways: dict[tuple[int, str], _Way] = {}
    sizes: dict[int, tuple[int, ...]] = {}  # of chunks, the best for the first way to compute a batch that fits

    def floor_of(batch: int, checkpoint: str) -> float:
        cut = batch, checkpoint
        if cut not in ways:
            option = BatchOption(batch, samples // batch, checkpoint)
            if progress is not None:
                what = f"{option.accumulation} x {batch} samples, activation checkpointing {checkpoint}"
                progress(what, len(ways), max(most, len(ways) + 1))
            whole = ways[batch, "none"].question.trace if (batch, "none") in ways else None
            found = _predicted(whole, checkpoint, layers) or trace_of(*cut)
            question = Question(found, hardware, replace(request, accumulation=option.accumulation))
            floors = packing_floors(question, sizes.get(batch, ()))
            sizes[batch] = sizes.get(batch) or tuple(size for _, size in floors[:1])
            least_s = round(min(floors, default=(math.inf, 0))[0], DECIMALS)
            ways[cut] = _Way(option, question, least_s, partial(trace_of, *cut))
        return ways[cut].seconds

    for cut in cuts:
        floor_of(*cut)
    if layers and forms:
        ranked = dict.fromkeys(way.option.batch for way in sorted(ways.values(), key=lambda way: way.seconds))
        for batch in list(ranked)[:BATCHES_REFINED]:
            _refine(partial(floor_of, batch), forms[0], layers)
    return _chosen(list(ways.values()))


@dataclass
class _Way:
    """A way, looked at closer and closer. Its seconds are those of the fastest plan at the rates of the machine, by
    which ways are compared: what a safe plan gives up for other rates differs by chance."""

    option: BatchOption
    question: Question
    seconds: float
    """The closest look so far; at first the least floor of its shapes, infinite where none fits."""
    trace: Callable[[], StepTrace]
    """Traces its step, of which the question may have what is predicted."""
    answer: Answer | None = None
    missed: PlanError | None = None

    @cached_property
    def planning(self) -> Planning:
        """All that is found out for its question."""
        return Planning(self.question)

    def nominal_s(self) -> float:
        """Seconds of its fastest plan, perhaps for a step that is predicted."""
        return self._seen(self.planning.nominal_s())

    def exact_s(self) -> float:
        """The least floor of the step as it is traced, where it was predicted: it may be slower, or not fit."""
        if not self.question.trace.step.activations:
            return self.seconds
        self.question = self.question._replace(trace=self.trace())
        self.planning = Planning(self.question)
        return self._seen(min(packing_floors(self.question), default=(math.inf, 0))[0])

    def plan_s(self) -> float:
        """Seconds of the fastest step that its plan knows, with the inputs of layers that move."""
        try:
            answer = Answer(self.planning.plan_or_shortage(), self.question)
            self.answer = with_exact_moves(answer, StepQuestion(model=self.question.trace))
        except PlanError as error:
            self.missed = error
            return math.inf
        predicted = self.answer.plan.predicted
        return self._seen(predicted.step_s if predicted.fastest_s is None else predicted.fastest_s)

    def _seen(self, seconds: float) -> float:
        self.seconds = round(seconds, DECIMALS)
        return self.seconds

    @property
    def result(self) -> BatchOption:
        """The option with figures of its plan, or with the reason why there is none."""
        if self.missed is not None:
            return replace(self.option, reason=str(self.missed).splitlines()[0])
        if self.answer is not None:
            predicted = self.answer.plan.predicted
            return replace(
                self.option,
                step_s=predicted.step_s,
                device_peak_bytes=predicted.device_peak_bytes,
                host_peak_bytes=predicted.host_peak_bytes,
            )
        reason = "does not fit with overlap and chunks of a sensible size"
        if self.seconds < math.inf:
            reason = f"takes at least {self.seconds:.4g} s where another way is as fast or faster"
        return replace(self.option, reason=reason)


def _predicted(whole: StepTrace | None, checkpoint: str, layers: int) -> StepTrace | None:
    """The step with checkpoints of layers, the first ones or all, from the one without; None if that does not tell."""
    if whole is None or not layers:
        return None
    count = checkpoint.partition(":")[2] or layers
    able = {name for forward in whole.forwards for name in forward.units}
    names = [unit.name for unit in whole.units if unit.name in able]
    if len(names) != layers or whole.step.activations:
        return None
    return kept_trace(whole, [UnitActivations(name, ()) for name in names[: int(count)]])


def _chosen(ways: list[_Way]) -> BatchChoice:
    """The way that has the least seconds when all is known of it; of those about as fast, that with the fewest batches,
    then the one that was tried first."""
    preferred = sorted(ways, key=lambda way: way.option.accumulation)
    best = fastest(preferred, (lambda it: it.seconds, _Way.nominal_s, _Way.exact_s, _Way.plan_s))
    if best is not None and best.answer is not None:
        return BatchChoice(best.answer, best.result, tuple(way.result for way in ways))
    missed = [(way.missed, way.question) for way in ways if way.missed is not None]
    raise with_levers(*min(missed, key=lambda each: each[0].needed_bytes - each[0].available_bytes))


def _refine(floor_s: Callable[[str], float], form: str, layers: int) -> None:
    """Looks at numbers of layers between none and all."""

    def of_count(count: int) -> float:
        ends = {0: "none", layers: form}
        return floor_s(ends.get(count, f"{form}:{count}"))

    here = min((layers, 0), key=of_count)
    step = layers // 2
    while step:
        around = [count for count in (here - step, here + step) if 0 <= count <= layers]
        best = min([here, *around], key=of_count)
        if best == here:
            step //= 2
        here = best


def _cuts(samples: int, checkpoints: Sequence[str], *, micro_batches: bool) -> list[tuple[int, str]]:
    """Batch and checkpointing, the largest batch first."""
    sizes = [samples]
    while micro_batches and not sizes[-1] % 2:
        sizes.append(sizes[-1] // 2)
    return list(product(sizes, checkpoints))


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
