"""Gradients on their way from autograd to the home of the optimizer states, and their memory."""

from __future__ import annotations

from elixir.chunk.gradients.flow import FlowOptions, GradientFlow
from elixir.chunk.gradients.gradient import ChunkGradient, GradState

__all__ = ["ChunkGradient", "FlowOptions", "GradState", "GradientFlow"]
