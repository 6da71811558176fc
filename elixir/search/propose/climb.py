"""The one hill climber of the search, and the tolerances by which candidates are compared.

Every tolerance of the search is in here, with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any, TypeVar

T = TypeVar("T")
Key = tuple[Any, ...]
"""Seconds, then what decides between equals; the least is the best."""

DECIMALS = 9
"""Digits of seconds by which candidates are put in order: machines may give the last bits of a sum differently."""
ROUNDING_S = 10.0**-DECIMALS
"""Seconds that this rounding changes at most."""
EXACTLY = 1 + 1e-9
"""Floors are above what they bound by no more than the rounding of their sums: 2**-53 for each of fewer than a million
terms."""
LITTLE_LESS = 1 - 2e-4
"""Neighbours that cannot be faster by so much are not simulated where each simulation is dear: no run could measure
that."""
NEAR = 1.01
"""A plan that takes so many times the fastest one's seconds is about as good, as far as rates are known. An estimate.
"""
MUCH_LESS = 0.97
"""If early updates make the step shorter than this, plans without any are not looked at more closely. An estimate."""
LESS_FULL = 0.75
"""Part of the device that is filled at last. New weights return to those that it holds, over the link that gradients
need: a chunk that is fetched when it is used may be quicker. An estimate."""
TIE = 0.01
"""Worst regrets that are less apart are equal, for the reason of `NEAR`, and none that is smaller is worth a search."""


def climb(
    start: T,
    neighbours: Callable[[T, float], Iterable[T]],
    key: Callable[[T], Key],
    bound: float = EXACTLY,
    *,
    steepest: bool = False,
) -> T:
    """Goes from `start` to a better neighbour for as long as there is one.

    Args:
        start: where to begin.
        neighbours: gives those of a place that may take no more than so many seconds, the most promising first. They
            are worked out as they are asked for.
        key: what is to become less.
        bound: neighbours are asked for that may take so many times the seconds of their place.
        steepest: take the best neighbour instead of the first that is better.
    """
    here, least = start, key(start)
    while True:
        keys = ((key(other), other) for other in neighbours(here, least[0] * bound + ROUNDING_S))
        better = (found for found in keys if found[0] < least)
        best = min(better, key=itemgetter(0), default=None) if steepest else next(better, None)
        if best is None:
            return here
        least, here = best


def halved(step: int) -> Iterator[int]:
    """`step` and its halves, down to 1."""
    while step:
        yield step
        step //= 2


def farthest(good: int, bad: int, holds: Callable[[int], bool]) -> int:
    """The number next to which `holds` ends, on the way from `good`, for which it does, to `bad`, for which it does
    not."""
    while abs(bad - good) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good
