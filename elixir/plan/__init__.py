"""`Plan`: what goes where, and when. `chunk_plan` has a chunk's part of it, `traffic` the bytes that its steps move."""

from elixir.plan.plan import Plan

__all__ = ["Plan"]
