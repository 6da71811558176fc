"""Frozen dataclasses that go to JSON and come back the same, or name the field that is wrong.

`StepTrace`, `HardwareProfile` and `Plan` are artifacts. A file is one JSON object with ``artifact`` (which of the
three), ``schema_version`` and the fields. Reading is strict: a missing, unknown or mistyped field is an
`ArtifactError` that names it by its path, such as ``chunks[3].weight_home``. No library does this for dataclasses:
msgspec accepts unknown fields, missing ones that have a default, a key twice, and NaN.

A field's type may carry a `Bound`, the numbers that it may hold, which `check_bounds` checks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import math
import os
import sys
import types
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from elixir.errors import ArtifactError, FileError, InputError, shortened
from elixir.files import FILES, temporary_name

T = TypeVar("T", bound="Artifact")

LARGEST_FILE_BYTES = 128 * 2**20
"""Limit on the size of a plan, profile or trace. The trace of OPT-175B has 1 MB, and parsing takes many times the bytes
of a file."""
_LONGEST_NAME, _LONGEST_PROBLEM = 200, 600
"""Characters of a key, and of what is wrong with fields, that an error repeats."""
_TOO_LARGE, _TOO_LONG = 2**60, 2**64
"""Limits of integers: a field counts fewer bytes, elements or FLOPs than 2**60, so that sums of several fit into the 64
bits in which searches compute; integers in lists may be checksums of 64 bits."""


ADDED = types.MappingProxyType({"added": True})
"""Metadata of a field that has come without a new schema version: files leave it out where it has its default."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """The numbers that a field may hold; part of its type, as in ``Annotated[int, POSITIVE] | None``."""

    text: str
    """The words of an error after "must be"."""
    least: float
    most: float = sys.float_info.max

    def allows(self, value: object) -> bool:
        """Whether `value` is a number from the least to the most."""
        return isinstance(value, (int, float)) and not isinstance(value, bool) and self.least <= value <= self.most


POSITIVE = Bound("a positive finite number", math.ulp(0.0))
NOT_NEGATIVE = Bound("finite and at least 0", 0)


def check_bounds(data: Any, where: str = "field '{}'") -> None:
    """Checks the numbers in a dataclass against the `Bound` in the types of its fields, for ``__post_init__``.

    A dict or a tuple is checked item by item. None is for fields whose type says so.

    Args:
        data: the dataclass.
        where: how an error names a field.

    Raises:
        InputError: names the first number out of bounds by its path, such as ``seconds.total`` or ``points[3][0]``.
    """
    for name, bound, optional in _bounds(data.__class__):
        value = getattr(data, name)
        if value is None and optional:
            continue
        for path, number in _leaves(name, value):
            if not bound.allows(number):
                raise InputError(f"{where.format(path)} must be {bound.text}, found {number!r}")


@functools.cache
def _bounds(cls: type) -> tuple[tuple[str, Bound, bool], ...]:
    """(name, bound, whether it may be None) of each field that has a bound."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found = ((field.name, hints[field.name]) for field in dataclasses.fields(cls))
    return tuple(
        (name, bound, type(None) in typing.get_args(hint))
        for name, hint in found
        if (bound := _bound_in(hint)) is not None
    )


def _bound_in(hint: Any) -> Bound | None:
    inner = (part if isinstance(part, Bound) else _bound_in(part) for part in typing.get_args(hint))
    return next((bound for bound in inner if bound is not None), None)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item)
    else:
        yield path, value


@dataclasses.dataclass(frozen=True)
class Artifact:
    """Base of the three artifacts: JSON out, JSON in, and a digest of the content."""

    artifact: ClassVar[str]
    schema_version: ClassVar[int]
    earlier: ClassVar[tuple[int, ...]] = ()
    """Earlier schema versions that it reads as well."""
    remake_hint: ClassVar[str] = "make the file anew"
    """How a user replaces a file of another schema version."""
    printed: ClassVar[tuple[str, ...]] = ()
    """Keys that a command prints next to the fields, and that follow from them."""

    def to_dict(self) -> dict[str, Any]:
        """The artifact as plain lists, dicts, strings and numbers."""
        return {"artifact": self.artifact, "schema_version": self.schema_version, **_encode(self)}

    def to_json(self) -> str:
        """JSON text; the same artifact always gives the same text. `InputError` if a number in it is not finite."""
        try:
            return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
        except ValueError as error:
            raise InputError(f"this {self.artifact} cannot be saved: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the JSON to `path`, atomically: a reader sees the old file or the whole new one."""
        return write_atomically(path, self.to_json())

    @classmethod
    def from_dict(cls: type[T], data: Any, *, source: str = "input") -> T:
        """Builds the artifact from what `to_dict` gave; `source` names the origin in errors."""
        if not isinstance(data, dict):
            raise ArtifactError(f"{source}: expected a JSON object, found {type(data).__name__}")
        for key, expected in (("artifact", cls.artifact), ("schema_version", cls.schema_version)):
            if key not in data:
                raise ArtifactError(f"{source}: field '{key}' is missing; this is no {cls.artifact} file", field=key)
            # True == 1 and 1.0 == 1, but neither is what `save` writes.
            if data[key] == expected and type(data[key]) is type(expected):
                continue
            found = shortened(repr(data[key]))
            read = " or ".join(map(str, (*cls.earlier, expected)))
            problem = f"field '{key}' is {found}, this version of Elixir reads {read}; {cls.remake_hint}"
            if key == "artifact":
                problem = f"expected a {cls.artifact.replace('_', ' ')}, but field 'artifact' is {found}"
            raise ArtifactError(f"{source}: {problem}", field=key)
        body = {key: value for key, value in data.items() if key not in ("artifact", "schema_version", *cls.printed)}
        decoded: T = _decode(cls, body, "", source)
        return decoded

    @classmethod
    def from_json(cls: type[T], text: str, *, source: str = "input") -> T:
        """Builds the artifact from JSON text; `ArtifactError` for text that is cut off or no JSON."""
        return cls.from_dict(parse_json(text, source), source=source)

    @classmethod
    def load(cls: type[T], path: str | os.PathLike[str]) -> T:
        """Reads an artifact that `save` wrote; `ArtifactError` where it cannot be read."""
        return cls.from_dict(read_json(path), source=str(path))


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads the JSON of a file.

    Raises:
        ArtifactError: it cannot be read, has more than `LARGEST_FILE_BYTES`, or is no JSON.
    """
    try:
        text = FILES.read_stream(path, limit_bytes=LARGEST_FILE_BYTES).decode()
    except FileError as error:
        if error.errno == errno.EFBIG:
            most = f"{LARGEST_FILE_BYTES // 2**20} MiB"
            raise ArtifactError(f"{path}: has more than {most}, so it is no file of Elixir's") from None
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise ArtifactError(f"{path}: not a text file") from None
    return parse_json(text, str(path))


def parse_json(text: str, source: str) -> Any:
    """Parses JSON text; `ArtifactError` where it is none, or an object has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=without_repetition)
    except ArtifactError as error:
        raise ArtifactError(f"{source}: {error}", field=error.field) from None
    except ValueError as error:  # JSONDecodeError, or an integer of thousands of digits
        raise ArtifactError(f"{source}: not valid JSON, perhaps truncated: {error}") from None
    except RecursionError:
        raise ArtifactError(f"{source}: nested too deeply") from None


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a dict of pairs for `json.loads`, which would take the last of several; `ArtifactError` for a key that
    comes twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ArtifactError(f"an object has the key {shortened(key)!r} twice", field=shortened(key))
    return found


def digest(*parts: Any) -> str:
    """16 hex digits that identify `parts` (anything JSON can hold), the same in every process."""
    text = json.dumps(parts, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_writable(path: str | os.PathLike[str]) -> Path:
    """Returns `path` after making sure that a file can be written there; `InputError` otherwise. Leaves no file
    behind."""
    with _writing(path) as target:
        name = temporary_name(target)
        FILES.create(name).close()
        FILES.remove(name)
    return Path(path)


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Writes `content` next to `path`, then renames it there; `InputError` where that cannot be done.

    Whatever is killed when, `path` holds the old content or the new one. A link stays a link, to a new file.
    """
    with _writing(path) as target:
        FILES.write_whole(target, content.encode() if isinstance(content, str) else content)
    return Path(path)


@contextlib.contextmanager
def _writing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives the file that `path` leads to. A failure to write is an `InputError`."""
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise InputError(f"cannot write {path}: it is a folder")
        if os.path.lexists(target) and not target.is_file():
            # A rename would put a plain file in place of a device such as /dev/null.
            raise InputError(f"cannot write {path}: it is no regular file")
        with contextlib.suppress(FileNotFoundError):
            os.lstat(target)  # the name itself may be impossible, such as too long
        yield target
    except OSError as error:
        missing = f"; make the folder {Path(path).parent} first" if error.errno == errno.ENOENT else ""
        raise InputError(f"cannot write {path}: {error.strerror}{missing}") from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot write {path!r}: {error}") from None


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        added = _added(value.__class__)
        held = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {name: _encode(item) for name, item in held if name not in added or item != added[name]}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    return value


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@functools.cache
def _added(cls: type) -> dict[str, Any]:
    """The fields that files may lack, with their defaults."""
    return {field.name: field.default for field in dataclasses.fields(cls) if field.metadata == ADDED}


@functools.cache
def _parts(annotation: Any) -> tuple[Any, tuple[Any, ...], bool]:
    return typing.get_origin(annotation), typing.get_args(annotation), dataclasses.is_dataclass(annotation)


def _decode(expected: Any, value: Any, path: str, source: str) -> Any:
    """Decodes `value` (plain JSON) as `expected` (a type annotation); errors name `path`."""
    if type(value) is expected and expected is not float and expected is not int:  # as many values of a large file are
        return value
    origin, args, is_dataclass = _parts(expected)
    if is_dataclass:
        return _decode_dataclass(typing.cast(type, expected), value, path, source)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (inner,) = (arg for arg in args if arg is not type(None))
        return _decode(inner, value, path, source)
    if expected is Any:
        return value  # plain JSON, which the class itself checks
    if origin is Literal:
        if value not in args:
            raise _mistyped(source, path, f"one of {list(args)}", value)
        return value
    if origin is tuple:
        return _decode_tuple(args, value, path, source)
    if origin is dict:
        if not isinstance(value, dict):
            raise _mistyped(source, path, "an object", value)
        return {
            key: _decode(args[1], item, f"{path}.{shortened(key, _LONGEST_NAME)}", source)
            for key, item in value.items()
        }
    return _decode_plain(expected, value, path, source)


def _decode_tuple(args: tuple[Any, ...], value: Any, path: str, source: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _mistyped(source, path, "a list", value)
    kinds = args[:1] * len(value) if args[1:] == (Ellipsis,) else args
    if len(kinds) != len(value):
        raise _mistyped(source, path, f"a list of {len(kinds)}", value)
    pairs = zip(kinds, value, strict=True)
    return tuple(_decode(kind, item, f"{path}[{i}]", source) for i, (kind, item) in enumerate(pairs))


def _decode_plain(expected: Any, value: Any, path: str, source: str) -> Any:
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise _mistyped(source, path, "a finite number", "an integer beyond 1e308") from None
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise _mistyped(source, path, expected.__name__, value)
    if expected is int and not -_TOO_LONG < value < _TOO_LONG:
        raise _mistyped(source, path, "an integer of at most 64 bits", "a longer one")
    if expected is float and not math.isfinite(value):
        raise _mistyped(source, path, "a finite number", value)
    return value


def _decode_dataclass(cls: type, value: Any, path: str, source: str) -> Any:
    if not isinstance(value, dict):
        raise _mistyped(source, path, "an object", value)
    prefix = f"{path}." if path else ""
    fields = _field_types(cls)
    for name in fields:
        if name not in value and name not in _added(cls):
            raise ArtifactError(f"{source}: field '{prefix}{name}' is missing", field=prefix + name)
    for name in value:
        if name not in fields:
            field = prefix + shortened(name, _LONGEST_NAME)
            raise ArtifactError(f"{source}: field '{field}' is unknown to this version of Elixir", field=field)
    decoded = {
        name: _decode(hint, value[name], prefix + name, source) for name, hint in fields.items() if name in value
    }
    for name, item in decoded.items():
        if type(item) is int and not -_TOO_LARGE < item < _TOO_LARGE:
            raise _mistyped(source, prefix + name, "an integer below 2**60", item)
    try:
        return cls(**decoded)
    except (ValueError, OverflowError) as error:
        where = f"{source}: field '{path}'" if path else source
        inner = error.field if isinstance(error, ArtifactError) else ""
        problem = shortened(str(error), _LONGEST_PROBLEM)
        raise ArtifactError(f"{where}: {problem}", field=prefix + inner if inner else path) from None


def _mistyped(source: str, path: str, expected: str, value: Any) -> ArtifactError:
    return ArtifactError(f"{source}: field '{path}' must be {expected}, found {value!r:.60}", field=path)
