"""The index of a checkpoint: one JSON file that names all others. What no index names is no part of any checkpoint.

It also holds the user's small values, as `encode` writes them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

from elixir.artifact import Artifact, without_repetition
from elixir.checkpoint_format.slices import CHECKSUM_KIND, SAFETENSORS_NAMES, STORED_DTYPES, SavedTensor
from elixir.errors import ArtifactError, CheckpointCorrupt, CheckpointError, InputError
from elixir.units import MIB, dtype_name

# --- the user's values -----------------------------------------------------------------------------------------------
# The user's small values as JSON and back, exactly: tags for what JSON lacks, and nothing that could run code.
#
# Plain JSON stands for itself. Other values are objects with one tag, ``{"$": kind, ...}``. Tensors and arrays are not
# in the JSON: it holds the key under which they are saved with the other tensors.


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


# --- index -----------------------------------------------------------------------------------------------------------


INDEX_NAME = "index.json"
PREVIOUS_NAME = "index.previous.json"
LARGEST_INDEX_BYTES = 128 * MIB
"""Limit on the size of an index: that of OPT-175B with fp32 states, each tensor cut in eight, has 10 MB. Parsing
takes many times the bytes of the file."""

NO_STATES = ("weight", "buffer", "value")
"""Kinds of tensors that are no states of an optimizer."""
_SCALE_SUFFIX = "_scale"
_ID = re.compile(r"[0-9a-f]{8,32}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")


@dataclass(frozen=True)
class SavedGroup:
    """One parameter group of an optimizer."""

    optimizer: str
    """Name under which the optimizer was saved."""
    names: tuple[str, ...]
    """Names of its parameters, in order."""
    options: Any
    """Options such as the learning rate, encoded by `encode`: a dict by name."""


@dataclass(frozen=True)
class Index(Artifact):
    """The files and tensors of a checkpoint, and all its small values.

    Raises:
        ArtifactError: fields that make no sense or contradict each other, such as pieces that overlap.
    """

    artifact: ClassVar[str] = "checkpoint"
    schema_version: ClassVar[int] = 3

    id: str
    """Hexadecimal digits that no other save has; the name of every file begins with them."""
    sequence: int
    """1 + the largest in the folder when this was saved: the checkpoint with the largest is the latest, whatever its
    step."""
    step: int | None
    world_size: int
    model_fingerprint: str
    plan_fingerprint: str
    moments: str | None
    """Kind of Adam's moments; None for other optimizers, or none."""
    checksum_kind: str
    """Kind of the checksums of spans: `CHECKSUM_KIND`."""
    files: dict[str, int]
    """Name -> bytes."""
    tensors: dict[str, SavedTensor]
    """Key, such as ``weight/<name>``, ``exp_avg/<name>`` or ``buffer/<name>`` -> the tensor."""
    steps: dict[str, int]
    """Parameter -> how many updates it has had. Those without states are not in it."""
    scalars: dict[str, Any]
    """Parameter -> its other states that are no tensors over its elements, by kind, as `encode` gives them: a
    number, or (dtype, number) for a tensor without dimensions."""
    aliases: dict[str, str]
    """Other names of tied parameters and buffers -> the name under which they are saved."""
    param_groups: tuple[SavedGroup, ...]
    optimizers: dict[str, Any]
    """Name of an optimizer -> what else it goes on from, as `encode` gives it: its class, and the like."""
    has_frozen: bool
    """Whether parameters that are not trained are saved; otherwise loading leaves them as they are."""
    loss_scale: Any
    """State of the loss scale, encoded by `encode`; None without one."""
    rng: tuple[Any, ...]
    """State of the random number generators of every rank, as `encode` gives it; empty where it is not saved."""
    rank_values: tuple[dict[str, Any], ...]
    """Values of every rank that the others do not have; may be empty."""
    values: dict[str, Any]
    """The rest of the user's state, as `encode` gives it."""

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise _wrong("id", f"must be 8 to 32 hexadecimal digits, found {self.id!r:.60}")
        if self.checksum_kind != CHECKSUM_KIND:
            raise _wrong(
                "checksum_kind",
                f"is {self.checksum_kind!r:.40}, this version of Elixir knows only {CHECKSUM_KIND!r}; read it "
                "with the version that saved it",
            )
        for name, least in (("sequence", 1), ("world_size", 1), ("step", 0)):
            found = getattr(self, name)
            if found is not None and found < least:
                raise _wrong(name, f"must be {least} or larger, found {found}")
        for name in ("rng", "rank_values"):
            found = len(getattr(self, name))
            if found not in (0, self.world_size):
                raise _wrong(name, f"must have one entry for each of {self.world_size} ranks, found {found}")
        for name, step in self.steps.items():
            if step < 0:
                raise _wrong(f"steps.{name}", f"must be 0 or larger, found {step}")
        self._check_names()
        self._check_files()
        for key, tensor in self.tensors.items():
            problem = tensor.uncovered() or self._wrong_scales(key, tensor)
            if problem:
                raise _wrong(f"tensors.{key}", problem)

    def _check_names(self) -> None:
        for name, target in self.aliases.items():
            if not any(f"{kind}/{target}" in self.tensors for kind in ("weight", "buffer")):
                raise _wrong(f"aliases.{name}", f"names {target!r:.60}, which is not saved")
        grouped: set[tuple[str, str]] = set()
        for i, group in enumerate(self.param_groups):
            for name in group.names:
                if (group.optimizer, name) in grouped:
                    raise _wrong(
                        f"param_groups[{i}].names", f"{name!r:.80} is in a group of {group.optimizer!r:.40} already"
                    )
                grouped.add((group.optimizer, name))

    def _check_files(self) -> None:
        for name in self.files:
            if not _FILE.fullmatch(name) or not name.startswith(f"{self.id}-") or ".." in name:
                raise _wrong("files", f"{name!r:.80} is no name of a file of checkpoint {self.id}")
        ranges: dict[str, list[tuple[int, int, str]]] = {name: [] for name in self.files}
        for key, tensor in self.tensors.items():
            if len({piece.file for piece in tensor.pieces}) < len(tensor.pieces):
                raise _wrong(f"tensors.{key}", "two pieces are in one file, whose header can name one")
            for piece in tensor.pieces:
                if piece.file not in ranges:
                    raise _wrong(f"tensors.{key}", f"file {piece.file!r:.80} is not listed in 'files'")
                end, size = piece.offset + piece.numel * tensor.itemsize, self.files[piece.file]
                if end > size:
                    raise _wrong(f"tensors.{key}", f"a piece ends at byte {end} of {piece.file}, which has {size}")
                ranges[piece.file].append((piece.offset, end, key))
        for name, found in ranges.items():
            for (_, end, key), (start, _, other) in pairwise(sorted(found)):
                if start < end:
                    raise _wrong(f"tensors.{other}", f"overlaps {key!r:.80} in {name}")

    def _wrong_scales(self, key: str, tensor: SavedTensor) -> str:
        """Says why codes and their scales do not fit together; empty if they do, or if the tensor has no codes."""
        block = tensor.block_numel
        if block is None:
            return ""
        scales, count = self.tensors.get(scale_key(key)), -(-tensor.numel // block)
        if tensor.dtype not in ("int8", "uint8"):
            return f"codes are int8 or uint8, found {tensor.dtype}"
        if scales is None or scales.dtype != "float32" or scales.shape != (count,):
            found = "none" if scales is None else f"{scales.dtype} {list(scales.shape)}"
            return f"expected {count} scales in float32 under {scale_key(key)!r:.80}, found {found}"
        cut = next((piece.start for piece in tensor.pieces[1:] if piece.start % block), None)
        return "" if cut is None else f"a piece begins at element {cut}, inside of a block"

    def holds_scales(self, kind: str, name: str) -> bool:
        """Whether a tensor of a parameter has the scales of its codes, and is no state by itself."""
        codes = self.tensors.get(f"{kind.removesuffix(_SCALE_SUFFIX)}/{name}")
        return kind.endswith(_SCALE_SUFFIX) and codes is not None and codes.block_numel is not None

    def state_kinds(self, names: Collection[str]) -> dict[str, list[str]]:
        """The kinds of states, such as ``exp_avg``, that are tensors over the elements of each of these parameters."""
        found: dict[str, list[str]] = {}
        for key in self.tensors:
            kind, _, name = key.partition("/")
            if name in names and kind not in NO_STATES and not self.holds_scales(kind, name):
                found.setdefault(name, []).append(kind)
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters whose weights are saved, in order."""
        return tuple(key.removeprefix("weight/") for key in self.tensors if key.startswith("weight/"))

    @property
    def nbytes(self) -> int:
        """Bytes of all files that the index names."""
        return sum(self.files.values())

    def to_json(self) -> str:
        """Compacts JSON text with a checksum over the rest; `InputError` for a value that JSON cannot hold."""
        try:
            body = self.to_dict()
            return _text(body | {"checksum": _checksum(body)}) + "\n"
        except (ValueError, TypeError, RecursionError) as error:
            raise InputError(f"this checkpoint's index cannot be saved: {error}") from None


def scale_key(key: str) -> str:
    """Key of the scales of codes: ``exp_avg/<name>`` -> ``exp_avg_scale/<name>``."""
    kind, _, name = key.partition("/")
    return f"{kind}{_SCALE_SUFFIX}/{name}"


def parse_index(raw: bytes, path: str | os.PathLike[str]) -> Index:
    """Parses the bytes of the file `path`; `CheckpointCorrupt` for anything that `Index.to_json` would not have
    written."""
    try:
        text = raw.decode("ascii")
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=without_repetition)
        if not isinstance(data, dict):
            raise CheckpointCorrupt(f"expected a JSON object, found {type(data).__name__}", path=path)
        if data.get("artifact") == Index.artifact and data.get("schema_version") == Index.schema_version:
            # What is of another version may have another checksum; `from_dict` says which version it is.
            found = data.pop("checksum", None)
            if found != _checksum(data):
                raise CheckpointCorrupt(
                    "does not fit the rest of the file, which was changed or damaged", path=path, key="checksum"
                )
        return Index.from_dict(data, source=os.fspath(path))
    except ArtifactError as error:
        message = str(error).removeprefix(f"{os.fspath(path)}: ")
        if error.field:  # the error names it by itself
            message = message.removeprefix(f"field '{error.field}'").lstrip(": ")
        raise CheckpointCorrupt(message, path=path, key=error.field) from None
    except RecursionError:
        raise CheckpointCorrupt("nested too deeply to be the index of a checkpoint", path=path) from None
    except ValueError as error:
        if isinstance(error, CheckpointCorrupt):
            raise
        raise CheckpointCorrupt(f"not valid JSON, perhaps truncated: {error}", path=path) from None


def merge_tensors(parts: Iterable[dict[str, SavedTensor]]) -> dict[str, SavedTensor]:
    """Merges the entries of single files into one for each key, with all its pieces in order.

    Raises:
        InputError: two files do not agree on dtype, shape, order or blocks of a tensor.
    """
    pieces: dict[str, list[Any]] = {}
    first: dict[str, SavedTensor] = {}
    for part in parts:
        for key, tensor in part.items():
            known = first.setdefault(key, tensor)
            if replace(known, pieces=()) != replace(tensor, pieces=()):
                raise InputError(
                    f"ranks do not agree on {key!r}: {known.dtype} {list(known.shape)} and {tensor.dtype} "
                    f"{list(tensor.shape)}"
                )
            pieces.setdefault(key, []).extend(tensor.pieces)
    return {
        key: replace(known, pieces=tuple(sorted(pieces[key], key=lambda piece: piece.start)))
        for key, known in first.items()
    }


def _wrong(field: str, message: str) -> ArtifactError:
    return ArtifactError(f"field '{field}': {message}", field=field)


def _text(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(_text(body).encode()).hexdigest()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
