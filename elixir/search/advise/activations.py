"""Chooses what units keep of their activations, together with the homes of chunks."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from elixir.access.recomputation import checkpoints_itself
from elixir.errors import InputError
from elixir.garbage import garbage_collection_paused
from elixir.hardware.profile import HardwareProfile
from elixir.models.layer_units import repeated_layers
from elixir.plan.activations import passes_together
from elixir.plan.prediction import NOTICEABLE_SHARE
from elixir.search.planner import budgets_of, glance, least_need, planned
from elixir.search.problem.kept_trace import kept_trace
from elixir.search.problem.swapped_trace import SwappableStep, swapped_trace
from elixir.search.propose.kept_results import KeptResults
from elixir.search.propose.moved_inputs import WORTHWHILE
from elixir.search.propose.swapped_units import SwappedUnits, Swaps
from elixir.search.question import Question, StepQuestion
from elixir.search.request import SearchRequest
from elixir.search.simulator.rates import Rates, main_dtype
from elixir.step_trace import StepTrace, UnitActivations

logger = logging.getLogger(__name__)

MOST_TRIALS = 4
"""Fillings for which homes of chunks are looked for."""
MOST_WAYS = 2
"""Ways to move activations for which they are looked for."""
PACKINGS = 3
"""Packings that are looked at for all fillings: the best for the first."""
CLEARLY = 0.93
"""A step of at most this part of the compute of one that keeps nothing is faster, whatever its plan. A first look may
misjudge plans by 3 %. The choice may need so much more memory than was predicted that it takes another 4 %, as steps
of opt-125m in 0.7 to 1 GiB."""


def that_keeps_everything(step: StepQuestion, built: nn.Module) -> StepQuestion:
    """The step with layers that keep everything, whether or not they checkpoint themselves."""
    own = [UnitActivations(name, None) for module, name in repeated_layers(built).items() if checkpoints_itself(module)]
    return replace(step, activations=tuple(own))


@garbage_collection_paused()
def trace_that_keeps(
    step: StepQuestion,
    hardware: HardwareProfile,
    request: SearchRequest,
    built: nn.Module | None = None,
    whole: StepTrace | None = None,
    kinds: dict[Any, Any] | None = None,
    *,
    exact: bool = True,
) -> StepTrace:
    """The step with the activations with which its plan is fastest at the rates of the machine.

    Args:
        step: of a model, or a trace of one.
        hardware: the machine.
        request: what is asked of the plan.
        built: the model, where it was built before.
        whole: the trace of `that_keeps_everything`, where it was made before.
        kinds: the code of kinds of compiled layers that earlier traces of this step have found, to which it adds.
        exact: trace the step with its choice, instead of taking what is predicted of it.

    Raises:
        InputError: the step trains nothing, its layers do not repeat, or it has checkpoints that cannot be taken away;
            or a trace is given that cannot be made again, if one is needed.
        TraceError: it cannot be traced.
    """
    if isinstance(step.model, StepTrace):
        made = step.model
        whole = made if not exact and not made.checkpointed_modules else None
        step = _without_choice(made) if whole is None else step
    if step.forward or step.generate:
        raise InputError("activations='auto' is for training; an evaluation keeps nothing for a backward")
    kinds = {} if kinds is None else kinds
    model = functools.cache(lambda: step.build() if built is None else built)
    request = replace(request, activations=None)
    one_by_one = request.pass_size in (1, "auto")  # micro-batches; in larger passes all that can runs again

    every = that_keeps_everything(step, model()).trace(hardware, model(), kinds) if whole is None else whole
    _check_trace(every, one_by_one=one_by_one)

    @functools.cache
    def traced(own: tuple[UnitActivations, ...]) -> StepTrace:
        return replace(step, activations=own).trace(hardware, model(), kinds)

    def predicted(own: tuple[UnitActivations, ...]) -> StepTrace:
        return swapped_trace(kept_trace(every, own), SwappableStep(every))

    found = []
    if one_by_one:
        found.append(_chosen(every, hardware, replace(request, pass_size=1), traced if exact else predicted))
    passing = _not_compiled(every)
    if request.pass_size != 1 and passing and not (found and passes_together(found[0].step)):
        found.append(traced(tuple(UnitActivations(name, ()) for name in passing)))
    if len(found) == 1:
        return found[0]
    one, several = (_planned_s(Question(each, hardware, request)) for each in found)
    return found[one > several * WORTHWHILE]


def _not_compiled(whole: StepTrace) -> list[str]:
    """The units that could run again and are not compiled."""
    return [name for forward in whole.forwards for name in forward.units if name not in whole.step.compiled]


def _without_choice(trace: StepTrace) -> StepQuestion:
    """The step of a trace, in which nothing runs again yet.

    Raises:
        InputError: it cannot be traced again.
    """
    if trace.step.checkpoint is None:
        raise InputError(
            f"activations='auto' makes several traces of a model, and the step of {trace.model_name} does not follow "
            "from its name; give the model, not the trace"
        )
    return replace(StepQuestion.again(trace), checkpoint="none", activations=())


def _check_trace(whole: StepTrace, *, one_by_one: bool) -> None:
    if whole.checkpointed_modules:
        raise InputError(
            f"activations='auto' decides what runs again in backward, but {whole.checkpointed_modules[0]!r} does "
            "already by a checkpoint in the model's code; take it out, or leave out activations="
        )
    if not (whole.forwards if one_by_one else _not_compiled(whole)):
        why = "the model repeats no layer; leave it out"
        if whole.units:
            why = (
                f"no repeated layer, such as {whole.units[0].name!r}, can run again: each writes to what it has not "
                "made, or runs several times in a step with other sizes or without a backward; leave it out"
            )
        if whole.forwards:
            why = (
                "its layers are compiled, and a compiled layer is kept or recomputed whole, micro-batch by micro-batch "
                "(pass_size=1); leave it out, or plan layers that are not compiled"
            )
        raise InputError(f"activations='auto' cannot keep less than everything: {why}")


@garbage_collection_paused()
def _chosen(
    whole: StepTrace,
    hardware: HardwareProfile,
    request: SearchRequest,
    made: Callable[[tuple[UnitActivations, ...]], StepTrace],
) -> StepTrace:
    """The step with the activations of the fastest plan, which is never slower than one that keeps nothing, or all.

    Args:
        whole: the step that keeps everything.
        hardware, request: of the plan.
        made: gives the step with some activations. What it needs may differ a little from what was predicted for the
            choice.
    """
    ranks = request.world_size, hardware.ranks_per_host(request.world_size)
    rates = Rates(hardware, main_dtype(whole), *ranks)
    kept = KeptResults(whole, rates)
    trials = _Trials(kept, SwappedUnits(kept, rates), rates, hardware, request)
    (own, step_s), nothing = trials.choice(), kept.activations(0)
    found = whole if own is None else made(own)
    logger.debug("%d of %d fillings with activations planned", len(trials.step_s), len(kept.changes) + 1)
    simpler = [whole] if found is not whole and trials.may_keep_everything else []
    doubtful = own != nothing and step_s > CLEARLY * trials.least_s(0)
    if not (simpler or doubtful):
        return found
    found_s = _planned_s(Question(found, hardware, request))
    if doubtful and found_s > trials.least_s(0):
        simpler.append(made(nothing))
    for each in reversed(simpler):
        each_s = _planned_s(Question(each, hardware, request))
        if each_s <= found_s:
            found, found_s = each, each_s
    return found


@dataclass
class _Trials:
    """Fillings whose plans were looked for, and ways to move activations."""

    kept: KeptResults
    units: SwappedUnits
    rates: Rates
    hardware: HardwareProfile
    request: SearchRequest
    step_s: dict[int, float] = field(default_factory=dict)
    """Seconds of the step with each filling; infinite if nothing fits."""
    sizes: tuple[int, ...] = ()
    """Sizes of chunks that are looked at, once some are known to be good; empty: all."""

    def choice(self) -> tuple[tuple[UnitActivations, ...] | None, float]:
        """The activations with which the step is fastest, None if everything is kept; and about its seconds."""
        every, may_keep_everything = len(self.kept.changes), self.may_keep_everything
        way, way_s = (None, math.inf) if may_keep_everything else self._moved(math.inf)
        if way is None or self._may_beat(way_s):
            count = self._best(way_s)
            found_s = self._seconds(count)
            if may_keep_everything and (count < every or found_s == math.inf):
                way, way_s = self._moved(found_s)
            if way is None or way_s >= found_s * (1 - NOTICEABLE_SHARE):
                return None if count == every else self.kept.activations(count), found_s
        return self.units.activations(way), way_s

    def _may_beat(self, way_s: float) -> bool:
        """Whether a filling may be about as fast as a way to move activations, which is clearly faster than nothing
        kept."""
        return self.least_s(self._most) * (1 - NOTICEABLE_SHARE) <= way_s or way_s > CLEARLY * self.least_s(0)

    def _best(self, most_s: float) -> int:
        """The number of changes with which the step is fastest; 0 if nothing fits. Those whose compute takes longer
        than `most_s` are not looked at."""
        here = self._most
        while here and self._seconds(here) == math.inf and len(self.step_s) < MOST_TRIALS:
            here -= max(1, here // 4)
        stride = max(1, here // 2)
        while stride and len(self.step_s) < MOST_TRIALS:
            around = [count for count in (here - stride, here + stride) if 0 <= count <= self._most]
            better = [
                count
                for count in around
                if count not in self.step_s
                and self.least_s(count) < min(self._seconds(here), most_s)
                and self._seconds(count) < self._seconds(here)
            ]
            here = min(better, key=self._seconds, default=here)
            stride = stride if better else stride // 2
        return here

    def least_s(self, count: int) -> float:
        """Seconds of compute with a filling, which none is faster than; they are fewer with each change."""
        return self.request.accumulation * (self._compute_s - self.kept.saved_s[count])

    def _moved(self, step_s: float) -> tuple[Swaps | None, float]:
        """The way to move activations with which the step is fastest, and its seconds; None if none is faster than
        `step_s`."""
        (device, host), (device_need, host_need) = self._room
        ways = sorted(
            self.units.ways(device - device_need, host - host_need, self._compute_s),
            key=lambda way: (way.step_s, way.whole, way.inputs),
        )
        best = None
        for way in ways[:MOST_WAYS]:
            if self.request.accumulation * way.step_s < step_s * (1 - NOTICEABLE_SHARE):
                found_s = self._glance_s(self.units.trace(way))
                if found_s < step_s * (1 - NOTICEABLE_SHARE):
                    best, step_s = way, found_s
        return best, step_s

    @cached_property
    def _nothing(self) -> StepTrace:
        """The step that keeps nothing."""
        return self.kept.filled(0)

    @cached_property
    def _compute_s(self) -> float:
        """Seconds of its compute."""
        return float(self.rates.accesses_s(self._nothing).sum())

    @cached_property
    def _room(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Budgets of device and host, and the least need of both if nothing is kept."""
        budgets = budgets_of(self.hardware, self.request)
        need = least_need(Question(self._nothing, self.hardware, self.request))
        return (budgets.device_bytes, budgets.host_bytes), (need.device_bytes, need.host_bytes)

    @cached_property
    def _most(self) -> int:
        """The most changes with which the least that a plan needs of the device fits."""
        (budget, _), (least, _) = self._room
        rest = least - _peak(self._nothing)
        return _last(lambda count: _peak(self.kept.filled(count)) + rest <= budget, len(self.kept.changes))

    def _seconds(self, count: int) -> float:
        if count not in self.step_s:
            self.step_s[count] = self._glance_s(self.kept.filled(count))
        return self.step_s[count]

    def _glance_s(self, trace: StepTrace) -> float:
        """A first look at a step; what chunks are best for the first of them is nearly so for all."""
        found = glance(Question(trace, self.hardware, self.request), self.sizes)
        if not self.sizes and found.step_s < math.inf:
            self.sizes = found.sizes[:PACKINGS]
        return found.step_s

    @property
    def may_keep_everything(self) -> bool:
        """Whether the device may have room for all activations."""
        return self._most == len(self.kept.changes)


def _planned_s(question: Question) -> float:
    """Seconds of the step after a full search, at the rates of the machine; infinite if nothing fits."""
    plan = planned(question._replace(request=replace(question.request, assume="nominal")))
    return math.inf if plan is None else plan.predicted.step_s


def _peak(trace: StepTrace) -> int:
    return max(access.live_bytes for access in trace.accesses)


def _last(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, if all below one that fits do too; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
