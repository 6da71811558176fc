"""Fused parts of other people's models, per instance: norms, SwiGLU, loss."""
