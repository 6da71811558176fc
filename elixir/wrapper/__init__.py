"""Runs a plan: `ElixirModule` holds the weights where the plan says, `ElixirOptimizer` steps them there."""

from elixir.wrapper.module import ElixirModule
from elixir.wrapper.optimizer import ElixirOptimizer
from elixir.wrapper.run_options import Debug

__all__ = ["Debug", "ElixirModule", "ElixirOptimizer"]
