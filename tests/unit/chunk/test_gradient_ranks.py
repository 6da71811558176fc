"""Gradients of several ranks, each a thread here, against sums by hand: every rank ends with the mean, whatever comes
where, in which order and when."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import elixir.access.interception  # noqa: F401  registers what operators on marked memory reach
from elixir.chunk.chunk import Chunk
from elixir.chunk.gradients.gradient_flow import FlowOptions, GradientFlow
from elixir.chunk.group import Group
from elixir.chunk.host_buffers import SUMMANDS, BufferKind, HostBuffers
from elixir.chunk.lanes import Work, make_lanes
from elixir.chunk.memory import Arena, Ticket
from elixir.plan.chunk_plan import ChunkPlan, ParamSlot
from elixir.plan.step_traffic import Backwards, ChunkRoute, step_traffic

CPU = torch.device("cpu")
SLOTS = ((0, 5), (5, 2), (8, 4))
"""Offset and elements of a chunk's parameters; there is a gap, and ranks share one of them."""
NUMEL = 16
WAIT_S = 30.0


class Meeting:
    """The place to which ranks bring values; all must bring one of the same name."""

    def __init__(self, size: int) -> None:
        self._barrier, self._brought = threading.Barrier(size, timeout=WAIT_S), [("", None)] * size

    def meet(self, rank: int, what: str, value: Any) -> list[Any]:
        """The values of all, by rank."""
        self._brought[rank] = (what, value)
        self._barrier.wait()
        brought = list(self._brought)
        self._barrier.wait()
        assert {name for name, _ in brought} == {what}
        return [each for _, each in brought]

    def leave(self) -> None:
        """Ends the meeting for all, since a rank has failed: nobody waits for it."""
        self._barrier.abort()


class RankOf(Group):
    """One rank of a meeting."""

    def __init__(self, meeting: Meeting, rank: int, size: int, replicas: int) -> None:
        super().__init__()
        self.rank, self.size, self.replicas, self._meeting = rank, size, replicas, meeting
        self.issued: list[str] = []

    def _meet(self, what: str, value: Any) -> list[Any]:
        self.issued.append(what)
        return self._meeting.meet(self.rank, what, value)

    def exchange(self, what: str, value: Any) -> list[Any]:
        return self._meet(what, value)

    def reduce_mean(self, shard: torch.Tensor, whole: torch.Tensor, what: str = "gradients") -> None:
        blocks = self._meet(f"reduce {what}", whole.div_(self.size).clone())
        first = self.rank - self.shard
        total = torch.stack(blocks[first : first + self.shards]).sum(0).view(self.shards, -1)[self.shard]
        whole.fill_(float("nan"))  # torch says nothing of it
        shard.copy_(total)

    def sum_replicas(self, shard: torch.Tensor, what: str = "gradients") -> None:
        shard.copy_(torch.stack(self._meet(f"sum {what}", shard.clone())[self.shard :: self.shards]).sum(0))


@dataclass
class Backward:
    """One backward: by rank, the gradients in the order of their arrival."""

    arrivals: list[list[tuple[int, int, float]]]
    """Chunk, slot, value."""
    dropped: tuple[int, int] | None
    """The gradient of a parameter that all ranks forget afterwards."""


@dataclass
class Case:
    ranks: int
    replicas: int
    accumulation: int
    homes: list[tuple[bool, str, str]]
    in_order: list[bool]
    """By chunk, whether the traced step gave it a gradient."""
    steps: list[list[Backward]]
    reduce_fp32: bool
    wants_norms: bool
    as_traced: bool
    """Whether every rank gets every gradient once in each backward."""
    dtype: str = "float32"

    @property
    def shards(self) -> int:
        return self.ranks // self.replicas


HOMES = [(True, "device", "device"), (True, "device", "host"), (False, "host", "host")]


def drawn(seed: int) -> Case:
    draw = random.Random(seed)
    ranks, replicas = draw.choice(((1, 1), (2, 1), (2, 1), (4, 2), (3, 1)))
    count, as_traced = draw.randint(1, 3), draw.random() < 0.5

    def arrivals(share: float) -> list[tuple[int, int, float]]:
        all_of = [(chunk, slot) for chunk in range(count) for slot in range(len(SLOTS)) if draw.random() < share]
        if not as_traced:
            all_of += draw.sample(all_of, min(len(all_of), draw.choice((0, 0, 1))))  # two nodes use the parameter
        draw.shuffle(all_of)
        return [(chunk, slot, float(12 * draw.randint(-9, 9))) for chunk, slot in all_of]

    def backward() -> Backward:
        share = 1.0 if as_traced else draw.choice((1.0, 0.7, 0.3))
        drops = draw.random() < 0.3 and not as_traced
        dropped = (draw.randrange(count), draw.randrange(len(SLOTS))) if drops else None
        came = [arrivals(share) for _ in range(ranks)]
        draw.random()  # decides nothing; later draws stay the same
        return Backward(came, dropped)

    return Case(
        ranks,
        replicas,
        draw.randint(1, 3),
        [draw.choice(HOMES) for _ in range(count)],
        [as_traced or draw.random() < 0.8 for _ in range(count)],
        [[backward() for _ in range(draw.randint(1, 3))] for _ in range(3)],
        draw.random() < 0.3,
        seed % 2 == 0,
        as_traced,
    )


def expected(case: Case, step: list[Backward]) -> torch.Tensor:
    """[chunk, element]: the mean over ranks of the sums over backwards."""
    total = torch.zeros(len(case.homes), NUMEL)
    for backward in step:
        for arrivals in backward.arrivals:
            for chunk, slot, value in arrivals:
                offset, numel = SLOTS[slot]
                total[chunk, offset : offset + numel] += value / case.ranks
        if backward.dropped is not None:
            chunk, slot = backward.dropped
            total[chunk, SLOTS[slot][0] : sum(SLOTS[slot])] = 0
    return total


def got(case: Case, step: list[Backward], rank: int, chunk: int) -> set[str]:
    """Names of the parameters of which a rank has got a gradient, and none was forgotten since."""
    names: set[str] = set()
    for backward in step:
        names |= {f"p{chunk}.{slot}" for number, slot, _ in backward.arrivals[rank] if number == chunk}
        if backward.dropped is not None and backward.dropped[0] == chunk:
            names.discard(f"p{chunk}.{backward.dropped[1]}")
    return names


class Training:
    """One rank's flow."""

    def __init__(self, case: Case, meeting: Meeting, rank: int) -> None:
        self.case, self.rank = case, rank
        self.group, self.lanes, self.arena = (
            RankOf(meeting, rank, case.ranks, case.replicas),
            make_lanes(CPU),
            Arena(CPU),
        )
        self.numel = NUMEL if NUMEL % case.shards == 0 else NUMEL + case.shards - NUMEL % case.shards
        self.chunks = list(self._chunks())
        buffers = HostBuffers(self.arena)
        buffers.add(BufferKind(SUMMANDS, "gradients", 0, 2, at_once=False))
        last = len(self.chunks) - 1  # by then all have come
        options = FlowOptions(
            block_count=2,
            block_bytes=4 * self.numel,
            reduce_fp32=case.reduce_fp32,
            places={index: last if case.as_traced else index for index, there in enumerate(case.in_order) if there},
            accumulation=case.accumulation,
        )
        gathering = sorted(self.chunks, key=lambda chunk: not case.in_order[chunk.index])
        self.completed: list[int] = []
        """Chunks of which all gradients are on their way home."""
        self.submitted: list[int] = []
        """Bytes of the work that lanes were given."""
        for lane in (self.lanes.network, self.lanes.offload):
            lane._put = partial(self._put, lane._put)  # type: ignore[method-assign]
        self.measured = 0
        self.flow = GradientFlow(
            gathering, self.arena, self.lanes, self.group, buffers, options,
            complete=lambda chunk: self.completed.append(chunk.index), wants_norms=lambda: case.wants_norms,
        )  # fmt: skip

    def _put(
        self, put: Callable[..., Ticket], work: Work, filling: Sequence[Any], using: Sequence[Any], nbytes: int
    ) -> Ticket:
        self.submitted.append(nbytes)
        return put(work, filling, using, nbytes)

    def _chunks(self) -> Iterator[Chunk]:
        for index, (resident, weights, states) in enumerate(self.case.homes):
            slots = tuple(ParamSlot(f"p{index}.{slot}", *SLOTS[slot]) for slot in range(len(SLOTS)))
            plan = ChunkPlan(
                self.case.dtype, True, self.numel, slots, weights, states, resident,  # type: ignore[arg-type]
                reduce_order=index if self.case.in_order[index] else None,
            )  # fmt: skip
            weights_of = [nn.Parameter(torch.zeros(numel)) for _, numel in SLOTS]
            shards = self.case.shards
            yield Chunk(index, plan, weights_of, rank=self.rank, world_size=shards, shard=self.rank % shards)

    def backward(self, backward: Backward) -> None:
        flow, left = self.flow, list(backward.arrivals[self.rank])
        flow.begin()
        for position in range(len(self.chunks)):
            flow.leave(position)
            flow.enter(position)
            for chunk, slot, value in left[:: len(self.chunks) - position]:
                held = self.chunks[chunk].slots[slot]
                flow.take(self.chunks[chunk], held, torch.full(held.shape, value))
            del left[:: len(self.chunks) - position]
        assert not left
        flow.flush()
        if backward.dropped is not None:
            chunk, slot = backward.dropped
            flow.drop(self.chunks[chunk], f"p{chunk}.{slot}")

    def step(self, step: list[Backward]) -> None:
        for backward in step:
            self.backward(backward)
        asked = self.group.issued.count
        before = asked("late gradients")
        for _ in range(2):  # ranks ask once
            self.flow.settle()
            assert asked("late gradients") - before == (self.case.ranks > 1)
        for chunk, mean in zip(self.chunks, expected(self.case, step), strict=True):
            gradient = self.flow.by_chunk[chunk.index]
            whole = torch.zeros(self.numel)
            whole[:NUMEL] = mean
            here = gradient.memory.tensor if gradient.holds else torch.zeros(chunk.shard_numel)
            for name, part in ((name, held.part) for name, held in chunk.held.items()):
                if name not in gradient.dropped:
                    assert torch.equal(here[part].float(), whole[chunk.mine][part]), (chunk.index, name)
                else:
                    assert not whole[chunk.mine][part].any()
            if gradient.norms is not None:
                gradient.norms.wait()
                for held in chunk.held.values():
                    assert gradient.norms.of(held.place).item() == pytest.approx(here[held.part].norm().item())
                    self.measured += 1
            assert gradient.arrived == got(self.case, step, self.rank, chunk.index)
            assert gradient.opened is None
            assert gradient.kept is None
        if self.case.as_traced:
            self.check_bytes(Backwards.of(len(step), self.case.accumulation))
            # All gradients of each chunk came in each backward.
            assert sorted(self.completed) == sorted(list(range(len(self.chunks))) * len(step))
        self.completed.clear()
        moved = self.lanes.counts
        assert (
            sum(self.submitted)
            == moved.device_to_host_bytes + moved.host_to_device_bytes + moved.network_bytes + moved.replicas_bytes
        )
        self.submitted.clear()
        self.lanes.counts.reset()
        self.flow.clear()
        assert not self.flow.any_held()
        for home in ("device", "host"):  # what was kept is counted no more
            there = [each.memory.tensor for each in self.flow.by_chunk.values() if each.chunk.plan.update_home == home]
            assert self.arena.parts(home).get("gradients", 0) == sum(memory.nbytes for memory in there)

    def check_bytes(self, backwards: Backwards) -> None:
        """Compares the bytes that were moved with those that a plan predicts."""
        routes = [
            ChunkRoute(
                weight_bytes=4 * self.numel,
                shard_bytes=4 * self.numel // self.case.shards,
                resident=False,
                weight_on_device=False,
                state_on_device=states == "device",
                trainable=True,
                gradient=True,
                stepped=True,
                turned_bytes=0,
                exchanged_bytes=0,
                file_bytes=0,
            )
            for _, _, states in self.case.homes
        ]
        expected = step_traffic(routes, {}, backwards, stepped=False, replicas=self.case.replicas)
        moved = self.lanes.counts
        assert (moved.device_to_host_bytes, moved.host_to_device_bytes, moved.network_bytes, moved.replicas_bytes) == (
            expected.device_to_host_bytes,
            expected.host_to_device_bytes,
            expected.network_bytes,
            expected.replicas_bytes,
        )


def test_ranks_send_a_complete_chunk_while_backward_goes_on() -> None:
    """It leaves once its place in the order has come; the next one gets its block."""
    case = Case(2, 1, 1, [HOMES[2]] * 3, [True] * 3, [], False, False, True)
    meeting = Meeting(2)
    trainings = [Training(case, meeting, rank) for rank in range(2)]
    for training in trainings:
        training.flow._options = replace(training.flow._options, places={0: 0, 1: 1, 2: 2})

    def train(rank: int) -> None:
        flow, chunks = trainings[rank].flow, trainings[rank].chunks
        flow.begin()
        for position, chunk in enumerate(chunks):
            for slot in chunk.slots:
                flow.take(chunk, slot, torch.ones(slot.shape))
            assert trainings[rank].completed == list(range(position))
            flow.enter(position)
            assert trainings[rank].completed == list(range(position + 1))
        flow.flush()
        flow.settle()
        assert flow.extra_blocks == 0

    on_ranks(2, train, meeting)
    for training in trainings:
        training.lanes.close()


@pytest.mark.parametrize("before", [(0,), (0, 1, 2)])
def test_what_was_dropped_before_gradients_were_forgotten_counts_no_more(before: tuple[int, ...]) -> None:
    """One rank of several keeps its part of a chunk until each of its gradients is dropped."""
    training = Training(Case(2, 1, 1, [HOMES[2]], [True], [], False, False, False), Meeting(2), 0)
    flow, chunk = training.flow, training.chunks[0]
    names = [slot.name for slot in chunk.slots]
    flow.hold(names)
    for number in before:
        flow.drop(chunk, names[number])
    assert flow.by_chunk[0].holds == (len(before) < 3)
    if len(before) < 3:
        flow.clear()
    flow.hold(names)
    for number, name in enumerate(reversed(names), 1):
        flow.drop(chunk, name)
        assert flow.by_chunk[0].holds == (number < 3)
    training.lanes.close()


@pytest.mark.parametrize("how", ["kept", "on the device", "zeros"])
def test_memory_of_gradients_that_still_arrive_is_given_to_nobody(how: str) -> None:
    """A call that forgets a gradient, or puts zeros in its place, waits for the copy under way."""
    ranks = 2 if how == "kept" else 1
    case = Case(ranks, 1, 1, [HOMES[0 if how == "on the device" else 2]], [how != "kept"], [], False, False, False)
    training = Training(case, Meeting(ranks), 0)
    flow, chunk = training.flow, training.chunks[0]
    gate, ended = threading.Event(), threading.Event()
    training.lanes.offload.submit(gate.wait)
    flow.begin()
    for slot in chunk.slots:
        flow.take(chunk, slot, torch.ones(slot.shape))
    flow.enter(0)

    def forget() -> None:
        if how == "kept":
            for slot in chunk.slots:
                flow.drop(chunk, slot.name)
        else:
            flow.clear()
        if how == "zeros":
            flow.hold([chunk.slots[0].name])
        ended.set()

    thread = threading.Thread(target=forget)
    thread.start()
    assert not ended.wait(0.05)
    gate.set()
    thread.join()
    assert ended.is_set()
    gradient = flow.by_chunk[0]
    assert gradient.kept is None
    assert gradient.holds == (how == "zeros")
    assert not gradient.memory.tensor.any()
    training.lanes.close()


@pytest.mark.parametrize(
    ("ordered", "sent"), [((True, True, False), ()), ((True, False, False), ()), ((True, True, True), (0,))]
)
def test_if_all_blocks_are_taken_what_comes_late_leaves_its_own(
    ordered: tuple[bool, ...], sent: tuple[int, ...]
) -> None:
    """A gradient that other ranks wait for stays in the two blocks, and no further block is made."""
    case = Case(2, 1, 1, [HOMES[2]] * 3, list(ordered), [], False, False, False)
    meeting = Meeting(2)
    trainings = [Training(case, meeting, rank) for rank in range(2)]

    def train(rank: int) -> None:
        flow, chunks = trainings[rank].flow, trainings[rank].chunks
        flow.begin()
        for number in sent:  # complete, and gone; then more comes
            for slot in chunks[number].slots:
                flow.take(chunks[number], slot, torch.ones(slot.shape))
            flow.enter(0)
        late = [*sent, *(number for number, there in enumerate(ordered) if not there)]
        waiting = [number for number in range(3) if number not in late]
        for number in (*waiting[:1], *late, *waiting[1:]):
            flow.take(chunks[number], chunks[number].slots[0], torch.ones(chunks[number].slots[0].shape))
        kept = [number for number in range(3) if flow.by_chunk[number].kept is not None]
        assert kept == late[:1]
        assert flow.extra_blocks == 0
        flow.flush()
        flow.settle()

    on_ranks(2, train, meeting)
    for training in trainings:
        training.lanes.close()


def on_ranks(count: int, work: Callable[[int], None], meeting: Meeting) -> None:
    """Runs `work` on a thread for each rank; raises the first error."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)
            meeting.leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


def check_means(seeds: Sequence[int]) -> None:
    measured = 0
    for seed in seeds:
        case = drawn(seed)
        meeting = Meeting(case.ranks)
        trainings = [Training(case, meeting, rank) for rank in range(case.ranks)]

        def train(rank: int, trainings: list[Training] = trainings, case: Case = case) -> None:
            for step in case.steps:
                trainings[rank].step(step)

        on_ranks(case.ranks, train, meeting)
        assert len({tuple(training.group.issued) for training in trainings}) == 1
        measured += sum(training.measured for training in trainings)
        for training in trainings:
            training.lanes.close()
    assert measured


_SEEDS = range(60)
_OF_REPLICAS = [seed for seed in _SEEDS if drawn(seed).replicas > 1]
_OTHERS = [seed for seed in _SEEDS if seed not in _OF_REPLICAS]


@pytest.mark.parametrize("part", range(2))
def test_every_replica_ends_with_the_mean(part: int) -> None:
    check_means(_OF_REPLICAS[part::2])


@pytest.mark.parametrize("reduce_fp32", [False, True])
def test_replicas_end_with_the_mean_also_if_a_step_comes_before_its_last_backward(reduce_fp32: bool) -> None:
    """The sum over replicas is made then, of what is at home, in the dtype of the reduction."""
    arrivals = [[(chunk, slot, 2.0 + rank) for chunk in range(2) for slot in range(3)] for rank in range(4)]
    step = [Backward(arrivals, None)]
    homes, meeting = [HOMES[0], HOMES[2]], Meeting(4)
    case = Case(4, 2, 2, homes, [True, True], [step, step], reduce_fp32, False, False, "bfloat16")
    trainings = [Training(case, meeting, rank) for rank in range(4)]
    on_ranks(4, lambda rank: [trainings[rank].step(each) for each in case.steps] and None, meeting)
    for training in trainings:
        training.lanes.close()


@pytest.mark.parametrize("part", range(5))
def test_every_rank_ends_with_the_mean(part: int) -> None:
    check_means(_OTHERS[part::5])
