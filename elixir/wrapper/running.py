"""One plan at work on one model: its memory, its chunks, and what listens to the model, until it is taken off again."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from elixir.access import ParameterAccess
from elixir.chunk.buffers import Arena, BlockPool
from elixir.chunk.cache import RCache
from elixir.chunk.chunk import Chunk
from elixir.chunk.gradients import GradientFlow
from elixir.chunk.group import Group
from elixir.chunk.lanes import Lanes, Ticket
from elixir.chunk.staging import Staging
from elixir.plan import Plan
from elixir.schedule import StepSchedule
from elixir.wrapper.state import ModelState
from elixir.wrapper.uses import WeightUses

if TYPE_CHECKING:
    from elixir.wrapper.module import ElixirModule

Build = Callable[[nn.Module, Plan, Arena, Group], list[Chunk]]
"""Chunks of a model under a plan, filled and with its parameters attached."""


@dataclass(frozen=True)
class RunOptions:
    """How a plan is run; see `ElixirModule`."""

    prefetch: bool = True
    reduce_fp32: bool = False
    poison: bool = False
    evict_always: bool = False


class RunningPlan:
    """A plan at work.

    Args:
        owner: the wrapper; its `settle` is called before weights are shown or written.
        model: the model inside.
        plan: what to do.
        group: over which chunks are sharded.
        lanes: for transfers and host steps.
        device: where compute runs.
        options: how.
        build: makes the chunks.
    """

    def __init__(
        self,
        owner: ElixirModule,
        model: nn.Module,
        plan: Plan,
        group: Group,
        lanes: Lanes,
        device: torch.device,
        options: RunOptions,
        build: Build,
    ) -> None:
        self.plan, self._group, self._lanes, self._device = plan, group, lanes, device
        self.arena = Arena(device)
        self.chunks = build(model, plan, self.arena, group)
        pool = BlockPool(self.arena, plan.block_count, plan.block_bytes, poison=options.poison)
        schedule = (plan if options.prefetch else replace(plan, prefetch_depth=0)).schedule()
        self.cache = RCache(
            self.chunks,
            schedule,
            pool,
            lanes,
            group,
            evict_always=options.evict_always,
            backward_from=next((i for i, use in enumerate(plan.order) if use.phase != "forward"), len(plan.order)),
        )
        tracked = [chunk for chunk in self.chunks if not self.is_ordinary(chunk)]
        parameters = {slot.parameter for chunk in tracked for slot in chunk.slots}
        self.uses = WeightUses(self.cache, self.chunks, tracked, device)
        self._access = ParameterAccess(model, self.uses, parameters) if tracked else None
        self.gradients = self._gradient_flow(schedule, options.reduce_fp32, partial(_complete, weakref.ref(owner)))
        self.cache.reductions = self.gradients
        self.uses.gradients = self.gradients
        self.uses.backward_runs = partial(_runs, weakref.ref(owner))
        self.staging = Staging(self.chunks, self.arena)
        self.state = ModelState(model, self.chunks, tracked, self.uses, owner.settle, owner.settle_together, self.whole)
        self._handles = self._watch_gradients(owner)

    def remove(self) -> None:
        """Take everything off the model; the chunks keep their memory, and parameters point to it."""
        if self._access is not None:
            self._access.remove()
        self.state.remove()
        for handle in self._handles:
            handle.remove()

    def is_ordinary(self, chunk: Chunk) -> bool:
        """Whether its parameters are plain ones: weights, gradients and states all on the device of one rank."""
        return chunk.plan.resident and chunk.plan.state_home == "device" and self._group.size == 1

    def whole(self, chunk: Chunk, precise: bool = False) -> torch.Tensor:
        """The gathered weights of a chunk on the device; with `precise`, its masters where it has any."""
        held = self.uses.gathered_memory.get(chunk.index, chunk.whole)
        if chunk.masters is not None and precise and chunk.index not in self.uses.gathered_memory:
            chunk.follow_writes()
            shard = chunk.masters
        elif held is not None:
            return held
        else:
            shard = chunk.shard_weights
        whole = torch.empty(chunk.plan.numel, dtype=shard.dtype, device=self._device)
        mine = shard.to(self._device)
        self._lanes.network.submit(lambda: self._group.gather(whole, mine)).synchronize()
        return whole

    def _gradient_flow(
        self, schedule: StepSchedule, reduce_fp32: bool, complete: Callable[[Chunk, Ticket], None]
    ) -> GradientFlow:
        gathering = [chunk for chunk in self.chunks if chunk.plan.trainable and not self.is_ordinary(chunk)]
        # Those that got no gradient in the traced step come last: nobody shall wait for them.
        last = len(self.chunks)
        gathering.sort(key=lambda chunk: (last if chunk.plan.grad_rank is None else chunk.plan.grad_rank, chunk.index))
        # A chunk is reduced behind the last gathers before its last gradient; -1 where there are none at all.
        loading = [position for position, window in enumerate(schedule.windows) if window]
        places = {
            chunk.index: ([-1, *loading])[bisect_right(loading, chunk.plan.grad_entry)]
            for chunk in gathering
            if chunk.plan.grad_entry is not None
        }
        return GradientFlow(
            gathering,
            self.arena,
            self._lanes,
            self._group,
            block_count=self.plan.grad_block_count,
            block_bytes=self.plan.block_bytes,
            reduce_fp32=reduce_fp32,
            overlap=self.plan.overlap,
            places=places,
            complete=complete if self.plan.steps_in_backward else None,
        )

    def _watch_gradients(self, owner: ElixirModule) -> list[RemovableHandle]:
        # What autograd holds must not hold the wrapper: the garbage collector cannot see through it.
        weak = weakref.ref(owner)
        return [
            slot.parameter.register_post_accumulate_grad_hook(partial(_arrived, weak, chunk.index, position))
            for chunk in self.chunks
            if chunk.index in self.gradients.shards
            for position, slot in enumerate(chunk.slots)
            if slot.parameter.requires_grad
        ]


def _complete(weak: weakref.ref[ElixirModule], chunk: Chunk, home: Ticket) -> None:
    """All gradients of a chunk are on their way home."""
    owner = weak()
    if owner is not None and chunk.plan.steps_in_backward:
        for optimizer in owner.optimizers:  # one at most, or the plan would have been refused
            optimizer.in_backward.begin(chunk, home)


def _runs(weak: weakref.ref[ElixirModule]) -> None:
    """Autograd executes a node that needs a weight."""
    owner = weak()
    if owner is not None:
        owner.backward_runs()


def _arrived(weak: weakref.ref[ElixirModule], index: int, position: int, parameter: nn.Parameter) -> None:
    """Autograd has accumulated a gradient: it leaves for its home."""
    owner = weak()
    if owner is None:
        return
    owner.backward_runs()
    with torch._C.DisableTorchFunctionSubclass():  # nobody else is reading gradients here
        if parameter.grad is not None:
            chunk = owner.chunks[index]
            owner.uses.order_compute()
            try:
                owner.gradients.take(chunk, chunk.slots[position], parameter.grad)
            finally:  # one that was refused must not stay where `step` takes it for one that was set by hand
                parameter.grad = None
