"""The least memory with which a question would have a plan: what is short where nothing fits, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

import numpy as np

from elixir.errors import PlanError
from elixir.search.problem.memory_model import MemoryNeed
from elixir.search.problem.placement import RESIDENT, Placement, Setting
from elixir.search.propose.candidate import spilled
from elixir.search.propose.family import Family, families
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.request import SearchRequest
from elixir.step_trace import StepTrace
from elixir.units import LARGEST_BYTES, format_bytes

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
    some = every_family(space.with_disk(budgets), request, budgets.device_bytes)
    device = least_device(some)
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
        needed_bytes=least_host(some) + budgets.other_bytes,
        available_bytes=budgets.given_host_bytes,
    )


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


def every_family(space: SearchSpace, request: SearchRequest, device_bytes: int) -> list[Family]:
    """The families of all sizes that the search tries, with so much of the device; without overlap, which is given up
    before a search fails."""
    sizes = chain.from_iterable(tier() for tier in space.tiers(request))
    return families(space.without_overlap, Budgets(device_bytes, LARGEST_BYTES), sizes, request.placement)


def least_device(some: Iterable[Family]) -> MemoryNeed:
    """The need of the candidate that takes the least device memory, whatever the host has."""
    needs = (family.model.need(*family.emptiest) for family in some)
    return min(needs, key=lambda need: need.device_bytes)  # there is always the size of the largest parameter


def least_host(some: Iterable[Family], depth: int = 0) -> int:
    """The least host memory of any candidate that fits the device and fetches so many chunks ahead, with all states on
    the disk that may be there; 0 where none does."""
    least = LARGEST_BYTES
    for family in some:
        choice = family.most_on_device(depth)
        if choice is not None:
            least = min(least, _hosted_bytes(family, *choice))
        least = min(least, _by_any_homes(family, depth, least))
    return least if least < LARGEST_BYTES else 0


def _hosted_bytes(family: Family, placement: Placement, blocks: int) -> int:
    return family.model.need(spilled(family.model, placement, host_bytes=0), blocks).host_bytes


def _by_any_homes(family: Family, depth: int, below: int) -> int:
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
            if family.work.schedule(residents, depth).min_blocks <= blocks[row]:
                return _hosted_bytes(family, Placement.numbered(some[row].tolist()), int(blocks[row]))
    return LARGEST_BYTES


def room(trace: StepTrace, setting: Setting, budgets: Budgets) -> tuple[int, int]:
    """Bytes of weights, master weights and states, each of which lies somewhere, once, wherever that is; and bytes of
    all devices, hosts and disks."""
    machines = math.ceil(setting.world_size / setting.ranks_per_host)
    there = setting.world_size * budgets.device_bytes + machines * (budgets.host_bytes + budgets.disk_bytes)
    in_files = trace.frozen_bytes if setting.frozen_weights == "files" else 0
    return trace.param_bytes - in_files + trace.state_bytes(
        setting.states, setting.matrices, setting.matrix_states
    ), there


def lacks_room(trace: StepTrace, setting: Setting, budgets: Budgets) -> int:
    """Bytes by which weights, master weights and states exceed all memory; 0 where they do not."""
    needed, there = room(trace, setting, budgets)
    return max(needed - there, 0)


def lacks_device(trace: StepTrace, budgets: Budgets) -> int:
    """Bytes by which what a batch takes exceeds a device, wherever weights are; 0 where it does not."""
    return max(live_bytes(trace) - budgets.device_bytes, 0)


def is_ruled_out(trace: StepTrace, setting: Setting, budgets: Budgets) -> bool:
    """Whether nothing fits, wherever weights and states are."""
    return bool(lacks_room(trace, setting, budgets) or lacks_device(trace, budgets))


def live_bytes(trace: StepTrace) -> int:
    """Device memory that a batch takes at its fullest, wherever weights are."""
    return max((access.live_bytes for access in trace.accesses), default=0) + trace.buffer_bytes
