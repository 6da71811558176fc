"""`Region`: one call of a layer for one micro-batch, which runs again in backward; `Trail`: what lies between them.

A region runs without keeping a graph and keeps its inputs. What it returns are leaves, at which autograd stops. So each
backward is one call of autograd for one region and one micro-batch, in an order that the pass decides, and the
gradients of a parameter are summed over the micro-batches as a loop does it.

Operators between two regions are called *glue*. A tensor that glue has made and that enters a region becomes a leaf in
place, so that later regions and glue stop there; its own graph waits until backward has come to that glue.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from elixir.access.swapping import MovedTensor, Swapping
from elixir.errors import InputError
from elixir.torch_private import sequence_number, tree_flatten, tree_unflatten
from elixir.wrapper.one_pass.late_hooks import LateHooks, hooks_of, late_hook, refuse_retained
from elixir.wrapper.one_pass.settings import Autocast, RandomState

Roots = list[tuple[Any, torch.Tensor]]
"""Tensors, or edges of the graph, with their gradients: where a backward begins."""


class Slot:
    """The gradient of a leaf.

    Args:
        glue: number of the glue that reads the leaf first, or that has made it.
        made: number of the next node of autograd then, one for all outputs of a region; None: of the next node now.
    """

    __slots__ = ("__weakref__", "glue", "gradient", "made")

    def __init__(self, glue: int, made: int | None = None) -> None:
        self.gradient: torch.Tensor | None = None
        self.glue = glue
        self.made = sequence_number() if made is None else made

    def add(self, gradient: torch.Tensor) -> None:
        """Adds what one use of the leaf gives, as autograd would.

        Raises:
            InputError: the gradient has a graph, in which what comes after it is missing.
        """
        if gradient.requires_grad:
            raise InputError(
                "backward was asked for a graph of gradients (create_graph=True), which in a pass of several "
                "micro-batches ends at each layer; leave it out, or plan with pass_size=1"
            )
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def take(self) -> torch.Tensor | None:
        """Gives the gradient away."""
        gradient, self.gradient = self.gradient, None
        return gradient

    def leaf(self, value: torch.Tensor) -> torch.Tensor:
        """The value without its graph, for glue and layers to read; unlike a leaf of autograd it may be written to."""
        leaf: torch.Tensor = _Caught.apply(value.detach().requires_grad_(), self)  # type: ignore[no-untyped-call]
        leaf.elixir_slot = self, leaf.grad_fn  # type: ignore[attr-defined]
        return leaf

    def cut(self, value: torch.Tensor) -> None:
        """Takes the graph off a tensor, which readers may have already, and makes it send its gradients here."""
        value.detach_().requires_grad_()
        value._backward_hooks = None  # these stay with the graph, where they get the sum of all gradients
        value.elixir_slot = self, None  # type: ignore[attr-defined]
        strides, restrided = value.stride(), list[torch.Tensor]()

        def passes(gradient: torch.Tensor | None) -> None:
            """Keeps a gradient to which autograd would give the strides of the leaf: other kernels may follow it. This
            runs for `torch.autograd.grad` of the leaf, too, which returns the gradient instead."""
            restrided.clear()
            if gradient is not None and gradient.stride() != strides and not gradient.requires_grad:
                restrided.append(gradient)  # none with a graph, which would keep itself alive

        def arrived(leaf: torch.Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            if restrided:
                gradient = restrided.pop()
            if gradient is not None:
                self.add(gradient)

        value.register_hook(passes)
        value.register_post_accumulate_grad_hook(arrived)
        refuse_retained(value)

    @staticmethod
    def of(value: torch.Tensor) -> Slot | None:
        """The slot of a leaf, or of what stands for it; None for anything else."""
        slot, node = getattr(value, "elixir_slot", (None, None))
        return slot if value.grad_fn is node else None  # an in-place write has given it another node


class _Caught(torch.autograd.Function):
    """Gives a tensor on, and its gradient to a slot, as it is: autograd would give it the strides of the tensor."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, slot: Slot) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.slot = slot
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None]:
        if gradient is not None:
            ctx.slot.add(gradient)
        return None, None


def leaf_of(node: Any) -> tuple[torch.Tensor | None, Slot | None]:
    """The leaf at which a node of autograd ends a graph, and the slot that gets its gradient; None for other nodes."""
    variable = getattr(node, "variable", None)
    slot = getattr(node, "slot", None) if variable is None else Slot.of(variable)
    return variable, slot if isinstance(slot, Slot) else None


class _Begin(torch.autograd.Function):
    """Begins a backward at an output, and lets go of its gradient: autograd holds those that it is given to its end."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
        ctx.gradients = gradients
        return output.new_empty(())

    @staticmethod
    def backward(ctx: Any, nothing: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradients.pop(), None


def beginnings(roots: Roots) -> tuple[list[Any], list[torch.Tensor]]:
    """Takes `roots` over: tensors and gradients for a call of autograd, which holds neither for long."""
    tensors, gradients = [], []
    with torch.enable_grad():
        while roots:
            root, gradient = roots.pop(0)
            if isinstance(root, torch.Tensor):
                root = _Begin.apply(root, [gradient])  # type: ignore[no-untyped-call]
                gradient = root.detach()
            tensors.append(root)
            gradients.append(gradient)
    return tensors, gradients


class Trail:
    """The backward that one micro-batch has left between its regions."""

    def __init__(self) -> None:
        self._marks = [sequence_number()]
        """By glue, the number of autograd's first node in it; each thread counts its own."""
        self._edges: dict[int, list[tuple[Any, Slot]]] = {}
        self._views: dict[int, dict[int, tuple[torch.Tensor, Slot]]] = {}
        self._entered: list[LateHooks] = []
        """The hooks of tensors that have entered a region."""

    @property
    def glue(self) -> int:
        """Number of the glue that runs now: regions that have run."""
        return len(self._marks) - 1

    @property
    def glue_began(self) -> int:
        """The number of autograd's first node in the glue that runs now."""
        return self._marks[-1]

    def region_over(self) -> None:
        """Begins the next glue."""
        self._marks.append(sequence_number())

    def slot_of(self, value: torch.Tensor) -> Slot | None:
        """The slot for the gradient of a region's input; None for an input without a graph, such as a parameter."""
        slot = Slot.of(value)
        if slot is None:
            if value.grad_fn is None:
                return None
            if value.retains_grad:
                raise late_hook(value.shape)
            glue = self._made_in(value)
            if value._is_view():  # cannot be detached in place
                views = self._views.setdefault(glue, {})
                return views.setdefault(id(value), (value, Slot(glue)))[1]
            edge = torch.autograd.graph.get_gradient_edge(value)
            slot = Slot(glue)
            slot.cut(value)
            self._edges.setdefault(glue, []).append((edge, slot))
        self.watch(value)
        return slot

    def watch(self, value: torch.Tensor) -> None:
        """Refuses hooks that this tensor has when backward begins."""
        self._entered.append(LateHooks.watched(value))

    def refuse_hooked(self) -> None:
        """Refuses hooks of tensors that have entered a region, whose gradients come without them.

        Raises:
            InputError: there are some.
        """
        for entered in self._entered:
            entered.refuse()

    def roots(self, glue: int) -> Roots:
        """The tensors and gradients with which the backward of a glue begins; they are given away."""
        found: list[tuple[Any, Slot]] = [*self._views.pop(glue, {}).values(), *self._edges.pop(glue, ())]
        return [(root, gradient) for root, slot in found if (gradient := slot.take()) is not None]

    def _made_in(self, tensor: torch.Tensor) -> int:
        """The oldest glue to whose operators a tensor's graph leads: nothing may be left of it once backward is there.

        Raises:
            InputError: it also leads to outputs of later regions, whose backward comes first.
        """
        oldest, newest_leaf = self.glue, -1
        todo, seen = [tensor.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable, slot = leaf_of(node)
            if slot is not None:
                newest_leaf = max(newest_leaf, slot.glue)
            if variable is not None:
                continue
            while oldest and node._sequence_nr() < self._marks[oldest]:
                oldest -= 1
            if slot is not None:
                continue
            todo += [following for following, _ in node.next_functions]
        if newest_leaf > oldest:
            raise InputError(
                "between two layers, this model computes with a tensor from before earlier layers and with their "
                "outputs, so its micro-batches cannot pass the layers together; plan with pass_size=1"
            )
        return oldest


class _Input:
    """One tensor among a region's inputs."""

    __slots__ = ("_kept", "_version", "slot")

    def __init__(self, value: torch.Tensor, version: int, sent: MovedTensor | None, trail: Trail) -> None:
        self.slot = trail.slot_of(value) if value.requires_grad else None
        self._version = version
        # A parameter, or a leaf of the user's, gets its gradient itself.
        gets_gradient = value.requires_grad and self.slot is None
        self._kept = sent or (value if gets_gradient else value.detach())
        if sent is not None:
            sent.arrived()

    def fetch(self) -> None:
        """Begins to bring it back, if it is on the host."""
        if isinstance(self._kept, MovedTensor):
            self._kept.fetch()

    def again(self, layer: str) -> torch.Tensor:
        """The input for another run, without the graph that made it."""
        kept = self._kept
        if isinstance(kept, torch.Tensor) and kept._version != self._version:
            raise InputError(
                f"an input of the layer {layer} was written to in place after the layer, which could not run again in "
                "backward; leave the operation out"
            )
        value = kept if isinstance(kept, torch.Tensor) else kept.tensor()
        return value if self.slot is None else self.slot.leaf(value)


class Region:
    """One call of a layer for one micro-batch.

    Args:
        name: of the layer.
        call: runs it.
        trail: of the micro-batch.
        device: the device of compute.
        swapping: moves its inputs to the host meanwhile, if the plan says so.
    """

    def __init__(
        self, name: str, call: Callable[..., Any], trail: Trail, device: torch.device, swapping: Swapping
    ) -> None:
        self._name, self._call, self._trail, self._device = name, call, trail, device
        self._swapping = swapping
        self._outputs: list[tuple[int, Slot]] = []
        self._caught: list[tuple[Any, int, Slot]] = []

    def forward(self, args: Any, kwargs: Any) -> Any:
        """Runs the layer; its floating outputs become leaves."""
        flat, self._spec = tree_flatten((args, kwargs))
        versions = [(item, item._version) for item in flat if isinstance(item, torch.Tensor)]
        hooked = [(item, hooks_of(item)) for item, _ in versions]
        given = [item for item in args if isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter)]
        sent = {
            id(item): self._swapping.input_of(self._name, number, item)
            for number, item in enumerate(given)
            if not (item.is_leaf and item.requires_grad and Slot.of(item) is None)  # which gets its gradient itself
        }
        self._random, self._autocast = RandomState(self._device), Autocast(self._device)
        collector = _collector()
        before = {key: len(items) for key, items in collector.items() if isinstance(items, list)}
        # With gradients on, and nothing saved: without them other kernels may be chosen, such as those of attention
        # with a bias that needs a gradient, and what is recomputed would not be what was computed.
        with torch.autograd.graph.saved_tensors_hooks(_forget, self._refuse):
            output = self._call(*args, **kwargs)
        for item, known in hooked:
            if hooks_of(item) - known:
                raise late_hook(item.shape)
        if any(item._version != version for item, version in versions):
            raise InputError(
                f"the layer {self._name} writes to its input in place, with which it could not run again in backward; "
                "plan with pass_size=1"
            )
        inputs = {id(item): _Input(item, version, sent.get(id(item)), self._trail) for item, version in versions}
        self._inputs = [inputs[id(item)] if isinstance(item, torch.Tensor) else item for item in flat]
        Autocast.forget_casts()  # one set for each micro-batch would wait for the end of its forward
        self._trail.region_over()
        results, spec = tree_flatten(output)
        leaves: dict[int, torch.Tensor] = {}
        for place, item in enumerate(results):
            if isinstance(item, torch.Tensor) and item.requires_grad and id(item) not in inputs:
                results[place], slot = self._leaf(item)
                self._outputs.append((place, slot))
                leaves[id(item)] = results[place]
        for key, first in before.items():  # what hooks inside have caught, such as router logits, is an output, too
            items = collector[key]
            for at in range(first, len(items)):
                item = items[at]
                if id(item) in leaves:  # one leaf, so that its gradient is one sum
                    items[at] = leaves[id(item)]
                elif isinstance(item, torch.Tensor) and item.requires_grad:
                    entered = id(item) in inputs
                    if entered and Slot.of(item) is not None:
                        continue  # it ends at a slot already
                    items[at], slot = self._leaf(item)
                    if entered:  # a view or a leaf of the user's, in whose gradient the layer has a part
                        self._trail.watch(items[at])
                    self._caught.append((key, at - first, slot))
        return tree_unflatten(results, spec)

    def fetch(self) -> None:
        """Begins to bring back inputs that are on the host."""
        for kept in self._inputs:
            if isinstance(kept, _Input):
                kept.fetch()

    def backward(self, differentiate: Callable[[Roots], None]) -> None:
        """Runs the layer again, and its backward, if any of its outputs has a gradient."""
        wanted = [(place, gradient) for place, slot in self._outputs if (gradient := slot.take()) is not None]
        caught = [(key, at, gradient) for key, at, slot in self._caught if (gradient := slot.take()) is not None]
        if not wanted and not caught:
            return
        roots: Roots = []
        with torch.enable_grad():
            given = {id(kept): kept.again(self._name) for kept in self._inputs if isinstance(kept, _Input)}
            for kept in self._inputs:
                had = kept.slot.take() if isinstance(kept, _Input) and kept.slot is not None else None
                if had is not None:
                    # Later regions have read it, too. Parts of this region are added to that gradient one by one, as in
                    # a graph that is not cut, instead of to each other first.
                    given[id(kept)] = given[id(kept)].view_as(given[id(kept)])
                    roots.append((given[id(kept)], had))
        flat = [given[id(kept)] if isinstance(kept, _Input) else kept for kept in self._inputs]
        results, collected = self._run_again(flat, caught)
        del flat, given
        roots = [
            *((results[place], gradient) for place, gradient in wanted if results[place].requires_grad),
            *((collected[key][place], gradient) for key, place, gradient in caught),
            *roots,
        ]
        del results, collected, wanted, caught
        differentiate(roots)
        self._inputs = []

    def _run_again(self, flat: list[Any], caught: list[Any]) -> tuple[list[Any], dict[Any, list[Any]]]:
        args, kwargs = tree_unflatten(flat, self._spec)
        present = RandomState(self._device)
        self._random.restore()
        try:
            with torch.enable_grad(), self._autocast.restored(), _collecting([key for key, *_ in caught]) as collected:
                output = self._call(*args, **kwargs)
        finally:
            Autocast.forget_casts()  # the weights will change, perhaps inside of the same outermost context
            present.restore()
        return tree_flatten(output)[0], collected

    def _leaf(self, value: torch.Tensor) -> tuple[torch.Tensor, Slot]:
        """An output without its graph, which glue may write to in place, unlike a leaf."""
        slot = Slot(self._trail.glue, self._trail.glue_began)
        return slot.leaf(value), slot

    def _refuse(self, packed: None) -> torch.Tensor:
        raise InputError(
            f"a tensor from inside the layer {self._name} is used in backward without being among its outputs, as if "
            "it was kept on a module or in a list; return it from the layer, or plan with pass_size=1"
        )


def _forget(tensor: torch.Tensor) -> None:
    return None


def _collector() -> dict[Any, Any]:
    """The lists to which hooks of transformers add outputs of inner modules now; empty if there are none."""
    active = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    return {} if active is None else active.get() or {}


@contextmanager
def _collecting(keys: list[Any]) -> Iterator[dict[Any, list[Any]]]:
    """Lets these hooks add to lists of ours, meanwhile."""
    into: dict[Any, list[Any]] = {key: [] for key in keys}
    active = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    if active is None:
        yield into
        return
    token = active.set(into or None)
    try:
        yield into
    finally:
        active.reset(token)
