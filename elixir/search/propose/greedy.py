"""Chunks onto the device, one after the other, for as long as the budget lasts."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from elixir.plan.chunk_plan import Home
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.placement import HOMES, Floats, Placement

_RESIDENT, _SHARDS = HOMES.index(Home.RESIDENT), HOMES.index(Home.DEVICE)
_HOME_OF = {
    (home.resident, home.states_on_device): home
    for home in HOMES
    if home.weights_on_device and home.update == "after_norm" and not home.states_on_disk
}
"""Homes of weights on the device, by whether they are resident, and whether the states are there as well."""


class PlacementBuilder:
    """A placement that starts with everything on the host and keeps its own device peak up to date.

    Thousands of moves are tried, one after the other, so sums over the chunks are carried along; all else is of
    `MemoryModel`, and the peak is that of `MemoryModel.need`. Outsized chunks are resident from the start: no block
    could hold them.

    Args:
        model: memory of the workload.
        blocks: rCache blocks.
        give_back: count no more blocks than there are streamed chunks left.
    """

    def __init__(self, model: MemoryModel, blocks: int, *, give_back: bool = True) -> None:
        self.model = model
        self.blocks = blocks
        self.give_back = give_back
        chunks = model.work.chunks
        self.resident = [chunk.outsized for chunk in chunks]
        self.weight = list(self.resident)
        self.state = [chunk.outsized and not chunk.trainable for chunk in chunks]
        self.streamed = self.resident.count(False)
        self.homes = [
            _HOME_OF[True, state] if weight else model.setting.away(chunk.trainable)
            for chunk, weight, state in zip(chunks, self.weight, self.state, strict=True)
        ]
        gathering = np.flatnonzero(model.gets_gradients).tolist()
        self._outsized = tuple(c for c in gathering if chunks[c].outsized)
        self._grad_chunks = len(gathering) - len(self._outsized)
        self._open = model.filling.sum(axis=0)
        self._most_open = int(self._open.max(initial=0))
        self._widest = int(model.filling.sum(axis=1).max(initial=0))
        self._curve: Floats = model.telling_stretches.base
        self._temporary = 0.0
        self._constant = sum(chunk.bytes for chunk in chunks if chunk.outsized)
        self._outsized_bytes = model.outsized_grad_bytes(self._outsized)
        self._curve_peak = self._peak_over_time(self._curve, 0.0, bool(gathering))
        self._weights: list[list[int]] = model.device_weights[:, [_SHARDS, _RESIDENT]].tolist()
        self._states: list[int] = model.device_states[:, _RESIDENT].tolist()
        self._temporaries: list[float] = model.temporaries.tolist()

    def with_blocks(self, blocks: int) -> PlacementBuilder:
        """The same as it stands, for so many rCache blocks."""
        other = copy.copy(self)
        other.blocks = blocks
        other.resident, other.weight, other.state = self.resident.copy(), self.weight.copy(), self.state.copy()
        other.homes = self.homes.copy()
        return other

    def placement(self) -> Placement:
        """The placement as it stands."""
        return Placement(tuple(self.homes))

    def peak_bytes(self) -> int:
        """Device peak as it stands."""
        return self._curve_peak + self._constant + self._pool_now

    def most_blocks(self, budget_bytes: int) -> int:
        """Most rCache blocks that fit next to everything else; negative where the rest alone does not fit."""
        block = self.model.work.packing.block_bytes
        used = self.blocks if not self.give_back else min(self.blocks, self.streamed)
        rest = self.peak_bytes() - used * block
        if not block or not self.streamed:
            return 0 if rest <= budget_bytes else -1
        return min((budget_bytes - rest) // block, self.streamed)

    def move_all(self, chunks: Iterable[int], *, state: bool, resident: bool, budget_bytes: int) -> None:
        """Walks `chunks`; put the weights of each that still fits, and with `state` its states, on the device."""
        waiting = list(chunks)
        least = self._least_bytes(waiting, state=state, resident=resident)
        room = budget_bytes - self.peak_bytes() + self._most_given_back(resident)
        at, together = 0, 1
        while at < len(waiting):
            some, added = waiting[at : at + together], sum(least[at : at + together])
            if least[at] > room + self._outsized_bytes * (some[0] in self._outsized):
                at, together = at + 1, 1
            elif self._move(some, added, state=state, resident=resident, budget_bytes=budget_bytes):
                room = budget_bytes - self.peak_bytes() + self._most_given_back(resident)
                at, together = at + len(some), 2 * together
            else:
                at, together = at + (len(some) == 1), max(len(some) // 2, 1)

    def _move(self, chunks: Sequence[int], added: int, *, state: bool, resident: bool, budget_bytes: int) -> bool:
        """Moves chunks, which add so many bytes, if each fits after those before it; whether it did. It may not know
        that several fit."""
        model, facts = self.model, self.model.work.chunks
        constant = self._constant + added
        streamed = self.streamed - sum(resident and not self.resident[c] for c in chunks)
        outsized, outsized_bytes, grad_chunks = self._outsized, self._outsized_bytes, self._grad_chunks
        opened, most_open, over_time = self._open, self._most_open, self._curve_peak
        curve, temporary, most_over_time = self._curve, self._temporary, over_time
        stepped = [c for c in chunks if state and facts[c].trainable and not self.state[c]]
        if stepped:
            curve = curve + _sum_of(model.telling_stretches.curves, stepped)
            temporary = max(temporary, *(self._temporaries[c] for c in stepped))
            # With several ranks their gradients take the same way as before.
            kept = [c for c in stepped if facts[c].grad_stretches is not None and model.setting.world_size == 1]
            pooled = [c for c in kept if not facts[c].outsized]
            if len(pooled) < len(kept):
                outsized = tuple(c for c in outsized if c not in kept)
                outsized_bytes = model.outsized_grad_bytes(outsized)
            if pooled:
                opened, grad_chunks = opened - _sum_of(model.filling, pooled), grad_chunks - len(pooled)
                most_open = int(np.maximum.reduce(opened))
            before, after = self._in_flight(self._outsized, self._grad_chunks), self._in_flight(outsized, grad_chunks)
            over_time = most_over_time = self._peak_over_time(curve, temporary, after)
            if before != after:
                most_over_time = self._peak_over_time(curve, temporary, before)
        pool = self._pool(streamed, most_open, grad_chunks, outsized_bytes)
        # What a chunk gives back does not help those before it.
        most = over_time + pool if len(chunks) == 1 else most_over_time + self._pool_now
        if most + constant > budget_bytes:
            return False
        self._constant, self._curve, self._temporary, self._curve_peak = constant, curve, temporary, over_time
        self._open, self._most_open, self._grad_chunks = opened, most_open, grad_chunks
        self._outsized, self._outsized_bytes, self.streamed = outsized, outsized_bytes, streamed
        for chunk in chunks:
            self.weight[chunk] = True
            self.resident[chunk] = resident or self.resident[chunk]
            self.state[chunk] = self.state[chunk] or state or not facts[chunk].trainable
            self.homes[chunk] = _HOME_OF[self.resident[chunk], self.state[chunk]]
        return True

    def _most_given_back(self, resident: bool) -> int:
        """The most that moving one chunk can free but for an outsized gradient: its block, its gradient block, the room
        of gradients in flight."""
        block = self.model.work.packing.block_bytes
        freed = block if resident and self.give_back and self.streamed <= self.blocks else 0
        if self.model.setting.world_size == 1:  # with more ranks gradients are gathered wherever their states live
            freed += block if self._grad_chunks and self._may_close() else 0
            if self._grad_chunks + len(self._outsized) == 1:
                freed += int(self.model.transient.max())
        return freed

    def _may_close(self) -> bool:
        """Whether one chunk less may mean one gradient block less: a chunk cannot be all that fills most blocks in
        stretches that lie further apart than its own gradients."""
        if self._grad_chunks <= self._most_open + self.model.setting.overlap:
            return True
        highest = np.flatnonzero(self._open == self._most_open)
        return bool(highest[-1] - highest[0] < self._widest)

    def squeeze(self, budget_bytes: int) -> bool:
        """While the peak is above the budget, makes all moves that lower it; whether it is within the budget then.

        A chunk on the device can free more than it takes, such as a gradient block that only it kept open.
        """
        resident = self.model.setting.world_size == 1
        while (peak := self.peak_bytes()) > budget_bytes:
            for chunk in range(len(self.weight)):
                if not self.state[chunk]:
                    lower = self.peak_bytes() - 1
                    self.move_all([chunk], state=True, resident=resident, budget_bytes=lower)
            if self.peak_bytes() == peak:
                return False
        return True

    def _least_bytes(self, chunks: Iterable[int], *, state: bool, resident: bool) -> list[int]:
        """Bytes that a move of each adds to the device, gradients and blocks not counted."""
        found = []
        for chunk in chunks:
            weights, already = self._weights[chunk], self.resident[chunk]
            nbytes = weights[resident or already]
            if self.weight[chunk]:
                nbytes -= weights[already]
            found.append(nbytes + self._states[chunk] if state and not self.state[chunk] else nbytes)
        return found

    def _peak_over_time(self, curve: Floats, temporary: float, in_flight: bool) -> int:
        running = curve[:-1] + self.model.telling_stretches.transient[:-1] if in_flight else curve[:-1]
        return max(int(np.maximum.reduce(running)), int(curve[-1] + temporary))

    def _in_flight(self, outsized: tuple[int, ...], grad_chunks: int) -> bool:
        return bool(outsized or grad_chunks) or self.model.setting.accumulation > 1

    @property
    def _pool_now(self) -> int:
        return self._pool(self.streamed, self._most_open, self._grad_chunks, self._outsized_bytes)

    def _pool(self, streamed: int, open_max: int, grad_chunks: int, outsized_bytes: int) -> int:
        blocks = min(self.blocks, streamed) if self.give_back else self.blocks
        grad_blocks = min(open_max + self.model.setting.overlap, grad_chunks) if grad_chunks else 0
        return (blocks + grad_blocks) * self.model.work.packing.block_bytes + outsized_bytes


def _sum_of(table: npt.NDArray[Any], rows: Sequence[int]) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = table[rows[0]] if len(rows) == 1 else table[rows].sum(axis=0)
    return found


def by_saving(model: MemoryModel, loads: Sequence[int], *, whole: bool) -> list[int]:
    """Chunks by link bytes saved per device byte, most first; equal ones in order of use.

    Args:
        loads: per chunk, its loads in one step.
        whole: weights and states move together; otherwise weights alone.
    """
    shards, grads, count = model.shard_bytes, model.grad_shard_bytes, np.asarray(loads)
    home = _RESIDENT if model.setting.world_size == 1 else _SHARDS
    if whole:
        cost = model.device_weights[:, home] + model.device_states[:, home]
        saved, taken = count * shards + grads, cost + grads
    else:
        trained = [chunk.trainable and chunk.grad_bytes > 0 for chunk in model.work.chunks]
        saved, taken = count * shards - shards * trained, shards
    order: list[int] = np.argsort(-saved / np.maximum(taken, 1), kind="stable").tolist()
    return order


def loads_per_chunk(count: int, loaded: Sequence[int]) -> list[int]:
    """Loads by chunk id, from the chunk of each."""
    counts: list[int] = np.bincount(np.array(loaded, dtype=np.int64), minlength=count).tolist()
    return counts
