"""`MatrixStates`: the states of an optimizer over whole matrices, and `MatrixRoom`, in which matrices get orthogonal.

The momentum lies and is updated at the home of the states. Each direction then passes through the device:

    home of the states:    momentum, direction      (i + 1)          new weights (i)
    device:                               orthogonal (i)

With states on the host there are two staging buffers, so that CPU work on one matrix runs while the device has another.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch

from elixir.chunk.arena import Arena
from elixir.errors import StateError
from elixir.kernels.muon import MOMENTUM, MuonRule
from elixir.memory_order import flattened, order_of, shaped
from elixir.optimizer_states import DIRECTION_BYTES, matrix_room_bytes
from elixir.plan.plan import MATRIX_STAGES, Plan
from elixir.wrapper.step.class_states import ClassStates, MakesOptimizer
from elixir.wrapper.step.segments import Arrived, Segment
from elixir.wrapper.step.states import BY_CLASS

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
        matrices = [(shape, chunk.update_home) for chunk in plan.chunks for shape in chunk.matrices]
        numel = max(matrix_room_bytes(*shape) for shape, _ in matrices) // DIRECTION_BYTES
        self._memory = arena.make(numel, _WIDTH, "device", "matrix_room")
        staged = max((rows * columns for (rows, columns), home in matrices if home == "host"), default=0)
        self._stages = [
            arena.make(staged, _WIDTH, "host", "matrix_staging") for _ in range(MATRIX_STAGES * bool(staged))
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
        return self._stages[turn % MATRIX_STAGES][:numel]

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
        with self._lock:
            if self._last is not None:
                torch.cuda.current_stream().wait_event(self._last)  # the stream below may still use the room
            direction = self._memory[: segment.slot.numel]
            rule.direction(*inputs, options, direction)
            rule.change(weights, self._turned(rule, segment, options), segment.slot.shape, options)
            if self._stream is not None:
                self._last = torch.cuda.current_stream().record_event()

    def turn_staged(
        self, rule: type[MuonRule], segment: Segment, stage: torch.Tensor, options: Mapping[str, Any]
    ) -> torch.cuda.Event | None:
        """Makes the direction in a staging buffer orthogonal, in place; returns what to wait for, if anything."""
        with self._lock, self._on_stream():
            if self._stream is not None and self._last is not None:
                self._stream.wait_event(self._last)  # compute may still use the room
            began = time.perf_counter()
            self._memory[: stage.numel()].copy_(stage, non_blocking=True)
            stage.copy_(self._turned(rule, segment, options), non_blocking=True)
            if self._bytes_per_s is not None:
                time.sleep(max(2 * stage.nbytes / self._bytes_per_s - (time.perf_counter() - began), 0))
            if self._stream is not None:
                self._last = self._stream.record_event()
            return self._last

    def _turned(self, rule: type[MuonRule], segment: Segment, options: Mapping[str, Any]) -> torch.Tensor:
        """The direction in the room made orthogonal, flat in the order of the chunk."""
        slot = segment.slot
        numel = slot.numel
        found = rule.orthogonal(shaped(self._memory[:numel], slot.shape, slot.order), self._memory, options)
        if order_of(found.shape, found.stride()) == slot.order:
            return flattened(found, slot.order)
        is_first = found.data_ptr() == self._memory.data_ptr()
        other = self._memory[numel : 2 * numel] if is_first else self._memory[:numel]
        shaped(other, slot.shape, slot.order).copy_(found)
        return other

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class MatrixStates(ClassStates):
    """See `States`. Every segment is a whole matrix.

    Args:
        user: gives groups and options.
        master: the flat shard of weights or masters.
        segments: its matrices.
        rule: of the optimizer.
        room: makes matrices orthogonal.
        staged: whether the states live on the host.
        weights: see `States`.
    """

    def __init__(
        self,
        user: MakesOptimizer,
        master: torch.Tensor,
        segments: list[Segment],
        rule: type[MuonRule],
        room: MatrixRoom,
        *,
        staged: bool,
        weights: torch.Tensor | None,
    ) -> None:
        super().__init__(user, master, segments, weights=weights)
        self._rule, self._room, self._staged = rule, room, staged

    def step(
        self,
        arrived: Arrived,
        gradients: torch.Tensor | None,
        factor: float | torch.Tensor,
        weight_out: torch.Tensor | None,
        into: ClassStates | None = None,
    ) -> set[str]:
        """See `States`."""
        if into is not None:
            raise StateError("chunks of matrices are not updated early")
        if self._staged:
            self._step_staged(arrived, factor)
            return {BY_CLASS}
        for segment, gradient in arrived:
            inputs = gradient, self._momentum(segment), factor
            self._room.of_device(self._rule, segment, inputs, self._options(segment), self._weights(segment))
        return {BY_CLASS}

    def _step_staged(self, arrived: Arrived, factor: float | torch.Tensor) -> None:
        """Steps matrices whose states live on the host: the momentum of one while the device has the one before."""
        room, rule = self._room, self._rule
        turning: tuple[Segment, torch.Tensor, torch.cuda.Event | None] | None = None
        for turn, (segment, gradient) in enumerate(arrived):
            stage, options = room.stage(turn, segment.slot.numel), self._options(segment)
            rule.direction(gradient, self._momentum(segment), factor, options, stage)
            event = room.turn_staged(rule, segment, stage, options)
            self._end_turn(turning)
            turning = segment, stage, event
        self._end_turn(turning)

    def _end_turn(self, turning: tuple[Segment, torch.Tensor, torch.cuda.Event | None] | None) -> None:
        if turning is None:
            return
        segment, stage, event = turning
        if event is not None:
            event.synchronize()  # this thread reads the staging buffer, which the device fills
        self._rule.change(self._weights(segment), stage, segment.slot.shape, self._options(segment))

    def _options(self, segment: Segment) -> dict[str, Any]:
        options: dict[str, Any] = self.optimizer.param_groups[segment.group]
        return options

    def _weights(self, segment: Segment) -> torch.Tensor:
        return flattened(segment.weights.detach(), segment.order)

    def _momentum(self, segment: Segment) -> torch.Tensor:
        """The momentum, flat; made in the first step."""
        state = self.optimizer.state[segment.weights]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(segment.weights, requires_grad=False)
        found: torch.Tensor = state[MOMENTUM]
        return flattened(found, segment.order)
