"""The exceptions that Elixir raises.

A caller's mistake is an `InputError` (also a `ValueError`) or an `InputTypeError` (also a `TypeError`). What cannot fit
is a `PlanError`, what cannot be traced a `TraceError`, a file that cannot be read back an `ArtifactError`, a file
operation that fails a `FileError` (also an `OSError`), optimizer states on a disk that cannot be reached a `DiskError`,
memory that this machine lacks a `NoMemoryError`, a checkpoint that cannot be saved or loaded a `CheckpointError`, ranks
that fall apart a `RankError`, a broken invariant of ours a `StateError`. All are `ElixirError`, so one `except` catches
them.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from errno import EIO
from functools import partial
from typing import Literal


class ElixirError(Exception):
    """Base of everything Elixir raises on purpose."""


class InputError(ElixirError, ValueError):
    """An argument has a value that makes no sense; the message says what was expected and what was found."""


class InputTypeError(ElixirError, TypeError):
    """An argument has the wrong type."""


class ArtifactError(ElixirError, ValueError):
    """A trace, profile or plan file is truncated, of another version, of another model, or lacks a field.

    Args:
        message: says what was found and what was expected.
        field: path of the field in question, such as ``chunks[3].weight_home``; empty if it is not one field.
    """

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class FileError(ElixirError, OSError):
    """A file operation failed: `errno`, `strerror` and `filename` as in any `OSError`, and which `operation` it was."""

    def __init__(self, errno: int, reason: str, path: str | os.PathLike[str], operation: str) -> None:
        super().__init__(errno, reason, os.fspath(path))
        self.operation = operation

    def __str__(self) -> str:
        return f"cannot {self.operation} {self.filename}: {self.strerror} (errno {self.errno})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.errno, self.strerror, self.filename, self.operation)


class DiskError(FileError):
    """Optimizer states on a disk could not be read or written.

    Args:
        error: of the file.
        what: whose states, such as a rank's chunk with the names of its parameters.
        then: what is left, and can be done.
    """

    def __init__(
        self, error: FileError, what: str, then: str = "the training cannot go on, but weights can still be saved"
    ) -> None:
        super().__init__(error.errno or EIO, error.strerror or "", error.filename, error.operation)
        self.error, self.what, self.then = error, what, then

    def __str__(self) -> str:
        return (
            f"cannot {self.operation} the states of {self.what} in {self.filename}: {self.strerror} (errno "
            f"{self.errno}); {self.then}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.error, self.what, self.then)


class NoMemoryError(ElixirError, MemoryError):
    """A buffer that a plan needs cannot be allocated: this machine has too little free memory."""


class CheckpointError(ElixirError, RuntimeError):
    """A checkpoint cannot be saved, read or loaded."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """The folder holds no checkpoint that was ever committed."""


class CheckpointCorrupt(CheckpointError, ValueError):
    """A file of a checkpoint is missing, damaged, or is not what the index says.

    Args:
        message: says what was found and what was expected.
        path: the file.
        key: the tensor, value or field of the index in it; empty if it is about the file as a whole.
    """

    def __init__(self, message: str, *, path: str | os.PathLike[str], key: str = "") -> None:
        where = f"{os.fspath(path)}: {key}" if key else os.fspath(path)
        super().__init__(f"{where}: {message}")
        self.path, self.key, self._message = os.fspath(path), key, message

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), path=self.path, key=self.key), (self._message,)


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint is whole, but not of what it is loaded into.

    Args:
        message: says what differs and what to do.
        missing: names that were expected and that the checkpoint lacks.
        unexpected: names that only the checkpoint has.
        shapes: name -> (shape in the checkpoint, shape expected), of those that differ.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] | None = None,
    ) -> None:
        super().__init__(message)
        self.missing, self.unexpected, self.shapes = tuple(missing), tuple(unexpected), dict(shapes or {})


class TraceError(ElixirError, RuntimeError):
    """The training step cannot be traced; the message names the file and the line that prevents it."""


class RankError(ElixirError, RuntimeError):
    """The ranks no longer do the same: one died, raised an error, or left the order of collectives they share."""


class StepError(ElixirError, RuntimeError):
    """Work on a lane has failed, such as the step of some weights, which the message names; training has ended. The
    cause is what the work has raised."""


class StateError(ElixirError, RuntimeError):
    """An invariant of Elixir itself broke. Always a defect of ours, never of the caller."""


@dataclass(frozen=True)
class Lever:
    """One thing the user can change to make a plan feasible."""

    action: str
    """The thing to do, in the imperative."""
    saves_bytes: int
    """Bytes by which this would lower the need, or raise what is available; 0 if they are not known."""
    effect: Literal["saves", "adds"] = "saves"
    """Whether `saves_bytes` lowers the need or raises what is available."""
    argument: str = ""
    """The argument of a search, or of the traced step, that does it; may be empty."""
    value: str = ""
    """The value for it; empty if that is the user's choice."""
    comes_first: bool = False
    """Whether it is named before all others: the step computes the same, and takes no longer."""
    comes_last: bool = False
    """Whether all others are named first, although it saves more: it makes steps slower, and they need not be."""
    options: tuple[tuple[str, str], ...] = ()
    """Arguments that do it, where these are known to the last; a switch has an empty value."""
    step_s: float | None = None
    """Seconds of the step with it, where it suffices; None where it does not, or is not known to."""
    enough: bool = True
    """False if it is known not to suffice by itself."""


class PlanError(ElixirError, RuntimeError):
    """No plan fits. The error has the need, what is available, and what to change, the most effective lever first.

    Args:
        message: one sentence that says which memory is short, and why.
        needed_bytes: smallest amount of that memory with which a plan would exist.
        available_bytes: the budget given.
        levers: what would help, in any order; kept sorted by what each saves.
        details: what else is short, and what holds the memory, a line each.
    """

    def __init__(
        self,
        message: str,
        *,
        needed_bytes: int,
        available_bytes: int,
        levers: Sequence[Lever] = (),
        details: Sequence[str] = (),
    ) -> None:
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.details = tuple(details)
        self.levers = tuple(sorted(levers, key=_by_worth))
        self.what = message
        super().__init__(self.in_words(_in_arguments))

    def in_words(self, action: Callable[[Lever], str]) -> str:
        """The whole message: what is short and by how much, the details, then one line for each lever, which `action`
        puts into words."""
        lines = [f"{self.what} ({how_far(self.needed_bytes, self.available_bytes)})"]
        lines += [f"  {detail}" for detail in self.details]
        for lever in self.levers:
            lines.append(f"  - {action(lever)}{_effect_of(lever)}")
        return "\n".join(lines)


def _by_worth(lever: Lever) -> tuple[bool, bool, float, bool, bool, int, str]:
    """Sorts levers: first what costs nothing; then what suffices, by step time; then what saves most; last what does
    not suffice by itself."""
    return (
        not lever.comes_first, lever.step_s is None, lever.step_s or 0.0, lever.comes_last, not lever.enough,
        -lever.saves_bytes, lever.action
    )  # fmt: skip


def _effect_of(lever: Lever) -> str:
    if lever.step_s is not None:
        return f" (enough: {lever.step_s:.3g} s a step)"
    said = [f"{lever.effect} {readable_bytes(lever.saves_bytes)}"] if lever.saves_bytes else []
    said += [] if lever.enough else ["not enough alone"]
    return f" ({', '.join(said)})" if said else ""


def _in_arguments(lever: Lever) -> str:
    """An action, with the arguments of a search that do it."""
    given = ", ".join(f"{name}={value!r}" if value else f"{name}=True" for name, value in lever.options)
    return f"{lever.action}: {given}" if given else lever.action


LONGEST_VALUE = 60
"""Characters of a value that an error repeats."""


def shortened(text: str, most: int = LONGEST_VALUE) -> str:
    """A value for an error: as it is, or its beginning and its end where it is longer than `most` characters."""
    if len(text) <= most:
        return text
    tail = most // 4
    return f"{text[: most - tail]}...{text[-tail:]} ({len(text):,} characters)"


GONE = {
    "hedge": "plans need no hedge any more: each bounds what it may lose in the scenarios that the profile thinks "
    "possible; leave hedge= (--hedge) out, or give assume='nominal' (--assume nominal) for the fastest at the "
    "profile's rates",
    "step_in_backward": "early updates have taken the place of step_in_backward= (--step-in-backward); leave it out",
    "speculate": "speculate= is called early_updates= now",
    "no_spawn": "no ranks are started any more; for collectives start `elixir hardware --measure` with torchrun",
}
"""Names of options that earlier versions had -> what to do instead."""

SHOWN_NAMES = 3
"""Names that an error repeats."""

LEAST_LIKE = 0.4
"""The share of letters, as `difflib` counts, that a name has in common with one it may have been meant for."""
_BETWEEN_WORDS = "[-_/ ]"


def few(names: Sequence[str]) -> str:
    """The first `SHOWN_NAMES` of them, and how many more there are."""
    if not names:
        return "none"
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def unknown_name(kind: str, name: str, known: Iterable[str], written: Mapping[str, str] | None = None) -> InputError:
    """An `InputError` for a name that is not known, with the nearest names that are.

    Args:
        kind: of thing that is named.
        name: as it was given.
        known: the names.
        written: ways to write them -> the names, where the nearest way counts; None: there is one way.
    """
    choices = sorted(known)
    written = written or {each: each for each in choices}
    found = name[:LONGEST_VALUE].lower()
    like = sorted((-_likeness(found, each), each) for each in written)
    near = list(dict.fromkeys(written[each] for worth, each in like if worth))[:SHOWN_NAMES]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(choices)}"
    return InputError(f"unknown {kind} {shortened(name)!r}; {hint}")


def _likeness(name: str, known: str) -> float:
    """The number of whole words that two names share, such as ``7b`` of ``qwen2.5-7b``, and how alike their letters
    are, from `LEAST_LIKE` to 1; 0 if these are less alike."""
    letters = difflib.SequenceMatcher(None, known, name).ratio()
    shared = set(re.split(_BETWEEN_WORDS, name)) & set(re.split(_BETWEEN_WORDS, known)) - {""}
    return len(shared) + letters if letters >= LEAST_LIKE else 0.0


def how_far(needed_bytes: int, available_bytes: int) -> str:
    """A need and a budget as text, and by how much the budget is short."""
    lacking = needed_bytes - available_bytes
    # A budget of 4.8 MiB should not read 4.79, but what is printed must stay below the need: up adds up to a hundredth.
    available = readable_bytes(available_bytes, up=100 * lacking > available_bytes)
    text = f"needed {readable_bytes(needed_bytes, up=True)}, available {available}"
    return text + (f", short by {readable_bytes(lacking, up=True)}" if lacking > 0 else "")


def readable_bytes(amount_bytes: int, *, up: bool = False) -> str:
    """Bytes as text, in a unit that leaves digits to read. A need is rounded up, so that the number shown is enough."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount_bytes >= size:
            hundredths = amount_bytes * 100 // size if not up else -(-amount_bytes * 100 // size)
            return f"{hundredths // 100}.{hundredths % 100:02} {unit}"
    return f"{amount_bytes} B"
