"""Shape propagation by operator signature: run an operator on meta once, then only repeat what it gave.

A large model dispatches the same few operators on the same few shapes over and over (OPT-175B: under a hundred
signatures in tens of thousands of dispatches), and PyTorch's meta kernels are slow. With the cache off the result is
the same to the byte, because an operator is remembered only under three conditions:

* Its schema says that all it returns is new tensors, or lengths next to them, and that neither shapes nor results
  follow from data. In-place operators, of which few steps have many, are out.
* Its arguments are ordinary dense meta tensors, numbers, dtypes and the like. Their types, shapes and strides, the
  numbers and the default dtype are all that shape propagation depends on.
* The first run has confirmed it: every result has a storage that `empty_strided` would make.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from elixir.access.access_listener import REPLACES_MEMORY
from elixir.errors import TraceError
from elixir.step_trace import Operation
from elixir.torch_private import TopDispatch
from elixir.tracer.device.autograd_in_place import WRITES_IN_PLACE
from elixir.tracer.device.routed_functions import LENGTHS_IN_TENSORS
from elixir.tracer.device.target import Target
from elixir.tracer.operation_kinds import PRODUCTS, names_if_of_documents, operation_of
from elixir.tracer.values.expert_choice import CHOOSES
from elixir.tracer.values.shadows import CHECKS_FINITE, CONSTANTS_LIKE
from elixir.tracer.values.unknown_number import user_location

aten = torch.ops.aten

DROPOUT = "dropout_p"
"""Argument of attention that says how much it drops."""
META = torch.device("meta")
_NAMESPACES = frozenset({"aten", "prims"})
"""Operators of others may do more than their schema says."""
_VALUE_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})

DATA_DEPENDENT = frozenset(
    {
        aten.nonzero.default, aten.masked_select.default, aten.unique_consecutive.default, aten._unique2.default,
        aten.unique_dim.default, aten.repeat_interleave.Tensor, aten.bincount.default, aten.equal.default,
        aten.is_nonzero.default, aten.allclose.default,
    }
)  # fmt: skip
"""Operators whose result's shape, or whose very result, follows from values."""

_DETOURS = frozenset(
    {
        aten.add.Tensor, aten._local_scalar_dense.default, aten._to_copy.default, aten.copy_.default,
        aten.empty.memory_format,
    }
)  # fmt: skip
"""Operators of which some calls do not run: sums of autograd in place, numbers read out, copies to the host and memory
for them."""

_QUICK_VIEWS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: torch.Tensor.detach,
    aten.t.default: torch.Tensor.t,
    aten.transpose.int: torch.Tensor.transpose,
    aten.view.default: torch.Tensor.view,
}
"""The most frequent views, which are half of all operators -> the method that calls the same operator in half the time,
as its arguments are parsed by generated code and not by the schema."""


class Traits:
    """Facts that never change about an operator, looked up once per dispatch."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func = func
        aliased = [
            (position, argument.name, argument.alias_info.is_write)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None
        ]
        self.mutates = schema.is_mutable
        """It writes to an argument."""
        self.views = bool(aliased) and not self.mutates
        """Its results alias an argument that it only reads."""
        self.call: Callable[..., Any] = _QUICK_VIEWS.get(func, func)
        self.written = tuple((position, name) for position, name, is_write in aliased if is_write)
        """(position, name) of the arguments that it writes to."""
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        names = [argument.name for argument in schema.arguments]
        self.dropout_at = names.index(DROPOUT) if DROPOUT in names else None
        followed = func.namespace in _NAMESPACES and _VALUE_TAGS.isdisjoint(func.tags)
        self.makes_tensors = followed and not aliased and _returns_tensors(schema)
        """By its schema, all it does is to return new tensors, whose shapes do not follow from data."""
        self.replaces_memory = schema.name == f"aten::{REPLACES_MEMORY}"
        self.matrix_product = func._overloadpacket in PRODUCTS  # for which matrix libraries keep a workspace
        self.one_dtype = self.matrix_product or func is aten.convolution.default
        self.needs_values = func in DATA_DEPENDENT or func is aten.index.Tensor
        self.lengths_in_tensors = func in LENGTHS_IN_TENSORS
        self.formula_may_write = func in WRITES_IN_PLACE
        self.constant_like = func in CONSTANTS_LIKE
        self.exchanges = func.namespace == "c10d"
        self.may_choose = func in CHOOSES
        self.checks_finite = func in CHECKS_FINITE
        self.of_documents = bool(names_if_of_documents(func))
        self.detours = self.lengths_in_tensors or self.formula_may_write or self.needs_values or func in _DETOURS
        """Whether some of its calls are more, or less, than to run it on meta."""


def _returns_tensors(schema: Any) -> bool:
    """Whether it returns one tensor, several, or one list of them; perhaps lengths as well, as attention does."""
    kinds = [str(returned.type) for returned in schema.returns]
    return kinds == ["List[Tensor]"] or (kinds[:1] == ["Tensor"] and set(kinds) <= {"Tensor", "int"})


KNOWN_TRAITS: dict[int, Traits] = {}
"""Identity of an operator -> its traits. An `OpOverload` hashes in Python, and lives as long as its traits."""


def traits(func: Any) -> Traits:
    """The traits of an operator."""
    known = KNOWN_TRAITS.get(id(func))
    if known is None:
        known = KNOWN_TRAITS[id(func)] = Traits(func)
    return known


_STRIDED = torch.strided
_ATOMS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device})
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})


@functools.cache
def _is_plain(kind: type) -> bool:
    """Whether tensors of a class do below autograd what `torch.Tensor` does."""
    return kind is torch.Tensor or getattr(kind, "__torch_dispatch__", None) is TopDispatch


class Arguments:
    """The tensors among an operator's arguments, and a key that stands for their shapes and for all else.

    There is no key where shape propagation may depend on more than that.
    """

    __slots__ = ("all_meta", "key", "storages", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.storages: list[int] = []
        self.all_meta = True
        parts: list[Any] = [len(args)]
        cacheable = self._scan((*args, *kwargs, *kwargs.values()) if kwargs else args, parts)
        self.key: tuple[Any, ...] | None = tuple(parts) if cacheable else None

    def _scan(self, items: Any, parts: list[Any]) -> bool:
        """Whether the parts stand for all of the items. Runs for every operator that makes something: no calls that
        can be spared.

        The first part of an item says how many follow: a class (one), a size (two), a length (that many items).
        """
        cacheable, tensors, storages = True, self.tensors, self.storages
        for item in items:
            kind: Any = type(item)
            if kind in _ATOMS:
                # 1, 1.0 and True are equal as keys, and mean different result types
                parts += (kind, item)
            elif isinstance(item, torch.Tensor):
                tensors.append(item)
                try:  # as `storage_of`
                    storages.append(item.untyped_storage()._cdata)
                except NotImplementedError:
                    storages.append(0)
                if not item.is_meta:
                    self.all_meta = False
                    cacheable = False
                    continue
                dtype = item.dtype
                # Only complex tensors, and parts of them, can be views that conjugate or negate what they show.
                if item.layout is not _STRIDED or dtype in _COMPLEX or item.is_neg() or not _is_plain(kind):
                    cacheable = False
                    continue
                parts += (item.shape, item.stride(), dtype)
            elif isinstance(item, (list, tuple)):
                parts.append(len(item))
                cacheable = self._scan(item, parts) and cacheable
            else:
                cacheable = False
        return cacheable


Spec = tuple[torch.Size, tuple[int, ...], torch.dtype, int]
"""Size, strides and dtype of a remembered tensor, and bytes that the target's allocator takes for its storage."""


class Outcome(NamedTuple):
    """The outcome of one operator signature, and how to have it again."""

    operation: Operation | None
    """The work of one call; None where no kernel runs."""
    transient_bytes: int
    """The bytes that a call takes and gives back while it runs."""
    container: type
    """`torch.Tensor` for one tensor; the kind of sequence that several come in."""
    outputs: list[Any]
    """Lengths and absent results as they are, otherwise a `Spec`."""


class OperatorCache:
    """Runs operators on meta, from memory where it can.

    Args:
        target: corrects what differs on the pretend device.
        enabled: False runs every operator anew.
    """

    def __init__(self, target: Target, enabled: bool = True) -> None:
        self._target = target
        self._enabled = enabled
        self._seen: dict[Any, Outcome] = {}

    def run(self, op: Traits, args: Any, kwargs: Any, arguments: Arguments) -> tuple[Any, list[Any], Outcome]:
        """`(result, its tensors, outcome)` of an operator that makes something; `recall` has it from then on if it can
        be repeated."""
        func = op.func
        if op.one_dtype and arguments.all_meta:
            _check_one_dtype(func, arguments.tensors)
        result = self.call(op, args, kwargs, arguments)
        if arguments.all_meta:
            result = self._target.results(func, args, result)
        outputs = _outputs(result)
        tensors = [item for item in outputs if isinstance(item, torch.Tensor)]
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                raise TraceError(
                    f"{user_location()}: {func} gives a {tensor.layout} tensor, and only dense ones can be followed; "
                    "an embedding takes sparse=False"
                )
        outcome = Outcome(
            operation=operation_of(func, args, kwargs, result, self._target.product_row_bytes),
            transient_bytes=self._target.transient_bytes(func, args, kwargs, tensors),
            container=type(result),
            outputs=[self._spec(item) for item in outputs],
        )
        repeats = self._enabled and arguments.key is not None and op.makes_tensors
        if repeats and _repeatable(outputs, arguments.tensors):
            self._seen[op, torch.get_default_dtype(), arguments.key] = outcome
        return result, tensors, outcome

    def recall(self, op: Traits, arguments: Arguments) -> Outcome | None:
        """The outcome of an operator that makes something, if `run` has met the signature before."""
        return self._seen.get((op, torch.get_default_dtype(), arguments.key))

    def _spec(self, item: torch.Tensor | int | None) -> Spec | int | None:
        if not isinstance(item, torch.Tensor):
            return item
        held_bytes = self._target.round_bytes(item.untyped_storage().nbytes())
        return item.size(), item.stride(), item.dtype, held_bytes

    def call(self, op: Traits, args: Any, kwargs: Any, arguments: Arguments) -> Any:
        """The result of an operator that runs anew, such as one that writes to an argument."""
        if op.of_documents and self._target.kind == "cpu":
            raise TraceError(
                f"{user_location()}: {op.func} has no kernel for a CPU; trace for a CUDA device, or give the model "
                "attn_implementation='sdpa'"
            )
        if op.func is aten._grouped_mm.default and arguments.all_meta:
            return _grouped_mm(op.func, args, kwargs)
        if op.func in _FILLS_WITH_A_TENSOR and args[0].is_meta and not args[2].is_meta:
            # Kernels take a number on the CPU next to a tensor elsewhere, meta's do not.
            return op.func(*args[:2], args[2].to(META), **kwargs)
        return op.func(*args, **kwargs)


_FILLS_WITH_A_TENSOR = frozenset({aten.masked_fill.Tensor, aten.masked_fill_.Tensor})


def _grouped_mm(func: Any, args: Any, kwargs: Any) -> Any:
    """The meta kernel takes bfloat16 only, the kernels of the devices take other dtypes as well."""
    dtype = args[0].dtype
    cast = [
        torch.empty_strided(arg.size(), arg.stride(), dtype=torch.bfloat16, device=META)
        if isinstance(arg, torch.Tensor) and arg.dtype == dtype
        else arg
        for arg in args
    ]
    result = func(*cast, **kwargs)
    return torch.empty_strided(result.size(), result.stride(), dtype=dtype, device=META)


def _check_one_dtype(func: Any, tensors: list[torch.Tensor]) -> None:
    """The devices' kernels refuse mixed dtypes, the meta kernels do not look."""
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors if tensor.is_floating_point()))
    if len(dtypes) > 1:
        raise TraceError(
            f"{user_location()}: {func} gets {' and '.join(map(str, dtypes))}, and no device multiplies mixed dtypes; "
            "cast one of them, or trace the whole model in one dtype"
        )


def _outputs(result: Any) -> list[Any]:
    if isinstance(result, torch.Tensor):
        return [result]
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _repeatable(outputs: list[Any], inputs: list[torch.Tensor]) -> bool:
    """Whether `empty_strided` gives the same tensors: nothing aliased, nothing larger than its view."""
    seen = {tensor.untyped_storage()._cdata for tensor in inputs}
    for item in outputs:
        if item is None or type(item) is int:
            continue
        if type(item) is not torch.Tensor or item.device != META or item.storage_offset() or item.dtype.is_complex:
            return False
        storage = item.untyped_storage()
        plain = torch.empty_strided(item.size(), item.stride(), dtype=item.dtype, device=META)
        if storage._cdata in seen or storage.nbytes() != plain.untyped_storage().nbytes():
            return False
        seen.add(storage._cdata)
    return True
