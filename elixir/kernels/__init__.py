"""The fused steps: Adam for shards and whole models, and a model's loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elixir.kernels.adam.hybrid_adam import HybridAdam

__all__ = ["HybridAdam"]


def __getattr__(name: str) -> Any:
    """Loads `HybridAdam` when it is asked for, since a trace needs the kernels of models alone."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from elixir.kernels.adam.hybrid_adam import HybridAdam

    return HybridAdam
