"""Walks of the rCache through made-up orders load, count and agree on what was recorded.

A commit that means to change what the cache does records them anew and says why:

    python -m tests.unit.chunk.test_recorded_cache             all of them
    python -m tests.unit.chunk.test_recorded_cache "walk 3"    prints one, to compare it by hand
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from elixir.artifact import digest
from elixir.errors import ElixirError
from elixir.schedule import Schedule
from tests.unit.chunk.test_rcache_ranks import Rank, Uses

RECORDED = Path(__file__).with_suffix(".json")
NAMES = tuple(f"walk {number}" for number in range(80))
LAYERS = 5


def order(draw: random.Random) -> tuple[Uses, int]:
    """Uses of a forward and a backward over it, and the number of the first one in backward."""
    forward = [tuple(draw.sample(range(LAYERS), draw.choice((1, 1, 2)))) for _ in range(draw.randint(1, 6))]
    if draw.random() < 0.3:
        forward.insert(draw.randrange(len(forward)), ())
    backward = forward[::-1][draw.choice((0, 0, 0, 1, len(forward))) :]
    return [*forward, *backward], len(forward)


class Walk:
    """One cache, and what it is asked for."""

    def __init__(self, name: str) -> None:
        self.draw = draw = random.Random(name)
        self.uses, self.turn = order(draw)
        self.uses.append((LAYERS,) if draw.random() < 0.3 else self.uses[-1])  # in most orders nothing uses the last
        depth, size = draw.randint(0, 2), draw.choice((1, 1, 2))
        blocks = Schedule(self.uses, depth).min_blocks + draw.choice((0, 0, 1, 2))
        options = {"size": size, "evict_always": draw.random() < 0.2}
        self.rank = Rank(self.uses, self.turn, blocks, depth, **options)
        self.cache, self.pinned = self.rank.cache, list[int]()

    def use(self, chunks: tuple[int, ...]) -> None:
        if self.draw.random() < 0.1:
            chunks = tuple({self.draw.randint(0, max(max(use, default=0) for use in self.uses))})
        pins = self.draw.random() < 0.1 and self.cache.has_room_for({*chunks})
        self.rank.use(*chunks, pinned=pins)
        self.pinned += chunks if pins else ()

    def walk(self, uses: Uses) -> None:
        for chunks in uses:
            if chunks and self.draw.random() < 0.85:
                self.use(chunks)

    def step(self) -> None:
        cache, draw = self.cache, self.draw
        cache.begin()
        self.rank.group.fails = draw.choice((0,) * 8 + (1, 2))
        forward = self.uses[: self.turn]
        self.walk(forward[: draw.randint(0, len(forward))] if draw.random() < 0.2 else forward)
        if draw.random() < 0.1:
            cache.disturbed()
            return
        if draw.random() < 0.5:
            cache.end_forward()  # otherwise backward begins in the middle of it
        draw.random()  # decides nothing; later draws are the recorded ones
        for _ in range(draw.choice((0, 1, 1, 2))):
            cache.enter_backward()
            self.walk(self.uses[self.turn :])
            cache.end_backward()

    def call(self) -> None:
        """Calls a part of the model, or all of it."""
        first = self.draw.randint(0, self.turn)
        part = self.uses[first : self.draw.randint(first, self.turn)]
        self.cache.begin_call(frozenset(chunk for chunks in part for chunk in chunks))
        self.walk(part)
        self.cache.end_call()

    def leave(self) -> None:
        self.cache.unpin(self.pinned)
        self.pinned = []

    def renew(self) -> None:
        """The weights have changed at home."""
        self.leave()
        self.cache.invalidate()

    def outcomes(self) -> list[list[Any]]:
        """Says what each of some things leads to."""
        found = []
        for _ in range(8):
            what = self.draw.choice((self.step, self.step, self.call, self.call, self.call, self.leave, self.renew))
            before, reported = len(self.rank.group.issued), len(self.rank.flow.noted)
            try:
                what()
                error = ""
            except ElixirError as raised:
                error = str(raised)
                self.leave()
            cache = self.cache
            state = [
                error,
                cache.held,
                cache.is_disturbed,
                cache.begins_with(frozenset({0})),
                cache.has_room_for({0, 1}),
            ]
            self.rank.lanes.network.ask(lambda: None)
            self.rank.lanes.fetch.ask(lambda: None)
            seen = [self.rank.group.issued[before:], self.rank.flow.noted[reported:]]
            found.append([what.__name__, *state, asdict(self.rank.take_counts()), *seen])
        self.leave()
        self.rank.close()
        return found


@pytest.mark.parametrize("name", NAMES)
def test_a_walk_is_as_recorded(name: str) -> None:
    assert digest(Walk(name).outcomes()) == json.loads(RECORDED.read_text())[name]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(Walk(sys.argv[1]).outcomes(), indent=1))
    else:
        rows = [f" {json.dumps(name)}: {json.dumps(digest(Walk(name).outcomes()))}" for name in NAMES]
        RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
