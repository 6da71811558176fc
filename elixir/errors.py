"""What Elixir raises.

A caller's mistake is an `InputError` (also a `ValueError`) or an `InputTypeError` (also a `TypeError`).
What cannot fit is a `PlanError`, what cannot be traced a `TraceError`, a file that cannot be read back an
`ArtifactError`, ranks that fall apart a `RankError`, a broken invariant of ours a `StateError`. All are `ElixirError`, so one `except` catches them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal


class ElixirError(Exception):
    """Base of everything Elixir raises on purpose."""


class InputError(ElixirError, ValueError):
    """An argument has a value that makes no sense; the message says what was expected and what was found."""


class InputTypeError(ElixirError, TypeError):
    """An argument has the wrong type."""


class ArtifactError(ElixirError, ValueError):
    """A trace, profile or plan file is truncated, of another version, of another model, or lacks a field."""


class TraceError(ElixirError, RuntimeError):
    """The training step cannot be traced; the message names the file and line that stands in the way."""


class RankError(ElixirError, RuntimeError):
    """The ranks no longer do the same: one died, raised an error, or left the order of collectives they share."""


class StateError(ElixirError, RuntimeError):
    """An invariant of Elixir itself broke. Always a defect of ours, never of the caller."""


@dataclass(frozen=True)
class Lever:
    """One thing the user can change to make a plan feasible."""

    action: str
    """What to do, in the imperative."""
    saves_bytes: int
    """By how much this alone would lower the need, or raise what is available; 0 where it is not known."""
    effect: Literal["saves", "adds"] = "saves"
    """Which of the two `saves_bytes` is."""
    argument: str = ""
    """Of a search, or of the step that is traced, through which that is done; empty where there is none."""
    value: str = ""
    """What to give for it; empty where that is the user's choice."""


class PlanError(ElixirError, RuntimeError):
    """No plan fits. Carries the need, what there is, and what to change, the most effective lever first.

    Args:
        message: one sentence that says which memory is short, and why.
        needed_bytes: smallest amount of that memory with which a plan would exist.
        available_bytes: the budget given.
        levers: what would help, in any order; kept sorted by what each saves.
    """

    def __init__(self, message: str, *, needed_bytes: int, available_bytes: int, levers: Sequence[Lever] = ()) -> None:
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.levers = tuple(sorted(levers, key=lambda lever: (-lever.saves_bytes, lever.action)))
        self._message = message
        super().__init__(self.in_words(lambda lever: lever.action))

    def in_words(self, action: Callable[[Lever], str]) -> str:
        """The whole message: what is short and by how much, then one line for each lever, which `action` puts into words."""
        lines = [f"{self._message} ({_how_far(self.needed_bytes, self.available_bytes)})"]
        for lever in self.levers:
            effect = f" ({lever.effect} {readable_bytes(lever.saves_bytes)})" if lever.saves_bytes else ""
            lines.append(f"  - {action(lever)}{effect}")
        return "\n".join(lines)


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """An `InputError` for a name that is not known, with the nearest names that are."""
    choices = sorted(known)
    near = difflib.get_close_matches(name.lower(), choices, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(choices)}"
    return InputError(f"unknown {kind} {name!r}; {hint}")


def _how_far(needed_bytes: int, available_bytes: int) -> str:
    text = f"needed {readable_bytes(needed_bytes, up=True)}, available {readable_bytes(available_bytes)}"
    lacking = needed_bytes - available_bytes
    return text + (f", short by {readable_bytes(lacking, up=True)}" if lacking > 0 else "")


def readable_bytes(amount_bytes: int, *, up: bool = False) -> str:
    """In a unit that leaves digits to read. What is needed is rounded up: whoever gives what he reads has enough."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount_bytes >= size:
            hundredths = amount_bytes * 100 // size if not up else -(-amount_bytes * 100 // size)
            return f"{hundredths // 100}.{hundredths % 100:02} {unit}"
    return f"{amount_bytes} B"
