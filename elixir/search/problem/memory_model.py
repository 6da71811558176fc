"""Bytes that a placement needs of device, host and disk, and moves between them. Formulas: `docs/appendix/formulas.md`.

All formulas work on many placements of one packing at once: `homes[placement, chunk]`, numbers of `HOMES`. One
placement is a batch of one. Device bytes are per rank, over the stretches of `StepFacts`; host and disk bytes of all
ranks of a machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from elixir.optimizer_states import (
    DIRECTION_BYTES,
    FP32_BYTES,
    LARGEST_HOST_PIECE_NUMEL,
    LARGEST_PIECE_NUMEL,
    STEP_TEMPORARY_BYTES,
    extent_bytes,
    master_bytes,
    second_set_bytes,
)
from elixir.plan.chunk_plan import Home
from elixir.plan.matrices import exchanged_bytes, room_bytes, stage_numel, stages
from elixir.plan.plan import FILE_BUFFERS, PASSAGE_BUFFERS, STAGING_BUFFERS, WINDOW_CHUNKS
from elixir.plan.prediction import LINKS
from elixir.plan.step_traffic import Backwards, ChunkRoute, StepTraffic, step_traffic
from elixir.schedule import Schedule
from elixir.search.problem.packed_step import PackedStep
from elixir.search.problem.placement import (
    DISK,
    EARLY,
    HOMES,
    HOSTED,
    IN_FILES,
    RESIDENT,
    STATES,
    WEIGHTS,
    Bools,
    Codes,
    Floats,
    Ints,
    Placement,
    Setting,
)
from elixir.units import dtype_bytes

_ALWAYS = ("weights", "optimizer_states", "gradients")
"""Parts of host memory that a plan names even if it does not need them."""
_PASSING = "passing"
"""Part of gradients: buffers through which they come to be added up."""
CHECKPOINT_CHUNKS = 2
"""Chunks whose states are copied for a checkpoint at most: one is written while the next is copied."""


@dataclass(frozen=True)
class MemoryNeed:
    """Peaks of one candidate and what they are made of; the parts sum to the peak."""

    device_bytes: int
    """Peak on one device."""
    host_parts: dict[str, int]
    grad_blocks: int
    disk_bytes: int
    """Need of the disk of one machine."""
    _device_parts: Callable[[], dict[str, int]] = field(repr=False, compare=False)

    @cached_property
    def device_parts(self) -> dict[str, int]:
        """Bytes of the device peak; worked out when they are asked for, as few of a search's thousands are."""
        return self._device_parts()

    @property
    def host_bytes(self) -> int:
        """Need of one machine."""
        return sum(self.host_parts.values())


class DeviceNeed(NamedTuple):
    """Device bytes of many placements but for their rCache blocks; an entry, or a row, for each."""

    constant: Ints
    """Weights, master weights and states."""
    at: Ints
    """Index of the highest stretch, of those that were looked at."""
    live: Floats
    """[placement, stretch]: all that comes and goes."""
    gradients: Floats
    """[placement, stretch]: of `live`, gradients that wait for a step on the device."""
    in_flight: Bools
    """Whether gradients exist next to where they go: in a block, or, with accumulation, in those before them."""
    temporary: Floats
    """Bytes of the step on the device, next to its operands."""
    grad_blocks: Ints
    grad_block_bytes: Ints
    """Bytes of the blocks, and of an outsized gradient, which is one tensor and needs no block."""

    @property
    def rest_bytes(self) -> Ints:
        """The peak."""
        found: Ints = self.live.max(axis=1).astype(np.int64) + self.constant + self.grad_block_bytes
        return found


class _Stretches(NamedTuple):
    """The stretches that are looked at; the last is that of the step."""

    base: Floats
    transient: Floats
    curves: Floats
    """[chunk, stretch]: gradients that wait for a step on the device; with accumulation of the batch before, too.
    """


@dataclass(frozen=True)
class BytesMoved(StepTraffic):
    """Bytes that one rank moves in one optimizer step, all its micro-batches together."""

    disk_bytes: int = 0
    """Read for updates on the host; as many are written."""
    loads: int = 0
    """Chunks brought into blocks."""
    hits: int = 0

    @property
    def by_link(self) -> dict[str, int]:
        """By the names of `elixir.plan.prediction.LINKS`."""
        read = self.disk_bytes + self.file_bytes
        amounts = self.host_to_device_bytes, self.device_to_host_bytes, self.network_bytes, self.replicas_bytes
        return dict(zip(LINKS, (*amounts, read, self.disk_bytes), strict=True))

    @property
    def link_bytes(self) -> int:
        """Over the link between device and host, both directions."""
        return self.host_to_device_bytes + self.device_to_host_bytes


class MemoryModel:
    """Memory of candidates of one workload."""

    def __init__(self, work: PackedStep, setting: Setting) -> None:
        self.work, self.setting = work, setting
        facts, chunks, ranks = work.facts, work.chunks, setting.shards
        self.base: Ints = facts.live_bytes + facts.trace.buffer_bytes
        # An outsized gradient that cannot be taken over as it is has a copy, for which nothing else counts then.
        copied = any(chunk.outsized for chunk in chunks) and not setting.overlap and setting.world_size == 1
        self.transient = facts.largest_arriving_bytes if copied else facts.arriving_bytes
        self.matrix_room_bytes = room_bytes([(chunk.matrices, chunk.numel // ranks) for chunk in chunks], ranks)
        """Device bytes in which matrices are made orthogonal."""
        self.base = self.base + self.matrix_room_bytes
        staged = [stage_numel(chunk.matrices, chunk.numel // ranks, ranks) for chunk in chunks]
        self.staged_numel: Ints = np.array(staged, dtype=np.int64)
        """Elements of matrices of each chunk that are at once on the way to be made orthogonal."""
        self.trainable: Bools = np.array([chunk.trainable for chunk in chunks], dtype=bool)
        self.outsized: Bools = np.array([chunk.outsized for chunk in chunks], dtype=bool)
        self._any_outsized = bool(self.outsized.any())
        self._ids: Ints = np.arange(len(chunks))
        self._low_precision: Bools = np.array([chunk.low_precision for chunk in chunks], dtype=bool)
        self.gets_gradients: Bools = np.array([chunk.grad_stretches is not None for chunk in chunks], dtype=bool)
        self._bytes: Ints = np.array([chunk.bytes for chunk in chunks], dtype=np.int64)
        self.shard_bytes: Ints = self._bytes // ranks
        """Bytes of one rank's part of the weights, by chunk."""
        self.shard_numel: Ints = np.array([chunk.numel for chunk in chunks], dtype=np.int64) // ranks
        self.grad_shard_bytes: Ints = np.array([chunk.grad_bytes for chunk in chunks], dtype=np.int64) // ranks
        widths = [chunk.weight_bytes for chunk in chunks]
        counts = self.shard_numel.tolist()
        sizes = [setting.matrix_states if chunk.matrices else setting.states for chunk in chunks]
        states = [size.nbytes(n, width) for size, n, width in zip(sizes, counts, widths, strict=True)]
        masters = np.array([master_bytes(width) for width in widths], dtype=np.int64) * self.shard_numel
        self._states: Ints = np.array(states, dtype=np.int64) * self.trainable
        self._masters: Ints = masters * self.trainable
        second = [second_set_bytes(numel, width, setting.states) for numel, width in zip(counts, widths, strict=True)]
        self.second_set_bytes: Ints = np.array(second, dtype=np.int64)
        """Bytes of new states that one rank keeps next to the old ones for early updates, by chunk."""
        parameters = facts.trace.parameters
        held = [] if self.trainable.all() else [each.numel * dtype_bytes(each.dtype) for each in parameters]
        self.file_bytes = [0 if chunk.trainable else chunk.held_bytes(held, ranks) for chunk in work.packing.chunks]
        """Bytes that a load of one rank reads if the weights are in files, by chunk."""
        frozen = self.shard_bytes * ~self.trainable * (setting.frozen_weights != "files")
        saved = self._states + self._masters + frozen
        self.copies_bytes = CHECKPOINT_CHUNKS * int(saved.max()) * setting.ranks_per_host
        """Bytes of the largest useful pool of checkpoint copies, of one machine."""
        extents = [extent_bytes(n, width, size) for size, n, width in zip(sizes, counts, widths, strict=True)]
        self.disk_shard_bytes: Ints = np.array(extents, dtype=np.int64) * self.trainable
        """Bytes that one rank keeps on the disk, by chunk. Masters are there too: no weight lives on a disk."""

    # --- tables: [chunk, home], of one rank ---------------------------------------------------------------------------

    @cached_property
    def device_weights(self) -> Ints:
        """The whole chunk where it stays gathered, otherwise the shard."""
        return WEIGHTS * np.where(RESIDENT, self._bytes[:, None], self.shard_bytes[:, None])

    @cached_property
    def device_states(self) -> Ints:
        """Bytes of states, and of master weights for weights of fewer bits than float32."""
        return STATES * (self._states + np.where(self._low_precision, self._masters, 0))[:, None]

    @cached_property
    def host_states(self) -> Ints:
        """Bytes of states and masters: an fp32 weight is its own master only if its home is that of the states."""
        kept = self._masters[:, None] * (self._low_precision[:, None] | WEIGHTS)
        found: Ints = ~(STATES | DISK) * (self._states[:, None] + kept)
        return found

    @cached_property
    def _device(self) -> Ints:
        return self.device_weights + self.device_states

    @cached_property
    def _host_tables(self) -> dict[str, tuple[Ints, int | None]]:
        """Host bytes by what holds them, by number of the chunk and of the home; and how many buffers the chunks share
        at most, each for the largest amount. None: every chunk counts. Buffers that no chunk needs are left out."""
        grads: Ints = ~STATES * (self.grad_shard_bytes * self.trainable)[:, None]
        rounded = self.shard_bytes * (self.trainable & self._low_precision)
        directions = stages(self.setting.shards) * DIRECTION_BYTES * self.staged_numel
        tables: dict[str, tuple[Ints, int | None]] = {
            "weights": (HOSTED * self.shard_bytes[:, None], None),
            "optimizer_states": (self.host_states, None),
            "gradients": (grads, None),
            # Gradients that are added to those of the batch before.
            _PASSING: (grads * (self.setting.accumulation > 1), PASSAGE_BUFFERS),
            "state_window": (DISK * self.disk_shard_bytes[:, None], WINDOW_CHUNKS),
            "file_window": (IN_FILES * self.shard_bytes[:, None], FILE_BUFFERS),
            # New weights, rounded by the host, that return to the device.
            "staging": ((WEIGHTS & ~STATES) * rounded[:, None], STAGING_BUFFERS),
            "new_states": (EARLY * self.second_set_bytes[:, None], None),
            "matrix_staging": (~STATES * directions[:, None], 1),
        }
        return {
            name: (table.reshape(-1), buffers)
            for name, (table, buffers) in tables.items()
            if buffers is None or table.any()
        }

    @cached_property
    def _gathering(self) -> Bools:
        """Whether gradients are put together in a block: to leave for the host, or to be reduced over ranks."""
        return self.gets_gradients[:, None] & (~STATES | (self.setting.world_size > 1))

    @cached_property
    def link_bytes(self) -> tuple[Ints, Ints]:
        """[chunk, home, link]: what a step moves whatever the rCache does, and with each load of the chunk on top.

        Links as in `StepTraffic`.
        """
        ranks, facts_of = self.setting.shards, []
        for chunk, read in zip(self.work.chunks, self.file_bytes, strict=True):
            shard_numel = chunk.numel // ranks
            turned = sum(map(math.prod, chunk.matrices)) if ranks == 1 else shard_numel * bool(chunk.matrices)
            received = exchanged_bytes(chunk.matrices, chunk.offsets, shard_numel, ranks, 0)
            moved = DIRECTION_BYTES * turned, received, read
            facts_of.append((chunk.bytes, chunk.trainable, chunk.grad_bytes > 0, moved))
        known = {facts: [self._link_bytes(*facts, home) for home in HOMES] for facts in dict.fromkeys(facts_of)}
        found: Ints = np.array([known[facts] for facts in facts_of], dtype=np.int64)
        return found[:, :, 0], found[:, :, 1]

    def _link_bytes(
        self, nbytes: int, trainable: bool, gradient: bool, moved: tuple[int, int, int], home: Home
    ) -> tuple[list[int], list[int]]:
        """`link_bytes` of one chunk at one home; `moved` are bytes of directions, of exchanges and of files."""
        setting, (direction_bytes, exchanged, file_bytes) = self.setting, moved
        route = ChunkRoute(
            nbytes,
            nbytes // setting.shards,
            home.resident,
            home.weights_on_device,
            home.states_on_device,
            trainable,
            gradient,
            turned_bytes=0 if home.states_on_device else direction_bytes,
            exchanged_bytes=exchanged,
            file_bytes=file_bytes if home is Home.FILES else 0,
        )
        backwards = Backwards.of(setting.accumulation, setting.accumulation)
        none, one = (
            list(vars(step_traffic([route], {0: loads}, backwards, replicas=setting.replicas)).values())
            for loads in (0, 1)
        )
        return none, [with_one - without for with_one, without in zip(one, none, strict=True)]

    def traffic(self, placement: Placement, schedule: Schedule, blocks: int) -> BytesMoved:
        """Bytes that one rank moves in a step under a placement; formulas in `docs/appendix/formulas.md`."""
        loads = schedule.step(blocks, self.setting.accumulation)
        always, per_load = self.link_bytes
        counts = np.array([loads.by_chunk.get(chunk, 0) for chunk in self._ids.tolist()], dtype=np.int64)
        here = self._ids, placement.codes
        moved = (always[here] + counts[:, None] * per_load[here]).sum(axis=0)
        stepped = DISK[placement.codes] & (self.grad_shard_bytes > 0)
        down, up, network, files, replicas = moved.tolist()
        swapped = self.setting.accumulation * self.work.facts.trace.step.swap_bytes
        down, up, disk = down + swapped, up + swapped, int(self.disk_shard_bytes[stepped].sum())
        return BytesMoved(down, up, network, files, replicas, disk_bytes=disk, loads=loads.loads, hits=loads.hits)

    # --- host and disk ------------------------------------------------------------------------------------------------

    def host_bytes(self, codes: Codes) -> Ints:
        """The sum of `host_parts`, of many placements at once."""
        at = self._ids * len(HOMES) + codes
        found = self._summed[at].sum(axis=1)
        for table, buffers in self._host_tables.values():
            if buffers is not None:
                found = found + _held(table[at], buffers)
        trace = self.work.facts.trace
        whole: Ints = (found + trace.host_peak_bytes + trace.step.swap_bytes) * self.setting.ranks_per_host
        return whole

    @cached_property
    def _summed(self) -> Ints:
        """Host bytes in which every chunk counts, by number of the chunk and of the home."""
        found: Ints = np.sum([table for table, buffers in self._host_tables.values() if buffers is None], axis=0)
        return found

    def host_parts(self, placement: Placement) -> dict[str, int]:
        """Host bytes of one machine under one placement by what holds them; buffers that it does not need are left
        out."""
        at, trace = (self._ids * len(HOMES) + placement.codes)[None], self.work.facts.trace
        parts = {name: int(_held(table[at], buffers)[0]) for name, (table, buffers) in self._host_tables.items()}
        parts["gradients"] += parts.pop(_PASSING, 0)
        parts |= {"activations": trace.host_peak_bytes, "swapped_activations": trace.step.swap_bytes}
        ranks = self.setting.ranks_per_host
        return {name: ranks * amount for name, amount in parts.items() if amount or name in _ALWAYS}

    # --- device -------------------------------------------------------------------------------------------------------

    def device(self, codes: Codes, *, all_stretches: bool = False) -> DeviceNeed:
        """Device bytes without rCache blocks; floats hold these whole numbers exactly.

        Args:
            codes: the placements.
            all_stretches: look at every stretch, so that `DeviceNeed.at` is the first of the highest, not only at those
                that may be the highest.
        """
        over = self._all_stretches if all_stretches else self.telling_stretches
        on_device = STATES[codes] & self.trainable
        stepped = on_device.astype(np.float64)
        gathering = self._gathering[self._ids, codes]
        flying: Bools = np.any(gathering, axis=1)
        if self.setting.accumulation > 1:
            flying = flying | np.any(on_device, axis=1)
        used = np.flatnonzero(on_device.any(axis=0))  # often few, and curves are long
        if 2 * len(used) > len(self.trainable):
            gradients = stepped @ over.curves
        else:
            gradients = stepped[:, used] @ over.curves[used]
        temporary = (stepped * self.temporaries).max(axis=1, initial=0.0)
        live = over.base + gradients + np.where(flying[:, None], over.transient, 0.0)
        live[:, -1] += temporary
        grad_blocks, alone = self._grad_blocks(gathering)
        return DeviceNeed(
            constant=self._device[self._ids, codes].sum(axis=1),
            at=np.argmax(live, axis=1),
            live=live,
            gradients=gradients,
            in_flight=flying,
            temporary=temporary,
            grad_blocks=grad_blocks,
            grad_block_bytes=grad_blocks * self.work.packing.block_bytes + alone,
        )

    def grad_blocks(self, codes: Codes) -> tuple[Ints, Ints]:
        """Gradient blocks by placement, and the bytes of an outsized gradient that exists next to another."""
        return self._grad_blocks(self._gathering[self._ids, codes])

    def _grad_blocks(self, gathering: Bools) -> tuple[Ints, Ints]:
        setting, count = self.setting, len(gathering)
        if setting.world_size > 1:
            gathering = gathering[:1]  # all gradients are gathered, whatever the homes
        pooled = (gathering & ~self.outsized).astype(np.float32)
        opened = (pooled @ self.filling).max(axis=1, initial=0.0)
        # Those open at once, and with overlap one that leaves next to them: more are needed only on a link that lags.
        found: Ints = np.minimum(opened + setting.overlap, pooled.sum(axis=1)).astype(np.int64)
        alone: Ints = np.zeros(len(gathering), dtype=np.int64)
        # An outsized gradient needs no block, but a second may arrive while it leaves.
        if self._any_outsized and (setting.overlap or setting.world_size > 1):
            alone = np.where(gathering & self.outsized, self._bytes, 0).max(axis=1, initial=0)
        return np.broadcast_to(found, count), np.broadcast_to(alone, count)

    def need(self, placement: Placement, blocks: int) -> MemoryNeed:
        """Peaks of a placement with `blocks` rCache blocks."""
        codes = placement.codes
        device = self.device(codes[None])
        disk = int((DISK[codes] * self.disk_shard_bytes).sum())
        return MemoryNeed(
            int(device.rest_bytes[0]) + blocks * self.work.packing.block_bytes,
            self.host_parts(placement),
            int(device.grad_blocks[0]),
            disk * self.setting.ranks_per_host,
            partial(self._device_parts, codes, blocks),
        )

    def _device_parts(self, codes: Codes, blocks: int) -> dict[str, int]:
        at = int(self.device(codes[None], all_stretches=True).at[0])
        return {name: int(values[at]) for name, values in self.device_curve(codes, blocks).items()}

    def device_curve(self, codes: Codes, blocks: int) -> dict[str, Ints]:
        """Device bytes of one placement in each stretch, by what holds them: activations at their highest there."""
        work, ids = self.work, self._ids
        device = self.device(codes[None], all_stretches=True)
        weights = self.device_weights[ids, codes]
        resident = int(weights[RESIDENT[codes]].sum())
        in_step = np.arange(work.facts.stretches) == work.facts.stretches - 1
        parts: dict[str, Ints | int] = {
            "activations": work.facts.live_bytes,
            "buffers": work.facts.trace.buffer_bytes,
            "rcache": blocks * work.packing.block_bytes,
            "resident_weights": resident,
            "weight_shards": int(weights.sum()) - resident,
            "optimizer_states": int(self.device_states[ids, codes].sum()),
            "gradients": device.gradients[0].astype(np.int64),
            "gradient_blocks": int(device.grad_block_bytes[0]),
            **({"matrix_room": self.matrix_room_bytes} if self.matrix_room_bytes else {}),
            "gradient_in_flight": self.transient * bool(device.in_flight[0]),
            "optimizer_temporaries": in_step * int(device.temporary[0]),
        }
        return {name: amount + np.zeros(len(in_step), dtype=np.int64) for name, amount in parts.items()}

    @cached_property
    def temporaries(self) -> Floats:
        """Bytes, by chunk, that a step on the device takes next to its operands.

        float32 moments: the fp32 copy of one gradient shard that a fused step over an fp32 master reads. Others are
        stepped in pieces.
        """
        moments = self.setting.moments
        if moments != "float32":
            largest = LARGEST_HOST_PIECE_NUMEL if self.setting.device_kind == "cpu" else LARGEST_PIECE_NUMEL
            taken = np.minimum(self.shard_numel, largest) * STEP_TEMPORARY_BYTES[moments]
        else:
            taken = self.shard_numel * FP32_BYTES * self._low_precision
        # The gradient in the dtype of the momentum, and the direction; or the orthogonal part in that of the weights.
        piece = np.minimum(self.staged_numel, LARGEST_PIECE_NUMEL)
        width = np.array([master_bytes(chunk.weight_bytes) for chunk in self.work.chunks], dtype=np.int64)
        taken = np.where(self.staged_numel > 0, 2 * width * piece, taken)
        return np.asarray(taken * self.trainable, dtype=np.float64)

    def _over(self, stretches: Ints) -> _Stretches:
        """Curves at some stretches, which rise to the last."""
        setting, several_batches = self.setting, self.setting.accumulation > 1
        if setting.world_size == 1:
            curves = self.work.arrived_grad_bytes(stretches[-1:] if several_batches else stretches)
            curves *= self.trainable[:, None]
        else:
            # Reduced when the last has arrived; with accumulation it waits for the next batch all the time.
            last = [(chunk.grad_stretches or (0, self.work.facts.stretches))[1] for chunk in self.work.chunks]
            waiting = (stretches >= np.array(last)[:, None]) | several_batches
            curves = waiting * (self.grad_shard_bytes * self.trainable).astype(np.float64)[:, None]
        return _Stretches(
            self.base[stretches].astype(np.float64),
            self.transient[stretches].astype(np.float64),
            np.broadcast_to(curves, (len(curves), len(stretches))),
        )

    @cached_property
    def _all_stretches(self) -> _Stretches:
        return self._over(np.arange(self.work.facts.stretches))

    @cached_property
    def telling_stretches(self) -> _Stretches:
        """Gradients only get more until the step: a stretch counts if nothing later in forward, or in backward, is as
        high, with gradients in flight or without."""
        facts, with_them = self.work.facts, self.base + self.transient
        backward = facts.first_backward_stretch
        parts = [np.arange(backward), np.arange(backward, facts.stretches - 1), np.array([facts.stretches - 1])]
        matters = [_above_all_later(self.base[part]) | _above_all_later(with_them[part]) for part in parts]
        return self._over(np.concatenate([part[mask] for part, mask in zip(parts, matters, strict=True)]))

    @cached_property
    def filling(self) -> npt.NDArray[np.float32]:
        """[chunk, stretch]: whether a gradient block of it is open, where any is opened: there most are."""
        stretches = np.array([chunk.grad_stretches or (0, -1) for chunk in self.work.chunks], dtype=np.int64)
        first, last = stretches[:, :1], stretches[:, 1:]
        opening = np.unique(first[self.gets_gradients & ~self.outsized])
        return ((first <= opening) & (opening <= last) & ~self.outsized[:, None]).astype(np.float32)


def _held(amounts: Ints, buffers: int | None) -> Ints:
    """Bytes by placement, of amounts by placement and chunk; see `MemoryModel._host_tables`."""
    if buffers is None:
        found: Ints = amounts.sum(axis=1)
    else:
        found = amounts.max(axis=1, initial=0) * np.minimum(np.count_nonzero(amounts, axis=1), buffers)
    return found


def _above_all_later(heights: Ints) -> Bools:
    later = np.maximum.accumulate(heights[::-1])[::-1]
    return np.asarray(heights > np.append(later[1:], -1), dtype=bool)
