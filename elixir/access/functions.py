"""Sorts torch functions by what they do to their arguments: read values, write values, or read only metadata."""

from __future__ import annotations

from typing import Any

_METADATA_ATTRIBUTES = frozenset(
    """shape dtype device requires_grad grad grad_fn is_leaf ndim layout is_cuda is_cpu is_meta is_sparse names
    is_nested _version output_nr retains_grad is_quantized itemsize nbytes grad_dtype""".split()
)
_METADATA_METHODS = frozenset(
    """size dim numel nelement element_size is_floating_point is_complex register_hook
    register_post_accumulate_grad_hook get_device requires_grad_ __hash__ __reduce_ex__ ndimension
    is_same_size empty_like zeros_like ones_like full_like rand_like randn_like randint_like
    new_empty new_zeros new_ones new_full new_tensor new_empty_strided stride is_contiguous dim_order""".split()
)
_IN_PLACE_OPERATORS = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ "
    "__ixor__".split()
)
RENORMALISE = frozenset(("embedding", "embedding_bag"))
"""Functions that with ``max_norm`` first write to the requested rows of their second argument, the weight."""
REPLACES_MEMORY = "set_"
"""The operator that gives a tensor other memory, like setting ``data``. PyTorch calls no torch function for it."""


def operator_reads_only_metadata(name: str) -> bool:
    """Whether an operator of this name reads no element of its arguments."""
    return name in _METADATA_METHODS


def reads_only_metadata(func: Any) -> bool:
    """Whether a function reads no element: it reads metadata, or sets an attribute that is no memory."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return name != "__get__" or getattr(getattr(func, "__self__", None), "__name__", "") in _METADATA_ATTRIBUTES
    return name in _METADATA_METHODS


def name_of(func: Any) -> str:
    """The name of a function, for an order of uses or a message."""
    name = getattr(func, "__name__", str(func))
    # A property is named by its getter.
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name == "__get__" else name


def written_arguments(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a function writes to: the first one of an in-place function, and ``out``."""
    if name in RENORMALISE:
        return () if kwargs["max_norm"] is None else args[1:2], {}
    out = {"out": kwargs["out"]} if kwargs.get("out") is not None else {}
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS
    if not in_place:
        return (), out
    return tuple(args[:1]), out if args else kwargs
