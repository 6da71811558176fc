"""Chunks onto the device, one after the other, for as long as the budget lasts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from elixir.search.memory import MemoryModel, Placement
from elixir.search.packing import Ints


class PlacementBuilder:
    """A placement that starts with everything on the host and keeps its own device peak up to date.

    Outsized chunks are resident from the start: no block could hold them. The peak is that of `MemoryModel.need`.

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
        gathering = [c for c in range(len(chunks)) if model.gathers_gradients(c, False)]
        self._outsized = tuple(c for c in gathering if chunks[c].outsized)
        self._grad_chunks = len(gathering) - len(self._outsized)
        self._open = model.open_grads([c for c in gathering if not chunks[c].outsized])
        self._open_max = int(self._open.max())
        self._curve = model.base.copy()
        self._temporary = 0
        self._constant = sum(chunk.bytes for chunk in chunks if chunk.outsized)
        self._stepped = False
        self._curve_peak = self._peak_over_time(self._curve, 0, bool(gathering))

    def placement(self) -> Placement:
        """The placement as it stands."""
        return Placement(tuple(self.resident), tuple(self.weight), tuple(self.state))

    def peak_bytes(self) -> int:
        """Device peak as it stands."""
        pool = self._pool(self.streamed, self._open_max, self._grad_chunks, self._outsized)
        return self._curve_peak + self._constant + pool

    def most_blocks(self, budget_bytes: int) -> int:
        """Most rCache blocks that fit beside everything else; negative where the rest alone does not fit."""
        block = self.model.work.packing.block_bytes
        used = self.blocks if not self.give_back else min(self.blocks, self.streamed)
        rest = self.peak_bytes() - used * block
        if not block or not self.streamed:
            return 0 if rest <= budget_bytes else -1
        return min((budget_bytes - rest) // block, self.streamed)

    def move(self, chunk: int, *, state: bool, resident: bool, budget_bytes: int) -> bool:
        """Put a chunk's weights, and with `state` its states, on the device if that fits; whether it did."""
        model, facts = self.model, self.model.work.chunks[chunk]
        resident = resident or self.resident[chunk]
        constant, curve, temporary = self._constant, self._curve, self._temporary
        if self.weight[chunk]:
            constant -= model.weight_bytes(chunk, resident=self.resident[chunk])
        constant += model.weight_bytes(chunk, resident=resident)
        streamed = self.streamed - (resident and not self.resident[chunk])
        outsized, grad_chunks = self._outsized, self._grad_chunks
        opened, open_max = self._open, self._open_max
        if state and facts.trainable and not self.state[chunk]:
            constant += model.state_shard_bytes(chunk, master=facts.low_precision)
            curve = curve + model.grad_curve(chunk)
            temporary = max(temporary, model.step_temporary_bytes(chunk))
            if facts.grad_slots is None or model.gathers_gradients(chunk, True):
                pass  # its gradients take the same way as before
            elif facts.outsized:
                outsized = tuple(c for c in outsized if c != chunk)
            else:
                opened = opened.copy()
                opened[facts.grad_slots[0] : facts.grad_slots[1] + 1] -= 1
                open_max, grad_chunks = int(opened.max()), grad_chunks - 1
        stepped = self._stepped or (state and facts.trainable)
        in_flight = model.in_flight(gathering=bool(outsized or grad_chunks), on_device=stepped)
        over_time = self._peak_over_time(curve, temporary, in_flight)
        if over_time + constant + self._pool(streamed, open_max, grad_chunks, outsized) > budget_bytes:
            return False
        self._constant, self._curve, self._temporary, self._curve_peak = constant, curve, temporary, over_time
        self._open, self._open_max, self._outsized, self._grad_chunks = opened, open_max, outsized, grad_chunks
        self.streamed, self._stepped = streamed, stepped
        self.weight[chunk] = True
        self.resident[chunk] = resident
        self.state[chunk] = self.state[chunk] or state or not facts.trainable
        return True

    def move_all(self, chunks: Iterable[int], *, state: bool, resident: bool, budget_bytes: int) -> None:
        """Walk `chunks` and move each that still fits."""
        slack = budget_bytes - self.peak_bytes()
        for chunk in chunks:
            least = self.least_bytes(chunk, state=state, resident=resident)
            if least > slack + self._most_given_back(resident):
                continue
            if self.move(chunk, state=state, resident=resident, budget_bytes=budget_bytes):
                slack = budget_bytes - self.peak_bytes()

    def _most_given_back(self, resident: bool) -> int:
        """The most that moving one chunk can free: its block, its gradient block, the room of gradients in flight."""
        block = self.model.work.packing.block_bytes
        freed = block if resident and self.give_back and self.streamed <= self.blocks else 0
        if self.model.setting.world_size == 1:  # with more ranks gradients are gathered wherever their states live
            freed += block if self._grad_chunks else 0
            freed += self.model.outsized_grad_bytes(self._outsized)
            if self._grad_chunks + len(self._outsized) == 1:
                freed += self.model.work.facts.largest_grad_bytes
        return freed

    def squeeze(self, budget_bytes: int) -> bool:
        """While the peak is above the budget, make moves that lower it; whether it is within the budget then.

        A chunk on the device can free more than it takes, such as a gradient block that only it kept open.
        """
        resident = self.model.setting.world_size == 1
        while (peak := self.peak_bytes()) > budget_bytes:
            for chunk in range(len(self.weight)):
                if not self.state[chunk]:
                    lower = self.peak_bytes() - 1
                    self.move_all([chunk], state=True, resident=resident, budget_bytes=lower)
                    if self.peak_bytes() <= budget_bytes:
                        return True
            if self.peak_bytes() == peak:
                return False
        return True

    def least_bytes(self, chunk: int, *, state: bool, resident: bool) -> int:
        """What a move adds to the device, gradients and blocks not counted."""
        model, facts = self.model, self.model.work.chunks[chunk]
        here = model.weight_bytes(chunk, resident=self.resident[chunk]) if self.weight[chunk] else 0
        there = model.weight_bytes(chunk, resident=resident or self.resident[chunk])
        states = model.state_shard_bytes(chunk, master=facts.low_precision) if state and not self.state[chunk] else 0
        return there - here + states

    def _peak_over_time(self, curve: Ints, temporary: int, in_flight: bool) -> int:
        running = curve[:-1] + self.model.transient[:-1] if in_flight else curve[:-1]
        return max(int(running.max()), int(curve[-1]) + temporary)

    def _pool(self, streamed: int, open_max: int, grad_chunks: int, outsized: Sequence[int]) -> int:
        blocks = min(self.blocks, streamed) if self.give_back else self.blocks
        grad_blocks = min(open_max + self.model.setting.overlap, grad_chunks) if grad_chunks else 0
        pool = (blocks + grad_blocks) * self.model.work.packing.block_bytes
        return pool + self.model.outsized_grad_bytes(outsized)


def by_saving(model: MemoryModel, loads: Sequence[int], *, whole: bool) -> list[int]:
    """Chunks by link bytes saved per device byte, most first; equal ones in order of use.

    Args:
        loads: per chunk, its loads in one step.
        whole: weights and states move together; else weights alone.
    """

    def saving(chunk: int) -> float:
        facts = model.work.chunks[chunk]
        shard = model.shard_bytes(chunk)
        upload = shard if facts.trainable and facts.grad_bytes else 0
        if not whole:
            return (loads[chunk] * shard - upload) / max(shard, 1)
        cost = model.weight_bytes(chunk, resident=model.setting.world_size == 1)
        cost += (
            model.state_shard_bytes(chunk, master=facts.low_precision) + facts.grad_bytes // model.setting.world_size
        )
        return (loads[chunk] * shard + facts.grad_bytes // model.setting.world_size) / max(cost, 1)

    return sorted(range(len(model.work.chunks)), key=lambda chunk: (-saving(chunk), chunk))


def loads_per_chunk(count: int, timeline: Sequence[tuple[int, int]]) -> list[int]:
    """Loads by chunk id."""
    return np.bincount([chunk for _, chunk in timeline], minlength=count).tolist() if timeline else [0] * count
