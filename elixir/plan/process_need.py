"""`ProcessNeed`: the peak of resident memory of one process that runs a plan, by what holds it."""

from __future__ import annotations

from dataclasses import dataclass

from elixir.hardware.process_memory import (
    FIRST_USE,
    HEAP_BYTES,
    HEAP_LEFT_BYTES,
    HEAP_OF_RANKS,
    HEAP_SHARE,
    HELD,
    Resident,
)
from elixir.hardware.profile import HardwareProfile
from elixir.optimizer_states import MASTER_BYTES
from elixir.plan.chunk_plan import ChunkPlan
from elixir.plan.plan import Plan
from elixir.units import dtype_bytes

LIBRARIES_PART = "libraries"
"""Its name in `ProcessNeed.parts`: pages of files, most of them code."""
GIVEN_PART = "state_dicts"
"""The name of the part for full state dicts and all else that the program takes between steps."""
_LASTING = (
    "buffers",
    "rcache",
    "resident_weights",
    "weight_shards",
    "optimizer_states",
    "gradient_blocks",
    "matrix_room",
)
"""Parts of device memory that are there between steps, too."""


@dataclass(frozen=True)
class ProcessNeed:
    """The peak of one process."""

    parts: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def own_bytes(self) -> int:
        """Bytes that no other process shares."""
        return self.peak_bytes - self.parts.get(LIBRARIES_PART, 0)

    def machine_bytes(self, ranks: int) -> int:
        """Bytes of so many processes on one machine."""
        return ranks * self.own_bytes + self.parts.get(LIBRARIES_PART, 0)


def process_need(
    plan: Plan,
    kind: str,
    *,
    host_bytes: int,
    held: Resident | None = None,
    replaced_bytes: int = 0,
    given_bytes: int = 0,
    reserve_bytes: int = 0,
    in_heap: bool = True,
) -> ProcessNeed:
    """The peak of one process of a run.

    Args:
        plan: at work in it.
        kind: of the device, ``cuda`` or ``cpu``. The memory of a CPU is the process's.
        host_bytes: that the plan keeps on the host for one rank.
        held: by this process before its model is wrapped; None: an estimate.
        replaced_bytes: of `held`, the model's own weights and buffers, which give way to those of the plan.
        given_bytes: that the user's program takes between steps, such as full state dicts.
        reserve_bytes: that the user's program takes later.
        in_heap: the C library keeps freed tensors in its heap (`MAPS_VARIABLE`).
    """
    found, more, predicted = held or HELD[kind], FIRST_USE[kind], plan.predicted
    on_cpu = kind == "cpu"
    passing = predicted.device_peak_bytes - sum(predicted.device_parts.get(name, 0) for name in _LASTING)
    passing = passing if on_cpu else 0
    freed = max(predicted.activation_bytes - predicted.device_parts.get("activations", 0), 0)
    gaps = HEAP_BYTES + HEAP_SHARE * freed
    if plan.shards > 1:
        gaps = HEAP_OF_RANKS * (predicted.device_peak_bytes + host_bytes)
    exchanged = max((chunk.weight_bytes for chunk in plan.chunks), default=0) if plan.shards > 1 else 0
    gathered = max(_gathered_bytes(plan, given_bytes) - exchanged, 0) if on_cpu else 0
    gaps = int(gaps) if on_cpu and in_heap else 0  # that a step leaves; they are given back before state dicts are made
    left = min(gaps, HEAP_LEFT_BYTES)
    parts = {
        LIBRARIES_PART: found.file_bytes + more.file_bytes,
        "program": max(found.own_bytes - replaced_bytes, 0),
        "first_use": more.own_bytes,
        "host": host_bytes,
        "device": predicted.device_peak_bytes if on_cpu else 0,
        "heap": gaps,
        "collectives": exchanged if on_cpu else 0,
        GIVEN_PART: max(given_bytes + gathered + left - passing - gaps, 0) if given_bytes else 0,
        "reserve": reserve_bytes,
    }
    return ProcessNeed({name: nbytes for name, nbytes in parts.items() if nbytes})


def planned_need(plan: Plan, hardware: HardwareProfile) -> ProcessNeed:
    """The expected peak of one process, before anything runs."""
    return process_need(
        plan,
        hardware.device_kind,
        host_bytes=plan.predicted.host_peak_bytes // hardware.ranks_per_host(plan.world_size),
        reserve_bytes=plan.reserve_bytes,
    )


def must_be_free_bytes(plan: Plan, hardware: HardwareProfile) -> int:
    """The memory of each machine that must be free for a run of the plan."""
    return planned_need(plan, hardware).machine_bytes(hardware.ranks_per_host(plan.world_size))


def _gathered_bytes(plan: Plan, given_bytes: int) -> int:
    """The memory in which a full state dict gathers one chunk after the other, at its largest; gloo has a copy there.

    Weights that one rank has in memory, in their own precision, are copied from there; more bytes than those of all
    weights have optimizer states among them, of which each rank brings a part.
    """
    only_weights = given_bytes <= MASTER_BYTES * sum(chunk.numel for chunk in plan.chunks)
    gathered = (chunk.numel for chunk in plan.chunks if not (only_weights and _lies_whole(plan, chunk)))
    largest = MASTER_BYTES * max(gathered, default=0)
    if plan.shards == 1:
        return largest
    return 2 * largest + (0 if only_weights else largest // plan.shards)


def _lies_whole(plan: Plan, chunk: ChunkPlan) -> bool:
    if plan.shards == 1 and chunk.state_home != "disk":
        return True
    return chunk.resident and dtype_bytes(chunk.dtype) >= MASTER_BYTES
