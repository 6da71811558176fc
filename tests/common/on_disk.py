"""Plans with states on a disk, and disks that fail."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elixir.errors import FileError
from elixir.files import Files
from elixir.plan.plan import Plan

KINDS = ((False, "host"), (True, "device"), (False, "device"))
"""(resident, weight home) of chunks whose states live on a disk, in turn."""


def on_disk(plan: Plan, every: int = 1) -> Plan:
    """The packing of a plan, with the states of every so many-th trained chunk on a disk; others stay on the host."""
    return with_states(plan, "disk", every)


def in_memory(plan: Plan) -> Plan:
    """`on_disk`, but with all states on the host: the same updates in memory."""
    return with_states(plan, "host")


def with_states(plan: Plan, home: str, every: int = 1) -> Plan:
    """The packing of a plan with states at `home`, and weights in all homes that such a plan can have."""
    chunks = []
    for index, chunk in enumerate(plan.chunks):
        resident, weights = KINDS[index % len(KINDS)]
        states = (home if index % every == 0 else "host") if chunk.trainable else weights
        chunks.append(replace(chunk, resident=resident, weight_home=weights, state_home=states))  # type: ignore[arg-type]
    return replace(plan, chunks=tuple(chunks))


class BrokenDisk(Files):
    """A disk whose transfers work until `break_it` is called, and fail from then on.

    Args:
        code: errno of the failures.
        only: the operations that fail.
        at: break at the so many-th of them; None: when told to.
    """

    def __init__(self, code: int, only: tuple[str, ...] = ("read", "write"), at: int | None = None) -> None:
        self._code, self._only, self._at = code, only, at
        self._lock = threading.Lock()
        self.broken, self.count = False, 0

    def break_it(self) -> None:
        """Fails from now on."""
        self.broken = True

    def call(self, operation: str, path: str, function: Callable[..., Any], *args: Any) -> Any:
        if operation in self._only:
            with self._lock:
                self.count += 1
                self.broken |= self._at is not None and self.count >= self._at
            if self.broken:
                raise FileError(self._code, os.strerror(self._code), path, operation)
        return super().call(operation, path, function, *args)


class ShortDisk(Files):
    """A disk on which, after `break_it`, a write moves half of its bytes, and the next one none."""

    def __init__(self) -> None:
        self._broken = False
        self._writes = 0

    def break_it(self) -> None:
        """Cut writes short from now on."""
        self._broken = True

    def call(self, operation: str, path: str, function: Callable[..., Any], *args: Any) -> Any:
        if operation != "write" or not self._broken:
            return super().call(operation, path, function, *args)
        self._writes += 1
        if self._writes > 1:
            return 0
        handle, view, offset = args
        return super().call(operation, path, function, handle, view[: len(view) // 2], offset)
