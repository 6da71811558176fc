"""`RunOptions`: how a plan is run."""

from __future__ import annotations

from dataclasses import dataclass, field

from elixir.chunk.lanes import Emulation
from elixir.files import FILES, Files


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
