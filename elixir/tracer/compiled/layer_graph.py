"""The graph of a compiled layer, as Dynamo would give it to inductor."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from elixir.torch_private import tree_flatten, tree_leaves

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]
"""Size, strides and dtype of a tensor, and whether it requires a gradient."""

_REQUIRES_GRAD = torch.Tensor.requires_grad
_NEVER = (sys.maxsize, False, 0)


class LayerGraph(NamedTuple):
    """A graph that calls a layer."""

    module: torch.fx.GraphModule
    inputs: list[torch.Tensor]
    """Fake tensors for its inputs."""
    order: list[int]
    """The places of the inputs among the tensors that the layer takes: by their first use."""
    form: Any
    """How the tensors are arranged that the layer returns."""


def layer_graph(
    call: Callable[[Sequence[torch.Tensor]], Any], layouts: Sequence[Layout], weights: int, device: str
) -> LayerGraph:
    """The graph of a layer, with Dynamo's notes on its inputs: weights are free to be saved for backward.

    Args:
        call: runs the layer on tensors.
        layouts: those of the tensors, of which the first `weights` belong to the layer.
        device: the device of the tensors of which the graph is recorded.
    """
    from torch._dynamo.source import LocalSource
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        fakes = [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype, _ in layouts]
    for tensor, (_, _, _, trained) in zip(fakes, layouts, strict=True):
        tensor.requires_grad_(trained)
    with mode, _FirstUses(fakes[:weights]) as uses, _as_compiling():
        results, form = tree_flatten(call(fakes))

    def flat(*tensors: torch.Tensor) -> tuple[Any, ...]:
        with _as_compiling():
            return tuple(tree_leaves(call(tensors)))

    order = sorted(range(len(fakes)), key=lambda place: uses.first.get(id(fakes[place]), _NEVER))
    graph = torch.fx.Graph()
    inputs: list[Any] = [None] * len(fakes)
    for place in order:
        node = inputs[place] = graph.placeholder(f"input_{place}")
        node.meta["example_value"] = fakes[place]
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"} if place < weights else {}
        node._dynamo_source = LocalSource(f"input_{place}", is_input=True)
    returned = graph.call_function(flat, tuple(inputs))
    graph.output(tuple(graph.call_function(operator.getitem, (returned, place)) for place in range(len(results))))
    module = torch.fx.GraphModule(nn.Module(), graph)
    module.meta["dynamo_compile_id"] = "elixir"
    vars(module)["_param_name_to_source"] = {}
    return LayerGraph(module, [fakes[place] for place in order], order, form)


def _as_compiling() -> AbstractContextManager[Any]:
    """`torch.compiler.is_compiling` says here that something compiles, as it does in what Dynamo records; under
    `while_nothing_compiles`."""
    return patch.object(torch.compiler, "is_compiling", lambda: True)


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


_CHECKPOINT_OPTIONS = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop")


@contextmanager
def checkpoints_in_the_graph(layer: nn.Module) -> Iterator[None]:
    """Makes the checkpoints that a layer's modules hold leave marks in the graph, as Dynamo's do: the compiler decides
    what is computed again."""
    held = [
        (module, name, value)
        for module in layer.modules()
        for name, value in vars(module).items()
        if getattr(value, "func", value) is checkpoint
    ]
    for module, name, value in held:
        setattr(module, name, partial(_marked, **getattr(value, "keywords", {})))
    try:
        yield
    finally:
        for module, name, value in held:
            setattr(module, name, value)


def _marked(function: Callable[..., Any], *args: Any, context_fn: Any = None, **options: Any) -> Any:
    if context_fn is not None:
        raise NotImplementedError("a checkpoint that keeps some results")
    kept = {name: value for name, value in options.items() if name not in _CHECKPOINT_OPTIONS}

    def contexts() -> tuple[Any, Any]:
        first, again = create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)
        first.ac_graph_id = 0
        return first, again

    with torch.fx.traceback.preserve_node_meta():
        return checkpoint(
            partial(function, **kept),
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            early_stop=False,
            context_fn=contexts,
        )
