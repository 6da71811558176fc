"""Values of meta tensors, where they are known.

A meta tensor has no values, yet a model may decide by one: skip a layer, pick an expert, stop at a padding token. What
follows from real data (token ids, masks, positions) is known, so storages of such tensors carry a *shadow*: their
values on the CPU, worked out only when something asks. What follows from weights or activations is not known, and is
never guessed: see `elixir.tracer.values.unknown_number`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from elixir.torch_private import DisableTorchDispatch, tree_leaves
from elixir.tracer.ledger import Ledger, StorageRecord
from elixir.tracer.values.unknown_number import undecidable

MAX_SHADOW_NUMEL = 2**26
"""Values of larger tensors are not worked out: 512 MiB of int64."""
MAX_COPIED_NUMEL = 2**22
"""Largest tensor whose values are copied, before an in-place operator changes them or where they lie on the CPU. Larger
ones lose their values once they are written to."""
MAX_CHAIN = 32
"""Values that follow by more operators than this, one from the other, are worked out at once: Python's stack ends."""

aten = torch.ops.aten

SELECTIONS = frozenset({aten.index.Tensor, aten.masked_select.default})
"""Operators that pick elements out of their first argument by a mask."""

CONSTANTS_LIKE = frozenset(
    {
        aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.new_zeros.default,
        aten.new_ones.default, aten.new_full.default,
    }
)  # fmt: skip
"""Operators whose result is known even where the values of their argument are not."""

_UNWRITTEN = "values that nobody has written"
"""Among the assumptions of a shadow: nothing follows from it until something writes to it. Programs fill what they make
by `torch.empty`; a kernel that a trace replaces makes its results so, and they follow from weights."""
_UNINITIALISED = frozenset(
    {
        aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)  # fmt: skip
_OVERWRITES = frozenset(
    {
        aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.copy_.default, aten.masked_fill_.Scalar,
        aten.masked_fill_.Tensor,
    }
)  # fmt: skip
"""Pointwise operators that do not read what they write to."""

_IF_FINITE = {
    aten.isnan.default: False,
    aten.isinf.default: False,
    aten.isposinf.default: False,
    aten.isneginf.default: False,
    aten.eq.Tensor: True,
    aten.ne.Tensor: False,
    aten.eq.Scalar: False,
    aten.ne.Scalar: True,
}
"""Operators that check for NaN and infinity -> what they say of a finite number. Comparisons do so where both operands
are the same, or one is infinite: `torch.isfinite` is made of them."""

CHECKS_FINITE = frozenset(_IF_FINITE)


def assume_finite(shadows: Shadows, func: Any, args: Any, outcome: torch.Tensor) -> None:
    """Supposes that a single floating number which the step checks, such as its loss, is finite.

    Args:
        shadows: take the outcome.
        func: one of `CHECKS_FINITE`.
        args: its arguments.
        outcome: what it gave.
    """
    number = args[0]
    if outcome.numel() != 1 or not number.is_floating_point() or shadows.known(outcome) is not None:
        return
    with_itself = len(args) > 1 and args[1] is number
    with_infinity = len(args) > 1 and isinstance(args[1], float) and math.isinf(args[1])
    if len(args) == 1 or with_itself or with_infinity:
        said = torch.full(outcome.shape, _IF_FINITE[func])
        shadows.attach(outcome, said, "single numbers that the step checks for NaN and infinity are finite")


class Shadow:
    """The values of one storage, which never change: a flat CPU tensor, or how to compute it.

    Args:
        numel: elements of the storage.
        compute: gives them.
        supposed: the assumptions that gave these values, such as balanced routing.
        operands: what `compute` works with.
    """

    __slots__ = ("_compute", "_value", "chain", "numel", "supposed")

    def __init__(
        self,
        numel: int,
        compute: Callable[[], torch.Tensor],
        supposed: frozenset[str] = frozenset(),
        operands: Iterable[Shadow] = (),
    ) -> None:
        self.numel = numel
        self.supposed = supposed
        self._compute: Callable[[], torch.Tensor] | None = compute
        self._value: torch.Tensor | None = None
        self.chain: int = 1 + max((operand.chain for operand in operands), default=0)
        """How many operators have to be worked out one after the other."""
        if self.chain > MAX_CHAIN:
            self.value()

    def value(self) -> torch.Tensor:
        """The storage's elements as a flat CPU tensor."""
        if self._value is None:
            assert self._compute is not None
            with DisableTorchDispatch():  # it is no operator of the step
                self._value = self._compute()
            self._compute, self.chain = None, 0
        return self._value


class View:
    """A shadow seen with a size, strides and an offset."""

    __slots__ = ("_geometry", "shadow")

    def __init__(self, shadow: Shadow, dtype: torch.dtype, *geometry: Any) -> None:
        self.shadow = shadow
        self._geometry = dtype, geometry

    @classmethod
    def of(cls, shadow: Shadow, tensor: torch.Tensor) -> View:
        """A shadow seen as a tensor is."""
        return cls(shadow, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def value(self) -> torch.Tensor:
        """A CPU tensor with the values, sharing memory with the shadow."""
        dtype, geometry = self._geometry
        flat = self.shadow.value()
        return (flat if flat.dtype == dtype else flat.view(dtype)).as_strided(*geometry)


def _blank(tensor: torch.Tensor) -> View:
    """Zeros that take no memory, in place of a tensor of which only shape and dtype matter."""
    shadow = Shadow(1, partial(torch.zeros, 1, dtype=tensor.dtype))
    return View(shadow, tensor.dtype, tensor.size(), (0,) * tensor.dim(), 0)


def arguments_changed(change: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
    """The arguments of an operator, each item of which, in lists too, is what `change` makes of it."""

    def changed(item: Any) -> Any:
        return [changed(each) for each in item] if type(item) in (list, tuple) else change(item)

    return tuple(map(changed, args)), {name: changed(item) for name, item in kwargs.items()}


class Shadows:
    """Attaches shadows to the storages of a ledger and follows them through operators."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._supposed: dict[str, None] = {}

    @property
    def supposed(self) -> tuple[str, ...]:
        """Assumptions on values by which the step has decided; see `attach`."""
        return tuple(self._supposed)

    def attach(
        self, tensor: torch.Tensor, values: torch.Tensor | Callable[[], torch.Tensor], supposed: str | None = None
    ) -> None:
        """`tensor` (meta) has these values, cast to its dtype; they are read only when asked for.

        Args:
            tensor: followed by the ledger.
            values: of its shape, or what gives them.
            supposed: what was supposed to have them, in words; None where they follow from data.
        """
        record = self._ledger.find(tensor)
        if record is not None and tensor.numel():
            numel, dtype = tensor.untyped_storage().nbytes() // tensor.itemsize, tensor.dtype
            geometry = (tensor.size(), tensor.stride(), numel)
            source = values.detach() if isinstance(values, torch.Tensor) else values

            def compute() -> torch.Tensor:
                found = source if isinstance(source, torch.Tensor) else source()
                return _flat_like(found.to(dtype), geometry)

            record.shadow = Shadow(tensor.numel(), compute, frozenset() if supposed is None else frozenset({supposed}))

    def known(self, tensor: torch.Tensor) -> View | None:
        """The known values of a meta tensor."""
        view = self._view(tensor)
        return None if view is None or _UNWRITTEN in view.shadow.supposed else view

    def _view(self, tensor: torch.Tensor) -> View | None:
        """The values of a meta tensor that are known, or will be once something has written to it."""
        record = self._ledger.find(tensor)
        if record is None or record.shadow is None:
            return None
        return View.of(record.shadow, tensor)

    def real(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor, meta or not, as a CPU tensor; None where they are unknown.

        The caller decides by them, so their assumption counts from now on.
        """
        if tensor.device.type != "meta":
            return tensor
        view = self.known(tensor)
        if view is None:
            return None
        self._supposed |= dict.fromkeys(sorted(view.shadow.supposed))
        return view.value()

    def derive(
        self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        """Lets new storages in `outputs` carry what `func` makes of known inputs, lazily."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return
        views: dict[int, View | torch.Tensor] = {}
        for tensor in inputs:
            view = snapshot(tensor) if not tensor.is_meta else self.known(tensor)
            if func in CONSTANTS_LIKE and tensor.is_meta:
                view = _blank(tensor)
            if view is None:
                return
            views[id(tensor)] = view
        sources, supposed = _sources(views.values())
        supposed |= {_UNWRITTEN} if func in _UNINITIALISED else frozenset()
        operands = arguments_changed(lambda item: views.get(id(item), item), args, kwargs)
        run = functools.cache(partial(self._evaluate, func, *operands))
        for position, tensor in enumerate(outputs):
            record = self._ledger.find(tensor)
            if record is None or record.shadow is not None or tensor.numel() == 0:
                continue
            numel = tensor.untyped_storage().nbytes() // tensor.itemsize
            if numel <= MAX_SHADOW_NUMEL:
                compute = partial(_made, run, position, (tensor.size(), tensor.stride(), numel))
                record.shadow = Shadow(numel, compute, supposed, sources)

    def mutate(
        self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], written: list[StorageRecord]
    ) -> None:
        """Follows an in-place operator, lazily: new values for what it writes to, or none if it makes them unknown."""
        followed = [record for record in written if record.shadow is not None]
        known = all(self._view(tensor) is not None for tensor in inputs if tensor.is_meta)
        small = all(record.shadow.numel <= MAX_COPIED_NUMEL for record in followed)
        if not known or not small or torch.Tag.nondeterministic_seeded in func.tags:
            for record in followed:
                record.shadow = None
            return
        overwrites = torch.Tag.pointwise not in func.tags or func in _OVERWRITES or "out" in kwargs
        copies: dict[int, Shadow] = {}
        for record in followed:
            old = record.shadow
            supposed = old.supposed - {_UNWRITTEN} if overwrites else old.supposed
            record.shadow = copies[record.index] = Shadow(old.numel, partial(_copied, old), supposed, [old])
        views = {id(t): snapshot(t) if not t.is_meta else self._view(t) for t in inputs}
        operands = arguments_changed(lambda item: views.get(id(item), item), args, kwargs)
        run, (sources, supposed) = functools.cache(partial(self._evaluate, func, *operands)), _sources(views.values())
        for record in followed:
            copy = copies[record.index]
            record.shadow = Shadow(copy.numel, partial(_written, run, copy), supposed, sources)

    def exchange(self, args: Any) -> None:
        """Follows a collective, whose schema does not say that it writes to its first argument: other ranks have what
        this one has. One without tensors in its second changes the first in place, which stays as it is here."""
        written, given, *_ = args
        sources = [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]
        for tensor in tree_leaves(written) if sources else ():
            record = self._ledger.find(tensor)
            if record is None or record.shadow is None:  # on the host, where it has values, or unknown as it was
                continue
            value = self.real(sources[0])
            if value is None or tensor.numel() % max(value.numel(), 1):
                record.shadow = None
                continue
            whole = value.reshape(-1).repeat(tensor.numel() // max(value.numel(), 1)).view(tensor.shape)
            self.mutate(aten.copy_.default, (tensor, whole), {}, [tensor, whole], [record])

    def evaluate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`func` on the real values of its arguments; `TraceError` where one is unknown."""

        def real(item: Any) -> Any:
            if not isinstance(item, torch.Tensor):
                return item
            value = self.real(item)
            if value is None:
                raise undecidable(f"the outcome of {func}")
            return value

        return self._evaluate(func, *arguments_changed(real, args, kwargs))

    def picked(self, func: Any, args: Any) -> tuple[Any, int]:
        """A selection by masks, rewritten as one by positions, and the bytes the positions take while it runs.

        Args:
            func: one of `SELECTIONS`, whose first argument is not known; the masks are, or this raises `TraceError`.

        Returns:
            Arguments for ``aten.index.Tensor``.
        """
        tensor = args[0]
        masks = [args[1]] if func is aten.masked_select.default else args[1]
        if func is aten.masked_select.default and tensor.shape != masks[0].shape:
            shape = torch.broadcast_shapes(tensor.shape, masks[0].shape)
            tensor, masks = tensor.expand(shape), [masks[0].expand(shape)]
        positions: list[torch.Tensor | None] = []
        taken = 0
        for mask in masks:
            if mask is None or mask.dtype not in (torch.bool, torch.uint8):
                positions.append(mask)
                continue
            count = len(self.evaluate(aten.nonzero.default, (mask,), {}))
            positions.extend(torch.empty(count, dtype=torch.int64, device="meta") for _ in range(mask.dim()))
            taken += count * mask.dim() * torch.int64.itemsize
        return (tensor, positions), taken

    @staticmethod
    def _evaluate(func: Any, args: Any, kwargs: Any) -> Any:
        def concrete(item: Any) -> Any:
            if isinstance(item, View):
                return item.value()
            if isinstance(item, torch.device) and item.type == "meta":
                return torch.device("cpu")
            return item

        args, kwargs = arguments_changed(concrete, args, kwargs)
        with torch.no_grad(), DisableTorchDispatch():
            if func is aten.histc.default and not args[0].is_floating_point():
                # the CPU has no kernel that counts integers
                return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
            if func in _WIDEN_IF_ASKED and args[2]:  # nor has it one that widens
                return func(args[0].float(), args[1], False)
            return func(*args, **kwargs)


_WIDEN_IF_ASKED = (aten._softmax.default, aten._log_softmax.default)


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor's present values, apart from it: it may be written to, and must not live longer for being known."""
    if tensor.numel() > MAX_COPIED_NUMEL:
        return tensor.detach()
    with DisableTorchDispatch():
        return tensor.detach().clone()


def _sources(views: Iterable[View | torch.Tensor | None]) -> tuple[list[Shadow], frozenset[str]]:
    """The shadows among some values, and the assumptions that gave them."""
    shadows = [view.shadow for view in views if isinstance(view, View)]
    return shadows, frozenset[str]().union(*(shadow.supposed for shadow in shadows))


def _made(run: Callable[[], Any], position: int, geometry: tuple[Any, Any, int]) -> torch.Tensor:
    """One of the tensors that an operator makes, as its storage is laid out."""
    made = run()
    tensors = [made] if isinstance(made, torch.Tensor) else [item for item in made if isinstance(item, torch.Tensor)]
    return _flat_like(tensors[position], geometry)


def _written(run: Callable[[], Any], copy: Shadow) -> torch.Tensor:
    """The values after an operator has written to them."""
    run()
    return copy.value()


def _copied(shadow: Shadow) -> torch.Tensor:
    return shadow.value().clone()


def _flat_like(values: torch.Tensor, geometry: tuple[Any, Any, int]) -> torch.Tensor:
    """`values` laid out as the meta storage is: flat, of `numel` elements, with the given size and stride."""
    size, stride, numel = geometry
    flat = torch.zeros(numel, dtype=values.dtype)
    flat.as_strided(size, stride).copy_(values)
    return flat
