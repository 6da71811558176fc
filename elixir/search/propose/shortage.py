"""The least memory with which a question would have a plan: what is short where nothing fits, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

import numpy as np

from elixir.errors import PlanError
from elixir.optimizer_states import MASTER_BYTES, MomentKind, is_adam, moments_size, optimizer_name
from elixir.search.problem.memory_model import MemoryNeed
from elixir.search.problem.pass_trace import pass_trace
from elixir.search.problem.placement import RESIDENT, Placement, Setting
from elixir.search.propose import family as shapes
from elixir.search.propose.disk_overflow import spilled
from elixir.search.propose.family import Family
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.question import Question
from elixir.search.variants import sizes_of_passes
from elixir.step_trace import StepTrace
from elixir.units import LARGEST_BYTES, dtype_bytes, format_bytes


@dataclass(frozen=True)
class Unmet:
    """A question that has no plan, as it concerns a machine."""

    question: Question
    setting: Setting

    @cached_property
    def space(self) -> SearchSpace:
        """Ready to be searched in the smallest passes that are asked for, without overlap: that is given up before a
        search fails."""
        trace = pass_trace(self.question.trace, sizes_of_passes(self.question)[0])
        return SearchSpace(trace, self.question.hardware, replace(self.setting, overlap=False))


def shortage(unmet: Unmet, budgets: Budgets) -> PlanError:
    """The error for a question that has no plan within its budgets, without levers.

    Args:
        unmet: what was asked for.
        budgets: what it was searched with.
    """
    where = f"{unmet.question.trace.model_name} at world size {unmet.setting.world_size}"
    families, setting = _families(unmet, budgets.device_bytes), unmet.setting
    device = _least_device(families)
    shares_host = setting.device_kind == "cpu" and budgets.machine_bytes is not None
    if device.device_bytes > budgets.device_bytes:
        if shares_host and budgets.device_bytes == budgets.host_bytes // setting.ranks_per_host:
            return PlanError(
                f"{where} does not fit the memory of the machine, in which its devices lie, too",
                needed_bytes=setting.ranks_per_host * device.device_bytes + device.host_bytes + budgets.other_bytes,
                available_bytes=budgets.given_host_bytes,
            )
        what = f"{where}{_device_message(unmet, budgets, device)}"
        return PlanError(what, needed_bytes=device.device_bytes, available_bytes=budgets.device_bytes)
    provided = f", with as much on the device as {format_bytes(budgets.device_bytes)} hold"
    if unmet.question.request.placement == "cpu":
        provided = ", where placement 'cpu' puts all weights and states"
    return PlanError(
        f"{where} does not fit the host memory{provided}",
        needed_bytes=_least_host(families) + budgets.other_bytes,
        available_bytes=budgets.given_host_bytes,
    )


def least_bytes(unmet: Unmet, device_bytes: int | None) -> int:
    """The least device memory of any candidate; the least host memory of those that fit `device_bytes` of it."""
    families = _families(unmet, device_bytes or 0)
    return _least_device(families).device_bytes if device_bytes is None else _least_host(families)


def _device_message(unmet: Unmet, budgets: Budgets, least: MemoryNeed) -> str:
    table = unmet.space.table
    rest = least.device_parts["activations"] + least.device_parts["buffers"]
    largest = max(range(len(table.aligned)), key=lambda index: (table.aligned[index], -index))
    if unmet.question.request.placement == "cuda":
        return ": weights and states of every chunk on the device (placement 'cuda') exceed its memory"
    if rest > budgets.device_bytes:
        return ": activations, inputs and buffers alone exceed the device memory, wherever weights are kept"
    parameter = unmet.question.trace.parameters[largest]
    together = 2 if parameter.trainable else 1
    if rest + together * table.aligned[largest] > budgets.device_bytes:
        gradient = " with its gradient" if parameter.trainable else ""
        return (
            f": parameter {parameter.name!r} of {format_bytes(table.bytes[largest])}{gradient} is larger than "
            "every chunk that fits the device"
        )
    return " does not fit the device memory, even with everything else on the host"


def moments_instead(unmet: Unmet, budgets: Budgets) -> MomentKind | None:
    """The kind of moments in fewer bits with which no disk is needed, that with most bits first; None if there is
    none."""
    for kind, other in _fewer_bits(unmet):
        if 0 < least_bytes(other, budgets.device_bytes) <= budgets.host_bytes:
            return kind
    return None


def _fewer_bits(unmet: Unmet) -> Iterator[tuple[MomentKind, Unmet]]:
    """The question with each kind of moments that has fewer bits, without a disk."""
    kinds: tuple[MomentKind, ...] = get_args(MomentKind)
    wide = any(p.trainable and dtype_bytes(p.dtype) > MASTER_BYTES for p in unmet.question.trace.parameters)
    if wide or not is_adam(optimizer_name(unmet.question.request.optimizer_type)):
        return
    for kind in kinds[kinds.index(unmet.setting.moments) + 1 :]:
        yield kind, replace(unmet, setting=replace(unmet.setting, states=moments_size(kind), moments=kind, spill=None))


def _families(unmet: Unmet, device_bytes: int) -> list[Family]:
    """The families of all sizes that the search tries, with so much of the device."""
    space, request = unmet.space, unmet.question.request
    sizes = [size for tier in space.tiers(request) for size in tier()]
    return shapes.families(space, Budgets(device_bytes, LARGEST_BYTES), sizes, request.placement)


def _least_device(families: list[Family]) -> MemoryNeed:
    """The need of the candidate that takes the least device memory, whatever the host has."""
    needs = (family.model.need(*family.emptiest) for family in families)
    return min(needs, key=lambda need: need.device_bytes)  # there is always the size of the largest parameter


def _least_host(families: list[Family]) -> int:
    """The least host memory of any candidate that fits the device; 0 where none does."""
    found = []
    for family in families:
        for choice in (family.most_on_device(), _least_of_all(family)):
            if choice is not None:
                placement, blocks = choice
                away = spilled(family.model, placement, host_bytes=0)
                found.append(family.model.need(away, blocks).host_bytes)
    return min(found, default=0)


def _least_of_all(family: Family) -> tuple[Placement, int] | None:
    """The homes that take least of the host of all that fit the device, and their blocks; None where the search does
    not look at all homes."""
    codes = family.every
    if not len(codes):
        return None
    blocks, fits = family.room_for(codes)
    host_bytes = family.host_bytes(codes)
    order = np.argsort(host_bytes, kind="stable")
    for row in order[fits[order]].tolist():
        residents = frozenset(np.flatnonzero(RESIDENT[codes[row]]).tolist())
        if family.work.schedule(residents, 0).min_blocks <= blocks[row]:
            return Placement.numbered(codes[row].tolist()), int(blocks[row])
    return None


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
