"""Plans what goes where, and when, from what a step needs and what a machine can do.

`question` and `request` say what is asked. From there up: `problem` (pure data and bytes) < `simulator` (seconds) <
`propose` (candidates) < `planner` (candidate to plan) < `advise` (what to change) < `searches`, `batches`, `replan` and
`whatif` (questions asked of a planner). `docs/design/search.md` says what it does and by which formulas.
"""

from __future__ import annotations

from elixir.search.advise.answer import Answer
from elixir.search.batches import search_batches
from elixir.search.searches import minimum_waste_search, optimal_search, plan_from_trace, simple_search

__all__ = ["Answer", "minimum_waste_search", "optimal_search", "plan_from_trace", "search_batches", "simple_search"]
