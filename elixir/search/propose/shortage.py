"""The least memory with which a question would have a plan: what is short where nothing fits, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

import numpy as np

from elixir.errors import PlanError
from elixir.optimizer_states import MASTER_BYTES, MomentKind, is_adam, moments_size, optimizer_name
from elixir.search.problem.memory_model import MemoryNeed
from elixir.search.problem.placement import RESIDENT, Placement, Setting
from elixir.search.propose import family as shapes
from elixir.search.propose.disk_overflow import spilled
from elixir.search.propose.family import Family
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.request import SearchRequest
from elixir.step_trace import StepTrace
from elixir.units import LARGEST_BYTES, dtype_bytes, format_bytes

TOGETHER = 256
"""Placements whose device memory is worked out at once."""


def shortage(space: SearchSpace, request: SearchRequest, budgets: Budgets) -> PlanError:
    """The error for a question that has no plan within its budgets, without levers.

    Args:
        space: of the variant that keeps least.
        request: what was asked.
        budgets: what it was searched with.
    """
    setting = space.setting
    where = f"{space.trace.model_name} at world size {setting.world_size}"
    families = _families(space.with_disk(budgets), request, budgets.device_bytes)
    device = _least_device(families)
    shares_host = setting.device_kind == "cpu" and budgets.machine_bytes is not None
    if device.device_bytes > budgets.device_bytes:
        if shares_host and budgets.device_bytes == budgets.host_bytes // setting.ranks_per_host:
            return PlanError(
                f"{where} does not fit the memory of the machine, in which its devices lie, too",
                needed_bytes=setting.ranks_per_host * device.device_bytes + device.host_bytes + budgets.other_bytes,
                available_bytes=budgets.given_host_bytes,
            )
        what = f"{where}{_device_message(space, request, budgets, device)}"
        return PlanError(what, needed_bytes=device.device_bytes, available_bytes=budgets.device_bytes)
    provided = f", with as much on the device as {format_bytes(budgets.device_bytes)} hold"
    if request.placement == "cpu":
        provided = ", where placement 'cpu' puts all weights and states"
    return PlanError(
        f"{where} does not fit the host memory{provided}",
        needed_bytes=_least_host(families) + budgets.other_bytes,
        available_bytes=budgets.given_host_bytes,
    )


def least_bytes(space: SearchSpace, request: SearchRequest, device_bytes: int | None) -> int:
    """The least device memory of any candidate; the least host memory of those that fit `device_bytes` of it."""
    families = _families(space, request, device_bytes or 0)
    return _least_device(families).device_bytes if device_bytes is None else _least_host(families)


def can_fit(space: SearchSpace, sizes: Iterable[int], request: SearchRequest, budgets: Budgets) -> bool:
    """Whether chunks of one of these sizes may fit device and host, as far as can be said without a search."""
    families = shapes.families(space, budgets, sizes, request.placement)
    if any(_by_shapes(family) <= budgets.host_bytes for family in families):
        return True
    return any(_by_any_homes(family, budgets.host_bytes + 1) <= budgets.host_bytes for family in families)


def _device_message(space: SearchSpace, request: SearchRequest, budgets: Budgets, least: MemoryNeed) -> str:
    table = space.table
    rest = least.device_parts["activations"] + least.device_parts["buffers"]
    largest = max(range(len(table.aligned)), key=lambda index: (table.aligned[index], -index))
    if request.placement == "cuda":
        return ": weights and states of every chunk on the device (placement 'cuda') exceed its memory"
    if rest > budgets.device_bytes:
        return ": activations, inputs and buffers alone exceed the device memory, wherever weights are kept"
    parameter = space.trace.parameters[largest]
    together = 2 if parameter.trainable else 1
    if rest + together * table.aligned[largest] > budgets.device_bytes:
        gradient = " with its gradient" if parameter.trainable else ""
        return (
            f": parameter {parameter.name!r} of {format_bytes(table.bytes[largest])}{gradient} is larger than "
            "every chunk that fits the device"
        )
    return " does not fit the device memory, even with everything else on the host"


def moments_instead(space: SearchSpace, request: SearchRequest, budgets: Budgets) -> MomentKind | None:
    """The kind of moments in fewer bits with which no disk is needed, that with most bits first; None if there is
    none."""
    kinds: tuple[MomentKind, ...] = get_args(MomentKind)
    trace, setting = space.trace, space.setting
    wide = any(p.trainable and dtype_bytes(p.dtype) > MASTER_BYTES for p in trace.parameters)
    if wide or not is_adam(optimizer_name(request.optimizer_type)):
        return None
    for kind in kinds[kinds.index(setting.moments) + 1 :]:
        fewer = replace(setting, states=moments_size(kind), moments=kind)
        if (
            0
            < least_bytes(SearchSpace(trace, space.hardware, fewer), request, budgets.device_bytes)
            <= budgets.host_bytes
        ):
            return kind
    return None


def _families(space: SearchSpace, request: SearchRequest, device_bytes: int) -> list[Family]:
    """The families of all sizes that the search tries, with so much of the device; without overlap, which is given up
    before a search fails."""
    budgets = Budgets(device_bytes, LARGEST_BYTES)
    return shapes.families(space.without_overlap, budgets, every_size(space, request), request.placement)


def every_size(space: SearchSpace, request: SearchRequest) -> list[int]:
    """The capacities of chunks that a search tries before it fails."""
    return [size for tier in space.tiers(request) for size in tier()]


def _least_device(families: list[Family]) -> MemoryNeed:
    """The need of the candidate that takes the least device memory, whatever the host has."""
    needs = (family.model.need(*family.emptiest) for family in families)
    return min(needs, key=lambda need: need.device_bytes)  # there is always the size of the largest parameter


def _least_host(families: list[Family]) -> int:
    """The least host memory of any candidate that fits the device; 0 where none does."""
    least = min(map(_by_shapes, families), default=LARGEST_BYTES)
    for family in families:
        least = min(least, _by_any_homes(family, least))
    return least if least < LARGEST_BYTES else 0


def _by_shapes(family: Family) -> int:
    """The least host memory of a shape that fits the device; `LARGEST_BYTES` where none does."""
    choice = family.most_on_device()
    return LARGEST_BYTES if choice is None else _hosted_bytes(family, *choice)


def _hosted_bytes(family: Family, placement: Placement, blocks: int) -> int:
    """Host memory of homes and blocks, with all states on the disk that may be there."""
    return family.model.need(spilled(family.model, placement, host_bytes=0), blocks).host_bytes


def _by_any_homes(family: Family, below: int) -> int:
    """The least host memory of any homes that fit the device, if it is below so many bytes; otherwise, or where the
    search does not look at all homes, `LARGEST_BYTES`."""
    codes = family.every
    host_bytes = family.host_bytes(codes) if len(codes) else np.zeros(0)
    order = np.argsort(host_bytes, kind="stable")
    order = order[host_bytes[order] < below]
    for first in range(0, len(order), TOGETHER):
        some = codes[order[first : first + TOGETHER]]
        blocks, fits = family.room_for(some)
        for row in np.flatnonzero(fits).tolist():
            residents = frozenset(np.flatnonzero(RESIDENT[some[row]]).tolist())
            if family.work.schedule(residents, 0).min_blocks <= blocks[row]:
                return _hosted_bytes(family, Placement.numbered(some[row].tolist()), int(blocks[row]))
    return LARGEST_BYTES


def room(trace: StepTrace, setting: Setting, budgets: Budgets) -> tuple[int, int]:
    """Bytes of weights, master weights and states, each of which lies somewhere, once, wherever that is; and bytes of
    all devices, hosts and disks."""
    machines = math.ceil(setting.world_size / setting.ranks_per_host)
    there = setting.world_size * budgets.device_bytes + machines * (budgets.host_bytes + budgets.disk_bytes)
    in_files = trace.frozen_bytes if setting.frozen_weights == "files" else 0
    return trace.param_bytes - in_files + trace.state_bytes(setting.states, setting.matrices), there


def lacks_room(trace: StepTrace, setting: Setting, budgets: Budgets) -> int:
    """Bytes by which weights, master weights and states exceed all memory; 0 where they do not."""
    needed, there = room(trace, setting, budgets)
    return max(needed - there, 0)


def lacks_device(trace: StepTrace, budgets: Budgets) -> int:
    """Bytes by which what a batch takes exceeds a device, wherever weights are; 0 where it does not."""
    return max(live_bytes(trace) - budgets.device_bytes, 0)


def live_bytes(trace: StepTrace) -> int:
    """Device memory that a batch takes at its fullest, wherever weights are."""
    return max((access.live_bytes for access in trace.accesses), default=0) + trace.buffer_bytes
