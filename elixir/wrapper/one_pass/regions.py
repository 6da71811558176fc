"""`Region`: one call of a layer for one micro-batch, which runs again in backward.

A region runs without keeping a graph, and keeps its inputs. A graph ends where a tensor enters or leaves a region; the
gradient that arrives there waits in a `Slot`. So each backward is one call of autograd, for one micro-batch and either
one region or the operators before it, in an order that the pass decides, and the gradients of a parameter are summed
over the micro-batches as a loop does it.

Operators between two regions are called *glue*. The backward of a glue is over before that of an earlier region begins,
so its operators may read what regions return, but nothing that an earlier glue has made: that is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from elixir.access.activations import MovedTensor, Swapping, with_own_caches
from elixir.access.autograd import innermost_saved_tensors_hooks
from elixir.errors import InputError
from elixir.torch_private import dispatch_mode_count, function_mode_count, sequence_number, tree_flatten, tree_unflatten

# --- settings of a thread --------------------------------------------------------------------------------------------
# Settings that PyTorch keeps per thread, and states of its generators, to be set again on another thread or later.


class Autocast:
    """The state of autocast on this thread.

    Args:
        device: the device of compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._cached = torch.is_autocast_cache_enabled()
        self._kinds = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys(("cpu", device.type))
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Sets this state, meanwhile; keeps no casts of weights, which will change."""
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in self._kinds:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self._cached))
            stack.callback(torch.clear_autocast_cache)
            yield


class ThreadSettings:
    """Everything that a thread of a micro-batch takes over from the thread that calls `accumulate`.

    Args:
        device: the device of compute.

    Raises:
        InputError: a mode or hooks for saved tensors are active here, which other threads would escape.
    """

    def __init__(self, device: torch.device) -> None:
        default = torch.get_default_device()
        self._default = contextlib.nullcontext() if default.type == "cpu" else default
        modes = dispatch_mode_count() or function_mode_count() > (self._default is default)
        if modes or innermost_saved_tensors_hooks() is not None:
            raise InputError(
                "a mode that watches operators (TorchDispatchMode or TorchFunctionMode), or hooks for saved tensors "
                "such as save_on_cpu, are active around accumulate(), whose micro-batches run on other threads; enter "
                "a mode inside of step_fn, leave out the hooks, or plan with pass_size=1"
            )
        self._autocast = Autocast(device)
        self._grad = torch.is_grad_enabled()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Sets them on this thread, meanwhile."""
        grad = torch.set_grad_enabled(self._grad)
        with torch.cuda.stream(self._stream), self._default, self._autocast.restored(), grad:
            yield


class RandomState:
    """The states of PyTorch's generators of the CPU and of the device of compute.

    Args:
        device: the device of compute.
        seed: the states that follow from this seed; None: the present ones.
    """

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        self._device, cuda = device, [device] if device.type == "cuda" else []
        if seed is None:
            self._states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, cuda)]
        else:
            devices = [torch.device("cpu"), *cuda]
            self._states = [torch.Generator(each).manual_seed(seed).get_state() for each in devices]

    def is_same(self, other: RandomState) -> bool:
        """Whether the states of all generators are those of `other`."""
        return all(map(torch.equal, self._states, other._states))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Makes these the present states, meanwhile."""
        present = RandomState(self._device)
        self._restore()
        try:
            yield
        finally:
            present._restore()

    def _restore(self) -> None:
        torch.set_rng_state(self._states[0])
        if len(self._states) > 1:
            torch.cuda.set_rng_state(self._states[1], self._device)


# --- regions ---------------------------------------------------------------------------------------------------------


class Slot:
    """The gradient of a tensor at which a graph ends."""

    gradient: torch.Tensor | None = None
    is_closed = False
    """Whether the backward that begins with its gradient has begun."""

    def leaf(self, value: torch.Tensor) -> torch.Tensor:
        """The value without its graph, for glue and layers to read; unlike a leaf of autograd it may be written to."""
        leaf: torch.Tensor = _Caught.apply(value.detach().requires_grad_(), self)  # type: ignore[no-untyped-call]
        return leaf


class _Caught(torch.autograd.Function):
    """Gives a tensor on, and its gradient to a slot, as it is: autograd would give it the strides of the tensor, and
    other kernels might follow."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, slot: Slot) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.slot = slot
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None]:
        if gradient is not None and ctx.slot.is_closed:
            raise InputError(
                "a backward after accumulate() goes through layers, whose graphs are gone then: call it inside of "
                "step_fn, once for each micro-batch, or plan with pass_size=1"
            )
        if gradient is not None:
            had = ctx.slot.gradient
            ctx.slot.gradient = gradient if had is None else had + gradient
        return None, None


_LEAF = "AccumulateGrad"
"""The class of the nodes at which autograd leaves gradients."""


def _slot_at(node: Any) -> Slot | None:
    """The slot of a node of autograd; None for one at which no graph ends."""
    slot = getattr(node, "slot", None)
    return slot if isinstance(slot, Slot) else None


Root = tuple[GradientEdge, Slot]
"""The place where a backward begins: an edge of the graph, and the slot that has the gradient there."""


class Glue:
    """The operators that one micro-batch runs after a region and before the next."""

    def __init__(self) -> None:
        self._slots: dict[GradientEdge, Slot] = {}  # of what has entered regions
        self._roots: list[Root] = []
        self._first = sequence_number()

    def over(self) -> list[Root]:
        """Begins the next glue, since a region is over; returns where the backward of the last one begins."""
        roots, self._roots, self._first = self._roots, [], sequence_number()
        return roots

    def slot_of(self, value: torch.Tensor) -> Slot | None:
        """The slot for the gradient of what enters a region; None if it has no graph, such as a parameter.

        Raises:
            InputError: a hook waits for this gradient, or operators of an earlier glue are part of the graph.
        """
        if not value.requires_grad or isinstance(value, nn.Parameter):
            return None
        if value._backward_hooks or value.retains_grad:
            _refuse_hook(value.shape)
        if value.grad_fn is None:
            return None
        refuse_hooks(value)
        edge = get_gradient_edge(value)
        slot = _slot_at(edge.node) or self._slots.get(edge)
        if slot is None:
            slot = self._slots[edge] = Slot()
            # What it is made of may have a gradient already, which later regions or the loss have given. Autograd
            # begins with that, too, and adds the parts of this glue one by one, as in a graph that is not cut.
            ends = [(GradientEdge(node, 0), node.slot) for node in self.ends_of([value])]
            self._roots += [(edge, slot), *ends]
        return slot

    def ends_of(self, outputs: Sequence[Any]) -> list[Any]:
        """The nodes of what has left regions, from which this glue has made tensors, or edges of the graph.

        Raises:
            InputError: operators before the last region have taken part.
        """
        todo = [each.grad_fn if isinstance(each, torch.Tensor) else each.node for each in outputs]
        found: dict[Any, None] = {}
        while todo:
            node = todo.pop()
            if node is None or node in found or type(node).__name__ == _LEAF:
                continue
            found[node] = None
            if _slot_at(node) is None:
                todo += [following for following, _ in node.next_functions]
                if node._sequence_nr() < self._first:
                    raise InputError(
                        "after a layer, this model or its loss computes with a tensor from before that layer, or with "
                        "one from inside of it that is not among its outputs, so its micro-batches cannot pass the "
                        "layers together; plan with pass_size=1"
                    )
        return [node for node in found if _slot_at(node) is not None]


class _Input:
    """One tensor among a region's inputs."""

    def __init__(self, value: torch.Tensor, slot: Slot | None, moved: MovedTensor | None) -> None:
        self.slot, self.moved, self._version = slot, moved, value._version
        # A parameter, or a leaf of the user's, gets its gradient itself.
        self._kept = moved or (value if value.requires_grad and slot is None else value.detach())

    def refuse_written(self, value: torch.Tensor, layer: str) -> None:
        """Raises if it is not as it was when the region began."""
        if value._version != self._version:
            raise InputError(
                f"an input of the layer {layer} was written to in place, by the layer or after it, which could not run "
                "again in backward; leave the operation out, or plan with pass_size=1"
            )

    def again(self, layer: str) -> torch.Tensor:
        """The input for another run, without the graph that made it."""
        if isinstance(self._kept, torch.Tensor):
            self.refuse_written(self._kept, layer)
        value = self._kept if isinstance(self._kept, torch.Tensor) else self._kept.tensor()
        return value if self.slot is None else self.slot.leaf(value)


class Region:
    """One call of a layer for one micro-batch.

    Args:
        name: of the layer.
        layer: the module.
        call: runs it.
        device: the device of compute.
        swapping: moves its inputs to the host meanwhile, if the plan says so.
    """

    def __init__(
        self, name: str, layer: nn.Module, call: Callable[..., Any], device: torch.device, swapping: Swapping
    ) -> None:
        self._name, self._layer, self._call, self._swapping = name, layer, call, swapping
        self._modes = self._present_modes()
        self._random, self._autocast = RandomState(device), Autocast(device)
        self.glue_roots: list[Root] = []
        """The places where the backward of the glue before this begins."""
        self._outputs: list[tuple[int, Slot]] = []

    def forward(self, glue: Glue, args: Any, kwargs: Any) -> Any:
        """Runs the layer after the glue of its micro-batch; its floating outputs become leaves."""
        flat, self._spec = tree_flatten((args, kwargs))
        tensors = [item for item in flat if isinstance(item, torch.Tensor)]
        inputs = {id(item): self._input(item, glue.slot_of(item), args) for item in tensors}
        self._inputs = [inputs.get(id(item), item) for item in flat]
        # With gradients on, and nothing saved: without them other kernels may be chosen, such as those of attention
        # with a bias that needs a gradient, and what is recomputed would not be what was computed.
        with torch.autograd.graph.saved_tensors_hooks(_forget, self._refuse):
            output = self._run(args, kwargs)
        for item in tensors:
            inputs[id(item)].refuse_written(item, self._name)
        for moved in self._moved():
            moved.arrived()
        torch.clear_autocast_cache()  # one set of casts for each micro-batch would wait for the end of its forward
        self.glue_roots = glue.over()
        results, spec = tree_flatten(output)
        for place, item in enumerate(results):
            if isinstance(item, torch.Tensor) and item.requires_grad:
                slot = Slot()
                results[place] = slot.leaf(item)
                refuse_hooks(results[place])  # of which several stages may give parts
                refuse_hooks(item)  # which code inside of the layer may have kept
                self._outputs.append((place, slot))
        return tree_unflatten(results, spec)

    def fetch(self) -> None:
        """Begins to bring back inputs that are on the host."""
        for moved in self._moved():
            moved.fetch()

    def roots(self) -> list[Root]:
        """Runs the layer again, if any of its outputs has a gradient; returns where its backward begins."""
        outputs = [(place, slot) for place, slot in self._outputs if slot.gradient is not None]
        for _, slot in self._outputs:
            slot.is_closed = True
        if not outputs:
            return []
        if self._present_modes() != self._modes:
            raise InputError(
                f"train() or eval() was called on the layer {self._name} before its backward, for which it runs again; "
                "call it outside of accumulate(), or plan with pass_size=1"
            )
        inputs = {id(kept): kept for kept in self._inputs if isinstance(kept, _Input)}
        given = {key: kept.again(self._name) for key, kept in inputs.items()}
        args, kwargs = tree_unflatten([given.get(id(kept), kept) for kept in self._inputs], self._spec)
        self._inputs = []
        with self._random.restored(), self._autocast.restored():
            results = tree_flatten(self._run(args, kwargs))[0]
        begins = [(results[place], slot) for place, slot in outputs]
        # See `Glue.slot_of`: what later regions have read, too, has a gradient already.
        begins += [(given[key], kept.slot) for key, kept in inputs.items() if kept.slot is not None]
        return [(get_gradient_edge(tensor), slot) for tensor, slot in begins if tensor.requires_grad]

    def _input(self, value: torch.Tensor, slot: Slot | None, args: Any) -> _Input:
        moved = None
        # Parameters and leaves of the user's get their gradients themselves.
        if slot is not None or not value.requires_grad:
            given = [item for item in args if isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter)]
            number = next((number for number, item in enumerate(given) if item is value), None)
            moved = None if number is None else self._swapping.input_of(self._name, number, value)
        return _Input(value, slot, moved)

    def _present_modes(self) -> list[bool]:
        return [module.training for module in self._layer.modules()]

    def _moved(self) -> list[MovedTensor]:
        inputs = {id(kept): kept for kept in self._inputs if isinstance(kept, _Input)}
        return [kept.moved for kept in inputs.values() if kept.moved is not None]

    def _run(self, args: Any, kwargs: Any) -> Any:
        args, kwargs = with_own_caches(args, kwargs)
        return self._call(*args, **kwargs)

    def _refuse(self, packed: None) -> torch.Tensor:
        raise InputError(
            f"a tensor from inside the layer {self._name} is used in backward without being among its outputs, as if "
            "it was kept on a module or in a list; return it from the layer, or plan with pass_size=1"
        )


def _forget(tensor: torch.Tensor) -> None:
    return None


def refuse_hooks(value: torch.Tensor) -> None:
    """Makes hooks on a tensor that is no leaf raise from now on: its own graph gets a part of its gradient, or none."""
    if value.grad_fn is not None:
        value.register_hook = value.retain_grad = partial(_refuse_hook, value.shape)  # type: ignore[method-assign]


def _refuse_hook(shape: torch.Size, *_: Any, **__: Any) -> Any:
    raise InputError(
        f"a hook, or retain_grad(), waits for the gradient of a tensor of shape {list(shape)} that enters or leaves a "
        "layer, which a pass of several micro-batches takes elsewhere; leave it out, put it on a tensor inside of the "
        "layer, or plan with pass_size=1"
    )
