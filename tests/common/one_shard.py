"""The states of one shard, without a module around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from elixir.chunk.chunk import ShardPart, Slot
from elixir.chunk.memory import Memory
from elixir.memory_order import Order, flattened
from elixir.plan.chunk_plan import ParamSlot
from elixir.wrapper.step.elementwise import options_of
from elixir.wrapper.step.rules import ClassRule, Inputs, Rule
from elixir.wrapper.step.segments import cut_segments
from elixir.wrapper.step.states import SavedState, SavedStates, SmallStates, States
from elixir.wrapper.step.user_optimizer import UserOptimizer

Make = Callable[..., torch.optim.Optimizer]
SHAPES = ((3,), (5, 4), (2,))


def user_over(make: Make, *options: dict[str, Any]) -> UserOptimizer:
    """An optimizer of a class, in groups with these options."""
    return user_of(make([{"params": weights_of((1,)), **each} for each in options or ({},)]))


class Saved:
    """Saved states, by parameter and kind, whose values come no sooner than they are waited for.

    Args:
        states: by parameter.
        order: of the elements of the parameters.
        small: by parameter.
    """

    def __init__(
        self, states: Mapping[str, Mapping[str, torch.Tensor]], order: Order | None = None, **small: SmallStates
    ) -> None:
        self._states, self._order, self._small = states, order, small
        self.coming: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.largest_numel = 0

    def find(self, name: str) -> SavedStates | None:
        if name not in self._states and name not in self._small:
            return None
        values = self._states.get(name, {})
        tensors = {kind: SavedState(value.dtype, partial(self._fill, value)) for kind, value in values.items()}
        return SavedStates(tensors, self._small.get(name, SmallStates()))

    def _fill(self, value: torch.Tensor, start: int, out: torch.Tensor) -> None:
        self.coming.append((out, flattened(value, self._order)[start : start + out.numel()]))
        self.largest_numel = max(self.largest_numel, out.numel())

    def wait(self) -> None:
        for out, values in self.coming:
            out.copy_(values)
        self.coming.clear()


def shard_of(*weights: nn.Parameter, groups: Sequence[int] = (), first: int = 0) -> Any:
    """Master and segments of a shard that has weights, one after the other, the first one from an element on."""
    held, at = {}, 0
    master = torch.zeros(sum(weight.numel() for weight in weights) - first)
    for place, weight in enumerate(weights):
        slot = Slot.of(weight, ParamSlot(f"w{place}", at, weight.numel()), weight.dtype, "cpu")
        lacks = 0 if place else first
        held[slot.name] = ShardPart(slot, place, lacks, slice(at, at := at + weight.numel() - lacks))
        master[held[slot.name].part] = slot.flattened(weight.detach())[lacks:]
    chunk: Any = SimpleNamespace(held=held)
    group_of = dict(zip(weights, groups or [0] * len(weights), strict=True))
    return master, cut_segments(chunk, master, group_of)


def weights_of(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)) for shape in shapes]


def states_of(rule: Rule, shapes: Any = SHAPES, groups: Sequence[int] = (), first: int = 0, **options: Any) -> States:
    """The states of a rule over a shard."""
    master, segments = shard_of(*weights_of(*shapes), groups=groups, first=first)
    states = States(master, segments, rule.kinds(master.dtype, {0}), [slice(0, len(master))], memory, **options)
    rule.attach(states)
    rule.begin_anew(states)
    return states


def another(states: States, rule: Rule) -> States:
    """A second set of states."""
    weights = [segment.source for segment in states.segments]
    groups = [segment.group for segment in states.segments]
    first = states.segments[0].first if states.segments else 0
    master, segments = shard_of(*weights, groups=groups, first=first)
    other = states.like(master.zero_(), segments, memory)
    rule.attach(other)
    return other


def inputs_of(
    states: States, gradients: torch.Tensor, factor: Any = 1.0, *, places: Any = None, together: bool = True
) -> Inputs:
    """Gradients of all segments, or of those with these places, and options of two groups."""
    arrived = [(it, gradients[it.part]) for it in states.segments if places is None or it.place in places]
    adam = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.5).param_groups[0]
    options = [{**adam, "lr": lr, "params": []} for lr in (0.5, 0.25)]
    if states.optimizer is not None:
        options = [{**group, "params": []} for group in states.optimizer.param_groups]
    return Inputs(arrived, gradients if together else None, factor, [options_of(each) for each in options], 0, 0)


def class_rule(make: Make = torch.optim.AdamW) -> ClassRule:
    return ClassRule(user_over(make))


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.5, momentum=0.5)


def transposed(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.arange(float(rows * columns)).view(columns, rows).t())


def memory(numel: int, dtype: torch.dtype) -> Memory:
    """Memory of states, which nobody counts."""
    return Memory(torch.zeros(numel, dtype=dtype))


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
