"""`RunOptions`: how a plan is run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from elixir.chunk.lanes import Emulation
from elixir.errors import InputTypeError
from elixir.files import FILES, Files, PathLike


@dataclass(frozen=True, kw_only=True)
class Debug:
    """Switches for tests of the runtime, and for measurements without the hardware; training needs none of them.

    Attributes:
        poison: fill returned blocks with NaN, so that a stale use shows.
        evict_always: evict everything unpinned after every use.
        emulation: speed and delays of the links, on the CPU.
        files: the file operations of states on a disk.
    """

    poison: bool = False
    evict_always: bool = False
    emulation: Emulation | None = None
    files: Files = FILES


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a plan is run; see `ElixirModule`."""

    prefetch: bool = True
    reduce_fp32: bool = False
    fused_kernels: bool = False
    disk_folders: tuple[str, ...] = ()
    debug: Debug = field(default_factory=Debug)


def folders_of(given: PathLike | Sequence[PathLike] | None) -> tuple[str, ...]:
    """The absolute folders of `disk_folder`; raises `InputTypeError` if they are none."""
    if given is None:
        return ()
    each = [given] if isinstance(given, (str, os.PathLike)) else list(given)
    if not all(isinstance(folder, (str, os.PathLike)) for folder in each):
        raise InputTypeError(f"disk_folder must be a folder or a list of folders, got {given!r}")
    return tuple(os.path.abspath(folder) for folder in each)
