"""Chooses the chunks that the host updates while backward still runs.

The host's Adam takes one chunk after the other. In backward gradients come in the reverse of the order in which the
next forward asks for the weights: if it took each as it comes, and were too slow, what forward needs first would come
last. What is left until the optimizer's step, on the other hand, is updated in the order of forward.
docs/design/search.md has the rule.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from elixir.search.problem.packed_step import PackedStep
from elixir.search.problem.placement import Placement
from elixir.search.simulator.work_times import WorkTimes

_LEAST_SLOWER = 1.01
"""A host that is slowed until memory holds what it makes is slowed by so much at least, each time."""


def can_step(work: PackedStep, placement: Placement) -> frozenset[int]:
    """Chunks that the host can update as soon as their gradients are there."""
    return frozenset(
        chunk
        for chunk, on_device in enumerate(placement.state_on_device)
        if not on_device and work.can_update_early(chunk)
    )


def gradients_home_s(times: WorkTimes, placement: Placement) -> tuple[dict[int, float], float]:
    """Tells when gradients of chunks that the host can update early are home, without a simulation, and when the last
    has gone.

    Compute comes to the last gradient of each chunk, which then goes through the network's lane and that to the host.
    """
    place, after_s = times.sent
    several, on_device = times.shards > 1, placement.state_on_device
    able = can_step(times.work, placement) - placement.state_on_disk
    copied_s = network_s = gone_s = 0.0
    home_s: dict[int, float] = {}
    for c in np.argsort(place, kind="stable")[int(np.sum(place < 0)) :].tolist():
        if not several and on_device[c] and placement.resident[c]:
            continue  # it stays where autograd has made it
        copied_s += times.device_copy_s[c]
        at_s = times.total_s - float(after_s[c]) + copied_s
        if several:
            network_s = at_s = max(network_s, at_s) + times.reduce_s[c]
        gone_s = max(gone_s, at_s) + (times.deliver_on_device_s[c] if on_device[c] else times.offload_s[c])
        if c in able:
            home_s[c] = gone_s
    return home_s, max(times.total_s + copied_s, gone_s)


def within(order: Iterable[int], needed: Sequence[int], left_bytes: int) -> frozenset[int]:
    """Takes chunks in this order, all that still fit into the memory that is left.

    Args:
        order: chunks.
        needed: bytes by chunk.
        left_bytes: for all.
    """
    kept = set()
    for chunk in order:
        if needed[chunk] <= left_bytes:
            kept.add(chunk)
            left_bytes -= needed[chunk]
    return frozenset(kept)


def worth_stepping(
    home_s: Mapping[int, float], until_s: float, update_s: Sequence[float], update_order: Sequence[int]
) -> frozenset[int]:
    """Picks the chunks to update early: an idle CPU Adam takes the chunk with gradients that forward needs first.

    The others wait until it is idle again, or for the optimizer's step.

    Args:
        home_s: by chunk that can be stepped, when its gradients are home.
        until_s: when the optimizer's step begins.
        update_s: by chunk, seconds of its update.
        update_order: chunks in the order in which forward asks for them.
    """
    place = {chunk: index for index, chunk in enumerate(update_order)}
    coming = sorted((at_s, chunk) for chunk, at_s in home_s.items())
    there: list[tuple[int, int]] = []
    chosen: set[int] = set()
    now_s, next_one = 0.0, 0
    while now_s < until_s:
        while next_one < len(coming) and coming[next_one][0] <= now_s:
            heapq.heappush(there, (place[coming[next_one][1]], coming[next_one][1]))
            next_one += 1
        if there:
            _, chunk = heapq.heappop(there)
            chosen.add(chunk)
            now_s += update_s[chunk]
        elif next_one < len(coming):
            now_s = coming[next_one][0]
        else:
            break
    return frozenset(chosen)


def worth_stepping_within(
    home_s: Mapping[int, float],
    until_s: float,
    update_s: Sequence[float],
    update_order: Sequence[int],
    needed: Sequence[int],
    left_bytes: int,
) -> frozenset[int]:
    """Picks as `worth_stepping`, for a host just slow enough that memory holds its new states.

    It works all the time then, so that its chunks lie among others that are updated later, everywhere in the order in
    which forward asks for them: no part of forward has to wait for many updates at once.
    """
    possible = {chunk: at_s for chunk, at_s in home_s.items() if needed[chunk] <= left_bytes}
    slower = 1.0
    while True:
        chosen = worth_stepping(possible, until_s, [slower * seconds for seconds in update_s], update_order)
        wanted = sum(needed[chunk] for chunk in chosen)
        if wanted <= left_bytes:
            return chosen
        slower *= max(wanted / left_bytes, _LEAST_SLOWER)
