"""Shape propagation by operator signature: run an operator on meta once, then only repeat what it gave.

A large model dispatches the same few operators on the same few shapes over and over (OPT-175B: under a hundred
signatures in tens of thousands of dispatches), and PyTorch's meta kernels are slow. Only operators whose arguments are
all meta and whose results alias nothing are remembered, so that with the cache off the result is the same to the byte.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from elixir.errors import TraceError
from elixir.tracer.targets import Target
from elixir.tracer.unknowns import user_location

aten = torch.ops.aten

_META = torch.device("meta")

_MATRIX_PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._grouped_mm.default,
    }
)
"""Operators for which matrix libraries keep a workspace."""

DATA_DEPENDENT = frozenset(
    {
        aten.nonzero.default,
        aten.masked_select.default,
        aten.unique_consecutive.default,
        aten._unique2.default,
        aten.unique_dim.default,
        aten.repeat_interleave.Tensor,
        aten.bincount.default,
        aten.equal.default,
        aten.is_nonzero.default,
        aten.allclose.default,
    }
)
"""Operators whose result's shape, or whose very result, follows from values."""


class Category(enum.Enum):
    """What an operator does with memory."""

    PLAIN = enum.auto()
    """Its results are new."""
    VIEW = enum.auto()
    """Its results alias an argument that it only reads."""
    MUTATES = enum.auto()
    """It writes to an argument."""


class Traits:
    """What never changes about an operator, looked up once per dispatch."""

    __slots__ = (
        "category",
        "foreach",
        "func",
        "matrix_product",
        "needs_values",
        "one_dtype",
        "rewrites_first",
        "written",
    )

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func = func
        aliased = [
            (position, argument.name, argument.alias_info.is_write)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None
        ]
        self.category = Category.MUTATES if schema.is_mutable else Category.VIEW if aliased else Category.PLAIN
        self.written = tuple((position, name) for position, name, is_write in aliased if is_write)
        """(position, name) of the arguments that it writes to."""
        self.foreach = schema.name.startswith("aten::_foreach_")
        resizes = schema.name in ("aten::resize_", "aten::resize_as_", "aten::set_")
        self.rewrites_first = schema.name.endswith("_") and not resizes and [p for p, _ in self.written] == [0]
        """An in-place operator that changes values, never size or storage."""
        self.matrix_product = func in _MATRIX_PRODUCTS
        self.one_dtype = self.matrix_product or func is aten.convolution.default
        self.needs_values = func in DATA_DEPENDENT or func is aten.index.Tensor


_TRAITS: dict[int, Traits] = {}


def traits(func: Any) -> Traits:
    """The traits of an operator. Keyed by identity: an `OpOverload` hashes in Python, and lives as long as its traits."""
    known = _TRAITS.get(id(func))
    if known is None:
        known = _TRAITS[id(func)] = Traits(func)
    return known


@dataclass(frozen=True)
class Cost:
    """What one call of an operator costs on any device."""

    flops: int
    moved_bytes: int
    transient_bytes: int


_ATOMS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device})


class Arguments:
    """The tensors among an operator's arguments, and a key that stands for their shapes and for all else."""

    __slots__ = ("all_meta", "key", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.all_meta = True
        parts: list[Any] = []
        cacheable = self._scan(args, parts)
        if kwargs:
            for name in kwargs:
                parts.append(name)
                cacheable = self._scan((kwargs[name],), parts) and cacheable
        self.key: tuple[Any, ...] | None = tuple(parts) if cacheable and self.all_meta else None

    def _scan(self, items: Any, parts: list[Any]) -> bool:
        cacheable = True
        for item in items:
            if isinstance(item, torch.Tensor):
                self.tensors.append(item)
                if not item.is_meta:
                    self.all_meta = False
                parts.append((item.shape, item.stride(), item.dtype))
            elif type(item) in _ATOMS:
                # 1, 1.0 and True are equal as keys, and mean different result types
                parts.append((type(item), item))
            elif isinstance(item, (list, tuple)):
                parts.append(len(item))
                cacheable = self._scan(item, parts) and cacheable
            else:
                cacheable = False
        return cacheable


class OperatorCache:
    """Runs operators on meta, from memory where it can.

    Args:
        target: corrects what differs on the pretend device.
        enabled: False runs every operator anew.
    """

    def __init__(self, target: Target, enabled: bool = True) -> None:
        self._target = target
        self._enabled = enabled
        self._seen: dict[Any, tuple[list[Any], bool, Cost]] = {}
        self._fits: set[Any] = set()

    def run(self, op: Traits, args: Any, kwargs: Any, arguments: Arguments) -> tuple[Any, list[Any], Cost]:
        """`(result, its tensors, cost)` of a PLAIN operator."""
        func = op.func
        key = (op, arguments.key) if self._enabled and arguments.key is not None else None
        known = self._seen.get(key) if key is not None else None
        if known is not None:
            return self._repeat(*known)
        if op.one_dtype and arguments.all_meta:
            _check_one_dtype(func, arguments.tensors)
        result = self._call(op, args, kwargs, arguments)
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
        cost = Cost(
            flops=count_flops(func, args, kwargs, result),
            moved_bytes=sum(t.nbytes for t in arguments.tensors) + sum(t.nbytes for t in tensors),
            transient_bytes=self._target.transient_bytes(func, args, tensors),
        )
        if key is not None and _repeatable(outputs, arguments.tensors):
            specs = [_spec(item) for item in outputs]
            self._seen[key] = (specs, isinstance(result, torch.Tensor), cost)
        return result, tensors, cost

    def run_in_place(self, op: Traits, args: Any, kwargs: Any, arguments: Arguments) -> Any:
        """Result of a MUTATES operator: on meta there is nothing to write, once its arguments are known to fit."""
        key = (op, arguments.key) if self._enabled and arguments.key is not None else None
        if key is not None and key in self._fits:
            return args[0] if op.func._schema.returns else None
        result = self._call(op, args, kwargs, arguments)
        if key is not None and op.rewrites_first and (result is None or result is args[0]):
            self._fits.add(key)
        return result

    def _call(self, op: Traits, args: Any, kwargs: Any, arguments: Arguments) -> Any:
        if op.foreach and self._enabled and arguments.all_meta:
            return _foreach_by_representatives(op.func, args, kwargs)
        if op.func is aten._grouped_mm.default and arguments.all_meta:
            return _grouped_mm(op.func, args, kwargs)
        return op.func(*args, **kwargs)

    @staticmethod
    def _repeat(specs: list[Any], single: bool, cost: Cost) -> tuple[Any, list[Any], Cost]:
        if single:
            size, stride, dtype = specs[0]
            tensor = torch.empty_strided(size, stride, dtype=dtype, device=_META)
            return tensor, [tensor], cost
        outputs = [
            torch.empty_strided(spec[0], spec[1], dtype=spec[2], device=_META) if type(spec) is tuple else spec
            for spec in specs
        ]
        return tuple(outputs), [item for item in outputs if isinstance(item, torch.Tensor)], cost

    @property
    def signatures(self) -> int:
        """How many distinct signatures it remembers."""
        return len(self._seen) + len(self._fits)


def _foreach_by_representatives(func: Any, args: Any, kwargs: Any) -> Any:
    """A foreach operator on meta, run on one tensor of each shape: an optimizer has thousands of a few shapes."""
    count = len(args[0])
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and len(arg) == count]
    rows: list[int] = []
    representatives: dict[Any, int] = {}
    chosen: list[int] = []
    for position in range(count):
        operands = (items[position] for items in lists)
        key = tuple((t.shape, t.stride(), t.dtype) if isinstance(t, torch.Tensor) else type(t) for t in operands)
        if key not in representatives:
            representatives[key] = len(chosen)
            chosen.append(position)
        rows.append(representatives[key])
    fewer = [
        [arg[position] for position in chosen] if isinstance(arg, (list, tuple)) and len(arg) == count else arg
        for arg in args
    ]
    result = func(*fewer, **kwargs)
    if result is None:
        return None
    specs = [_spec(tensor) for tensor in result]
    return [torch.empty_strided(specs[r][0], specs[r][1], dtype=specs[r][2], device=_META) for r in rows]


def _grouped_mm(func: Any, args: Any, kwargs: Any) -> Any:
    """The meta kernel takes bfloat16 only, the kernels of the devices take other dtypes as well."""
    dtype = args[0].dtype
    cast = [
        torch.empty_strided(arg.size(), arg.stride(), dtype=torch.bfloat16, device=_META)
        if isinstance(arg, torch.Tensor) and arg.dtype == dtype
        else arg
        for arg in args
    ]
    result = func(*cast, **kwargs)
    return torch.empty_strided(result.size(), result.stride(), dtype=dtype, device=_META)


def _check_one_dtype(func: Any, tensors: list[torch.Tensor]) -> None:
    """The devices' kernels refuse mixed dtypes, the meta kernels do not look."""
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors if tensor.is_floating_point()))
    if len(dtypes) > 1:
        raise TraceError(
            f"{user_location()}: {func} gets {' and '.join(map(str, dtypes))}, and no device multiplies mixed dtypes; "
            "cast one of them, or trace the whole model in one dtype"
        )


def count_flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating-point operations by PyTorch's own formulas (`torch.utils.flop_counter`); 0 where it has none."""
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _outputs(result: Any) -> list[Any]:
    if isinstance(result, torch.Tensor):
        return [result]
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _spec(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return (item.size(), item.stride(), item.dtype)
    return item


def _repeatable(outputs: list[Any], inputs: list[torch.Tensor]) -> bool:
    """Whether `empty_strided` gives the same storages: nothing aliased, nothing larger than its view."""
    seen = {tensor.untyped_storage()._cdata for tensor in inputs}
    for item in outputs:
        if not isinstance(item, torch.Tensor):
            if type(item) not in _ATOMS:
                return False
            continue
        storage = item.untyped_storage()
        plain = torch.empty_strided(item.size(), item.stride(), dtype=item.dtype, device=_META)
        if storage._cdata in seen or storage.nbytes() != plain.untyped_storage().nbytes() or item.device != _META:
            return False
        seen.add(storage._cdata)
    return True
