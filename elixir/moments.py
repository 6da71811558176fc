"""Adam's two moments as float32, bfloat16, or 8 bits in blocks: the names, and how many bytes each takes.

What steps with them is in `elixir.kernels`; plans and the search know only this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from elixir.errors import InputError, unknown_name

MomentKind = Literal["float32", "bfloat16", "8bit"]

FP32_BYTES = 4

BLOCK_NUMEL = 256
"""Elements that share a scale. Dettmers et al. use 2048; 256 costs 1/64 byte per element and keeps outliers more to themselves."""

_SCALE_BYTES = FP32_BYTES
"""Of a block's scale, which is float32."""

LARGEST_PIECE_NUMEL = 2**23
"""A step that is not compiled works on so many elements at once, or fewer. 32 MiB of float32: fits the second-level cache of
an A100 or H100, and hides the launches."""
LARGEST_HOST_PIECE_NUMEL = 2**19
"""On the host, whose plans do not count what such a step with moments in fewer bits holds: with this at most 15 or 30 MB, however
many threads there are. A thread's part of it stays in its core's cache."""
STEP_TEMPORARY_BYTES: dict[MomentKind, int] = {"bfloat16": 28, "8bit": 58}
"""Per element of a piece, what such a step holds at most beside its arguments. Counted on the CPU, storage by storage."""


@dataclass(frozen=True)
class StateSize:
    """Bytes of optimizer states by number of elements: a whole block's for every block that is begun.

    Of weights up to float32. Those of wider weights are as much wider, as `torch.optim` makes them.

    Raises:
        InputError: a negative size, or blocks without elements.
    """

    block_bytes: int
    """States of one block, master weights not included."""
    block_numel: int = 1

    def __post_init__(self) -> None:
        if self.block_bytes < 0:
            raise InputError(f"field 'block_bytes' must be 0 or larger, found {self.block_bytes}")
        if self.block_numel < 1:
            raise InputError(f"field 'block_numel' must be 1 or larger, found {self.block_numel}")

    def nbytes(self, numel: int, weight_bytes: int = FP32_BYTES) -> int:
        """Exact bytes of a flat tensor's states.

        Args:
            numel: its elements.
            weight_bytes: of one of them.

        Raises:
            InputError: `numel` is negative.
        """
        if numel < 0:
            raise InputError(f"a tensor cannot have {numel} elements")
        return -(-numel // self.block_numel) * self.block_bytes * max(1, weight_bytes // FP32_BYTES)

    def least_per_numel(self, weight_bytes: int = FP32_BYTES) -> float:
        """Bytes per element of whole blocks; no number of elements takes less."""
        return self.block_bytes / self.block_numel * max(1, weight_bytes // FP32_BYTES)


_SIZES: dict[MomentKind, StateSize] = {
    "float32": StateSize(2 * FP32_BYTES),
    "bfloat16": StateSize(2 * 2),
    "8bit": StateSize(2 * (BLOCK_NUMEL + _SCALE_BYTES), BLOCK_NUMEL),
}


def check_kind(kind: str) -> MomentKind:
    """`kind` itself; `InputError` where it is none."""
    for known in get_args(MomentKind):
        if kind == known:
            return known  # type: ignore[no-any-return]
    raise unknown_name("kind of moments", str(kind), get_args(MomentKind))


def moments_size(moments: str = "float32") -> StateSize:
    """What both moments take; `InputError` where the kind is unknown."""
    return _SIZES[check_kind(moments)]


def state_bytes(numel: int, moments: str = "float32") -> int:
    """Bytes of both moments of a flat tensor of `numel` elements, exactly as `elixir.kernels.make_moments` allocates them.

    Raises:
        InputError: `numel` is negative, or the kind unknown.
    """
    return moments_size(moments).nbytes(numel)
