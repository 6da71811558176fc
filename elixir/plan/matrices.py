"""Matrices that an optimizer steps as a whole, on several ranks: who makes which orthogonal, and what that takes.

Each rank has a part of each matrix in its shard, with the momentum of that part. In a step the parts of the directions
go to the owner of the matrix, which makes it orthogonal, and come back. One chunk after the other does so, hence the
matrices of a chunk are spread over the ranks by their FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elixir.optimizer_states import DIRECTION_BYTES, matrix_flops, matrix_room_bytes

MATRIX_STAGES = 2
"""Buffers in host memory through which matrices pass on one rank if their states live there: while the device has one,
the host works on the other. Several ranks have one, for their part of a chunk."""

Matrices = Sequence[tuple[int, int]]
"""Rows and columns of the parameters of a chunk."""


def owners(matrices: Matrices, ranks: int) -> tuple[int, ...]:
    """The rank that makes each matrix of a chunk orthogonal: the largest first, always to the rank with least to do."""
    flops, found = [0] * ranks, [0] * len(matrices)
    for index in sorted(range(len(matrices)), key=lambda index: (-matrix_flops(*matrices[index]), index)):
        found[index] = flops.index(min(flops))
        flops[found[index]] += matrix_flops(*matrices[index])
    return tuple(found)


def owned(matrices: Matrices, ranks: int, rank: int) -> list[tuple[int, int]]:
    """The matrices of a chunk that a rank makes orthogonal."""
    return [shape for shape, owner in zip(matrices, owners(matrices, ranks), strict=True) if owner == rank]


def slowest(matrices: Matrices, ranks: int) -> list[tuple[int, int]]:
    """The matrices of the rank that has most to do in a chunk."""
    each = (owned(matrices, ranks, rank) for rank in range(ranks))
    return max(each, key=lambda mine: sum(matrix_flops(*shape) for shape in mine))


def part_of(offset: int, numel: int, shard_numel: int, rank: int) -> slice:
    """The elements of a parameter that lie in a rank's shard; empty if none do.

    Args:
        offset: of the parameter in its chunk.
        numel: its elements.
        shard_numel: elements of a shard.
        rank: of the shard.
    """
    first = min(max(rank * shard_numel - offset, 0), numel)
    return slice(first, min(max((rank + 1) * shard_numel - offset, first), numel))


def exchanged_bytes(matrices: Matrices, offsets: Sequence[int], shard_numel: int, ranks: int, rank: int) -> int:
    """Bytes that a rank receives for a chunk in a step: parts of what it owns, and its part of what others own."""
    total = 0
    if not matrices or ranks == 1:
        return total
    for (rows, columns), offset, owner in zip(matrices, offsets, owners(matrices, ranks), strict=True):
        mine = part_of(offset, rows * columns, shard_numel, rank)
        numel = mine.stop - mine.start
        total += rows * columns - numel if owner == rank else numel
    return DIRECTION_BYTES * total


def room_bytes(chunks: Iterable[tuple[Matrices, int]], ranks: int) -> int:
    """Device bytes of one rank in which matrices are made orthogonal.

    Several ranks need room for the directions of a shard, and for all matrices of a chunk that one of them owns.

    Args:
        chunks: matrices and elements of a shard, of each chunk that has matrices.
        ranks: over how many the chunks are sharded.
    """
    known = [(matrices, shard) for matrices, shard in chunks if matrices]
    largest = max((matrix_room_bytes(*shape) for matrices, _ in known for shape in matrices), default=0)
    if ranks == 1:
        return largest
    return largest + DIRECTION_BYTES * (directions_numel(known) + owned_numel(known, ranks))


def directions_numel(chunks: Iterable[tuple[Matrices, int]]) -> int:
    """Elements of the largest shard with matrices; arguments as for `room_bytes`."""
    return max((shard for matrices, shard in chunks if matrices), default=0)


def owned_numel(chunks: Iterable[tuple[Matrices, int]], ranks: int) -> int:
    """Elements of the most that a rank owns of a chunk."""
    return max(
        (
            sum(rows * columns for rows, columns in owned(matrices, ranks, rank))
            for matrices, _ in chunks
            for rank in range(ranks)
        ),
        default=0,
    )


def stage_numel(matrices: Matrices, shard_numel: int, ranks: int) -> int:
    """Elements of a staging buffer on the host for a chunk whose states live there."""
    if not matrices:
        return 0
    return shard_numel if ranks > 1 else max(rows * columns for rows, columns in matrices)


def stages(ranks: int) -> int:
    """The number of staging buffers."""
    return MATRIX_STAGES if ranks == 1 else 1
