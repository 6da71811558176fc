"""Fused parts of other people's models, per instance: the loss, and layers by libraries."""
