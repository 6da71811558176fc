"""`Shards`: the shards of one optimizer, in the order in which the next forward asks for their chunks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch

from elixir.chunk.chunk import Chunk
from elixir.errors import InputError
from elixir.hardware.process_memory import give_back_freed
from elixir.models.quantised import flat
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.shard import Left, Shard
from elixir.wrapper.step.user_optimizer import UserOptimizer

logger = logging.getLogger(__name__)

_SLOW_NUMEL = 10**7
"""Number of weights from which a step by torch's Adams without ``fused=True`` is reported: some 30 ms on one core."""


class Shards:
    """The shards of one optimizer.

    Args:
        engine: of the chunks.
        user: the optimizer.
    """

    def __init__(self, engine: Engine, user: UserOptimizer) -> None:
        self._engine, self._user = engine, user
        self._by_chunk: dict[int, Shard] = {}
        self._left: dict[int, Left] = {}  # by chunk, states that no shard of this plan has taken over yet
        self._refuse_parameters()

    def __iter__(self) -> Iterator[Shard]:
        return iter(self._by_chunk.values())

    def __getitem__(self, index: int) -> Shard:
        """The shard of the chunk with this number."""
        return self._by_chunk[index]

    def make(self) -> None:
        """Creates all shards, with the states that the plan foresees."""
        for chunk in self._engine.chunks_by_use():
            if chunk.plan.trainable:
                with chunk.in_memory(write=self._user.begins_with_states):
                    self._by_chunk[chunk.index] = shard = Shard(self._engine, self._user, chunk)
                    if chunk.plan.update_home == "host":
                        self._make_states(shard)

    def forget(self) -> None:
        """Takes all shards off their chunks, and drops states on their way to another home."""
        for each in (*self, *self._left.values()):
            each.states.forget()
        self._by_chunk.clear()
        self._left.clear()

    def make_states(self) -> None:
        """Allocates all optimizer states before the first step."""
        for shard in self:
            if shard.chunk.plan.update_home == "device":
                shard.states.allocate()

    def leave(self) -> None:
        """Takes the states off the chunks; no chunk is stepped until `arrive`."""
        while self._by_chunk:
            index, shard = self._by_chunk.popitem()
            left = shard.leave()
            # Others may still be there, which this shard could not take over; they are still where they were.
            if self._left.setdefault(index, left).states is not left.states:
                left.states.forget()

    def arrive(self) -> None:
        """Takes over the states that `leave` has taken, under the engine's current plan, one by one."""
        for chunk in self._engine.chunks_by_use():
            if chunk.plan.trainable:
                before = self._left[chunk.index].states
                self._arrive(chunk, self._left[chunk.index])
                # Only now, since the write to a disk at the end of `in_memory` may fail.
                del self._left[chunk.index]
                if before is not self._by_chunk[chunk.index].states:
                    before.forget()
                del before
                give_back_freed()  # or all states would be there twice

    def _arrive(self, chunk: Chunk, before: Left) -> None:
        leaving = self._engine.leaving.get(chunk.index)
        left = contextlib.nullcontext() if leaving is None else leaving.in_memory()
        with left, chunk.in_memory(write=True):
            self._by_chunk[chunk.index] = shard = Shard(self._engine, self._user, chunk, before)
            if chunk.plan.update_home == "host":
                self._make_states(shard)
            if shard.states is not before.states:
                shard.states.copy_from(before.states)

    def _make_states(self, shard: Shard) -> None:
        """Allocates states on the threads that step them, so that memory is close to their cores."""
        # This thread may read or move the states next. If memory is too small, wrapping must raise.
        self._engine.lanes.host_adam.submit(shard.states.allocate).synchronize()

    def _refuse_parameters(self) -> None:
        own = {slot.parameter for chunk in self._engine.chunks for slot in chunk.slots}
        mine = set(self._user.group_of)
        foreign = sum(any(part not in own for _, part in flat("", each)) for each in mine)
        if foreign:
            raise InputError(f"{foreign} parameters of the optimizer are not parameters of the module")
        taken = sum(len(mine & other.parameters) for other in self._engine.steppers)
        if taken:
            raise InputError(
                f"{taken} parameters of the optimizer have an ElixirOptimizer already, and would be stepped twice; "
                "give each parameter to one, or close the module and wrap the model again"
            )

    def warn_if_slow(self) -> None:
        """Warns if the host steps by torch's Adams without ``fused=True``, which read memory several times."""
        numel = sum(shard.chunk.plan.numel for shard in self if shard.chunk.plan.update_home == "host")
        kind, groups = type(self._user.given), self._user.given.param_groups
        plain = kind in (torch.optim.Adam, torch.optim.AdamW) and not self._user.fuses
        slow = plain and numel >= _SLOW_NUMEL and not all(group.get("fused") for group in groups)
        if slow and self._engine.group.rank == 0:
            logger.warning(
                "the host steps %.0f M weights with %s, which takes some 3 times as long as with fused=True, or as "
                "elixir.HybridAdam",
                numel / 1e6,
                kind.__name__,
            )
