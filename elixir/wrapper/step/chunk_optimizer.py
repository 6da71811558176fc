"""The optimizer of one chunk: steps this rank's shard of it, where its states live."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from elixir.chunk.chunk import Chunk
from elixir.chunk.disk import MASTERS
from elixir.chunk.gradients import ChunkGradient
from elixir.chunk.memory_uses import MemoryUses
from elixir.memory_order import shaped
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.segments import Arrived, Segment
from elixir.wrapper.step.states import BY_CLASS, SavedStates, States
from elixir.wrapper.step.user_class import UserOptimizer


class ChunkOptimizer:
    """The optimizer of one chunk. Make it, and call it, while masters and states are at hand (`Chunk.at_hand`).

    Args:
        engine: of the chunk.
        user: the optimizer whose class or rule steps it.
        chunk: is stepped.
    """

    def __init__(self, engine: Engine, user: UserOptimizer, chunk: Chunk) -> None:
        self._engine, self._user, self.chunk = engine, user, chunk
        self._shard: ChunkGradient | None = engine.gradients.by_chunk.get(chunk.index)
        self.gradient_uses = MemoryUses() if self._shard is None else self._shard.uses
        """Who uses the gradients at their home; nobody is entered where they are autograd's own."""
        self._separate = chunk.masters is not None
        chunk.follow_writes()  # between wrapping and now
        master = chunk.shard_weights if chunk.masters is None else chunk.masters
        # Moments in fewer bits are stepped by one function wherever gradients are, float32 ones where they lie
        # together.
        gathered = self._shard is not None or engine.plan.moments != "float32"
        fuses = user.fuses and gathered and master.dtype == torch.float32
        ordinary = not self._separate and not fuses and engine.is_ordinary(chunk)
        segments = self._cut(master, ordinary=ordinary)
        self._waits_for_states = chunk.index in engine.leaving
        """Whether `take_states` comes next, so that what the class has made now must not replace what is to come."""
        weights = chunk.shard if self._separate and chunk.plan.weight_home == "host" else None
        self.states: States = user.states_over(
            chunk, master, segments, weights=weights, fuses=fuses, empty=self._waits_for_states
        )
        """Those of now."""
        self._counted_states = chunk.stored is not None  # they are part of an extent, which is
        self._counted_bytes = 0
        self._versions: dict[str, int] = {}  # of the parameters, after the last step that changed them
        self._data_writes = chunk.data_writes
        copied = {segment.place for segment in segments if segment.weights is not segment.source}
        self.copied = [chunk.slots[place] for place in sorted(copied)]
        """The parameters that are not stepped themselves, so that they have to lie where their chunk does."""
        self.stow()

    def gradients(self, used: Collection[str]) -> Arrived:
        """The segments that got a gradient, with it; where these are sharded, the parameters that did are `used`."""
        found = []
        for segment in self.segments:
            if self._shard is None:
                gradient = segment.source.grad
                if gradient is not None:
                    slot = self.chunk.slots[segment.place]
                    flat = slot.flattened(gradient)
                    if flat.data_ptr() != gradient.data_ptr():  # set by hand; clipping writes to what is returned here
                        segment.source.grad = shaped(flat, slot.shape, slot.order)
                    found.append((segment, flat))
            elif segment.name in used:
                numel = segment.weights.numel()
                found.append((segment, self._shard.memory[segment.start : segment.start + numel]))
        return found

    def empty_with_gradient(self, used: Collection[str]) -> list[nn.Parameter]:
        """The parameters without elements that got a gradient, which nobody steps; `used` as in `gradients`."""
        mine = [slot for slot in self.chunk.slots if not slot.numel and slot.parameter in self._user.group_of]
        return [
            slot.parameter
            for slot in mine
            if (slot.parameter.grad is not None if self._shard is None else slot.name in used)
        ]

    @property
    def segments(self) -> list[Segment]:
        """The parts of the shard that are stepped."""
        return self.states.segments

    def make_states(self) -> bool:
        """Makes the moments now, all zero, and counts of 0: the state in which the first step would find them.

        False for a class that makes its states itself.
        """
        made = self.states.make()
        if made and self.segments:
            self._count_states()
        return made

    def stow(self) -> None:
        """Where masters and states live on a disk, has all that there are by now lie in the chunk's extent.

        The one place in which what an optimizer has made itself gets its part of the extent; tensors that are there
        already only stay.
        """
        stored = self.chunk.stored
        if stored is None:
            return
        stored.forget(self)
        for segment in self.segments:
            stored.show(self, segment.weights, MASTERS, segment.start)
        for region, tensor, start in () if self._waits_for_states else self.states.memory():
            if region is not None:
                if not stored.has(region):
                    stored.region(region, self.chunk.shard_numel, tensor.dtype)
                stored.keep(self, tensor, region, start)

    @property
    def shard_gradients(self) -> torch.Tensor | None:
        """The gradients of the whole shard, if they lie in one tensor."""
        return None if self._shard is None else self._shard.memory

    @property
    def passes_gradients(self) -> bool:
        """Whether gradients lie in a separate shard at the home of the states, and not with autograd."""
        return self._shard is not None

    def with_norms(self, arrived: Arrived) -> list[tuple[tuple[Segment, torch.Tensor], torch.Tensor | None]]:
        """Each gradient with its norm, where that was summed on the way; compute and this thread may read what this
        gives.

        Where it was not, the gradient itself is waited for.
        """
        norms = None if self._shard is None else self._shard.norms
        if norms is not None:
            norms.wait()  # the lane that sums them writes their values
            return [(item, norms.of(item[0].place)) for item in arrived]
        # The step before may still multiply it in place, where no zero_grad() came in between.
        for ticket in self.gradient_uses.to_read():
            ticket.wait()  # compute reads the shard of gradients, which the ticket's work writes
            if self.chunk.plan.update_home == "host":
                ticket.synchronize()  # it is read by this thread
        return [(item, None) for item in arrived]

    def forget_norms(self) -> None:
        """The gradients are not what they were when their norms were summed."""
        if self._shard is not None:
            self._shard.norms = None

    def give_up_states(self) -> dict[str, tuple[States, Segment]]:
        """The states and the segment by parameter, for `MovedStates`; nothing here holds them, or the weights, any
        more."""
        states = self.states
        states.let_go()
        del self.states
        return {segment.name: (states, segment) for segment in states.segments if states.begun(segment)}

    def load(self, saved: SavedStates) -> set[str]:
        """Goes on from other states; notes on what is not exact.

        Nothing else may read or step the chunk meanwhile, and it is at hand (`Chunk.at_hand`).
        """
        notes = self.states.load(saved)
        self._waits_for_states = False
        self.stow()
        if self.segments and len(self.states.lacking()) < len(self.segments):
            self._count_states()
        return notes

    def lacks_states(self, arrived: Arrived) -> bool:
        """Whether a step with the gradients in `arrived` may make states for which the plan has room on a disk."""
        stored = self.chunk.stored
        if stored is None or not stored.has_room_for_states:
            return False
        places = {segment.place for segment in self.states.lacking()}
        return any(segment.place in places for segment, _ in arrived)

    def mark_changed(self, arrived: Arrived, used: Collection[str]) -> None:
        """Let autograd know that a backward over the weights before this step would be wrong.

        Args:
            arrived: what this rank steps.
            used: where gradients are sharded, the parameters that got one on any rank: others step their parts.
        """
        mine = {segment.name: segment for segment, _ in arrived}
        for slot in self.chunk.slots:
            segment = mine.get(slot.name)
            elsewhere = self._shard is not None and slot.name in used and slot.parameter in self._user.group_of
            if segment is None and not elsewhere:
                continue
            if segment is None or segment.weights is not segment.source:  # else the step itself has
                torch.autograd.graph.increment_version(slot.parameter)
            if segment is not None:
                self._versions[slot.name] = slot.parameter._version

    def follow_writes(self) -> None:
        """Resident weights may be written to, ordinary ones by anyone, others by their own forward; masters follow."""
        if not self.were_written:
            return
        # Another optimizer over this chunk may have stepped it: its lane writes masters, then brings the new weights.
        self.chunk.synchronize_weights()
        self.chunk.follow_writes()
        # Also of what is never stepped, or masters would follow in each step.
        self._versions |= {segment.name: segment.source._version for segment in self.segments}
        self._data_writes = self.chunk.data_writes

    @property
    def were_written(self) -> bool:
        """Whether resident weights were written to since the last step."""
        return self.chunk.whole is not None and (
            self.chunk.data_writes != self._data_writes
            or any(
                segment.source._version != self._versions.get(segment.name, segment.version)
                for segment in self.segments
            )
        )

    def step(
        self,
        arrived: Arrived,
        factor: float | torch.Tensor,
        hyperparameters: list[dict[str, Any]],
        staged: torch.Tensor | None = None,
        *,
        in_place: bool = False,
        states: States | None = None,
    ) -> None:
        """One step with the gradients in `arrived` times `factor`; `write_weights` comes next.

        Args:
            arrived: of `gradients`.
            factor: gradients are multiplied by it; a tensor on the device only where `follows_torch`.
            hyperparameters: by group.
            staged: takes the shard's new weights in their dtype, on their way to another memory.
            in_place: the gradients themselves are multiplied, as torch.nn.utils.clip_grad_norm_ does it, where they
                have the weights' dtype. A copy would take memory that no plan counts, and as long as half of the step.
            states: are stepped; by default those of now. A step that runs later has those of when it was submitted.
        """
        states = states or self.states
        # A tensor is not compared: this thread would wait for the device.
        scales = isinstance(factor, torch.Tensor) or factor != 1.0
        if in_place and scales and arrived and arrived[0][1].dtype == states.master.dtype:
            for _, gradient in arrived:
                gradient.mul_(factor)
            factor = 1.0
        states.set_options(hyperparameters)
        out = staged
        if self._writes_itself():
            out = self.chunk.shard_weights if states.weights is None else states.weights
        forms = states.step(arrived, self.shard_gradients, factor, out)
        if BY_CLASS in forms:
            if out is not None:
                self._copy(arrived, states.master, out)
            self.stow()  # the first step of some classes makes states
        if self.chunk.plan.update_home == "host":
            self._engine.host_forms.extend(forms)
        self._count_states()

    def rewrite(self, method: str, hyperparameters: list[dict[str, Any]]) -> None:
        """Rewrites the weights by a method of the user's class, such as schedule-free's ``eval``, and shows them.

        Nothing else may read or step the chunk meanwhile.

        Args:
            method: of the class.
            hyperparameters: by group.
        """
        self.follow_writes()
        self.chunk.about_to_write()
        with self.chunk.at_hand(write=True):
            self.states.set_options(hyperparameters)
            self.states.call(method)
            arrived = [(segment, segment.weights.detach()) for segment in self.segments]
            if self._separate:
                self._copy(arrived, self.states.master, self.chunk.shard_weights)
        self.mark_changed(arrived, {slot.name for slot in self.chunk.slots})

    @property
    def has_stepped(self) -> bool:
        """Whether it has states of a step, rather than none or those made ahead of the first."""
        return any(self.states.begun(segment) for segment in self.segments)

    @property
    def has_all_states(self) -> bool:
        """Whether every segment has states of a step, and no step makes others."""
        return self.states.is_known and all(self.states.begun(segment) for segment in self.segments)

    @property
    def rests_without_gradients(self) -> bool:
        """Whether a step without gradients does nothing."""
        return self.states.is_known or not self.segments

    @property
    def follows_torch(self) -> bool:
        """Whether autograd's own gradients are stepped by the user's class: all on the device, and nothing waits for
        it."""
        return self._shard is None and self.states.by_torch

    def _writes_itself(self) -> bool:
        """Whether the step writes the weights: they are where their masters are, and it may do so in the same pass."""
        plan = self.chunk.plan
        able = plan.update_home == "host" or not self.states.by_torch
        return able and self._separate and plan.weight_home == plan.update_home

    def write_weights(self, arrived: Arrived, staged: torch.Tensor | None = None) -> None:
        """Copy master weights, if there are any, or what was `staged` of them, to where the weights are, in their
        dtype."""
        self.writing(arrived, staged)()

    def writing(self, arrived: Arrived, staged: torch.Tensor | None = None) -> Callable[[], None]:
        """`write_weights` for later, from and to the memory of now."""
        if not self._separate or self._writes_itself():
            return lambda: None
        return partial(self._copy, arrived, self.states.master if staged is None else staged, self.chunk.shard_weights)

    def make_spare(self) -> States | None:
        """Memory for all states once more, and an optimizer over it; None while the optimizer has no states yet, or if
        not all of the shard is stepped by it."""
        chunk, arena = self.chunk, self._engine.arena
        first, stop = chunk.shard_start, chunk.shard_start + chunk.shard_numel
        held = [slot for slot in chunk.slots if slot.offset < stop and slot.offset + slot.numel > first]
        if not held or len(held) != len(self.segments):
            return None

        def memory(numel: int, dtype: torch.dtype, *, pin: bool = False) -> torch.Tensor:
            return arena.make(numel, dtype, "host", "undo", pin=pin)

        on_host = chunk.plan.weight_home == "host"
        copied = chunk.masters is None or (not on_host and not chunk.low_precision)
        master = memory(chunk.shard_numel, self.states.master.dtype, pin=copied)
        spare = self.states.like(master, self._cut(master), memory)
        if spare is not None and chunk.low_precision:
            spare.weights = memory(chunk.shard_numel, chunk.dtype, pin=True)
        return spare

    def exchange(self, new: States) -> States:
        """Makes `new` the states of the chunk; gives those of before, which are the caller's to fill with others."""
        before, self.states = self.states, new
        rounded = new.weights
        if before.weights is None:  # rounded weights on their way to a device come out of the same memory in each step
            before.weights, new.weights, rounded = new.weights, None, None
        self.chunk.exchange_state(new.master, rounded)
        return before

    def _copy(self, arrived: Arrived, source: torch.Tensor, target: torch.Tensor) -> None:
        """New weights of a whole shard; nobody writes to `source` before they are there."""
        asynchronous = target.is_cuda and target.dtype == source.dtype
        if len(arrived) == len(self.chunk.slots):
            target.copy_(source, non_blocking=asynchronous)
            return
        for segment, _ in arrived:  # the others may be another optimizer's
            end = segment.start + segment.weights.numel()
            target[segment.start : end].copy_(source[segment.start : end], non_blocking=asynchronous)

    def _cut(self, master: torch.Tensor, *, ordinary: bool = False) -> list[Segment]:
        chunk = self.chunk
        start, end = chunk.shard_start, chunk.shard_start + chunk.shard_numel
        segments = []
        for place, slot in enumerate(chunk.slots):
            begin, stop = max(slot.offset, start), min(slot.offset + slot.numel, end)
            group = self._user.group_of.get(slot.parameter)
            if begin >= stop or group is None or not slot.parameter.requires_grad:
                continue
            part = master[begin - start : stop - start]
            order = None
            if ordinary and slot.shape:
                weights, order = slot.parameter, slot.order  # plain PyTorch's own: same kernel, same bits
            else:
                # Also for a weight without dimensions: its moments would look like a count of steps.
                weights = nn.Parameter(part, requires_grad=True)
            first, version = begin - slot.offset, slot.parameter._version
            segments.append(Segment(slot, place, group, begin - start, weights, first, version, order))
        return segments

    def _count_states(self) -> None:
        if self._counted_states:
            return
        self._counted_states = not self.states.lacking()  # a gradient may come to others later
        nbytes = self.states.nbytes
        self._engine.arena.count(nbytes - self._counted_bytes, self.chunk.plan.update_home, "optimizer_states")
        self._counted_bytes = nbytes
