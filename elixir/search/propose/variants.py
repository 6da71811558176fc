"""Variants of a step: other passes, other replicas, inputs of layers that wait on the host.

Each is a question with a separate trace, which planning answers like any other. Floors rank them, so that few are
planned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from elixir.plan.activations import passes_together
from elixir.search.problem.pass_trace import pass_trace
from elixir.search.problem.swapped_trace import movable_inputs, with_inputs_on_host
from elixir.search.question import Question

WORTHWHILE = 1.01
"""Larger passes, moved inputs, and more replicas must be faster by more than this factor."""
T = TypeVar("T")


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


def _passing(question: Question, size: int, replicas: int) -> Question:
    request = question.request.in_replicas(replicas)
    return question._replace(trace=pass_trace(question.trace, size), request=request)


def _divisions(question: Question) -> tuple[int, ...]:
    return question.request.divisions(question.hardware.ranks_per_host(question.request.world_size))


def sizes_of_passes(question: Question) -> tuple[int, ...]:
    """The sizes of passes to try: several micro-batches go through layers that run again as a whole."""
    sizes = question.request.sizes
    return sizes if passes_together(question.trace.step) or len(sizes) == 1 else sizes[:1]


def fastest(
    variants: list[Question], floor_s: Callable[[Question], float], planned: Callable[[Question], tuple[T, float]]
) -> T:
    """The result of the fastest variant; of those about as fast, of the first.

    Args:
        variants: those that are preferred first.
        floor_s: the least floor of the shapes of a variant; infinite where none seems to fit.
        planned: its result, and its seconds; infinite where nothing fits.
    """
    floors = [floor_s(each) for each in variants] if len(variants) > 1 else [0.0]
    found: dict[int, tuple[T, float]] = {}
    best_s = float("inf")
    for number in sorted(range(len(variants)), key=lambda number: floors[number]):
        if floors[number] > WORTHWHILE * best_s:
            break
        found[number] = planned(variants[number])
        best_s = min(best_s, found[number][1])
    return next(found[number][0] for number in sorted(found) if found[number][1] <= WORTHWHILE * best_s)
