"""What a placement needs of device, host and disk. `docs/search.md` has a formula for every line here.

All device bytes are per rank, over the slots of `StepFacts`; host and disk bytes are of all ranks of one machine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from elixir.moments import FP32_BYTES, LARGEST_PIECE_NUMEL, STEP_TEMPORARY_BYTES, MomentKind, StateSize
from elixir.plan import STAGING_BUFFERS, master_bytes
from elixir.search.packing import Ints
from elixir.search.workload import Workload

WINDOW_CHUNKS = 2
"""Chunks whose states are in host memory at once where they live on a disk: one is stepped, one is read or written."""


@dataclass(frozen=True)
class Placement:
    """Homes of all chunks of a packing, as flags by chunk id."""

    resident: tuple[bool, ...]
    """Gathered on the device for the whole step."""
    weight_on_device: tuple[bool, ...]
    state_on_device: tuple[bool, ...]
    """For a frozen chunk the same as its weights."""
    state_on_disk: frozenset[int] = frozenset()
    """Ids of chunks with master weights and states on the disk; none of them has states on the device."""

    @property
    def residents(self) -> frozenset[int]:
        """Ids of the resident chunks."""
        return frozenset(index for index, flag in enumerate(self.resident) if flag)


@dataclass(frozen=True)
class Spill:
    """What decides which states go to the disk; both of one machine, all its ranks together."""

    host_bytes: int
    """Budget; above it, states go to the disk."""
    disk_bytes: int
    """Budget."""


@dataclass(frozen=True)
class Setting:
    """What stays the same for all candidates of one search."""

    world_size: int
    ranks_per_host: int
    """Ranks that share one machine."""
    states: StateSize
    """Optimizer states of a shard, master weights not included."""
    overlap: bool
    accumulation: int = 1
    """Batches per optimizer step."""
    spill: Spill | None = None
    """Whether states that the host cannot hold go to the disk; None: they do not."""
    moments: MomentKind = "float32"
    """How Adam's moments are kept, which also says how fast it steps."""
    step_in_backward: bool = False
    """Whether the host may update chunks while backward still runs: those with which the step is simulated to be fastest."""
    every_in_backward: bool = False
    """If so, whether it does so with all that can be, whatever that takes."""


@dataclass(frozen=True)
class MemoryNeed:
    """Peaks of one candidate and what they are made of; the parts sum to the peak."""

    device_parts: dict[str, int]
    host_parts: dict[str, int]
    grad_blocks: int
    disk_bytes: int = 0
    """Need of the disk of one machine."""

    @property
    def device_bytes(self) -> int:
        """Peak on one device."""
        return sum(self.device_parts.values())

    @property
    def host_bytes(self) -> int:
        """Need of one machine."""
        return sum(self.host_parts.values())


class MemoryModel:
    """Memory of candidates of one workload."""

    def __init__(self, work: Workload, setting: Setting) -> None:
        self.work = work
        self.setting = setting
        facts = work.facts
        self.base: Ints = facts.live_bytes + facts.trace.buffer_bytes
        self.transient: Ints = np.zeros(facts.slots, dtype=np.int64)
        # The step begins when the last gradient has been taken over.
        self.transient[facts.first_backward_slot : -1] = facts.largest_grad_bytes

    def shard_bytes(self, chunk: int) -> int:
        """One rank's part of the weights."""
        return self.work.chunks[chunk].bytes // self.setting.world_size

    def shard_numel(self, chunk: int) -> int:
        """One rank's part of the elements."""
        return self.work.chunks[chunk].numel // self.setting.world_size

    def state_shard_bytes(self, chunk: int, *, master: bool) -> int:
        """One rank's part of moments and, where kept, master weights."""
        facts, numel = self.work.chunks[chunk], self.shard_numel(chunk)
        if not facts.trainable:
            return 0
        states = self.setting.states.nbytes(numel, facts.weight_bytes)
        return states + (numel * master_bytes(facts.weight_bytes) if master else 0)

    def weight_bytes(self, chunk: int, *, resident: bool) -> int:
        """Device bytes of weights that live there: the whole chunk where it stays gathered, else the shard."""
        return self.work.chunks[chunk].bytes if resident else self.shard_bytes(chunk)

    def grad_curve(self, chunk: int) -> Ints:
        """Device bytes over the slots of gradients that wait there for a step on the device.

        With accumulation those of the batch before are there all the time.
        """
        facts = self.work.chunks[chunk]
        if self.setting.accumulation > 1:
            waiting = self.work.arrived_grad_bytes[chunk, -1] if self.setting.world_size == 1 else facts.grad_bytes
            return np.full(self.work.facts.slots, int(waiting) // self.setting.world_size, dtype=np.int64)
        if self.setting.world_size == 1:
            arrived: Ints = self.work.arrived_grad_bytes[chunk]
            return arrived
        reduced = np.zeros(self.work.facts.slots, dtype=np.int64)
        slots = self.work.chunks[chunk].grad_slots
        if slots is not None:
            reduced[slots[1] :] = self.work.chunks[chunk].grad_bytes // self.setting.world_size
        return reduced

    def step_temporary_bytes(self, chunk: int) -> int:
        """What a step on the device takes beside its operands.

        float32 moments: the fp32 copy of one gradient shard that a fused step over an fp32 master reads. Others are stepped
        in pieces.
        """
        facts = self.work.chunks[chunk]
        if self.setting.moments != "float32":
            piece = min(self.shard_numel(chunk), LARGEST_PIECE_NUMEL)
            return piece * STEP_TEMPORARY_BYTES[self.setting.moments] if facts.trainable else 0
        return self.shard_numel(chunk) * FP32_BYTES if facts.trainable and facts.low_precision else 0

    def gathers_gradients(self, chunk: int, state_on_device: bool) -> bool:
        """Whether gradients are put together in a block: to leave for the host, or to be reduced over ranks."""
        return self.work.chunks[chunk].grad_slots is not None and (self.setting.world_size > 1 or not state_on_device)

    def in_flight(self, *, gathering: bool, on_device: bool) -> bool:
        """Whether gradients exist beside where they go: in a block, or, with accumulation, in those before them."""
        return gathering or (on_device and self.setting.accumulation > 1)

    def open_grads(self, gathering: Sequence[int]) -> Ints:
        """How many gradient blocks are being filled in each slot."""
        change = np.zeros(self.work.facts.slots + 1, dtype=np.int64)
        for chunk in gathering:
            slots = self.work.chunks[chunk].grad_slots
            if slots is not None:
                change[slots[0]] += 1
                change[slots[1] + 1] -= 1
        opened: Ints = np.cumsum(change[:-1])
        return opened

    def grad_block_count(self, gathering: Sequence[int]) -> int:
        """Those open at once, and with overlap one that leaves beside them: more are needed only on a link that lags."""
        blocks = [chunk for chunk in gathering if not self.work.chunks[chunk].outsized]
        if not blocks:
            return 0
        return min(int(self.open_grads(blocks).max()) + self.setting.overlap, len(blocks))

    def outsized_grad_bytes(self, gathering: Sequence[int]) -> int:
        """An outsized gradient is one tensor and needs no block, but a second may arrive while it leaves."""
        outsized = [self.work.chunks[chunk].bytes for chunk in gathering if self.work.chunks[chunk].outsized]
        return max(outsized, default=0) if self.setting.overlap or self.setting.world_size > 1 else 0

    def need(self, placement: Placement, blocks: int) -> MemoryNeed:
        """Peaks of a placement with `blocks` rCache blocks."""
        work, chunks = self.work, range(len(self.work.chunks))
        gathering = [c for c in chunks if self.gathers_gradients(c, placement.state_on_device[c])]
        grad_blocks = self.grad_block_count(gathering)
        on_device = [c for c in chunks if placement.state_on_device[c] and work.chunks[c].trainable]
        resident = sum(work.chunks[c].bytes for c in chunks if placement.resident[c])
        shards = sum(self.shard_bytes(c) for c in chunks if placement.weight_on_device[c] and not placement.resident[c])
        masters = sum(self.state_shard_bytes(c, master=work.chunks[c].low_precision) for c in on_device)
        gradients = np.zeros(work.facts.slots, dtype=np.int64)
        for chunk in on_device:
            gradients += self.grad_curve(chunk)
        temporaries = np.zeros(work.facts.slots, dtype=np.int64)
        temporaries[-1] = max((self.step_temporary_bytes(c) for c in on_device), default=0)
        in_flight = self.in_flight(gathering=bool(gathering), on_device=bool(on_device))
        transient = self.transient if in_flight else np.zeros_like(self.transient)
        slot = int(np.argmax(self.base + gradients + temporaries + transient))
        device_parts = {
            "activations": int(work.facts.live_bytes[slot]),
            "buffers": work.facts.trace.buffer_bytes,
            "rcache": blocks * work.packing.block_bytes,
            "resident_weights": resident,
            "weight_shards": shards,
            "optimizer_states": masters,
            "gradients": int(gradients[slot]),
            "gradient_blocks": grad_blocks * work.packing.block_bytes + self.outsized_grad_bytes(gathering),
            "gradient_in_flight": int(transient[slot]),
            "optimizer_temporaries": int(temporaries[slot]),
        }
        disk = sum(self.disk_shard_bytes(chunk) for chunk in chunks if chunk in placement.state_on_disk)
        return MemoryNeed(device_parts, self.host_parts(placement), grad_blocks, disk * self.setting.ranks_per_host)

    def host_parts(self, placement: Placement) -> dict[str, int]:
        """Host bytes of one machine by what holds them."""
        parts = {"weights": 0, "optimizer_states": 0, "gradients": 0}
        for chunk in range(len(self.work.chunks)):
            weights, states, gradients = self.host_bytes(
                chunk, placement.weight_on_device[chunk], placement.state_on_device[chunk]
            )
            parts["weights"] += weights
            parts["optimizer_states"] += 0 if chunk in placement.state_on_disk else states
            parts["gradients"] += gradients
        if placement.state_on_disk:
            parts["state_window"] = self.window_bytes(placement.state_on_disk)
        parts["gradients"] += self.host_adding_bytes(placement.state_on_device)
        homes = zip(placement.weight_on_device, placement.state_on_device, strict=True)
        staged = [self.staged_bytes(chunk, *at) for chunk, at in enumerate(homes)]
        if any(staged):
            parts["staging"] = min(len(staged) - staged.count(0), STAGING_BUFFERS) * max(staged)
        return {name: amount * self.setting.ranks_per_host for name, amount in parts.items()}

    def staged_bytes(self, chunk: int, weight_on_device: bool, state_on_device: bool) -> int:
        """Host bytes of one rank through which new weights of a chunk return to the device, rounded by the host."""
        facts = self.work.chunks[chunk]
        rounded = facts.trainable and facts.low_precision and weight_on_device and not state_on_device
        return self.shard_bytes(chunk) if rounded else 0

    def disk_shard_bytes(self, chunk: int) -> int:
        """Disk bytes of one rank for one chunk. The master is there too: no weight lives on a disk."""
        return self.state_shard_bytes(chunk, master=True)

    def window_bytes(self, on_disk: Collection[int]) -> int:
        """Host bytes of one rank through which states on the disk pass: a buffer for the largest of them, twice."""
        largest = max((self.disk_shard_bytes(chunk) for chunk in on_disk), default=0)
        return min(len(on_disk), WINDOW_CHUNKS) * largest

    def adding_bytes(self, chunk: int, state_on_device: bool) -> int:
        """Host bytes of one rank while a gradient of the chunk is added to that of the batch before."""
        facts = self.work.chunks[chunk]
        adds = self.setting.accumulation > 1 and facts.trainable and not state_on_device
        return facts.grad_bytes // self.setting.world_size if adds else 0

    def host_adding_bytes(self, state_on_device: Sequence[bool]) -> int:
        """One is added after the other."""
        return max((self.adding_bytes(chunk, state) for chunk, state in enumerate(state_on_device)), default=0)

    def host_bytes(self, chunk: int, weight_on_device: bool, state_on_device: bool) -> tuple[int, int, int]:
        """Host bytes of one rank for one chunk: weights, states with master weights, gradients that wait."""
        facts = self.work.chunks[chunk]
        weights = 0 if weight_on_device else self.shard_bytes(chunk)
        if state_on_device or not facts.trainable:
            return weights, 0, 0
        # An fp32 weight is its own master, but only where its home is that of the states.
        master = facts.low_precision or weight_on_device
        return weights, self.state_shard_bytes(chunk, master=master), facts.grad_bytes // self.setting.world_size
