"""Passes of several micro-batches that wait with the inputs of layers on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from elixir.plan.activations import passes_together
from elixir.search.problem.pass_trace import pass_trace
from elixir.search.problem.swapped_trace import movable_inputs, with_inputs_on_host
from elixir.search.question import Question
from elixir.search.simulator.rates import Rates, main_dtype

WORTHWHILE = 1.01
"""Larger passes, moved inputs, and more replicas must be faster by more than this factor."""


def sizes_of_passes(question: Question) -> tuple[int, ...]:
    """The sizes of passes to try: several micro-batches go through layers that run again as a whole."""
    sizes = question.request.sizes
    return sizes if passes_together(question.trace.step) or len(sizes) == 1 else sizes[:1]


def with_moved_inputs(
    question: Question, fastest_s: float, least_s: Callable[[Question], float]
) -> list[tuple[float, Question]]:
    """The passes in which half of the layers, or all, have their inputs on the host, by about the least seconds of
    their plans.

    None are if the step takes hardly longer than its compute: more room on the device does not help it.

    Args:
        question: with a trace of one micro-batch.
        fastest_s: seconds of the fastest plan without.
        least_s: about the least seconds of a plan for a question.
    """
    trace, hardware, request = question
    sizes = [size for size in sizes_of_passes(question) if size > 1]
    units = movable_inputs(trace) if sizes and trace.pass_size == 1 and not trace.step.swap_bytes else ()
    if not units:
        return []
    ranks_per_host = hardware.ranks_per_host(request.world_size)
    rates = Rates(hardware, main_dtype(trace), request.world_size, ranks_per_host)
    if fastest_s <= WORTHWHILE * request.accumulation * float(rates.accesses_s(trace).sum()):
        return []
    found = []
    for count in (len(units) // 2, len(units)):
        moving = with_inputs_on_host(trace, units[:count])
        for replicas in request.divisions(ranks_per_host):
            for size in sizes:
                asked = replace(request.in_replicas(replicas), pass_size=size)
                of_pass = Question(pass_trace(moving, size), hardware, asked)
                found.append((least_s(of_pass), of_pass))
    return sorted(found, key=lambda each: each[0])
