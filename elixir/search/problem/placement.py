"""Homes of all chunks of a packing, and what stays the same while placements are compared."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from elixir.optimizer_states import MATRIX_STATES, MomentKind, StateSize
from elixir.plan.chunk_plan import FrozenHome, Home

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int8]
HOMES = tuple(Home)
"""The number of a home is its place in here."""
_NUMBER = attrgetter("number")
_AFTER_NORM = tuple(home.having() if home.early else home for home in HOMES)
"""The home with its update after the norm, by number."""
RESIDENT, WEIGHTS, STATES, DISK, EARLY = (
    np.array([getattr(home, name) for home in HOMES], dtype=bool)
    for name in ("resident", "weights_on_device", "states_on_device", "states_on_disk", "early")
)
"""Flags by number of a home: resident; weights, states on the device; states on the disk; updated early."""
HOSTED, IN_FILES = (np.array([home.weight_home == place for home in HOMES], dtype=bool) for place in ("host", "files"))
"""The same for weights in host memory, and in files."""


def _flags(table: Bools) -> cached_property[tuple[bool, ...]]:
    """A property of a placement: the flag of each chunk."""
    return cached_property(lambda placement: tuple(table[placement.codes].tolist()))


def _ids(table: Bools) -> cached_property[frozenset[int]]:
    """A property of a placement: ids of the chunks with the flag."""
    return cached_property(lambda placement: frozenset(np.flatnonzero(table[placement.codes]).tolist()))


@dataclass(frozen=True)
class Placement:
    """Homes of all chunks of a packing, by chunk id. That of a frozen chunk has its states where its weights are."""

    homes: tuple[Home, ...]

    def __hash__(self) -> int:
        return hash(self.codes.tobytes())

    @classmethod
    def numbered(cls, codes: Iterable[int]) -> Placement:
        """Makes a placement of numbers of homes."""
        return cls(tuple(map(HOMES.__getitem__, codes)))

    @cached_property
    def codes(self) -> Codes:
        """Numbers of the homes."""
        return np.fromiter(map(_NUMBER, self.homes), np.int8, len(self.homes))

    resident = _flags(RESIDENT)
    """Whether each chunk is gathered on the device for the whole step."""
    residents = _ids(RESIDENT)
    """Ids of these chunks."""
    weight_on_device = _flags(WEIGHTS)
    """Whether the weights of each chunk live there."""
    state_on_device = _flags(STATES)
    """Whether its states do."""
    state_on_disk = _ids(DISK)
    """Ids of chunks with master weights and states on the disk."""
    in_files = _ids(IN_FILES)
    """Ids of chunks with weights in files."""
    early = _ids(EARLY)
    """Ids of chunks that the host updates early."""

    def updated_early(self, chunks: Collection[int]) -> Placement:
        """Changes the updates: of these chunks early, of all others after the norm."""
        if not (chunks or self.early):
            return self
        homes = [*map(_AFTER_NORM.__getitem__, self.codes.tolist())]
        for c in chunks:
            homes[c] = homes[c].having(update="early")
        return Placement(tuple(homes))

    @property
    def keeps_everything(self) -> bool:
        """Whether all weights are gathered on the device for good, and all states are there."""
        return self.homes.count(Home.RESIDENT) == len(self.homes)


@dataclass(frozen=True)
class Spill:
    """Budgets that decide which states go to the disk; both of one machine, all its ranks together."""

    host_bytes: int
    """Budget; above it, states go to the disk."""
    disk_bytes: int
    """Budget."""


@dataclass(frozen=True)
class Setting:
    """Values that stay the same for all candidates of one search."""

    world_size: int
    ranks_per_host: int
    """Ranks that share one machine."""
    states: StateSize
    """Optimizer states of a shard, master weights not included."""
    overlap: bool
    accumulation: int = 1
    """Batches per optimizer step."""
    spill: Spill | None = None
    """Whether states that the host cannot hold go to the disk; None: they do not."""
    moments: MomentKind = "float32"
    """How Adam's moments are kept, which also says how fast it steps."""
    early_updates: bool | None = False
    """Whether the host may update chunks early, with memory that is left; None: where that shortens the step.
    """
    copied: bool = False
    """Whether it copies the old ones first; see `elixir.optimizer_states.is_copied`."""
    matrices: frozenset[str] = frozenset()
    """Names of the parameters that are stepped as whole matrices."""
    matrix_states: StateSize = MATRIX_STATES
    """Optimizer states of these."""
    averages: bool = False
    """Whether an average of the weights is among all states."""
    clipping: bool = True
    """Whether the norm of all gradients is worked out before each step, which clipping needs, and loss scaling."""
    frozen_weights: FrozenHome = "host"
    """The home of frozen weights that do not fit the device."""
    replicas: int = 1
    """Replicas of the model, each sharded over as many ranks."""
    device_kind: str = "cuda"
    """The kind of the devices; a CPU steps smaller pieces at once."""

    @property
    def shards(self) -> int:
        """Ranks over which each replica is sharded."""
        return self.world_size // self.replicas

    def away(self, trainable: bool) -> Home:
        """The home of a streamed chunk of which nothing lives on the device."""
        return Home.FILES if self.frozen_weights == "files" and not trainable else Home.HOST
