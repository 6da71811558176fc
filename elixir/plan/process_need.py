"""`ProcessNeed`: the peak of resident memory of one process that runs a plan, by what holds it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from elixir.hardware.process_memory import (
    FIRST_USE,
    HEAP_BYTES,
    HEAP_LEFT_BYTES,
    HEAP_OF_RANKS,
    HEAP_SHARE,
    HELD,
    MAPPED_BYTES,
    Resident,
)
from elixir.hardware.profile import HardwareProfile
from elixir.optimizer_states import ADAM_FAMILIES, MASTER_BYTES, is_adam, without_average
from elixir.plan.chunk_plan import ChunkPlan
from elixir.plan.plan import Plan
from elixir.units import dtype_bytes

LIBRARIES_PART = "libraries"
"""Its name in `ProcessNeed.parts`: pages of files, most of them code."""
GIVEN_PART = "state_dicts"
"""The name of the part for full state dicts and all else that the program takes between steps."""
LOOP_TENSORS = 2
"""Float32 tensors as large as a weight that torch's Adam makes while it steps that weight, unless it is fused: the root
of the second moment, and its quotient. The quotient of the weight before is still there.

Source: ``torch.optim.adam._single_tensor_adam`` of torch 2.13, which is the default for tensors on a CPU."""
_LASTING = "buffers rcache resident_weights weight_shards optimizer_states gradient_blocks matrix_room".split()
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


def process_need(  # noqa: PLR0913 - all that a process holds, by name
    plan: Plan,
    kind: str,
    *,
    host_bytes: int,
    held: Resident | None = None,
    replaced_bytes: int = 0,
    given_bytes: int = 0,
    reserve_bytes: int = 0,
    in_heap: bool = True,
    room_bytes: int = 0,
    loops: bool = False,
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
        room_bytes: of the machine that nobody needs: so much may stay in the heap that it would otherwise give back.
        loops: torch's Adam steps one weight after the other (`LOOP_TENSORS`), not by one fused kernel.
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
    mapped = sum(nbytes for nbytes in gradient_bytes(plan) if nbytes > MAPPED_BYTES)
    gaps += min(max(passing - mapped - gaps, 0), room_bytes)  # no more than a step makes and frees there
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
        "optimizer_step": _stepping_bytes(plan, on_cpu=on_cpu) if loops else 0,
        GIVEN_PART: max(given_bytes + gathered + left - passing - gaps, 0) if given_bytes else 0,
        "reserve": reserve_bytes,
    }
    return ProcessNeed({name: nbytes for name, nbytes in parts.items() if nbytes})


def planned_need(plan: Plan, hardware: HardwareProfile) -> ProcessNeed:
    """The expected peak of one process, before anything runs."""
    kind = hardware.device_kind
    # A plan for Adam does not say which kernel steps it; on a CPU torch's default is the loop.
    loops = plan.moments == "float32" and (kind == "cpu" if _names_adam(plan) else steps_in_loop(plan))
    return process_need(
        plan,
        kind,
        host_bytes=plan.predicted.host_peak_bytes // hardware.ranks_per_host(plan.world_size),
        reserve_bytes=plan.reserve_bytes,
        loops=loops,
    )


def steps_in_loop(plan: Plan) -> bool:
    """Whether the plan was made for one of torch's Adams that is not fused."""
    return plan.moments == "float32" and not _names_adam(plan) and is_adam(plan.optimizer)


def _names_adam(plan: Plan) -> bool:
    """Whether the plan was made for an Adam, and does not say which kernel steps it."""
    return without_average(plan.optimizer) in ADAM_FAMILIES


def must_be_free_bytes(plan: Plan, hardware: HardwareProfile) -> int:
    """The memory of each machine that must be free for a run of the plan."""
    return planned_need(plan, hardware).machine_bytes(hardware.ranks_per_host(plan.world_size))


def gradient_bytes(plan: Plan) -> list[int]:
    """Bytes of the gradient of each trained weight."""
    return [dtype_bytes(chunk.dtype) * s.numel for chunk in plan.chunks if chunk.trainable for s in chunk.parameters]


def _stepping_bytes(plan: Plan, *, on_cpu: bool) -> int:
    """Bytes of a loop's tensors, as far as they exceed what a step takes elsewhere.

    The host steps a chunk while the next forward computes. A device steps once the activations are gone.
    """
    stepped = [chunk for chunk in plan.chunks if chunk.trainable and chunk.reduce_order is not None]
    on_host = max((_looped_bytes(plan, chunk) for chunk in stepped if chunk.update_home == "host"), default=0)
    on_device = [chunk for chunk in stepped if chunk.update_home == "device"]
    if not (on_cpu and on_device):
        return on_host
    parts = plan.predicted.device_parts
    at_step = sum(parts.get(name, 0) for name in _LASTING)
    at_step += sum(chunk.weight_bytes // plan.shards for chunk in on_device)  # their gradients
    at_step += max(_looped_bytes(plan, chunk) for chunk in on_device)
    return on_host + max(at_step - plan.predicted.device_peak_bytes, 0)


def _looped_bytes(plan: Plan, chunk: ChunkPlan) -> int:
    """Bytes that a loop takes to step a chunk; of weights in fewer bits it gets float32 gradients."""
    shard_numel = chunk.numel // plan.shards
    sizes = [min(slot.numel, shard_numel) for slot in chunk.parameters]
    tensors = (before + LOOP_TENSORS * now for before, now in itertools.pairwise([0, *sizes]))
    gradients = 0 if dtype_bytes(chunk.dtype) >= MASTER_BYTES else shard_numel
    return MASTER_BYTES * (max(tensors, default=0) + gradients)


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
