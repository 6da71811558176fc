"""Chunks at run time: memory, transfers, the cache, gradients. No hooks, no model code."""
