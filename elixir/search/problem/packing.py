"""Parameters into chunks: consecutive in order of first use, of one dtype, all trained or none, all with a gradient or
none, all stepped as whole matrices or none.

All arithmetic is in bytes. A parameter takes its bytes rounded up to the alignment of the plan; a chunk ends after its
last parameter, rounded up so that every rank's shard is aligned as well. A chunk never exceeds the capacity, except
that a parameter larger than it (an *outsized* one) gets a separate chunk.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from elixir.optimizer_states import MomentKind
from elixir.plan.chunk_plan import alignment_bytes
from elixir.search.problem.placement import Ints
from elixir.step_trace import StepTrace
from elixir.units import dtype_bytes

_NUMBERED = re.compile(r"^(.*?\.)??(\d+)\.")


def round_up(amount: int, unit: int) -> int:
    """Smallest multiple of `unit` that is not below `amount`."""
    return -(-amount // unit) * unit


@dataclass(frozen=True)
class PackedChunk:
    """Parameters of one chunk."""

    parameters: tuple[int, ...]
    """Indices into `StepTrace.parameters`, in order of first use."""
    offset_bytes: tuple[int, ...]
    """The start of each."""
    bytes: int
    """Bytes of the gathered chunk, padding included."""
    dtype: str
    trainable: bool
    outsized: bool
    matrices: bool = False
    """Whether an optimizer steps its parameters as whole matrices."""

    def held_bytes(self, sizes: Sequence[int], ranks: int) -> int:
        """Bytes of parameters in the shard of the first of so many ranks, given the bytes of each parameter."""
        shard = self.bytes // ranks
        ends = ((at, at + sizes[index]) for index, at in zip(self.parameters, self.offset_bytes, strict=True))
        return sum(min(end, shard) - start for start, end in ends if start < shard)


@dataclass(frozen=True)
class Packing:
    """All chunks of a model, in order of first use."""

    capacity_bytes: int
    """No chunk but an outsized one is larger."""
    chunks: tuple[PackedChunk, ...]

    @cached_property
    def block_bytes(self) -> int:
        """The largest chunk that is not outsized; what an rCache block must hold."""
        return max((chunk.bytes for chunk in self.chunks if not chunk.outsized), default=0)


class ParamTable:
    """Parameters of a trace in order of first use, and the sums that packing needs. Made once per search.

    Args:
        trace: the step; parameters that it never uses come last, in the model's order.
        world_size: chunks are padded to multiples of so many aligned shards.
        moments: how Adam's are kept, on which the alignment depends.
        matrices: names of parameters that are stepped as whole matrices.
    """

    def __init__(
        self, trace: StepTrace, world_size: int, moments: MomentKind = "float32", matrices: Collection[str] = ()
    ) -> None:
        self.trace, self._matrices = trace, matrices
        self.alignment_bytes = alignment_bytes(moments, {each.dtype for each in trace.parameters if each.trainable})
        self.unit_bytes = world_size * self.alignment_bytes
        used = dict.fromkeys(index for access in trace.accesses for index in access.parameters)
        self.order = list(used | dict.fromkeys(range(len(trace.parameters))))
        self.bytes = [param.numel * dtype_bytes(param.dtype) for param in trace.parameters]
        self.aligned = [round_up(amount, self.alignment_bytes) for amount in self.bytes]
        self.largest_bytes = round_up(max(self.aligned), self.unit_bytes)
        self.total_bytes = sum(self.aligned)
        # A chunk that misses a gradient keeps its block until backward is over, and with several ranks all later ones
        # wait.
        groups: dict[tuple[str, bool, bool, bool], list[int]] = {}
        for index in self.order:
            param = trace.parameters[index]
            key = (param.dtype, param.trainable, param.grad_access is not None, param.name in matrices)
            groups.setdefault(key, []).append(index)
        self.groups = groups

    def pack(self, capacity_bytes: int) -> Packing:
        """Chunks of at most `capacity_bytes` (rounded up to whole aligned shards)."""
        capacity = round_up(max(capacity_bytes, 1), self.unit_bytes)
        chunks: list[PackedChunk] = []
        for (dtype, trainable, *_), members in self.groups.items():
            fitting = [index for index in members if self.aligned[index] <= capacity]
            chunks.extend(
                self._chunk([index], dtype, trainable, True) for index in members if self.aligned[index] > capacity
            )
            ends = _ends([0, *accumulate(self.aligned[index] for index in fitting)], capacity)
            chunks += [self._chunk(fitting[start:end], dtype, trainable, False) for start, end in pairwise(ends)]
        place = {index: position for position, index in enumerate(self.order)}
        chunks.sort(key=lambda chunk: place[chunk.parameters[0]])
        return Packing(capacity, tuple(chunks))

    def _chunk(self, members: Sequence[int], dtype: str, trainable: bool, outsized: bool) -> PackedChunk:
        ends = list(accumulate(self.aligned[index] for index in members))
        return PackedChunk(
            parameters=tuple(members),
            offset_bytes=(0, *ends[:-1]),
            bytes=round_up(max(ends[-1], 1), self.unit_bytes),
            dtype=dtype,
            trainable=trainable,
            outsized=outsized,
            matrices=self.trace.parameters[members[0]].name in self._matrices,
        )

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Sizes of what repeats (``layers.0.``, ``layers.1.``, ...), largest share of the model first.

        Sub-modules numbered inside a layer (experts) belong to the layer.
        """
        sums: dict[str, dict[str, int]] = {}
        for index, param in enumerate(self.trace.parameters):
            match = _NUMBERED.match(param.name)
            if match is not None:
                layers = sums.setdefault(match[1] or "", {})
                layers[match[2]] = layers.get(match[2], 0) + self.aligned[index]
        ranked = sorted(sums.items(), key=lambda item: (-sum(item[1].values()), item[0]))
        return tuple(round_up(max(layers.values()), self.unit_bytes) for _, layers in ranked)


def _ends(sums: Sequence[int], capacity: int) -> list[int]:
    """Cuts parameters, given by running sums of their bytes, into chunks of at most a capacity."""
    ends = [0]
    while ends[-1] < len(sums) - 1:
        ends.append(bisect_right(sums, sums[ends[-1]] + capacity) - 1)
    return ends


GRID_REACH = 3
"""Chunk sizes are searched from the largest parameter up to so many times that, as the first Elixir did."""
GRID_STEPS = 4096
MIN_CHUNK_BYTES = 32 * 2**20
"""Bytes below which a transfer no longer fills the link; the first Elixir's smallest size as well."""


def search_grid(table: ParamTable) -> Ints:
    """The sizes that `minimum_waste_size` and the first Elixir's rule choose from: evenly spaced, both ends included,
    of whole aligned shards."""
    smallest = max(table.largest_bytes, round_up(MIN_CHUNK_BYTES, table.unit_bytes))
    sizes = smallest + (np.arange(GRID_STEPS + 1, dtype=np.int64) * (GRID_REACH - 1) * smallest) // GRID_STEPS
    return np.unique(-(-sizes // table.unit_bytes) * table.unit_bytes)


def minimum_waste_size(table: ParamTable) -> int:
    """The capacity whose chunks, all taken as whole blocks, pad the least; the smallest of equals.

    Searched from the largest parameter (at least `MIN_CHUNK_BYTES`) up to `GRID_REACH` times that: an even grid, and
    multiples of a layer.
    """
    grid = search_grid(table)
    low, high = int(grid[0]), int(grid[-1])
    multiples = [k * size for size in table.layer_bytes[:1] for k in range(1, high // size + 1) if k * size >= low]
    sizes, found = np.union1d(grid, np.array(multiples, dtype=np.int64)), list[tuple[int, int]]()
    groups = [[0, *accumulate(table.aligned[index] for index in members)] for members in table.groups.values()]
    while len(sizes):  # as `ParamTable.pack`; all parameters fit
        cuts = [(sums, *cut) for sums in groups for cut in pairwise(_ends(sums, int(sizes[-1])))]
        block_bytes = round_up(max(1, *(sums[end] - sums[start] for sums, start, end in cuts)), table.unit_bytes)
        found.append((len(cuts) * block_bytes, block_bytes))
        # Any capacity from the largest chunk up packs alike.
        sizes = sizes[: np.searchsorted(sizes, block_bytes)]
    return min(found)[1]
