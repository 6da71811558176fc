"""From what a step needs and what a machine can do to what goes where, and when.

A chain without cycles: states, packing -> workload -> memory -> homes, cost -> candidate, rates -> work_times -> floors,
replay -> simulator -> space -> classic, variants -> polish -> optimal -> budgets, shortage -> planner -> searches, batches.
`lower_bound` beside it bounds all plans. `docs/search.md` says what it does and by which formulas.
"""

from __future__ import annotations

from elixir.search.batches import search_batches
from elixir.search.planner import plan_from_trace
from elixir.search.searches import minimum_waste_search, optimal_search, simple_search

__all__ = ["minimum_waste_search", "optimal_search", "plan_from_trace", "search_batches", "simple_search"]
