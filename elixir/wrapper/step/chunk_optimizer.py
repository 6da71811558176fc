"""The optimizer of one chunk: steps this rank's shard of it, where its states live."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from elixir.chunk.chunk import Chunk
from elixir.chunk.disk import MASTERS
from elixir.chunk.gradients import ChunkGradient
from elixir.chunk.memory_uses import MemoryUses
from elixir.chunk.pinned import host_zeros
from elixir.kernels import HybridAdam
from elixir.memory_order import Order, flattened, shaped
from elixir.units import dtype_name
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.elementwise import set_options
from elixir.wrapper.step.fused_adam import FusedAdam, KeptMoments, MakeZeros
from elixir.wrapper.step.segments import Arrived, Segment
from elixir.wrapper.step.shard_states import BY_CLASS, ShardStates, can_copy, copied_small
from elixir.wrapper.step.user_class import UserOptimizer, has_stepped

_ALIGNED_NUMEL = 16
"""Alignment of a float32 moment: 64 bytes, as PyTorch's allocator aligns what it makes one by one."""


def state_region(kind: str, dtype: torch.dtype) -> str:
    """Name of the region of an extent that has a state of each element."""
    return f"{kind} {dtype_name(dtype)}"


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
        self._master = chunk.shard_weights if chunk.masters is None else chunk.masters
        # Moments in fewer bits are stepped by one function wherever gradients are, float32 ones where they lie
        # together.
        gathered = self._shard is not None or engine.plan.moments != "float32"
        fuses = user.fuses and gathered and self._master.dtype == torch.float32
        ordinary = not self._separate and not fuses and engine.is_ordinary(chunk)
        self.segments = self._cut(self._master, ordinary=ordinary)
        self.optimizer: torch.optim.Optimizer | FusedAdam
        self._waits_for_states = chunk.index in engine.leaving
        """Whether `take_states` comes next, so that what the class has made now must not replace what is to come."""
        if fuses:
            self.optimizer = user.fused_over(self._master, self.segments, self._zeros())
        else:
            self.optimizer = user.over(self.segments)
            if self._waits_for_states:
                self.optimizer.state.clear()  # else those of all chunks would be in memory until then
        self._counted_states = chunk.stored is not None  # they are part of an extent, which is
        self._counted_bytes = 0
        self._versions: dict[str, int] = {}  # of the parameters, after the last step that changed them
        self._data_writes = chunk.data_writes
        copied = {segment.place for segment in self.segments if segment.weights is not segment.source}
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

    def make_states(self) -> bool:
        """Have the moments now, all zero, and counts of 0: the state in which the first step would find them.

        On the host they lie in memory that no child process gets; otherwise the first step would make them there, page
        by page, and run out of memory in the middle. Other classes than torch's Adams and `HybridAdam` make their
        states themselves; False for such a class.
        """
        if not self.segments:
            return True
        # Those on a disk are views of their extent from the beginning.
        if isinstance(self.optimizer, FusedAdam):
            self.optimizer.make_moments()
        elif isinstance(self.optimizer, HybridAdam) and self.chunk.stored is None:
            self.optimizer.make_states()
        elif type(self.optimizer) in (torch.optim.Adam, torch.optim.AdamW):
            self._make_moments(self.optimizer)
        else:
            return False
        self._count_states()
        return True

    def _make_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """The state that torch's Adam begins with, all of one moment in one buffer."""
        stored = self.chunk.stored
        places, numel = [], 0
        for segment in self.segments:
            places.append(numel)
            numel += -(-segment.weights.numel() // _ALIGNED_NUMEL) * _ALIGNED_NUMEL
        if stored is not None:  # as `stow` has them: where the weights are
            places, numel = [segment.start for segment in self.segments], self.chunk.shard_numel
        amsgrad = any(group["amsgrad"] for group in optimizer.param_groups)
        names = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else []))
        device, dtype = self._master.device, self._master.dtype
        on_host = device.type == "cpu" and self.chunk.plan.state_home == "host"

        def zeros(name: str) -> torch.Tensor:
            if stored is not None:
                return stored.region(state_region(name, dtype), numel, dtype)
            return host_zeros(numel, dtype) if on_host else torch.zeros(numel, dtype=dtype, device=device)

        buffers = {name: zeros(name) for name in names}
        for segment, place in zip(self.segments, places, strict=True):
            weights, group = segment.weights, optimizer.param_groups[segment.group]
            wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
            counted_on = device if group.get("fused") else None
            count = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=counted_on)
            state: dict[str, Any] = {"step": count}
            for name in names if group["amsgrad"] else names[:2]:
                state[name] = shaped(buffers[name][place : place + weights.numel()], weights.shape, segment.order)
            optimizer.state[weights] = state

    def stow(self) -> None:
        """Where masters and states live on a disk, have all that there are by now lie in the chunk's extent.

        The one place in which what an optimizer has made itself gets its part of the extent; tensors that are there
        already only stay.
        """
        stored = self.chunk.stored
        if stored is None:
            return
        stored.forget(self)
        for segment in self.segments:
            stored.show(self, segment.weights, MASTERS, segment.start)
        if self._waits_for_states:
            return
        if isinstance(self.optimizer, FusedAdam):
            for name, tensor in self.optimizer.named_moments().items():
                stored.keep(self, tensor, self._own_region(name, tensor.dtype))
            return
        for segment in self.segments:
            for kind, value in self.optimizer.state.get(segment.weights, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == segment.weights.shape:
                    name = state_region(kind, value.dtype)
                    if not stored.has(name):
                        stored.region(name, self.chunk.shard_numel, value.dtype)
                    stored.keep(self, value, name, segment.start)

    def _zeros(self) -> MakeZeros | None:
        """Makes the moments of a whole shard in its extent; None where they are in memory."""
        stored = self.chunk.stored
        if stored is None:
            return None
        return lambda name, numel, dtype: stored.region(self._own_region(name, dtype), numel, dtype)

    def _own_region(self, kind: str, dtype: torch.dtype) -> str:
        """Moments of a whole shard have parts of it that are another optimizer's, so each optimizer has its own."""
        return state_region(kind if not self._user.number else f"{kind} of optimizer {self._user.number}", dtype)

    def where_stored(self, kind: str, dtype: torch.dtype) -> str:
        """Name of the region of the extent that has a state."""
        return self._own_region(kind, dtype) if isinstance(self.optimizer, FusedAdam) else state_region(kind, dtype)

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

    def give_up_states(self) -> dict[str, dict[str, Any]]:
        """States by parameter name, as their elements lie; nothing here holds them, or the weights, any more."""
        optimizer = self.optimizer
        if isinstance(optimizer, FusedAdam):
            states = {segment.name: optimizer.give_up(segment) for segment in self.segments}
        else:
            states = {segment.name: dict(optimizer.state.get(segment.weights, {})) for segment in self.segments}
            for segment in self.segments:
                if segment.order is not None:
                    _flatten(states[segment.name], segment.weights.shape, segment.order)
        del optimizer
        self.optimizer.state.clear()
        self.segments = []
        del self.optimizer, self._master
        return {name: state for name, state in states.items() if state}

    def take_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on from states of the same segments, wherever they were, contiguous in whatever shape; they stay as they
        are."""
        for segment in self.segments:
            state = dict(states.get(segment.name, ()))
            if not state:
                continue
            if isinstance(self.optimizer, FusedAdam):
                self.optimizer.take(segment, state)
                continue
            weights = segment.weights
            kept = state.pop("moments", None)
            if isinstance(kept, KeptMoments):
                state["exp_avg"], state["exp_avg_sq"] = kept.read()
            made = self.optimizer.state.get(weights, {})
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                mine = made.get(key)
                if mine is not None and mine.dim() and mine.dtype == value.dtype and mine.numel() == value.numel():
                    state[key] = mine.copy_(shaped(value, mine.shape, segment.order))
                elif value.dim() and value.numel() == weights.numel():
                    # What comes from a disk lies in a buffer through which others pass, too.
                    leaves = self.chunk.index in self._engine.leaving
                    moved = value.to(weights.device, copy=leaves).detach()  # what a disk takes is another tensor
                    state[key] = shaped(moved, weights.shape, segment.order)
                elif weights.device.type != "cpu" and self.optimizer.param_groups[segment.group].get("fused"):
                    state[key] = value.to(weights.device)  # a fused step reads its own count on the device
                else:
                    state[key] = value.to("cpu")
            self.optimizer.state[weights] = state
        self.states_were_made()

    def new_state(self, kind: str, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a state of a segment, in the chunk's extent if that has them."""
        if self.chunk.stored is None:
            return torch.zeros_like(segment.weights, dtype=dtype, requires_grad=False)
        region = self.chunk.stored.region(state_region(kind, dtype), self.chunk.shard_numel, dtype)
        return region[segment.start : segment.start + segment.weights.numel()].view(segment.weights.shape)

    def states_were_made(self) -> None:
        """Count states that came otherwise than by a step."""
        self._waits_for_states = False
        without = [] if isinstance(self.optimizer, FusedAdam) else self._without_states()
        if without and self._user.begins_with_states:
            made: Mapping[Any, dict[str, Any]] = self._user.over(without).state
            self.optimizer.state.update(made)
        self.stow()
        if self.optimizer.state:
            self._count_states()

    def _without_states(self) -> list[Segment]:
        return [segment for segment in self.segments if not self.optimizer.state.get(segment.weights)]

    def lacks_states(self, arrived: Arrived) -> bool:
        """Whether a step with the gradients in `arrived` may make states for which the plan has room on a disk."""
        stored = self.chunk.stored
        if stored is None or isinstance(self.optimizer, FusedAdam) or not stored.has_room_for_states:
            return False
        places = {segment.place for segment in self._without_states()}
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
        states: ShardStates | None = None,
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
        for group, values in zip(states.optimizer.param_groups, hyperparameters, strict=True):
            set_options(group, values)
        out = staged
        if self._writes_itself():
            out = self.chunk.shard_weights if states.weights is None else states.weights
        if isinstance(states.optimizer, FusedAdam):
            forms = states.optimizer.step(arrived, self.shard_gradients, float(factor), out)
        else:
            forms = states.step_with(states.optimizer, arrived, factor, out)
            if BY_CLASS in forms and out is not None:
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
            for group, values in zip(self.optimizer.param_groups, hyperparameters, strict=True):
                set_options(group, values)
            getattr(self.optimizer, method)()
            arrived = [(segment, segment.weights.detach()) for segment in self.segments]
            if self._separate:
                self._copy(arrived, self._master, self.chunk.shard_weights)
        self.mark_changed(arrived, {slot.name for slot in self.chunk.slots})

    @property
    def has_stepped(self) -> bool:
        """Whether it has states of a step, rather than none or those made ahead of the first."""
        if isinstance(self.optimizer, FusedAdam):
            return any(self.optimizer.steps_of(segment) for segment in self.segments)
        return any(has_stepped(state) for state in list(self.optimizer.state.values()))

    @property
    def rests_without_gradients(self) -> bool:
        """Whether a step without gradients does nothing."""
        return self.is_known or not self.segments

    @property
    def is_known(self) -> bool:
        """Whether no user's own class steps it; see `UserOptimizer.is_known`."""
        return isinstance(self.optimizer, FusedAdam) or self._user.is_known

    @property
    def follows_torch(self) -> bool:
        """Whether autograd's own gradients are stepped by the user's class: all on the device, and nothing waits for
        it."""
        return self._shard is None and not isinstance(self.optimizer, FusedAdam)

    def _writes_itself(self) -> bool:
        """Whether the step writes the weights: they are where their masters are, and it may do so in the same pass."""
        plan = self.chunk.plan
        able = plan.update_home == "host" or isinstance(self.optimizer, FusedAdam)
        return able and self._separate and plan.weight_home == plan.update_home

    def write_weights(self, arrived: Arrived, staged: torch.Tensor | None = None) -> None:
        """Copy master weights, if there are any, or what was `staged` of them, to where the weights are, in their
        dtype."""
        self.writing(arrived, staged)()

    def writing(self, arrived: Arrived, staged: torch.Tensor | None = None) -> Callable[[], None]:
        """`write_weights` for later, from and to the memory of now."""
        if not self._separate or self._writes_itself():
            return lambda: None
        return partial(self._copy, arrived, self._master if staged is None else staged, self.chunk.shard_weights)

    def make_spare(self) -> ShardStates | None:
        """Memory for all states once more, and an optimizer over it; None while the optimizer has no states yet, or if
        not all of the shard is stepped by it."""
        chunk, arena = self.chunk, self._engine.arena
        first, stop = chunk.shard_start, chunk.shard_start + chunk.shard_numel
        held = [slot for slot in chunk.slots if slot.offset < stop and slot.offset + slot.numel > first]
        if not held or len(held) != len(self.segments):
            return None
        if not isinstance(self.optimizer, FusedAdam) and not all(
            can_copy(self.optimizer.state.get(segment.weights)) for segment in self.segments
        ):
            return None

        def memory(numel: int, dtype: torch.dtype, *, pin: bool = False) -> torch.Tensor:
            return arena.make(numel, dtype, "host", "undo", pin=pin)

        on_host = chunk.plan.weight_home == "host"
        copied = chunk.masters is None or (not on_host and not chunk.low_precision)
        master = memory(chunk.shard_numel, self._master.dtype, pin=copied)
        weights = memory(chunk.shard_numel, chunk.dtype, pin=True) if chunk.low_precision else None
        segments = self._cut(master)
        if isinstance(self.optimizer, FusedAdam):
            fused = self._user.fused_over(master, segments, lambda _, numel, dtype: memory(numel, dtype))
            fused.make_moments()
            return ShardStates(master, segments, fused, weights)
        spare = ShardStates(master, segments, self._user.over(segments), weights)
        for mine, theirs in zip(segments, self.segments, strict=True):
            state = self.optimizer.state[theirs.weights]
            spare.optimizer.state[mine.weights] = {
                kind: memory(value.numel(), value.dtype).view(value.shape)
                if isinstance(value, torch.Tensor) and value.dim()
                else copied_small(value)
                for kind, value in state.items()
            }
        return spare

    @property
    def states(self) -> ShardStates:
        """The states of now; with the weights that the masters round to, if these are on the host."""
        weights = self.chunk.shard if self._separate and self.chunk.plan.weight_home == "host" else None
        return ShardStates(self._master, self.segments, self.optimizer, weights)

    def exchange(self, new: ShardStates) -> ShardStates:
        """Have `new` be the states of the chunk; those of before, which are the caller's to fill with others."""
        before = self.states
        self.chunk.exchange_state(new.master, None if before.weights is None else new.weights)
        self._master, self.segments, self.optimizer = new.master, new.segments, new.optimizer
        # Rounded weights on their way to a device come out of the same memory in each step.
        return replace(before, weights=new.weights) if before.weights is None else before

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
                # Also for a weight without dimensions: its moments would look like a count of steps in `take_states`.
                weights = nn.Parameter(part, requires_grad=True)
            version = slot.parameter._version
            segments.append(Segment(slot.name, group, begin - start, place, weights, slot.parameter, version, order))
        return segments

    def _count_states(self) -> None:
        if self._counted_states:
            return
        if isinstance(self.optimizer, FusedAdam):
            self._counted_states, states = True, self.optimizer.nbytes
        else:
            self._counted_states = not self._without_states()  # a gradient may come to others later
            states = sum(
                value.nbytes
                for state in self.optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.numel() > 1
            )
        self._engine.arena.count(states - self._counted_bytes, self.chunk.plan.update_home, "optimizer_states")
        self._counted_bytes = states


def _flatten(state: dict[str, Any], shape: torch.Size, order: Order) -> None:
    """Have the elementwise states of a parameter be flat."""
    for kind, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == shape:
            state[kind] = flattened(value, order)
