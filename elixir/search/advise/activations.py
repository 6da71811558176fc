"""Chooses what units keep of their activations, together with the homes of chunks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from elixir.access.recomputation import checkpoints_itself
from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile
from elixir.models.layer_units import repeated_layers
from elixir.plan.prediction import NOTICEABLE_SHARE
from elixir.search.planner import budgets_of, everything_on_host, glance_s, planned
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
CLEARLY = 0.97
"""A step of at most this part of the compute of one that keeps nothing is faster, whatever its plan."""


def trace_that_keeps(
    step: StepQuestion, hardware: HardwareProfile, request: SearchRequest, built: nn.Module | None = None
) -> StepTrace:
    """The step with the activations with which its plan is fastest at the rates of the machine.

    Args:
        step: of a model.
        hardware: the machine.
        request: what is asked of the plan.
        built: the model, where it was built before.

    Raises:
        InputError: the step trains nothing, its layers do not repeat or are compiled, or it has checkpoints that cannot
            be taken away.
        TraceError: it cannot be traced.
    """
    _check(step, request)
    model = step.build() if built is None else built
    own = [UnitActivations(name, None) for module, name in repeated_layers(model).items() if checkpoints_itself(module)]
    whole = replace(step, activations=tuple(own)).trace(hardware, model)
    _check_trace(whole)
    request = replace(request, activations=None)
    found = []
    if request.pass_size in (1, "auto"):
        filled = _filling(whole, hardware, replace(request, pass_size=1))
        found.append(whole if filled is None else replace(step, activations=filled).trace(hardware, model))
    if request.pass_size != 1 and not (found and _is_again(found[0])):
        again = tuple(UnitActivations(name, ()) for forward in whole.forwards for name in forward.units)
        found.append(replace(step, activations=again).trace(hardware, model))
    if len(found) == 1:
        return found[0]
    one, several = (_planned_s(Question(each, hardware, request)) for each in found)
    return found[one > several * WORTHWHILE]


def _is_again(trace: StepTrace) -> bool:
    """Whether all units run again as a whole, so that several micro-batches could pass them together."""
    return bool(trace.step.activations) and all(each.keep == () for each in trace.step.activations)


def predicted_that_keeps(trace: StepTrace, hardware: HardwareProfile, request: SearchRequest) -> StepTrace:
    """The step of a trace with the activations with which its plan is fastest, as it is predicted.

    Raises:
        InputError: some of it runs again already and it cannot be traced without, or its layers cannot run again.
    """
    if trace.checkpointed_modules:
        trace = replace(StepQuestion.again(trace), checkpoint="none").trace(hardware)
    _check_trace(trace)
    filled = _filling(trace, hardware, request)
    return trace if filled is None else swapped_trace(kept_trace(trace, filled), SwappableStep(trace))


def _check(step: StepQuestion, request: SearchRequest) -> None:
    if isinstance(step.model, StepTrace):
        raise InputError("activations='auto' makes several traces of a model; give the model, not a trace")
    if step.forward or step.generate:
        raise InputError("activations='auto' is for training; an evaluation keeps nothing for a backward")


def _check_trace(whole: StepTrace) -> None:
    if whole.checkpointed_modules:
        raise InputError(
            f"activations='auto' decides what runs again in backward, but {whole.checkpointed_modules[0]!r} does "
            "already by a checkpoint in the model's code; take it out, or leave out activations="
        )
    if not whole.forwards:
        why = "its layers are compiled" if whole.step.compiled else "the model repeats no layer that can run again"
        raise InputError(f"activations='auto' cannot keep less than everything: {why}; leave it out")


def _filling(whole: StepTrace, hardware: HardwareProfile, request: SearchRequest) -> tuple[UnitActivations, ...] | None:
    """The activations of the fastest plan; None if everything is kept."""
    ranks = request.world_size, hardware.ranks_per_host(request.world_size)
    rates = Rates(hardware, main_dtype(whole), *ranks)
    kept = KeptResults(whole, rates.operations_s(whole))
    trials = _Trials(kept, hardware, request)
    compute_s = float(rates.accesses_s(kept.filled(0)).sum())
    count = trials.best(compute_s)
    step_s = trials.step_s.get(count, math.inf)
    units = SwappedUnits(kept, rates)
    swaps = None if count == len(kept.changes) and step_s < math.inf else trials.swapped(units, compute_s, step_s)
    logger.debug("%d of %d fillings with activations planned", len(trials.step_s), len(kept.changes) + 1)
    if swaps is not None:
        return units.activations(swaps)
    return None if count == len(kept.changes) else kept.activations(count)


@dataclass
class _Trials:
    """Fillings whose plans were looked for."""

    kept: KeptResults
    hardware: HardwareProfile
    request: SearchRequest
    step_s: dict[int, float] = field(default_factory=dict)
    """Seconds of the step with each; infinite if nothing fits."""

    def best(self, compute_s: float) -> int:
        """The number of changes with which the step is fastest; 0 if nothing fits.

        Args:
            compute_s: seconds of compute of a step that keeps nothing. No filling is faster than its compute, and
                compute takes less with each change.
        """
        saved_s = self.kept.saved_s

        def least_s(count: int) -> float:
            return self.request.accumulation * (compute_s - saved_s[count])

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
                and least_s(count) < self._seconds(here)
                and self._seconds(count) < self._seconds(here)
            ]
            here = min(better, key=self._seconds, default=here)
            stride = stride if better else stride // 2
        if here and self._seconds(here) > CLEARLY * least_s(0):
            here = min((0, here), key=self._planned_s)
            self._seconds(here)
        return here

    def swapped(self, units: SwappedUnits, compute_s: float, step_s: float) -> Swaps | None:
        """The way to move activations with which the step is fastest; None if none is faster than `step_s`."""
        (device, host), (device_need, host_need) = self._room
        ways = sorted(
            units.ways(device - device_need, host - host_need, compute_s),
            key=lambda way: (way.step_s, way.whole, way.inputs),
        )
        best = None
        for way in ways[:MOST_WAYS]:
            if self.request.accumulation * way.step_s < step_s * (1 - NOTICEABLE_SHARE):
                found = glance_s(Question(units.trace(way), self.hardware, self.request))
                if found < step_s * (1 - NOTICEABLE_SHARE):
                    best, step_s = way, found
        return best

    @cached_property
    def _room(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Budgets of device and host, and the need of both if nothing is kept and everything is on the host."""
        budgets = budgets_of(self.hardware, self.request)
        need = everything_on_host(Question(self.kept.filled(0), self.hardware, self.request))
        return (budgets.device_bytes, budgets.host_bytes), (need.device_bytes, need.host_bytes)

    @cached_property
    def _most(self) -> int:
        """The most changes with which the least that a plan needs of the device fits."""
        (budget, _), (least, _) = self._room
        rest = least - _peak(self.kept.filled(0))
        return _last(lambda count: _peak(self.kept.filled(count)) + rest <= budget, len(self.kept.changes))

    def _seconds(self, count: int) -> float:
        if count not in self.step_s:
            self.step_s[count] = glance_s(Question(self.kept.filled(count), self.hardware, self.request))
        return self.step_s[count]

    def _planned_s(self, count: int) -> float:
        """Seconds of the step with a filling after a full search, which a first look may misjudge a little."""
        return _planned_s(Question(self.kept.filled(count), self.hardware, self.request))


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
