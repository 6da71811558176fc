"""`MatrixRule`: steps whole matrices, and `MatrixRoom`, in which matrices get orthogonal.

The momentum lies and is updated at the home of the states. Each direction then passes through the device:

    home of the states:    momentum, direction      (i + 1)          new weights (i)
    device:                               orthogonal (i)

If the host steps, there are two staging buffers, so that CPU work on one matrix runs while the device has another.

Several ranks exchange directions in between: each matrix has an owner, which makes it orthogonal.

    momentum, direction (part)  -> owner: orthogonal (whole)  -> new weights (part)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from elixir.chunk.chunk import Chunk, Slot
from elixir.chunk.group import Group
from elixir.chunk.memory import Arena
from elixir.kernels.muon import MOMENTUM, MuonRule
from elixir.memory_order import flattened, order_of, shaped
from elixir.optimizer_states import DIRECTION_BYTES
from elixir.plan.matrices import directions_numel, owned_numel, owners, part_of, room_bytes, stage_numel, stages
from elixir.plan.plan import Plan
from elixir.wrapper.step.rules import BY_CLASS, Inputs, MakesOptimizer, Rule
from elixir.wrapper.step.segments import Segment
from elixir.wrapper.step.states import Kind, States

_WIDTH = torch.bfloat16
_ROOMS: WeakKeyDictionary[Arena, MatrixRoom] = WeakKeyDictionary()


class MatrixRoom:
    """The memory in which one matrix at a time is made orthogonal, for all chunks of an engine.

    Args:
        arena: makes and counts it, on the device and, for states on the host, pinned on the host.
        plan: says how large it is.
        bytes_per_s: speed of the emulated link, if any.
    """

    def __init__(self, arena: Arena, plan: Plan, bytes_per_s: float | None = None) -> None:
        ranks = plan.shards
        chunks = [(chunk.matrices, chunk.numel // ranks) for chunk in plan.chunks]
        self._memory = arena.make(room_bytes(chunks, ranks) // DIRECTION_BYTES, _WIDTH, "device", "matrix_room").tensor
        numels = (directions_numel(chunks), owned_numel(chunks, ranks)) if ranks > 1 else (0, 0)
        *_, self.directions, self.own = self._memory.split([self._memory.numel() - sum(numels), *numels])
        hosted = [chunk for chunk in plan.chunks if chunk.update_home == "host"]
        staged = max((stage_numel(chunk.matrices, chunk.numel // ranks, ranks) for chunk in hosted), default=0)
        self._stages = [
            arena.make(staged, _WIDTH, "host", "matrix_staging").tensor for _ in range(stages(ranks) * bool(staged))
        ]
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()  # compute's thread and the one of CPU Adam both step
        cuda = arena.device.type == "cuda"
        self._stream = torch.cuda.Stream(arena.device) if cuda and staged else None
        self._last: torch.cuda.Event | None = None  # of the work that had the room last

    @classmethod
    def of(cls, arena: Arena, plan: Plan, bytes_per_s: float | None) -> MatrixRoom:
        """The room of an arena, which all optimizers share; made when it is first asked for."""
        found = _ROOMS.get(arena)
        if found is None:
            found = _ROOMS[arena] = cls(arena, plan, bytes_per_s)
        return found

    def stage(self, turn: int, numel: int) -> torch.Tensor:
        """The staging buffer of a turn, flat."""
        return self._stages[turn % len(self._stages)][:numel]

    def of_device(
        self,
        rule: type[MuonRule],
        segment: Segment,
        inputs: tuple[torch.Tensor, torch.Tensor, float | torch.Tensor],
        options: Mapping[str, Any],
        weights: torch.Tensor,
    ) -> None:
        """Steps one matrix whose states live on the device.

        Args:
            rule: of the optimizer.
            segment: the whole matrix.
            inputs: gradient and momentum, flat, and the factor of the gradient.
            options: of its group.
            weights: flat; they are changed.
        """
        with self._alone(None):
            direction = self._memory[: segment.slot.numel]
            rule.direction(*inputs, options, direction)
            rule.change(weights, self.turned(rule, segment.slot, options), segment.slot.shape, options)

    def turn_staged(
        self, rule: type[MuonRule], segment: Segment, stage: torch.Tensor, options: Mapping[str, Any]
    ) -> torch.cuda.Event | None:
        """Makes the direction in a staging buffer orthogonal, in place; returns what to wait for, if anything."""
        with self._alone(self._stream):
            began = time.perf_counter()
            self._memory[: stage.numel()].copy_(stage, non_blocking=True)
            stage.copy_(self.turned(rule, segment.slot, options), non_blocking=True)
            if self._bytes_per_s is not None:
                time.sleep(max(2 * stage.nbytes / self._bytes_per_s - (time.perf_counter() - began), 0))
        return self._last

    def turned(self, rule: type[MuonRule], slot: Slot, options: Mapping[str, Any]) -> torch.Tensor:
        """The direction in the first elements of the room made orthogonal, flat in the order of the chunk."""
        numel = slot.numel
        found = rule.orthogonal(shaped(self._memory[:numel], slot.shape, slot.order), self._memory, options)
        if order_of(found.shape, found.stride()) == slot.order:
            return flattened(found, slot.order)
        is_first = found.data_ptr() == self._memory.data_ptr()
        other = self._memory[numel : 2 * numel] if is_first else self._memory[:numel]
        shaped(other, slot.shape, slot.order).copy_(found)
        return other

    def turn_own(self, rule: type[MuonRule], slot: Slot, whole: torch.Tensor, options: Mapping[str, Any]) -> None:
        """Makes a direction that was put together from several ranks orthogonal, in place."""
        self._memory[: slot.numel].copy_(whole)
        whole.copy_(self.turned(rule, slot, options))

    @contextlib.contextmanager
    def _alone(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Has the room alone, among threads and streams; without a stream, that of compute is meant."""
        with self._lock, torch.cuda.stream(stream):
            if self._last is not None:
                torch.cuda.current_stream().wait_event(self._last)  # the other stream may still use the room
            yield
            if self._stream is not None:
                self._last = torch.cuda.current_stream().record_event()


class Exchange:
    """The matrices of one optimizer in one chunk, of which each rank has parts.

    Args:
        chunk: the chunk.
        group: its ranks.
        room: takes the directions of this rank's shard, and all matrices that it owns.
        group_of: see `cut_segments`.
    """

    def __init__(self, chunk: Chunk, group: Group, room: MatrixRoom, group_of: Mapping[nn.Parameter, int]) -> None:
        self._group, self._room, self._what = group, room, f"matrices of chunk {chunk.index}"
        self.directions = room.directions[: chunk.shard_numel]
        """Takes the directions of this rank's parts, where these lie in the shard."""
        self._of_others: list[tuple[torch.Tensor, int]] = []  # this rank's parts of what others own, by owner
        self._from_others: list[tuple[torch.Tensor, int]] = []  # parts of what this rank owns, by the rank that has it
        self._own: list[tuple[Slot, int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        at = 0
        for slot, owner in zip(chunk.slots, owners(chunk.plan.matrices, group.shards), strict=True):
            parts = [part_of(slot.offset, slot.numel, chunk.shard_numel, rank) for rank in range(group.shards)]
            mine = parts[group.shard]
            first = slot.offset + mine.start - chunk.shard_start
            here = self.directions[first : first + mine.stop - mine.start]
            if slot.parameter not in group_of:
                continue
            if owner != group.shard:
                self._of_others += [(here, owner)] if here.numel() else []
                continue
            whole = room.own[at : at + slot.numel]
            at += slot.numel
            others = ((whole[part], rank) for rank, part in enumerate(parts) if rank != group.shard)
            self._from_others += [(part, rank) for part, rank in others if part.numel()]
            self._own.append((slot, group_of[slot.parameter], whole, whole[mine], here))

    @property
    def received_bytes(self) -> int:
        """Bytes that this rank receives in a step."""
        return sum(part.nbytes for part, _ in (*self._of_others, *self._from_others))

    def run(self, rule: type[MuonRule], options: Sequence[Mapping[str, Any]]) -> None:
        """Makes the directions of all ranks orthogonal, in place; all ranks call this.

        Args:
            rule: of the optimizer.
            options: by group.
        """
        for *_, part, here in self._own:
            part.copy_(here)
        self._group.swap(self._of_others, self._from_others, self._what)
        for slot, index, whole, part, here in self._own:
            self._room.turn_own(rule, slot, whole, options[index])
            here.copy_(part)
        self._group.swap(self._from_others, self._of_others, f"orthogonal {self._what}")


class MatrixRule(Rule):
    """See `Rule`. On one rank every segment is a whole matrix; several ranks have an `Exchange`.

    Args:
        user: gives groups and options.
        rule: of the optimizer.
        room: makes matrices orthogonal.
        staged: whether the host steps, so that directions pass through staging buffers.
        exchange: of several ranks.
    """

    accepts_tensor_factor = True

    def __init__(
        self,
        user: MakesOptimizer,
        rule: type[MuonRule],
        room: MatrixRoom,
        *,
        staged: bool,
        exchange: Exchange | None = None,
    ) -> None:
        self._user, self._rule, self._room, self._staged, self._exchange = user, rule, room, staged, exchange
        self._options: Sequence[Mapping[str, Any]] = ()  # by group, of the step that has begun
        if exchange is not None:
            self.turn, self.exchanged_bytes = partial(self._run_turn, exchange), exchange.received_bytes
            self._parts = room.stage(0, len(exchange.directions)) if staged else exchange.directions

    def kinds(self, dtype: torch.dtype, groups: Collection[int]) -> dict[str, Kind]:
        """See `Rule`."""
        return {MOMENTUM: Kind(dtype)}

    def attach(self, states: States) -> None:
        """See `Rule`."""
        states.optimizer = self._user.over(states.segments)  # only keeps the states
        states.by_weights = states.optimizer.state

    def step(
        self, states: States, inputs: Inputs, weight_out: torch.Tensor | None = None, into: States | None = None
    ) -> set[str]:
        """See `Rule`."""
        if self._exchange is not None:
            for segment, _ in inputs.arrived:
                part = self._parts[segment.part]
                options = inputs.options[segment.group]
                self._rule.change(segment.weights.detach(), part, segment.slot.shape, options)
        elif self._staged:
            self._step_staged(states, inputs)
        else:
            for segment, gradient in inputs.arrived:
                given, options = (gradient, _momentum(states, segment), inputs.factor), inputs.options[segment.group]
                self._room.of_device(self._rule, segment, given, options, segment.weights.detach())
        return {BY_CLASS}

    def begin(self, states: States, inputs: Inputs) -> None:
        """See `Rule`."""
        self._options = inputs.options
        for segment, gradient in inputs.arrived:
            out, options = self._parts[segment.part], inputs.options[segment.group]
            self._rule.direction(gradient, _momentum(states, segment), inputs.factor, options, out)

    def _run_turn(self, exchange: Exchange) -> None:
        directions = exchange.directions
        if self._staged:
            directions.copy_(self._parts, non_blocking=True)
        exchange.run(self._rule, self._options)
        if self._staged:
            self._parts.copy_(directions, non_blocking=True)

    def _step_staged(self, states: States, inputs: Inputs) -> None:
        """Steps matrices whose states live on the host: the momentum of one while the device has the one before."""
        room, rule = self._room, self._rule
        turning: tuple[Segment, torch.Tensor, torch.cuda.Event | None] | None = None
        for turn, (segment, gradient) in enumerate(inputs.arrived):
            stage, options = room.stage(turn, segment.slot.numel), inputs.options[segment.group]
            rule.direction(gradient, _momentum(states, segment), inputs.factor, options, stage)
            event = room.turn_staged(rule, segment, stage, options)
            self._end_turn(turning, inputs)
            turning = segment, stage, event
        self._end_turn(turning, inputs)

    def _end_turn(self, turning: tuple[Segment, torch.Tensor, torch.cuda.Event | None] | None, inputs: Inputs) -> None:
        if turning is None:
            return
        segment, stage, event = turning
        if event is not None:
            event.synchronize()  # this thread reads the staging buffer, which the device fills
        options = inputs.options[segment.group]
        self._rule.change(segment.weights.detach(), stage, segment.slot.shape, options)


def _momentum(states: States, segment: Segment) -> torch.Tensor:
    """The momentum, flat; zeros before the first step."""
    if segment.weights not in states.by_weights:
        states.put(segment, [MOMENTUM], {})
    return states.part(MOMENTUM, segment)
