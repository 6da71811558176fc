"""`SteppedShard`: one optimizer's part of one chunk on this rank: states, a second set, gradients, writes to weights;
`SteppedShards`: all of one optimizer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import nn

from elixir.chunk.chunk import Chunk, Slot
from elixir.chunk.gradients.chunk_gradient import ChunkGradient
from elixir.chunk.memory import Arena, Memory
from elixir.errors import InputError, StateError
from elixir.hardware.process_memory import give_back_freed
from elixir.memory_order import shaped
from elixir.models.quantised import flat
from elixir.optimizer_states import AVERAGE
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.rules import BY_CLASS, EarlyUpdate, Inputs, Rule
from elixir.wrapper.step.segments import Arrived, Segment, cut_segments, own_ranges
from elixir.wrapper.step.states import Find, Kind, States
from elixir.wrapper.step.user_optimizer import UserOptimizer


class ShardGradients:
    """The gradients of one shard, held by autograd or brought by the runtime to the home of the states.

    Args:
        chunk: the chunk of the shard.
        brought: the gradient that the runtime brings home; None if gradients stay with autograd.
        slots: the parameters that the optimizer steps.
    """

    def __init__(self, chunk: Chunk, brought: ChunkGradient | None, slots: Sequence[Slot]) -> None:
        self._chunk, self._brought = chunk, brought
        self._empty = [slot for slot in slots if not slot.numel]
        self.memory = Memory() if brought is None else brought.memory
        """Memory of the gradients at their home; no lane uses that of autograd."""

    @property
    def are_at_home(self) -> bool:
        """Whether they lie at the home of the states, not with autograd."""
        return self._brought is not None

    @property
    def whole(self) -> torch.Tensor | None:
        """The gradients of the whole shard, if they lie in one tensor."""
        return None if self._brought is None else self.memory.tensor

    @property
    def changes(self) -> int:
        """Version counter of the gradients."""
        return 0 if self._brought is None else self._brought.changes

    def of(self, segments: Sequence[Segment], used: Collection[str]) -> Arrived:
        """The segments that got a gradient, each with its flat gradient.

        Args:
            segments: the segments to look at.
            used: the parameters that got a gradient on any rank; read only if gradients are brought home.
        """
        if self._brought is not None:
            memory = self.memory.tensor
            return [(segment, memory[segment.part]) for segment in segments if segment.name in used]
        found = []
        for segment in segments:
            gradient, slot = segment.source.grad, segment.slot
            if gradient is not None:
                flat = slot.flattened(gradient)
                if flat.data_ptr() != gradient.data_ptr():  # set by hand in another layout; clipping must write to it
                    segment.source.grad = shaped(flat, slot.shape, slot.order)
                found.append((segment, flat))
        return found

    def empty_with_gradient(self, used: Collection[str]) -> list[nn.Parameter]:
        """The parameters without elements that got a gradient; `used` as in `of`."""
        return [
            slot.parameter
            for slot in self._empty
            if (slot.parameter.grad is not None if self._brought is None else slot.name in used)
        ]

    def with_norms(self, arrived: Arrived) -> list[tuple[tuple[Segment, torch.Tensor], torch.Tensor | None]]:
        """Each gradient with its norm, or with None if the norm was not summed while it arrived. Waits until compute
        and this thread may read them."""
        norms = None if self._brought is None else self._brought.norms
        if norms is not None:
            norms.wait()  # the lane that sums them writes their values
            return [(item, norms.of(item[0].place)) for item in arrived]
        # The previous step may still multiply it in place, if no zero_grad() came in between.
        self.memory.wait()  # compute reads the shard of gradients, which the work of a lane writes
        if self._chunk.plan.update_home == "host":
            self.memory.synchronize()  # this thread reads it
        return [(item, None) for item in arrived]

    def forget_norms(self) -> None:
        """Drops the norms, since the gradients have changed."""
        if self._brought is not None:
            self._brought.norms = None


class WrittenWeights:
    """The writes to the weights of one shard.

    Anyone may write to ordinary weights; other resident weights only the model's own forward.

    Args:
        chunk: the chunk of the shard.
        segments: the parts of the shard.
        elsewhere: the parameters that other ranks may step in part.
    """

    def __init__(self, chunk: Chunk, segments: Sequence[Segment], elsewhere: Container[nn.Parameter]) -> None:
        self._chunk, self._elsewhere = chunk, elsewhere
        self._slots = [segment.slot for segment in segments]
        self._seen = {segment.name: segment.version for segment in segments}  # versions of the parameters
        self._data_writes = chunk.data_writes

    def record_step(self, arrived: Arrived, used: Collection[str]) -> None:
        """Records a step's writes, and tells autograd, which then refuses a backward over the old weights.

        Args:
            arrived: the segments that this rank steps.
            used: the parameters that got a gradient on any rank.
        """
        mine = {segment.name: segment for segment, _ in arrived}
        for slot in self._chunk.slots:
            segment = mine.get(slot.name)
            if segment is not None:
                torch.autograd.graph.increment_version(slot.parameter)
                self._seen[slot.name] = slot.parameter._version
            elif slot.name in used and slot.parameter in self._elsewhere:
                torch.autograd.graph.increment_version(slot.parameter)

    @property
    def exist(self) -> bool:
        """Whether resident weights were written to since the last step."""
        if self._chunk.weights is None:
            return False
        written = self._chunk.data_writes != self._data_writes
        return written or any(slot.parameter._version != self._seen[slot.name] for slot in self._slots)

    def copy_to_masters(self) -> None:
        """Copies weights that were written to into the masters."""
        if not self.exist:
            return
        # Another optimizer over this chunk may have stepped it: a lane then writes masters, and copies the new weights.
        self._chunk.synchronize_weights()
        self._chunk.follow_writes()
        # Parameters that are never stepped count, too; otherwise masters would be copied in every step.
        self._seen = {slot.name: slot.parameter._version for slot in self._slots}
        self._data_writes = self._chunk.data_writes


class _Make(Protocol):
    def __call__(self, numel: int, dtype: torch.dtype, *, pin: bool = False) -> Memory: ...


def _maker(arena: Arena, chunk: Chunk, kind: str) -> _Make:
    """Makes memory where a chunk is updated, counted as a `kind`."""
    home = chunk.plan.update_home

    def make(numel: int, dtype: torch.dtype, *, pin: bool = False) -> Memory:
        return arena.make(numel, dtype, home, kind, pin=pin, paged=True)

    return make


class Left(NamedTuple):
    """The states of a chunk on their way to the homes of another plan."""

    chunk: Chunk
    rule: type[Rule]
    states: States

    def may_stay(self, chunk: Chunk, rule: Rule, kinds: Mapping[str, Kind]) -> bool:
        """Whether a rule steps them where they are: their chunk has stayed, and they are of its kinds."""
        return self.chunk is chunk and type(rule) is self.rule and kinds.items() <= self.states.kinds.items()


class SteppedShard:
    """One optimizer's part of one chunk. Create it while masters and states are in memory (`Chunk.in_memory`).

    Args:
        engine: the engine of the chunk.
        user: the optimizer.
        chunk: the chunk.
        before: what the shard of the same chunk has left under the previous plan; `States.copy_from` comes next, unless
            this shard has its states.
    """

    def __init__(self, engine: Engine, user: UserOptimizer, chunk: Chunk, before: Left | None = None) -> None:
        self._engine, self._user, self.chunk = engine, user, chunk
        brought = engine.gradients.by_chunk.get(chunk.index)
        self.gradients = ShardGradients(chunk, brought, [s for s in chunk.slots if s.parameter in user.group_of])
        self.is_concerned = any(slot.parameter in user.group_of for slot in chunk.slots)
        """Whether the optimizer steps any parameter of the chunk, on any rank."""
        self._separate = chunk.masters is not None
        chunk.follow_writes()  # writes between wrapping and now
        master = chunk.shard_weights if chunk.masters is None else chunk.masters
        self.rule: Rule = user.rule_for(chunk, master.dtype, gathered=brought is not None)
        """Steps the states."""
        weights = chunk.shard if self._separate and chunk.plan.weight_home == "host" else None
        segments, make = cut_segments(chunk, master, user.group_of), _maker(engine.arena, chunk, "optimizer_states")
        kinds = dict(self.rule.kinds(master.dtype, {segment.group for segment in segments}))
        if user.decay is not None:
            kinds[AVERAGE] = Kind(master.dtype)
        if before is not None and before.may_stay(chunk, self.rule, kinds):
            self.states: States = before.states
            self.states.point_to(master, weights)
            self.states.count_in(make, engine.arena.count)
        else:
            self.states = States(
                master,
                segments,
                kinds,
                own_ranges(chunk, user.group_of),
                make,
                stored=chunk.stored,
                number=user.number,
                weights=weights,
            )
            self.rule.attach(self.states)
            if before is None:
                self.rule.begin_anew(self.states)
        self.second: States | None = None
        """The states of early updates, allocated once there are states to copy."""
        self._early: EarlyUpdate | None = None
        self.writes = WrittenWeights(chunk, self.segments, user.group_of if self.gradients.are_at_home else ())
        self.copied = [chunk.slots[segment.place] for segment in self.segments]
        """The parameters that are stepped, so that they must lie where their chunk does."""

    @property
    def segments(self) -> list[Segment]:
        """The parts of the shard that are stepped."""
        return self.states.segments

    @property
    def has_stepped(self) -> bool:
        """Whether it has states of a step, not only zeros for the first."""
        return any(self.states.has_stepped(segment) for segment in self.segments)

    @property
    def has_all_states(self) -> bool:
        """Whether every segment has states of a step, and no step creates others."""
        states = self.states
        lacks_average = self._user.decay is not None and len(states.averaged) < len(self.segments)  # as after a load
        return self.rule.is_predictable and not lacks_average and all(map(states.has_stepped, self.segments))

    @property
    def skips_without_gradients(self) -> bool:
        """Whether a step without gradients does nothing."""
        return (self.rule.is_predictable and not self.states.averaged) or not self.segments

    @property
    def accepts_tensor_factor(self) -> bool:
        """Whether the clip factor may be a tensor: the user's class steps autograd's gradients, all on the device."""
        return not self.gradients.are_at_home and self.rule.accepts_tensor_factor

    def leave(self) -> Left:
        """Gives up the shard, whose chunk may be freed: its states, without weights and masters."""
        self.end_early(None)
        self.states.point_to(None)
        return Left(self.chunk, type(self.rule), self.states)

    def load(self, find: Find, wait: Callable[[], None]) -> set[str]:
        """Loads other states (`States.load`); returns notes on inexact ones.

        Nothing else may read or step the chunk meanwhile. It must be in memory (`Chunk.in_memory`).
        """
        self.end_early(None)
        notes = self.states.load(find, wait)
        self.rule.begin_anew(self.states)
        return notes

    def inputs(
        self, used: Collection[str], factor: float | torch.Tensor, options: list[dict[str, object]], *, in_place: bool
    ) -> Inputs:
        """The inputs of an update, as they are now: later, other parameters may have gradients. For arguments see
        `Inputs`."""
        arrived = self.gradients.of(self.segments, used)
        writes, changes = self.chunk.writes, self.gradients.changes
        return Inputs(arrived, self.gradients.whole, factor, options, writes, changes, in_place)

    def begin(self, states: States, inputs: Inputs) -> None:
        """Runs the first part of a step that has a `Rule.turn`; for arguments see `step`."""
        self.rule.begin(states, inputs.multiplied(states.master.dtype))

    def begin_and_turn(self, states: States, inputs: Inputs) -> None:
        """Runs all but the last part of such a step; for arguments see `step`."""
        self.begin(states, inputs)
        if self.rule.turn is not None:
            self.rule.turn()

    def step(self, states: States, inputs: Inputs, staged: torch.Tensor | None = None) -> None:
        """Steps in place; the caller runs `copy_out` afterwards.

        Args:
            states: the current states when the step was submitted.
            inputs: the inputs of the step.
            staged: takes the shard's new weights in their dtype, from where a lane copies them to the device.
        """
        if self.rule.turn is None:  # otherwise `begin` has read the gradients
            inputs = inputs.multiplied(states.master.dtype)
        out = staged
        if self._writes_itself:
            out = self.chunk.shard_weights if states.weights is None else states.weights
        self.begin_average(states, inputs)
        forms = self.rule.step(states, inputs, out)
        self.average(states)
        if BY_CLASS in forms and out is not None:
            self._copy(inputs.arrived, states.master, out)
        if self.chunk.plan.update_home == "host":
            self._engine.host_forms.extend(forms)

    def begin_average(self, states: States, inputs: Inputs) -> None:
        """Prepares the averages of weights for a step, if there are any; for arguments see `step`."""
        if self._user.decay is not None:
            arrived = [segment for segment, _ in inputs.arrived]
            states.begin_average(arrived if self.rule.is_predictable else states.segments)

    def average(self, states: States) -> None:
        """Takes the new weights of a step into their averages, if there are any, where the states live."""
        if self._user.decay is not None:
            states.average(self._user.decay)

    def _step_into(self, states: States, inputs: Inputs, weight_out: torch.Tensor | None, into: States) -> set[str]:
        forms = self.rule.step(states, inputs, weight_out, into)
        if self._user.decay is not None:
            into.average(self._user.decay, states)
        return forms

    def fill_averages(self, out: torch.Tensor) -> None:
        """Copies the averages of weights into a flat shard, which has the weights of all others. The chunk must be in
        memory (`Chunk.in_memory`)."""
        for segment in self.segments:
            if segment.place in self.states.averaged:
                out[segment.part].copy_(self.states.part(AVERAGE, segment))

    @property
    def _writes_itself(self) -> bool:
        """Whether the step itself writes the weights, since they lie where their masters do."""
        plan = self.chunk.plan
        able = plan.update_home == "host" or not self.rule.accepts_tensor_factor
        return able and self._separate and plan.weight_home == plan.update_home

    def copy_out(self, arrived: Arrived, rounded: torch.Tensor | None = None) -> Callable[[], None]:
        """Returns work that copies new weights to their home, in their dtype: from `rounded`, which has that dtype,
        otherwise from the masters. Source and target are read now, since an early update may swap the memory later."""
        if not self._separate or self._writes_itself:
            return lambda: None
        return partial(
            self._copy, arrived, self.states.master if rounded is None else rounded, self.chunk.shard_weights
        )

    def _copy(self, arrived: Arrived, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies the new weights of a shard; nothing writes to `source` until they have arrived."""
        asynchronous = target.is_cuda and target.dtype == source.dtype
        if len(arrived) == len(self.chunk.slots):
            target.copy_(source, non_blocking=asynchronous)
            return
        for segment, _ in arrived:  # other segments may be another optimizer's
            target[segment.part].copy_(source[segment.part], non_blocking=asynchronous)

    # --- early updates ---------------------------------------------------------------------------------------------

    def make_second(self) -> bool:
        """Allocates the second set of states, and of the rounded weights, as the plan counts them; returns whether it
        exists. It cannot if another optimizer steps a part of the shard, or if states cannot be copied."""
        chunk = self.chunk
        whole = bool(chunk.held) and len(chunk.held) == len(self.segments)
        if self.second is None and whole and self.states.can_copy:
            make = _maker(self._engine.arena, chunk, "new_states")
            copied = chunk.masters is None or (chunk.plan.weight_home != "host" and not chunk.low_precision)
            master = make(chunk.shard_numel, self.states.master.dtype, pin=copied).tensor
            self.second = self.states.like(master, cut_segments(chunk, master, self._user.group_of), make)
            self.rule.attach(self.second)
            self.second.allocate()
            if chunk.low_precision:
                self.second.weights = make(chunk.shard_numel, chunk.dtype, pin=True).tensor
        return self.second is not None and self.states.can_copy  # its first step may have made others since

    def begin_early(self, inputs: Inputs) -> EarlyUpdate:
        """Begins an early update, which the caller submits. `make_second` must have returned True, and the last one
        must have ended."""
        if self.second is None or self._early is not None:
            raise StateError(
                f"rank {self.chunk.rank}: chunk {self.chunk.index} has no second set of states that is free"
            )
        reads = self.gradients.memory, self.chunk.states
        self._early = EarlyUpdate(inputs, self._step_into, self.states, self.second, reads)
        return self._early

    def end_early(self, inputs: Inputs | None) -> EarlyUpdate | None:
        """Ends an early update, if one has begun. Returns it, with its states kept, if a step with `inputs` gives the
        same."""
        early, self._early = self._early, None
        if early is None or self.second is None:
            return None
        if inputs is None or not early.inputs.equal(inputs):
            early.discard()
            return None
        old, self.states = self.states, self.second
        self.second, shown = old, early.rounded
        if old.weights is None:  # rounded weights always leave for the device from the same memory
            old.weights, self.states.weights, shown = shown, None, None
        self.chunk.exchange_state(self.states.master, shown)
        return early


# --- shards ----------------------------------------------------------------------------------------------------------
# `SteppedShards`: the shards of one optimizer, in the order in which the next forward asks for their chunks.


logger = logging.getLogger(__name__)

_SLOW_NUMEL = 10**7
"""Number of weights from which a step by torch's Adams without ``fused=True`` is reported: some 30 ms on one core."""


class SteppedShards:
    """The shards of one optimizer.

    Args:
        engine: of the chunks.
        user: the optimizer.
    """

    def __init__(self, engine: Engine, user: UserOptimizer) -> None:
        self._engine, self._user = engine, user
        self._by_chunk: dict[int, SteppedShard] = {}
        self._left: dict[int, Left] = {}  # by chunk, states that no shard of this plan has taken over yet
        self._refuse_parameters()

    def __iter__(self) -> Iterator[SteppedShard]:
        return iter(self._by_chunk.values())

    def __getitem__(self, index: int) -> SteppedShard:
        """The shard of the chunk with this number."""
        return self._by_chunk[index]

    def make(self) -> None:
        """Creates all shards, with the states that the plan foresees."""
        for chunk in self._engine.chunks_by_use():
            if chunk.plan.trainable:
                with chunk.in_memory(write=self._user.begins_with_states):
                    self._by_chunk[chunk.index] = shard = SteppedShard(self._engine, self._user, chunk)
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
            self._by_chunk[chunk.index] = shard = SteppedShard(self._engine, self._user, chunk, before)
            if chunk.plan.update_home == "host":
                self._make_states(shard)
            if shard.states is not before.states:
                shard.states.copy_from(before.states)

    def _make_states(self, shard: SteppedShard) -> None:
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
