"""The states of one shard, without a module around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from elixir.chunk.chunk import Held, Slot
from elixir.memory_order import Order, flattened, order_of
from elixir.plan.chunk_plan import ParamSlot
from elixir.wrapper.step.class_states import ClassStates
from elixir.wrapper.step.fused_states import FusedStates
from elixir.wrapper.step.segments import Segment, cut_segments
from elixir.wrapper.step.states import SavedStates, SmallStates, StateForm
from elixir.wrapper.step.user_optimizer import UserOptimizer

Make = Callable[..., torch.optim.Optimizer]
SHAPES = ((3,), (5, 4), (2,))


class User:
    """Makes optimizers of a class over segments, in groups with these options."""

    is_predictable = True

    def __init__(self, make: Make, *options: dict[str, Any]) -> None:
        self._make, self._options = make, options or ({},)
        self.begins_with_states = bool(make([nn.Parameter(torch.ones(1))]).state)

    def over(self, segments: Sequence[Segment]) -> torch.optim.Optimizer:
        groups = [{"params": [], **options} for options in self._options]
        for segment in segments:
            groups[segment.group]["params"].append(segment.weights)
        return self._make(groups)


class Extent:
    """Regions that are in memory; none may be made while values are on their way into the others."""

    def __init__(self, saved: Saved | None = None) -> None:
        self.regions: dict[str, torch.Tensor] = {}
        self._saved = saved

    def region(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if name not in self.regions:
            assert self._saved is None or not self._saved.coming
            self.regions[name] = torch.zeros(numel, dtype=dtype)
        return self.regions[name]

    def read(self, name: str, first: int, stop: int) -> torch.Tensor:
        return self.regions[name][first:stop].clone()


class Saved(SavedStates):
    """Saved states, by parameter and kind, whose values come no sooner than they are waited for."""

    def __init__(self, states: Mapping[str, Mapping[str, torch.Tensor]], **small: SmallStates) -> None:
        self._states, self._small = states, small
        self.order: Order | None = None
        """The order of the elements of the parameters."""
        self.coming: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.largest_numel = 0

    def forms(self, name: str) -> dict[str, StateForm]:
        return {
            kind: StateForm(value.dtype, order_of(value.shape, value.stride()))
            for kind, value in self._states.get(name, {}).items()
        }

    def small(self, name: str) -> SmallStates:
        return self._small.get(name, SmallStates())

    def fill(self, kind: str, name: str, start: int, out: torch.Tensor) -> None:
        values = flattened(self._states[name][kind], self.order)
        self.coming.append((out, values[start : start + out.numel()]))
        self.largest_numel = max(self.largest_numel, out.numel())

    def filled(self) -> None:
        for out, values in self.coming:
            out.copy_(values)
        self.coming.clear()


def shard_of(*weights: nn.Parameter, groups: Sequence[int] = (), ordinary: bool = False, first: int = 0) -> Any:
    """Master and segments of a shard that has weights, one after the other, the first one from an element on."""
    held, at = {}, 0
    master = torch.zeros(sum(weight.numel() for weight in weights) - first)
    for place, weight in enumerate(weights):
        slot = Slot.of(weight, ParamSlot(f"w{place}", at, weight.numel()), weight.dtype, "cpu")
        lacks = 0 if place else first
        held[slot.name] = Held(slot, place, lacks, slice(at, at := at + weight.numel() - lacks))
        master[held[slot.name].part] = slot.flattened(weight.detach())[lacks:]
        if ordinary:
            weight.data = slot.part_of(master)
    chunk: Any = SimpleNamespace(held=held)
    group_of = dict(zip(weights, groups or [0] * len(weights), strict=True))
    return master, cut_segments(chunk, master, group_of, ordinary=ordinary)


def weights_of(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)) for shape in shapes]


def class_states(make: Make = torch.optim.AdamW, shapes: Any = SHAPES, first: int = 0, **options: Any) -> ClassStates:
    master, segments = shard_of(*weights_of(*shapes), first=first)
    return ClassStates(User(make), master, segments, **options)


def fused_states(shapes: Any = SHAPES, groups: Sequence[int] = (), first: int = 0, **options: Any) -> FusedStates:
    master, segments = shard_of(*weights_of(*shapes), groups=groups, first=first)
    adam = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.5).param_groups[0]
    return FusedStates(master, segments, [adam, {**adam, "lr": 0.25}], decoupled=True, **options)


def put(states: ClassStates, *each: dict[str, Any]) -> None:
    for segment, state in zip(states.segments, each, strict=False):
        states.optimizer.state[segment.weights] = state


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.5, momentum=0.5)


def transposed(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.arange(float(rows * columns)).view(columns, rows).t())


def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of a second set of states."""
    return torch.zeros(numel, dtype=dtype)


def user_of(
    given: torch.optim.Optimizer, *, fused_kernels: bool = False, moments: str = "float32", changing: Any = frozenset()
) -> UserOptimizer:
    """An optimizer over the parameters of one chunk, and one more that it does not step."""
    parameters = [each for group in given.param_groups for each in group["params"]]
    slots = [SimpleNamespace(parameter=each, name=f"w{at}") for at, each in enumerate([*weights_of((1,)), *parameters])]
    plan = SimpleNamespace(moments=moments, matrices=(), optimizer="AdamW")
    engine: Any = SimpleNamespace(
        chunks=[SimpleNamespace(slots=slots)], steppers=[], plan=plan,
        options=SimpleNamespace(fused_kernels=fused_kernels),
    )  # fmt: skip
    return UserOptimizer(given, lambda: given.param_groups, engine, changing)
