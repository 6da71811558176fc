"""The graph of forward and backward of a compiled layer, recorded once for all memory budgets.

A budget only decides how the compiler splits this graph. Private names of PyTorch's recorder are in this file; if a
version lacks the one that is replaced, the graph is recorded for each budget.
"""

from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from elixir.torch_private import Draws, as_compiling, tree_flatten, tree_leaves

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]
"""Size, strides and dtype of a tensor, and whether it requires a gradient."""

_REQUIRES_GRAD = torch.Tensor.requires_grad
_NEVER = (sys.maxsize, False, 0)


@dataclass
class JointGraph:
    """A layer as a function of tensors, and the graph that the compiler records of it."""

    layer: nn.Module
    call: Callable[[Sequence[torch.Tensor]], Any]
    """Runs the layer on tensors of these layouts, of which the first `weights` belong to it."""
    layouts: Sequence[Layout]
    weights: int
    device: str
    """The device of the tensors that record the graph."""
    form: Any = None
    """How the tensors are arranged that `call` returns."""
    order: list[int] = field(default_factory=list)
    """The places of the tensors that the compiled function takes, in the order in which the layer first uses them."""
    draws: bool = False
    """Whether forward draws random numbers, once `as_dynamo_gives_it` has been called."""
    _fakes: list[torch.Tensor] = field(default_factory=list)
    _results: int = 0
    _recorded: tuple[torch.fx.GraphModule, list[Any]] | None = None

    def _flat(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        with as_compiling():
            found, self.form = tree_flatten(self.call(tensors))
        return tuple(found)

    def _look(self) -> None:
        """Finds out what `call` returns, and which tensors it uses first."""
        from torch._subclasses import FakeTensorMode

        with FakeTensorMode() as mode:
            self._fakes = [
                torch.empty_strided(size, stride, dtype=dtype, device=self.device)
                for size, stride, dtype, _ in self.layouts
            ]
        for tensor, (_, _, _, trained) in zip(self._fakes, self.layouts, strict=True):
            tensor.requires_grad_(trained)
        with mode, _FirstUses(self._fakes[: self.weights]) as uses, Draws() as draws:
            self._results = len(self._flat(*self._fakes))
        self.draws = draws.found
        places = range(len(self._fakes))
        self.order = sorted(places, key=lambda place: uses.first.get(id(self._fakes[place]), _NEVER))

    @contextmanager
    def recorded_once(self) -> Iterator[None]:
        """Gives the compiler the graph that it has recorded before, if it has."""
        import torch._functorch._aot_autograd.graph_compile as recorder

        record = getattr(recorder, "aot_dispatch_autograd_graph", None)
        if record is None:
            yield
            return

        def once(*args: Any, **kwargs: Any) -> Any:
            recorder.aot_dispatch_autograd_graph = record  # type: ignore[attr-defined]  # patterns are recorded next
            if self._recorded is None:
                graph, *others = record(*args, **kwargs)
                self._recorded = _copied(graph), others
                return (graph, *others)
            graph, others = self._recorded
            return (_copied(graph), *others)

        recorder.aot_dispatch_autograd_graph = once  # type: ignore[attr-defined]
        try:
            yield
        finally:
            recorder.aot_dispatch_autograd_graph = record  # type: ignore[attr-defined]

    def as_dynamo_gives_it(self) -> tuple[torch.fx.GraphModule, list[Any]]:
        """A graph that calls the layer, with Dynamo's notes on its inputs: weights are free to be saved for backward;
        and these inputs."""
        from torch._dynamo.source import LocalSource

        if not self.order:
            self._look()
        graph = torch.fx.Graph()
        inputs: list[Any] = [None] * len(self._fakes)
        for place in self.order:
            node = inputs[place] = graph.placeholder(f"input_{place}")
            node.meta["example_value"] = self._fakes[place]
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"} if place < self.weights else {}
            node._dynamo_source = LocalSource(f"input_{place}", is_input=True)  # noqa: SLF001 - as Dynamo does
        returned = graph.call_function(self._flat, tuple(inputs))
        graph.output(tuple(graph.call_function(operator.getitem, (returned, place)) for place in range(self._results)))
        module = torch.fx.GraphModule(nn.Module(), graph)
        module.meta["dynamo_compile_id"] = "elixir"
        vars(module)["_param_name_to_source"] = {}
        return module, [self._fakes[place] for place in self.order]


def _copied(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A module whose graph may be changed; its tensors are those of the other."""
    return torch.fx.GraphModule(module, copy.deepcopy(module.graph))


class _FirstUses(TorchFunctionMode):
    """Notes when each tensor is first an argument of a function: the order in which Dynamo makes inputs of a graph.

    Args:
        weights: come before the other arguments of a function, as a module looks them up while it builds the call.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._weights = set(map(id, weights))
        self._calls = 0
        self.first: dict[int, tuple[int, bool, int]] = {}
        """By `id` of a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is _REQUIRES_GRAD and func.__name__ == "__set__":
            raise NotImplementedError("it sets requires_grad, around which the compiler breaks its graph")
        self._calls += 1
        for place, item in enumerate(tree_leaves((args, kwargs))):
            if isinstance(item, torch.Tensor):
                self.first.setdefault(id(item), (self._calls, id(item) not in self._weights, place))
        return func(*args, **(kwargs or {}))
