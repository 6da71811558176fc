"""`WeightFile`: a file with frozen weights as it was when a plan was made, so that a run can see whether it changed."""

from __future__ import annotations

from dataclasses import dataclass, field

from elixir.artifact import check_bounds
from elixir.plan.chunk_plan import Count


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file in which a plan leaves frozen weights."""

    name: str
    """Its name without the folder, which may be another one where the plan runs."""
    nbytes: Count
    """Its size."""
    digest: str
    """Digest of its size, its header and a sample of each tensor (`elixir.extents.weight_files`)."""
    modified_us: int | None = field(default=None, compare=False)
    """Time of its last change, in microseconds; a copy on another machine may have another. None if not known."""

    def __post_init__(self) -> None:
        check_bounds(self)
