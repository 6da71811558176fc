"""The rounds of a search, of which the docs have a list, and the one hill climber that they use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from elixir.search.propose.best import ROUNDS
from elixir.search.propose.climb import climb, farthest, halved

PAGE = Path(__file__).parents[3] / "docs" / "design" / "search.md"


def test_the_docs_list_the_rounds_in_their_order() -> None:
    listed = re.findall(
        r"^\d+\. (.*)$", PAGE.read_text().split("through these rounds:")[1].split("##")[0], re.MULTILINE
    )
    assert listed == [look.__doc__ for look in ROUNDS]


def test_a_climb_ends_at_the_first_place_without_a_better_neighbour() -> None:
    """Seconds fall up to 7, rise up to 12 and fall again; with steps of one, 7 is the end, from either side."""
    seconds = [10.0, 9, 8, 7, 6, 5, 4, 3, 4, 5, 6, 7, 8, 1]

    def around(here: int, _most_s: float) -> Iterator[int]:
        yield from (place for place in (here - 1, here + 1) if 0 <= place < len(seconds))

    for start in range(12):
        assert climb(start, around, lambda place: (seconds[place],)) == 7
    assert climb(12, around, lambda place: (seconds[place],), steepest=True) == 13


def test_a_climb_takes_the_first_better_neighbour_or_the_best() -> None:
    """Equal seconds are decided by what follows them in the key, and no neighbour is no end of the world."""
    keys = {"start": (2.0, 0.0), "near": (2.0, -1.0), "far": (1.0, 0.0), "alone": (1.0, -1.0)}
    ways = {"start": ("near", "far"), "near": ("start",), "far": ("start", "alone"), "alone": ()}
    asked: list[float] = []

    def from_here(here: str, most_s: float) -> tuple[str, ...]:
        asked.append(most_s)
        return ways[here]

    assert climb("start", from_here, keys.__getitem__) == "near"
    assert climb("start", from_here, keys.__getitem__, bound=0.5, steepest=True) == "alone"
    assert [round(most_s, 6) for most_s in asked] == [2.0, 2.0, 1.0, 0.5, 0.5]


def test_a_climb_asks_for_no_more_neighbours_than_it_needs() -> None:
    given: list[int] = []

    def up(here: int, _most_s: float) -> Iterator[int]:
        for place in range(here + 1, here + 4):
            given.append(place)
            yield place

    assert climb(0, up, lambda place: (-min(place, 3),)) == 3
    assert given == [1, 2, 3, 4, 5, 6]


def test_numbers_are_halved_and_their_ends_found() -> None:
    assert list(halved(11)) == [11, 5, 2, 1]
    for end in range(1, 20):
        assert farthest(0, 20, lambda number, end=end: number <= end) == end  # type: ignore[misc]
        assert farthest(20, 0, lambda number, end=end: number >= end) == end  # type: ignore[misc]
