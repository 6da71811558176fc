"""`schedule.py` loads no more than it must, never blocks itself, and its two forms agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir.errors import InputError
from elixir.schedule import Schedule, ScheduleResult

orders = st.lists(st.sets(st.integers(0, 5), min_size=0, max_size=3), min_size=1, max_size=9)


def simulate(order: Sequence[Sequence[int]], blocks: int, prefetch_depth: int = 0) -> ScheduleResult:
    return Schedule(order, prefetch_depth).simulate(blocks)


def fewest_loads(order: list[set[int]], blocks: int) -> int:
    """Brute force: try every content of the blocks after every position."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for required in order:
        following: dict[frozenset[int], int] = {}
        for held, loads in states.items():
            missing = required - held
            others = held - required
            for size in range(min(len(others), blocks - len(required)) + 1):
                for kept in combinations(sorted(others), size):
                    state = frozenset(required) | frozenset(kept)
                    following[state] = min(following.get(state, loads + len(missing)), loads + len(missing))
        states = following
    return min(states.values())


def test_the_known_order_takes_six_loads() -> None:
    result = simulate([[0], [1, 2], [3], [3], [1, 2], [0]], blocks=2)
    assert result.loads == 6
    assert result.hits == 2
    assert Counter(result.chunks) == {0: 2, 1: 1, 2: 2, 3: 1}


@given(orders, st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_demand_loads_equal_the_optimum(order: list[set[int]], spare: int) -> None:
    blocks = max(map(len, order)) + spare
    assert simulate([sorted(s) for s in order], blocks).loads == fewest_loads(order, blocks)


@given(orders, st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_another_block_never_costs_a_load(order: list[set[int]], depth: int) -> None:
    schedule = Schedule([sorted(s) for s in order], depth)
    loads = [schedule.simulate(schedule.min_blocks + extra).loads for extra in range(5)]
    assert loads == sorted(loads, reverse=True)


def test_too_few_blocks_say_how_many_are_needed() -> None:
    with pytest.raises(InputError, match=r"position 1 of the order needs 3 rCache blocks at once, there are 2;"):
        simulate([[0], [1, 2, 3]], blocks=2)
    with pytest.raises(InputError, match="to prefetch included"):
        simulate([[0], [1]], blocks=1, prefetch_depth=1)


def test_negative_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="chunk ids"):
        simulate([[-1]], 1)
    with pytest.raises(InputError, match="prefetch depth"):
        simulate([[0]], 1, prefetch_depth=-1)
