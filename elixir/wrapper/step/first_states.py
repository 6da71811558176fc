"""States that the user's class makes itself, in its constructor or in a first step, where they belong on a disk.

Made at once, the states of a chunk would take as much host memory again as they have in the window. So they are made
for one *piece* of a weight after the other, and copied to the chunk's extent. The class is elementwise, so it makes of
pieces what it makes of the whole. That holds for classes whose states are known; those of others may keep a list of
tensors, or counters in tensors, which no piece may share with the next, and are made at once.

The optimizer of the chunk itself sees one element of each such weight meanwhile: this makes its counters, and whatever
else it keeps that has no element per weight.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from elixir.chunk.disk import StoredStates
from elixir.kernels import HybridAdam
from elixir.units import MIB, dtype_name
from elixir.wrapper.step.segments import Arrived, Segment, step_segments

PIECE_NUMEL = MIB // 4
"""Elements of a piece: its states are in memory twice for a moment."""
MakeOptimizer = Callable[[Sequence[Segment]], torch.optim.Optimizer]


def makes_known_states(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each state is known to have one element per weight, or to be a number: as in torch's own classes."""
    cls = type(optimizer)
    return cls is HybridAdam or cls.__module__.startswith("torch.optim.")


@dataclass(frozen=True)
class FirstStates:
    """Makes the states of one chunk, which must be at hand.

    Args:
        stored: where they live.
        shard_numel: elements of this rank's shard.
    """

    stored: StoredStates
    shard_numel: int

    def construct(self, make: MakeOptimizer, segments: Sequence[Segment], *, come_later: bool) -> torch.optim.Optimizer:
        """An optimizer over segments, with the states that its constructor makes.

        Args:
            make: an optimizer of the user's class.
            segments: of the chunk.
            come_later: its states are about to be those of another optimizer, which may lie in the extent already.
        """
        with _of_one_element(segments):
            optimizer = make(segments)
        if come_later:
            optimizer.state.clear()
        else:
            self._fill(make, optimizer, segments)
        return optimizer

    def complete(self, make: MakeOptimizer, optimizer: torch.optim.Optimizer, segments: Sequence[Segment]) -> None:
        """Have what the constructor makes for segments that have got no states after all."""
        without = [segment for segment in segments if not optimizer.state.get(segment.weights)]
        if without:
            with _of_one_element(without):
                optimizer.state.update(make(without).state)
            self._fill(make, optimizer, without)

    def _fill(self, make: MakeOptimizer, optimizer: torch.optim.Optimizer, segments: Sequence[Segment]) -> None:
        begun = [segment for segment in segments if optimizer.state.get(segment.weights)]
        if not begun:
            return
        with self.stored.at_hand(write=True):
            self._make_room(optimizer, begun)
            for segment in begun:
                self._make(segment, optimizer, lambda piece, first: make([piece]))

    def step(
        self, optimizer: torch.optim.Optimizer, segments: Sequence[Segment], arrived: Arrived, factor: float
    ) -> None:
        """`step_segments`, in which segments without states get them."""
        new = [(segment, gradient) for segment, gradient in arrived if not optimizer.state.get(segment.weights)]
        if not new:
            step_segments(optimizer, segments, arrived, factor)
            return
        places = {segment.place for segment, _ in new}
        before = _twin(optimizer)
        # What is stepped in pieces takes part with one element, so that the optimizer itself counts the step.
        rest = [(segment, gradient[:1] if segment.place in places else gradient) for segment, gradient in arrived]
        with _of_one_element([segment for segment, _ in new]):
            step_segments(optimizer, segments, rest, factor)
        # Those that get no states even now need no pieces.
        at_once = [(segment, gradient) for segment, gradient in new if not optimizer.state.get(segment.weights)]
        if at_once:
            whole = [segment for segment, _ in at_once]
            step_segments(_twin(before, whole), whole, at_once, factor)
        begun = [(segment, gradient) for segment, gradient in new if optimizer.state.get(segment.weights)]
        self._make_room(optimizer, [segment for segment, _ in begun])
        for segment, gradient in begun:

            def stepped(piece: Segment, first: int, gradient: torch.Tensor = gradient) -> torch.optim.Optimizer:
                twin = _twin(before, [piece])
                step_segments(twin, [piece], [(piece, gradient[first : first + piece.weights.numel()])], factor)
                return twin

            self._make(segment, optimizer, stepped)

    def _make_room(self, optimizer: torch.optim.Optimizer, segments: Sequence[Segment]) -> None:
        """Have regions for what the states of one element say that there will be; an extent that is too small for them
        grows, and moves in memory."""
        for segment in segments:
            for kind, value in optimizer.state.get(segment.weights, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == (1,):
                    self._region(kind, value.dtype)

    def _make(
        self,
        segment: Segment,
        optimizer: torch.optim.Optimizer,
        make: Callable[[Segment, int], torch.optim.Optimizer],
    ) -> None:
        """The states of a segment, of one piece after the other.

        Args:
            segment: `optimizer` has the states of its first element.
            optimizer: gets the others.
            make: an optimizer that has the states of a piece, given also the first element of it in the segment.
        """
        whole, kinds = segment.weights.detach(), set[str]()
        for first in range(0, whole.numel(), PIECE_NUMEL):
            weights = nn.Parameter(whole[first : first + PIECE_NUMEL])
            piece = replace(segment, start=segment.start + first, weights=weights)
            for kind, value in make(piece, first).state.get(weights, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == weights.shape:
                    self._region(kind, value.dtype)[piece.start : piece.start + value.numel()].copy_(value)
                    kinds.add(kind)
        state = optimizer.state.get(segment.weights, {})
        for kind in kinds:
            state[kind] = self._region(kind, state[kind].dtype)[segment.start : segment.start + whole.numel()]

    def _region(self, kind: str, dtype: torch.dtype) -> torch.Tensor:
        return self.stored.region(state_region(kind, dtype), self.shard_numel, dtype)


def state_region(kind: str, dtype: torch.dtype) -> str:
    """Name of the region of an extent that has a state of each element."""
    return f"{kind} {dtype_name(dtype)}"


@contextlib.contextmanager
def _of_one_element(segments: Sequence[Segment]) -> Iterator[None]:
    """Have the weights of segments be copies of their first elements for as long as this lasts."""
    whole = [segment.weights.data for segment in segments]
    for segment, data in zip(segments, whole, strict=True):
        segment.weights.data = data[:1].clone()
    try:
        yield
    finally:
        for segment, data in zip(segments, whole, strict=True):
            segment.weights.data = data


def _twin(optimizer: torch.optim.Optimizer, segments: Sequence[Segment] = ()) -> torch.optim.Optimizer:
    """An optimizer over segments, without states, that has counted what this one has."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in optimizer.__dict__.items():
        twin.__dict__[name] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": [segment.weights for segment in segments if segment.group == index]}
        for index, group in enumerate(optimizer.param_groups)
    ]
    return twin
