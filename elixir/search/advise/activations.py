"""Chooses what units keep of their activations, together with the homes of chunks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from elixir.access.activations import checkpoints_itself
from elixir.errors import InputError
from elixir.garbage import garbage_collection_paused
from elixir.hardware.profile import HardwareProfile
from elixir.models.layer_units import repeated_layers
from elixir.plan.activations import passes_together
from elixir.search.planner import Planning, budgets_of, least_need, packing_floors
from elixir.search.propose.activation_choices import KeptResults, SwappedUnits
from elixir.search.propose.family import spread
from elixir.search.propose.variants import WORTHWHILE, fastest
from elixir.search.question import Question, StepQuestion
from elixir.search.request import SearchRequest
from elixir.search.simulator.rates import Rates, main_dtype
from elixir.step_trace import StepTrace, UnitActivations

LOOKS, ROUNDS = 4, 4
"""Steps in which the number of kept results goes from nothing to everything, and how often again next to the best."""
MOST_WAYS = 8
"""Ways to move activations that are looked at."""


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
    def traced(own: Own) -> StepTrace:
        return replace(step, activations=own).trace(hardware, model(), kinds)

    found = []
    if one_by_one:
        variants = _Variants(every, hardware, replace(request, pass_size=1))
        found.append(variants.chosen(traced) if exact else variants.predicted())
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


Own = tuple[UnitActivations, ...]
"""The activations of units; none: all keep everything."""


class _Variants:
    """The step with all fillings and ways to move activations that are looked at, by floors of their seconds."""

    def __init__(self, whole: StepTrace, hardware: HardwareProfile, request: SearchRequest) -> None:
        self._whole, self._hardware, self._request = whole, hardware, request
        ranks = request.world_size, hardware.ranks_per_host(request.world_size)
        self._rates = Rates(hardware, main_dtype(whole), *ranks)
        self._kept = KeptResults(whole, self._rates)
        self._units = SwappedUnits(self._kept, self._rates)
        self._sizes: tuple[int, ...] = ()
        """The size of chunks that is best for the first choice that fits, with which all others are looked at."""
        self._floors: dict[Own, tuple[float, StepTrace]] = {}
        self.nothing = self._filling(0)

    def predicted(self) -> StepTrace:
        """The step with the choice whose floor is least, as it is predicted."""
        return self._floors[self.ranked()[0]][1]

    def chosen(self, made: Callable[[Own], StepTrace]) -> StepTrace:
        """The step with the activations of the fastest plan.

        Args:
            made: gives the step with some activations. What it needs may differ a little from what was predicted for
                the choice.
        """

        def exact(own: Own) -> StepTrace:
            return made(own) if own else self._whole

        def seconds(trace: StepTrace) -> float:
            return _planned_s(Question(trace, self._hardware, self._request))

        looks: tuple[Callable[[Own], float], ...] = (
            lambda own: self._floors[own][0],
            lambda own: seconds(self._floors[own][1]),
            lambda own: seconds(exact(own)),
        )
        # Choices that copy nothing are preferred: links may be slower than they are said to be.
        best = fastest(sorted(self.ranked(), key=lambda own: any(it.swap for it in own)), looks)
        return exact(self.nothing if best is None else best)

    def ranked(self) -> list[Own]:
        """All choices in order of their floors. If none fits, the first is the one that keeps no results."""
        self._look_at_fillings()
        self._look_at_moves()
        return sorted(self._floors, key=lambda own: (self._floors[own][0], own != self.nothing))

    def _look_at_fillings(self) -> None:
        """Looks from nothing to everything, then again and again next to the fastest."""
        counts = spread(0, len(self._kept.changes), LOOKS + 1).tolist()
        for _ in range(ROUNDS):
            for count in reversed(counts):
                self._look(self._filling(count))
            if all(floor_s == math.inf for floor_s, _ in self._floors.values()):
                return  # what lies between does not fit either
            best = min(counts, key=lambda count: (self._floors[self._filling(count)][0], -count))
            at = counts.index(best)
            counts = spread(counts[max(at - 1, 0)], counts[min(at + 1, len(counts) - 1)], LOOKS + 1).tolist()

    def _filling(self, count: int) -> Own:
        """The choice with so many of the changes."""
        return () if count == len(self._kept.changes) else self._kept.activations(count)

    def _look_at_moves(self) -> None:
        """The fastest ways by what compute and the links take, wherever chunks are."""
        nothing = self._kept.filled(0)
        question = Question(nothing, self._hardware, self._request)
        budgets, need = budgets_of(question), least_need(question)
        spare = budgets.device_bytes - need.device_bytes, budgets.host_bytes - need.host_bytes
        ways = self._units.ways(*spare, float(self._rates.accesses_s(nothing).sum()))
        for way in sorted(ways, key=lambda way: (way.step_s, way.whole, way.inputs))[:MOST_WAYS]:
            if self._request.accumulation * way.step_s < min(floor_s for floor_s, _ in self._floors.values()):
                self._look(self._units.activations(way))

    def _look(self, own: Own) -> None:
        """Works out the floor of a choice."""
        if own in self._floors:
            return
        trace = self._units.trace(own) if own else self._whole
        floors = packing_floors(Question(trace, self._hardware, self._request), self._sizes)
        self._sizes = self._sizes or tuple(size for _, size in floors[:1])
        self._floors[own] = floors[0][0] if floors else math.inf, trace


def _planned_s(question: Question) -> float:
    """Seconds of the fastest step at the rates of the machine; infinite if nothing fits, or the machine lacks what must
    be free next to it."""
    planning = Planning(question.nominal, briefly=True)
    if budgets_of(question).machine_bytes is None:
        return planning.nominal_s()
    return math.inf if planning.plan is None else planning.plan.predicted.step_s
