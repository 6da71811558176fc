"""`PlanPromise`: the memory of this machine that one plan at work may take, among the reservations of the process; and
what state dicts take of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from elixir.chunk.host_buffers import file_window_kind, staging_kind, summands_kind, window_kind
from elixir.errors import InputError
from elixir.hardware import promises
from elixir.hardware.memory import free_device_bytes, free_host_bytes
from elixir.hardware.process_memory import HEAP, MAPS_VARIABLE, give_back_freed, resident
from elixir.hardware.promises import Memory
from elixir.optimizer_states import (
    DIRECTION_BYTES,
    MASTER_BYTES,
    MATRIX_STATES,
    family_of,
    master_bytes,
    second_set_bytes,
    state_size,
)
from elixir.plan.matrices import stage_numel, stages
from elixir.plan.plan import Plan
from elixir.plan.process_need import (
    GIVEN_PART,
    LIBRARIES_PART,
    ProcessNeed,
    gradient_bytes,
    process_need,
    steps_in_loop,
)
from elixir.units import LARGEST_BYTES, dtype_bytes
from elixir.wrapper.engine import Engine

# --- state dict bytes ------------------------------------------------------------------------------------------------
# Bytes of the full state dicts that frameworks save between steps.


def state_dict_bytes(
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    only: Callable[[nn.Parameter], bool] | None = None,
    *,
    averaged: bool = False,
) -> int:
    """Bytes of the full state dicts of a model, and of optimizers, as they are under a plan: in float32 or wider.

    Args:
        model: plain.
        optimizers: of the model, not stepped yet.
        only: whether a parameter is in the model's state dict.
        averaged: whether the optimizers keep an average of the weights.
    """
    total = 0
    for parameter in model.parameters():
        if only is None or only(parameter):
            size = parameter.element_size()
            total += parameter.numel() * (size if size == 1 else max(size, MASTER_BYTES))
    for optimizer in optimizers:
        try:
            states = state_size(family_of(optimizer))
        except ValueError:  # of whole matrices; all that cannot be planned for is refused later
            states = MATRIX_STATES
        states = states.averaged if averaged else states
        for group in optimizer.param_groups:
            total += sum(states.nbytes(each.numel(), each.element_size()) for each in group["params"])
    return total


# --- plan promise ----------------------------------------------------------------------------------------------------


class PlanPromise:
    """The promise to one model, whichever plan it runs under; reserved while the plan is at work.

    Args:
        model: as it is before it is wrapped.
        engine: of the model.
        reserve_bytes: host memory of this rank that the user's program takes later.
        between_steps_bytes: host memory that it takes while no step runs.
    """

    def __init__(
        self, model: nn.Module, engine: Engine, *, reserve_bytes: int = 0, between_steps_bytes: int = 0
    ) -> None:
        self._engine, self._reserve_bytes, self._between_steps_bytes = engine, reserve_bytes, between_steps_bytes
        self.ranks = len(engine.host_share.memory_ranks)
        self.device = str(engine.device)
        give_back_freed()  # such as what tracing and planning took
        self.held = resident()
        """This process before the model was wrapped; None where the operating system does not tell."""
        self._most_bytes = self._room_bytes = 0
        self._earlier_device_peak: int | None = None
        self._replaced = {"cpu": 0, engine.device.type: 0}
        for each in (*model.parameters(), *model.buffers()):
            if not each.is_meta:
                self._replaced[each.device.type] = self._replaced.get(each.device.type, 0) + _held_bytes(each)

    @property
    def promised(self) -> Memory:
        """The peaks of the plan."""
        predicted = self._engine.plan.predicted
        return Memory(predicted.device_peak_bytes, predicted.host_peak_bytes)

    @property
    def taken(self) -> Memory:
        """Buffers of the runtime and of the model; those of the host for all ranks that share its memory."""
        engine = self._engine
        buffers = sum(_held_bytes(each) for each in engine.model.buffers() if each.device.type == engine.device.type)
        held = engine.arena.live_bytes
        return Memory(held("device") + buffers, held("host") * self.ranks)

    def need(self, plan: Plan, host_bytes: int, *, room_bytes: int | None = None) -> ProcessNeed:
        """The peak of this process under a plan, of which so many bytes are on the host.

        Args:
            plan: at work, or that will be.
            host_bytes: of this rank.
            room_bytes: of `process_need`; None: what there was when the plan came to work.
        """
        given = self._engine.arena.given_bytes if self._engine.has_plan else {}
        steppers = self._engine.steppers
        loops = any(stepper.loops for stepper in steppers) if steppers else steps_in_loop(plan)
        return process_need(
            plan,
            self._engine.device.type,
            host_bytes=host_bytes,
            held=self.held,
            replaced_bytes=self._replaced["cpu"],
            given_bytes=max(sum(given.values()), self._between_steps_bytes),
            reserve_bytes=self._reserve_bytes,
            in_heap=MAPS_VARIABLE not in os.environ,
            room_bytes=self._room_bytes if room_bytes is None else room_bytes,
            loops=loops,
        )

    def need_of(self, plan: Plan, *, room: bool = False) -> ProcessNeed:
        """The peak of this process under a plan, without copies for a checkpoint, which a run can do without: with the
        room there is, or where memory is short."""
        host_bytes = rank_host_bytes(plan, self._engine.device.type, plan.passes)
        return self.need(plan, host_bytes, room_bytes=None if room else 0)

    def spare_host_bytes(self) -> int:
        """Host memory that is free for this rank, less what its next steps take; `LARGEST_BYTES` if it is not known."""
        now = resident()
        try:
            free = free_host_bytes()
        except InputError:  # this operating system does not tell it
            return LARGEST_BYTES
        if now is None:
            return LARGEST_BYTES
        need_bytes = self.need_of(self._engine.plan, room=True).own_bytes
        later = max(need_bytes - now.own_bytes, 0) + int(promises.UNSTEADY_SHARE * need_bytes)
        return max(free // self.ranks - later, 0)

    def peaks(self, need: ProcessNeed) -> tuple[int, int] | None:
        """The observed peak of this process and the predicted one, both of its whole life; None where it is not known,
        or belongs to several plans. Pages of files that came later, such as libraries, are in both."""
        now = resident()
        if now is None or self.held is None or promises.outstanding(self.device).plans > 1:
            return None
        files_bytes = max(now.file_bytes - need.parts.get(LIBRARIES_PART, 0), 0)
        self._most_bytes = max(self._most_bytes, need.peak_bytes + files_bytes, self.held.peak_bytes)
        self._limit_heap(need, self._engine.plan)
        return now.peak_bytes, self._most_bytes

    def note_device_peak(self) -> None:
        """Remembers the peak of the CUDA device before the plan's first step, which is none of its steps'."""
        if self._earlier_device_peak is None and self._engine.device.type == "cuda":
            self._earlier_device_peak = torch.cuda.max_memory_allocated(self._engine.device)

    def forget_device_peak(self) -> None:
        """Lets the next step of another plan be its first."""
        self._earlier_device_peak = None

    def device_peak(self) -> int | None:
        """The CUDA device's peak by torch's allocator; None without such a device, or where it belongs to several plans
        or to what ran before this plan's first step."""
        if self._engine.device.type != "cuda" or promises.outstanding(self.device).plans > 1:
            return None
        peak = torch.cuda.max_memory_allocated(self._engine.device)
        return None if peak == self._earlier_device_peak else peak

    def _limit_heap(self, need: ProcessNeed, plan: Plan) -> None:
        others = promises.outstanding(self.device, self)
        if self._engine.device.type == "cpu":
            # Of the memory of other models, `need` has what they held when this one was wrapped.
            expected = need.own_bytes + others.host_bytes
            expected = max(expected, HEAP.expected_bytes) if others.plans else expected
            HEAP.set(expected, _unseen_bytes(plan), self._room_bytes)
        elif not others.plans:
            HEAP.forget()

    def coming_bytes(self, plan: Plan) -> int:
        """Bytes of the host that this process still takes under a plan, without full state dicts, which one rank holds;
        0 if it holds more already, such as a data set, or where the operating system does not tell."""
        now, need = resident(), self.need_of(plan)
        return 0 if now is None else max(need.own_bytes - need.parts.get(GIVEN_PART, 0) - now.own_bytes, 0)

    def refuse_exceeded(self, plan: Plan, coming: Sequence[int] = ()) -> None:
        """Refuses a plan for which this machine has too little memory left, the limits of control groups included.

        Args:
            plan: comes to work.
            coming: `coming_bytes` of all ranks of the group, in order, for those that share this machine's memory hold
                different amounts once they have run; without them, each takes as much as this one.

        Raises:
            InputError: says what is needed, what is left, and what to do.
        """
        engine, name = self._engine, type(self._engine.model).__name__
        try:
            on_host = free_host_bytes()
        except InputError:  # this operating system does not tell it
            return
        now = resident()
        if now is None:
            return
        on_device = math.inf if engine.device.type == "cpu" else free_device_bytes(engine.device)
        need = self.need_of(plan)
        sharing = engine.host_share.memory_ranks
        theirs = [coming[rank] if coming else self.coming_bytes(plan) for rank in sharing if rank != engine.group.rank]
        later = max(need.own_bytes - now.own_bytes, 0) + sum(theirs)
        running = engine.arena.live_bytes("device") if engine.has_plan else self._replaced[engine.device.type]
        promises.refuse_exceeded(
            Memory(plan.predicted.device_peak_bytes - running, later),
            Memory(int(min(on_device, 2**62)), on_host),
            self.device,
            name=name,
            but=self,
        )
        self._room_bytes = max((on_host - later) // len(sharing), 0) // 2  # half is left to other programs
        self._limit_heap(self.need_of(plan, room=True), plan)


def _unseen_bytes(plan: Plan) -> int:
    """Bytes that autograd may take before the heap is looked at again: a gradient of the largest weight, and its sum
    with that of another read."""
    return 2 * max(gradient_bytes(plan), default=0)


def _held_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor; of a sparse one those of its elements, with their places."""
    if tensor.layout != torch.sparse_coo:
        return tensor.nbytes
    found = tensor.coalesce()
    return found.values().nbytes + found.indices().nbytes


def rank_host_bytes(plan: Plan, device_type: str, micro_batches: int) -> int:
    """Bytes of one rank in host memory: weights, gradients, masters and states, and the buffers for new weights, states
    on a disk, and, with a device, gradients that are added to others."""
    summands = summands_kind(plan, device_type, backwards=max(plan.passes, micro_batches))
    kinds = (staging_kind(plan), window_kind(plan), file_window_kind(plan))
    total = sum(kind.nbytes for kind in kinds) + (summands.nbytes if summands.at_once else 0)
    ranks, hosted = plan.shards, [chunk for chunk in plan.chunks if chunk.update_home == "host"]
    staged = max((stage_numel(chunk.matrices, chunk.numel // ranks, ranks) for chunk in hosted), default=0)
    total += stages(ranks) * DIRECTION_BYTES * staged + plan.step.swap_bytes
    for chunk in plan.chunks:
        numel, itemsize = chunk.numel // plan.shards, dtype_bytes(chunk.dtype)
        if chunk.weight_home == "host":
            total += numel * itemsize
        if chunk.trainable and chunk.update_home == "host" and chunk.reduce_order is not None:
            total += numel * itemsize
        if chunk.trainable and chunk.state_home == "host":
            kept = itemsize < MASTER_BYTES or chunk.weight_home == "device"
            total += numel * master_bytes(itemsize) * kept + plan.states_of(chunk).nbytes(numel, itemsize)
        if chunk.home.early:
            total += second_set_bytes(numel, itemsize, plan.state_size)
    return total
