"""The fused steps: Adam for shards and whole models, and a model's norms, SwiGLU blocks, rotations and loss."""

from elixir.kernels.adam.hybrid_adam import HybridAdam

__all__ = ["HybridAdam"]
