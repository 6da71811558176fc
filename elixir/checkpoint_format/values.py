"""The user's small values as JSON and back, exactly: tags for what JSON lacks, and nothing that could run code.

Plain JSON stands for itself. Other values are objects with one tag, ``{"$": kind, ...}``. Tensors and arrays are not in
the JSON: it holds the key under which they are saved with the other tensors.
"""

from __future__ import annotations

import base64
import math
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from elixir.checkpoint_format.saved_tensor import SAFETENSORS_NAMES, STORED_DTYPES
from elixir.errors import CheckpointCorrupt, CheckpointError, InputError
from elixir.units import dtype_name

DEEPEST = 64
"""Levels of containers in each other. Deeper values would exceed the limit of programs that read the JSON."""
_TAG = "$"
_PLAIN_INT = 2**63
"""Integers from here on are written in hexadecimal: readers of JSON have limits for long decimal ones."""
_NUMPY = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128".split()
)
_BIG = ">"
"""Prefix of the dtype of a big-endian array."""
_HEX = re.compile(r"-?0x[0-9a-f]+")


def encode(value: Any, key: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Encodes a value as plain JSON; also returns the tensors that are saved with it.

    Args:
        value: None, bool, int, float, complex, str, bytes, list, tuple, dict, `Counter`, `OrderedDict`, set, frozenset,
            tensors, numpy scalars and arrays, in each other.
        key: name of the value, such as ``scheduler``; tensors in it get keys that begin with ``value/<key>``.

    Raises:
        InputError: something else is in it; the message says where.
    """
    tensors: dict[str, torch.Tensor] = {}

    def encoded(value: Any, where: str, depth: int) -> Any:
        if depth > DEEPEST:
            raise InputError(
                f"{where[:200]}: more than {DEEPEST} containers in each other, perhaps one that contains itself"
            )

        def inside(item: Any, name: str) -> Any:
            return encoded(item, f"{where}{name}", depth + 1)

        kind = type(value)  # not isinstance: a subclass would come back as something else
        if kind is list:
            return _items(value, inside)
        if kind is dict and all(type(key) is str for key in value) and _TAG not in value:
            return {key: inside(item, f".{key}") for key, item in value.items()}
        if _is_plain(value, kind):
            return value
        if kind in _KINDS:
            return {_TAG: kind.__name__, _KINDS[kind].field: _KINDS[kind].encode(value, inside)}
        if isinstance(value, np.generic) and kind is value.dtype.type and value.dtype.name in _NUMPY:
            raw = np.asarray(value).astype(_numpy_dtype(value.dtype.name)).tobytes()
            return {_TAG: "numpy", "dtype": value.dtype.name, "hex": raw.hex()}
        tag, flat, dtype = _flat(value, where)
        name = f"value/{where}"
        if name in tensors:  # two paths that read the same, such as of the keys 1.0 and '1.0]'
            name = f"{name}#{len(tensors)}"
        tensors[name] = flat
        return {_TAG: tag, "key": name, "dtype": dtype, "shape": list(value.shape)}

    return encoded(value, key, 0), tensors


def decode(data: Any, read: Callable[[str], torch.Tensor], *, path: str | os.PathLike[str], key: str) -> Any:
    """Decodes what `encode` gave. Tensors come back in host memory.

    Args:
        data: plain JSON.
        read: a tensor of the checkpoint by its key, in its shape.
        path: of the file it comes from, for errors.
        key: name of the value, for errors.

    Raises:
        CheckpointCorrupt: the JSON is none that `encode` gives; the error says where.
    """

    def decoded(data: Any, depth: int) -> Any:
        if depth > DEEPEST:
            raise ValueError(f"more than {DEEPEST} containers in each other")

        def inside(item: Any, name: str = "") -> Any:
            return decoded(item, depth + 1)

        if isinstance(data, list):
            return _items(data, inside)
        if not isinstance(data, dict):
            return data  # None, a number or text of an index, which has no other
        if _TAG not in data:
            return {name: inside(item) for name, item in data.items()}
        tag, fields = data[_TAG], {name: item for name, item in data.items() if name != _TAG}
        if tag == "numpy":
            return _scalar(**fields)
        if tag in ("tensor", "array"):
            return _unflat(tag, read, **fields)
        kind = next((kind for kind in _KINDS if kind.__name__ == tag), None)
        if kind is None or list(fields) != [_KINDS[kind].field]:
            raise ValueError(f"no value of kind {tag!r:.40} with {sorted(fields)} is known to this version of Elixir")
        return _KINDS[kind].decode(fields[_KINDS[kind].field], inside)

    try:
        return decoded(data, 0)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointCorrupt(f"not what was saved: {type(error).__name__} {error}", path=path, key=key) from None


_Inside: TypeAlias = Callable[[Any, str], Any]
"""Encodes or decodes what is inside of a value, at a place with a name."""


class _Kind(NamedTuple):
    """A kind of tagged values: the field next to the tag, and the ways there and back."""

    field: str
    encode: Callable[[Any, _Inside], Any]
    decode: Callable[[Any, _Inside], Any]


def _items(values: Any, inside: _Inside) -> list[Any]:
    return [inside(item, f"[{i}]") for i, item in enumerate(values)]


def _of_bytes(kind: Callable[[bytes], Any]) -> _Kind:
    return _Kind(
        "base64",
        lambda value, _: base64.b64encode(value).decode("ascii"),
        lambda data, _: kind(base64.b64decode(_of(str, data), validate=True)),
    )


def _of_items(kind: Callable[[Any], Any], order: Callable[[list[Any]], list[Any]]) -> _Kind:
    return _Kind(
        "items",
        lambda value, inside: order(_items(value, inside)),
        lambda data, inside: kind(_items(_of(list, data), inside)),
    )


def _of_pairs(kind: Callable[[Any], Any]) -> _Kind:
    def encode(value: Any, inside: _Inside) -> Any:
        return [[inside(key, f"[key {key!r:.60}]"), inside(item, f"[{key!r:.60}]")] for key, item in value.items()]

    def decode(data: Any, inside: _Inside) -> Any:
        pairs = [(inside(key, ""), inside(item, "")) for key, item in _of(list, data)]
        found = kind(dict(pairs))
        if len(found) < len(pairs):
            raise ValueError("a key occurs twice")
        return found

    return _Kind("pairs", encode, decode)


def _sorted(items: list[Any]) -> list[Any]:
    return sorted(items, key=repr)  # the order of a set means nothing and differs between processes


_KINDS: dict[type, _Kind] = {
    int: _Kind("hex", lambda value, _: hex(value), lambda data, _: int(_matching(_HEX, data), 16)),
    float: _Kind("hex", lambda value, _: value.hex(), lambda data, _: float.fromhex(_of(str, data))),
    complex: _Kind(
        "hex",
        lambda value, _: [value.real.hex(), value.imag.hex()],
        lambda data, _: _complex(*(float.fromhex(_of(str, part)) for part in _of(list, data))),
    ),
    bytes: _of_bytes(bytes),
    bytearray: _of_bytes(bytearray),
    tuple: _of_items(tuple, list),
    set: _of_items(set, _sorted),
    frozenset: _of_items(frozenset, _sorted),
    dict: _of_pairs(dict),
    OrderedDict: _of_pairs(OrderedDict),
    Counter: _of_pairs(Counter),
}


def _flat(value: Any, where: str) -> tuple[str, torch.Tensor, str]:
    """The tag of a tensor or an array, a flat tensor of what is saved of it, and its dtype in words."""
    kind = type(value)
    if kind is np.ndarray and value.dtype.name in _NUMPY:
        little = _numpy_dtype(value.dtype.name)
        flat = torch.from_numpy(np.array(value, dtype=little, order="C", copy=True).reshape(-1).view(np.uint8))
        return "array", flat, value.dtype.name if value.dtype == little else _BIG + value.dtype.name
    known = isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta
    if kind in (torch.Tensor, torch.nn.Parameter) and known and value.dtype in {*SAFETENSORS_NAMES, torch.complex128}:
        flat = value.detach().resolve_conj().resolve_neg().to("cpu", copy=True).contiguous().reshape(-1)
        # safetensors has no complex128: its real and imaginary parts are saved.
        flat = torch.view_as_real(flat).reshape(-1) if flat.dtype is torch.complex128 else flat
        return "tensor", flat, dtype_name(value.dtype)
    dtype = f" of {value.dtype}" if isinstance(value, (torch.Tensor, np.ndarray)) else ""
    raise InputError(
        f"{where}: a {kind.__module__}.{kind.__qualname__}{dtype} cannot be saved; give plain values (None, bool, int, "
        "float, str, bytes, list, tuple, dict, set, tensors with memory, numpy), or an object with state_dict and "
        "load_state_dict"
    )


def _unflat(tag: str, read: Callable[[str], torch.Tensor], *, key: Any, dtype: Any, shape: Any) -> Any:
    sizes = tuple(_of(int, size) for size in _of(list, shape))
    flat = read(_of(str, key)).reshape(-1)
    if tag == "array":
        saved = _numpy_dtype(_of(str, dtype).removeprefix(_BIG))
        if flat.dtype is not torch.uint8:
            raise ValueError(f"saved as {flat.dtype}")
        there = saved.newbyteorder(">") if dtype.startswith(_BIG) else saved.newbyteorder("=")
        return flat.numpy().view(saved).astype(there, copy=False).reshape(sizes)
    parts = dtype == "complex128"
    if flat.dtype is not (torch.float64 if parts else STORED_DTYPES[_of(str, dtype)]):
        raise ValueError(f"saved as {flat.dtype}")
    return (torch.view_as_complex(flat.view(-1, 2)) if parts else flat).reshape(sizes)


def _scalar(*, dtype: Any, hex: Any) -> Any:
    (found,) = np.frombuffer(bytes.fromhex(_of(str, hex)), dtype=_numpy_dtype(dtype))
    return found


def _complex(real: float, imaginary: float) -> complex:
    return complex(real, imaginary)


def _is_plain(value: Any, kind: type) -> bool:
    """Whether JSON has the value as it is."""
    if kind is int:
        return bool(-_PLAIN_INT < value < _PLAIN_INT)
    return value is None or kind in (bool, str) or (kind is float and math.isfinite(value))


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def _matching(pattern: re.Pattern[str], text: Any) -> str:
    if not pattern.fullmatch(_of(str, text)):
        raise ValueError(f"{text!r:.40} is no number")
    return str(text)


def _numpy_dtype(name: Any) -> np.dtype[Any]:
    if _of(str, name) not in _NUMPY:
        raise ValueError(f"{name!r:.40} is no dtype of an array")
    little: np.dtype[Any] = np.dtype(str(name)).newbyteorder("<")
    return little
