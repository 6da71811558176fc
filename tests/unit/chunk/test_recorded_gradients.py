"""Made-up backwards of several ranks send, keep, add up, wait for and count gradients as was recorded.

A commit that means to change where gradients go records them anew and says why:

    python -m tests.unit.chunk.test_recorded_gradients             all of them
    python -m tests.unit.chunk.test_recorded_gradients "flow 3"    prints one, to compare it by hand
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elixir.artifact import digest
from elixir.chunk.chunk import Chunk
from elixir.chunk.gradients.chunk_gradient import GradientBlocks
from elixir.chunk.lanes import Work
from elixir.chunk.memory import Ticket
from elixir.plan.chunk_plan import ChunkPlan, ParamSlot
from tests.unit.chunk.test_gradient_ranks import HOMES, Case, Meeting, Training, on_ranks

RECORDED = Path(__file__).with_suffix(".json")
NAMES = tuple(f"flow {number}" for number in range(60))


class Noted:
    """A ticket that writes down who waits for it, but for lanes."""

    def __init__(self, ticket: Ticket, number: int, log: list[Any]) -> None:
        self._ticket, self.number, self._log, self._thread = ticket, number, log, threading.get_ident()

    def _note(self, what: str) -> None:
        if threading.get_ident() == self._thread:
            self._log.append([what, self.number])

    def wait(self) -> None:
        self._note("waits for")
        self._ticket.wait()

    def synchronize(self) -> None:
        self._note("has")
        self._ticket.synchronize()

    def join(self) -> None:
        self._note("has")
        self._ticket.join()

    @property
    def error(self) -> BaseException | None:
        return self._ticket.error

    def done(self) -> bool:
        return self._ticket.done()


class Flow(Training):
    """One rank's flow, and what it is asked for: the same on all ranks, but for the gradients that come."""

    def __init__(self, name: str, case: Case, meeting: Meeting, rank: int) -> None:
        self.log: list[Any] = []
        self.whole = [random.Random(f"{name} {index}").random() < 0.4 for index in range(len(case.homes))]
        super().__init__(case, meeting, rank)
        self.common, self.own = random.Random(name), random.Random(f"{name} {rank}")
        draw, flow = self.common, self.flow
        flow._options = replace(
            flow._options,
            block_count=draw.randint(1, 3),
            block_bytes=draw.choice((1, 1, 2)) * flow._options.block_bytes // draw.choice((1, 1, 2)),
            overlap=draw.random() < 0.6,
            places={index: draw.randint(0, index) for index in flow._options.places},
        )
        self.arena.count(-self.arena.parts("device").get("gradient_blocks", 0), "device", "gradient_blocks")
        flow._blocks = GradientBlocks(self.arena, flow._options.block_count, flow._options.block_bytes)
        self.done: set[nn.Parameter] = set()

    def _put(
        self, put: Callable[..., Ticket], work: Work, filling: Sequence[Any], using: Sequence[Any], nbytes: int
    ) -> Ticket:
        self.submitted.append(nbytes)
        self.log.append([nbytes, *([ticket.number for ticket in tickets] for tickets in (filling, using))])
        return Noted(put(work, filling, using, nbytes), len(self.submitted), self.log)

    def _chunks(self) -> Iterator[Chunk]:
        for chunk, whole in zip(super()._chunks(), self.whole, strict=True):
            if not whole:
                yield chunk
                continue
            slots = (ParamSlot(f"p{chunk.index}.0", 0, self.numel),)  # which may be larger than a block
            homes: Any = self.case.homes[chunk.index][1:]
            plan = ChunkPlan("float32", True, self.numel, slots, *homes, False, reduce_order=chunk.plan.reduce_order)
            weights = [nn.Parameter(torch.zeros(self.numel))]
            options = {"world_size": self.case.shards, "shard": self.rank % self.case.shards}
            yield Chunk(chunk.index, plan, weights, rank=self.rank, **options)

    def some_backward(self) -> None:
        """One backward, in which a rank gets other gradients than the next one, or none."""
        draw, flow = self.common, self.flow
        draw.random()  # decides nothing; later draws are the recorded ones
        one_pass, share = draw.random() < 0.25, draw.choice((1.0, 1.0, 0.6, 0.2))
        self.done.clear()
        flow.hold_until(self.done.__contains__ if one_pass else None)
        flow.begin()
        of_all = [(chunk, slot) for chunk in self.chunks for slot in chunk.slots]
        for position in range(len(self.chunks)):
            flow.leave(position)
            flow.enter(position)
            left = [each for each in of_all if self.own.random() < share]
            for chunk, slot in self.own.sample(left, len(left))[: 1 + len(left) // len(self.chunks)]:
                flow.take(chunk, slot, torch.full(slot.shape, 12.0 * self.own.randint(-9, 9)))
                self.log.append(flow.by_chunk[chunk.index].state.value)
            if one_pass and draw.random() < 0.7:
                self.done |= {slot.parameter for slot in draw.choice(self.chunks).slots}
                flow.release()
        flow.flush()
        flow.hold_until(None)

    def changed(self) -> None:
        """Forgets some gradients between backwards, or sends what came late."""
        draw, flow = self.common, self.flow
        if draw.random() < 0.15:
            flow.clear()
        for _ in range(draw.choice((0, 0, 1, 3, 5))):
            chunk = draw.choice(self.chunks)
            flow.drop(chunk, draw.choice(chunk.slots).name)
        if draw.random() < 0.3:
            flow.send_late()
        if draw.random() < 0.2:
            flow.settle()
            flow.hold([draw.choice(draw.choice(self.chunks).slots).name])
        if draw.random() < 0.3:
            flow.dropped()

    def seen(self, *, settled: bool) -> list[Any]:
        """Says what the rank has done since, and what there is now."""
        flow, found = self.flow, [list(self.log), self.completed.copy()]
        self.log.clear()
        for chunk in self.chunks:
            mine = flow.by_chunk[chunk.index]
            found.append(
                [mine.state.value, sorted(mine.arrived), mine.is_partial, flow.is_partial(chunk), mine.changes]
            )
            found[-1] += [None if each is None else sorted(each.arrived) for each in (mine.opened, mine.kept)]
            found[-1] += [[flow.holds(chunk, slot.name) for slot in chunk.slots], mine.norms is not None]
            if settled and mine.memory.tensor.numel():
                found[-1] += [mine.memory.tensor[held.part].tolist() for held in chunk.held.values()]
                found[-1] += [f"{norm:.3g}" for norm in (mine.norms.values.tolist() if mine.norms is not None else ())]
        found += [self.arena.parts("device"), self.arena.parts("host"), dict(self.arena.peak_bytes)]
        found += [flow.extra_blocks, flow.backward_count, sorted(flow.untraced)]
        return [*found, flow.any_held(), asdict(self.lanes.counts)]

    def outcomes(self) -> list[Any]:
        found = []
        for _ in range(2):
            for _ in range(self.common.randint(1, 3)):
                self.some_backward()
                found.append(self.seen(settled=False))
                self.changed()
            self.flow.settle()
            found.append(self.seen(settled=True))
            self.lanes.counts.reset()
            self.flow.clear()
            for _ in range(2):
                self.changed()
            found.append(self.seen(settled=False))
        return [*found, self.group.issued]


def outcomes(name: str) -> list[Any]:
    """By rank."""
    draw = random.Random(name)
    ranks, replicas = draw.choice(((1, 1), (1, 1), (2, 1), (4, 2)))
    homes = [draw.choice(HOMES) for _ in range(draw.randint(1, 3))]
    in_order = [draw.random() < 0.8 for _ in homes]
    fp32, wants_norms = draw.random() < 0.3, draw.random() < 0.7
    case = Case(ranks, replicas, draw.randint(1, 2), homes, in_order, [], fp32, wants_norms, False)
    meeting = Meeting(ranks)
    flows = [Flow(name, case, meeting, rank) for rank in range(ranks)]
    found: dict[int, list[Any]] = {}
    on_ranks(ranks, lambda rank: found.update({rank: flows[rank].outcomes()}), meeting)
    for flow in flows:
        flow.lanes.close()
    return [found[rank] for rank in range(ranks)]


@pytest.mark.parametrize("name", NAMES)
def test_a_flow_of_gradients_is_as_recorded(name: str) -> None:
    assert digest(outcomes(name)) == json.loads(RECORDED.read_text())[name]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(outcomes(sys.argv[1]), indent=1))
    else:
        rows = [f" {json.dumps(name)}: {json.dumps(digest(outcomes(name)))}" for name in NAMES]
        RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
