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
from collections.abc import Callable, Mapping
from typing import Any

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
    encoder = _Encoder()
    return encoder.encode(value, key, 0), encoder.tensors


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
    return _Decoder(read, path).decode(data, key, 0)


def _number(value: complex) -> Any:
    if type(value) is int:
        return value if -_PLAIN_INT < value < _PLAIN_INT else {_TAG: "int", "hex": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "hex": value.hex()}
    return {_TAG: "complex", "hex": [value.real.hex(), value.imag.hex()]}


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, where: str, depth: int) -> Any:
        if depth > DEEPEST:
            raise InputError(
                f"{where[:200]}: more than {DEEPEST} containers in each other, perhaps one that contains itself"
            )
        kind = type(value)  # not isinstance: a subclass would come back as something else
        if value is None or kind in (bool, str):
            return value
        if kind in (int, float, complex):
            return _number(value)
        if kind in (bytes, bytearray):
            return {_TAG: kind.__name__, "base64": base64.b64encode(value).decode("ascii")}
        if kind is list:
            return self._items(value, where, depth)
        if kind in (tuple, set, frozenset):
            items = self._items(value, where, depth)
            # The order of a set means nothing and differs between processes.
            return {_TAG: kind.__name__, "items": items if kind is tuple else sorted(items, key=repr)}
        if kind in (dict, OrderedDict, Counter):
            return self._mapping(value, where, depth)
        if kind in (torch.Tensor, torch.nn.Parameter):
            return self._tensor(value, where)
        if kind is np.ndarray:
            return self._array(value, where)
        if isinstance(value, np.generic) and kind is value.dtype.type and value.dtype.name in _NUMPY:
            raw = np.asarray(value).astype(_numpy_dtype(value.dtype.name)).tobytes()
            return {_TAG: "numpy", "dtype": value.dtype.name, "hex": raw.hex()}
        raise InputError(
            f"{where}: a {kind.__module__}.{kind.__qualname__} cannot be saved; give plain values (None, bool, int, "
            "float, str, bytes, list, tuple, dict, set, tensors, numpy), or an object with state_dict and "
            "load_state_dict"
        )

    def _items(self, values: Any, where: str, depth: int) -> list[Any]:
        return [self.encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(values)]

    def _mapping(self, value: Mapping[Any, Any], where: str, depth: int) -> Any:
        if type(value) is dict and all(type(key) is str for key in value) and _TAG not in value:
            return {key: self.encode(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
        pairs = []
        for key, item in value.items():
            encoded = self.encode(key, f"key {key!r:.60} of {where}", depth + 1)
            pairs.append([encoded, self.encode(item, f"{where}[{key!r:.60}]", depth + 1)])
        return {_TAG: type(value).__name__, "pairs": pairs}

    def _tensor(self, value: torch.Tensor, where: str) -> Any:
        known = value.dtype in SAFETENSORS_NAMES or value.dtype is torch.complex128
        if value.layout is not torch.strided or value.is_meta or not known:
            raise InputError(f"{where}: a tensor of {value.dtype}, {value.layout}, on {value.device} cannot be saved")
        flat = value.detach().resolve_conj().resolve_neg().to("cpu", copy=True).contiguous().reshape(-1)
        dtype = dtype_name(value.dtype)
        return {_TAG: "tensor", "key": self._keep(flat, where), "dtype": dtype, "shape": list(value.shape)}

    def _array(self, value: np.ndarray[Any, Any], where: str) -> Any:
        if value.dtype.name not in _NUMPY:
            raise InputError(f"{where}: an array of {value.dtype} cannot be saved")
        dtype = _numpy_dtype(value.dtype.name)
        flat = torch.from_numpy(np.array(value, dtype=dtype, order="C", copy=True).reshape(-1).view(np.uint8))
        name = value.dtype.name if value.dtype == dtype else _BIG + value.dtype.name
        return {_TAG: "array", "key": self._keep(flat, where), "dtype": name, "shape": list(value.shape)}

    def _keep(self, flat: torch.Tensor, where: str) -> str:
        key = f"value/{where}"
        if key in self.tensors:  # two paths that read the same, such as of the keys 1.0 and '1.0]'
            key = f"{key}#{len(self.tensors)}"
        self.tensors[key] = torch.view_as_real(flat).reshape(-1) if flat.dtype is torch.complex128 else flat
        return key


class _Decoder:
    def __init__(self, read: Callable[[str], torch.Tensor], path: str | os.PathLike[str]) -> None:
        self._read, self._path = read, path

    def decode(self, data: Any, where: str, depth: int) -> Any:
        if depth > DEEPEST:
            raise self._wrong(f"more than {DEEPEST} containers in each other", where)
        if isinstance(data, list):
            return self._items(data, where, depth)
        if not isinstance(data, dict):
            return data  # None, a number or text of an index, which has no other
        if _TAG not in data:
            return {key: self.decode(item, f"{where}.{key}", depth + 1) for key, item in data.items()}
        try:
            return self._tagged(data, where, depth)
        except CheckpointError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise self._wrong(f"not what was saved: {type(error).__name__} {error}", where) from None

    def _tagged(self, data: dict[str, Any], where: str, depth: int) -> Any:
        kind, fields = data[_TAG], frozenset(data) - {_TAG}
        if not isinstance(kind, str) or _FIELDS.get(kind) != fields:
            raise self._wrong(
                f"no value of kind {kind!r:.40} with {sorted(fields)} is known to this version of Elixir", where
            )
        if kind in ("bytes", "bytearray"):
            return _CLASSES[kind](base64.b64decode(_of(str, data["base64"]), validate=True))
        if kind == "int":
            return int(_matching(_HEX, data["hex"]), 16)
        if kind == "float":
            return float.fromhex(_of(str, data["hex"]))
        if kind == "complex":
            real, imaginary = (float.fromhex(_of(str, part)) for part in _of(list, data["hex"]))
            return complex(real, imaginary)
        if kind in ("tuple", "set", "frozenset"):
            return _CLASSES[kind](self._items(_of(list, data["items"]), where, depth))
        if kind == "numpy":
            (scalar,) = np.frombuffer(bytes.fromhex(_of(str, data["hex"])), dtype=_numpy_dtype(data["dtype"]))
            return scalar
        if kind in ("tensor", "array"):
            return self._stored(kind, data)
        pairs = [
            (self.decode(key, f"a key of {where}", depth + 1), self.decode(item, f"{where}[{i}]", depth + 1))
            for i, (key, item) in enumerate(_of(list, data["pairs"]))
        ]
        found = dict(pairs)
        if len(found) < len(pairs):
            raise self._wrong("a key occurs twice", where)
        return _CLASSES[kind](found)

    def _items(self, data: list[Any], where: str, depth: int) -> list[Any]:
        return [self.decode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(data)]

    def _stored(self, kind: str, data: dict[str, Any]) -> Any:
        shape = tuple(_of(int, size) for size in _of(list, data["shape"]))
        flat = self._read(_of(str, data["key"])).reshape(-1)
        if kind == "array":
            if flat.dtype is not torch.uint8:
                raise ValueError(f"saved as {flat.dtype}")
            saved = _numpy_dtype(_of(str, data["dtype"]).removeprefix(_BIG))
            dtype = saved.newbyteorder(">" if data["dtype"].startswith(_BIG) else "=")
            return flat.numpy().view(saved).astype(dtype, copy=False).reshape(shape)
        parts = data["dtype"] == "complex128"  # safetensors has no such dtype: its real and imaginary parts are saved
        if flat.dtype is not (torch.float64 if parts else STORED_DTYPES[_of(str, data["dtype"])]):
            raise ValueError(f"saved as {flat.dtype}")
        return (torch.view_as_complex(flat.view(-1, 2)) if parts else flat).reshape(shape)

    def _wrong(self, message: str, where: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(message, path=self._path, key=where)


_CLASSES: dict[str, Any] = {
    each.__name__: each for each in (bytes, bytearray, tuple, set, frozenset, dict, OrderedDict, Counter)
}
"""Kind of value -> its class, for values that are made of bytes or of other values."""
_FIELDS = {
    **dict.fromkeys(("bytes", "bytearray"), frozenset({"base64"})),
    **dict.fromkeys(("int", "float", "complex"), frozenset({"hex"})),
    **dict.fromkeys(("tuple", "set", "frozenset"), frozenset({"items"})),
    **dict.fromkeys(("dict", "OrderedDict", "Counter"), frozenset({"pairs"})),
    **dict.fromkeys(("tensor", "array"), frozenset({"key", "dtype", "shape"})),
    "numpy": frozenset({"dtype", "hex"}),
}
"""Kind of value -> what stands next to its tag."""


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
