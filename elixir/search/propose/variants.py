"""Variants of a step: other passes, other replicas, inputs of layers that wait on the host.

Each is a question with a separate trace, which planning answers like any other. Floors rank them, so that few are
planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from elixir.plan.activations import passes_together
from elixir.plan.plan import plan_of
from elixir.search.problem.activation_trace import movable_inputs, with_inputs_on_host
from elixir.search.problem.coarse_trace import joined_trace, pass_trace
from elixir.search.question import Question

WORTHWHILE = 1.01
"""Larger passes, moved inputs, and more replicas must be faster by more than this factor; weights that are fetched one
by one as well, since predictions lack the time to intercept each read."""
Way = TypeVar("Way")


def variants(question: Question, *, moves: bool) -> list[Question]:
    """All that are asked for, those that keep least first: few replicas, small passes, no inputs moved.

    Args:
        question: with a trace of one micro-batch, if several sizes of passes are asked for.
        moves: half of the layers, or all, may have their inputs on the host during larger passes.
    """
    found = [
        _passing(question, size, replicas) for replicas in _divisions(question) for size in sizes_of_passes(question)
    ]
    trace, sizes = question.trace, [size for size in sizes_of_passes(question) if size > 1]
    units = movable_inputs(trace) if moves and sizes and trace.pass_size == 1 and not trace.step.swap_bytes else ()
    for count in (len(units) // 2, len(units)) if units else ():
        moving = question._replace(trace=with_inputs_on_host(trace, units[:count]))
        found += [_passing(moving, size, replicas) for replicas in _divisions(question) for size in sizes]
    return found


def with_units_as_one(question: Question) -> tuple[Question, ...]:
    """The question with all units that may be fetched as one, which is preferred, and as it is: the runtime intercepts
    every read of a streamed weight, and a layer that is fetched as one once."""
    trace, kept = question.trace, question.request.chunks_of
    if kept is not None:  # they were packed in the order in which the step then fetches
        return (question._replace(trace=joined_trace(trace, plan_of(kept).step.fetched_whole)),)
    able = [unit.name for unit in trace.units if unit.fetch == "either"]
    # Units whose activations are planned run inside of checkpoints that the trace has not seen as their own.
    if not able or trace.pass_size > 1 or trace.step.activations:
        return (question,)
    return question._replace(trace=joined_trace(trace, able)), question


def _passing(question: Question, size: int, replicas: int) -> Question:
    request = question.request.in_replicas(replicas)
    return question._replace(trace=pass_trace(question.trace, size), request=request)


def _divisions(question: Question) -> tuple[int, ...]:
    return question.request.divisions(question.hardware.ranks_per_host(question.request.world_size))


def sizes_of_passes(question: Question) -> tuple[int, ...]:
    """The sizes of passes to try: several micro-batches go through layers that run again as a whole."""
    sizes = question.request.sizes
    return sizes if passes_together(question.trace.step) or len(sizes) == 1 else sizes[:1]


def fastest(ways: Sequence[Way], looks: Sequence[Callable[[Way], float]], worth: float = WORTHWHILE) -> Way | None:
    """The way with the least seconds; of those about as fast, the first. None where none fits.

    No way is looked at more closely than it takes to tell.

    Args:
        ways: those that are preferred first.
        looks: each gives seconds of a way, infinite where it seems not to fit: what it cannot beat, closer and closer,
            and last what it takes.
        worth: a way is better than one that is preferred if it is faster by more than this factor.
    """
    seconds, looked = [0.0] * len(ways), [0] * len(ways)
    while True:
        done = [at for at, count in enumerate(looked) if count == len(looks) and seconds[at] < math.inf]
        best_s = min((seconds[at] for at in done), default=math.inf)
        taken = next((at for at in done if seconds[at] <= worth * best_s), len(ways))

        def may_win(at: int, best_s: float = best_s, taken: int = taken) -> bool:
            return seconds[at] <= worth * best_s if at < taken else worth * seconds[at] < seconds[taken]

        rest = [at for at, count in enumerate(looked) if count < len(looks) and may_win(at)]
        if not rest:
            return ways[taken] if done else None
        least_s = min(seconds[at] for at in rest)
        at = next(at for at in rest if seconds[at] <= worth * least_s)  # if it wins, no other needs a closer look
        if len(rest) == 1 and not done:  # then only the last look tells anything
            looked[at] = len(looks) - 1
        seconds[at] = looks[looked[at]](ways[at])
        looked[at] += 1
