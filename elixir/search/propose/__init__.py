"""Where candidates come from, in the order in which they are tried."""

from __future__ import annotations

from elixir.search.propose.best import MOST_AHEAD, Outcome, find_best
from elixir.search.propose.candidate import Candidate, as_it_runs, everything_resident, settled, weigh
from elixir.search.propose.disk_overflow import spilled
from elixir.search.propose.fillings import Fillings
from elixir.search.propose.greedy import PlacementBuilder
from elixir.search.propose.local_search import LocalSearch
from elixir.search.propose.original_elixir import classic_candidates
from elixir.search.propose.placement_batch import Variants, possible_homes
from elixir.search.propose.regret import TIE, find_surest
from elixir.search.propose.sizes import MAX_OUTSIZED, Budgets, SearchSpace

__all__ = [
    "MAX_OUTSIZED",
    "MOST_AHEAD",
    "TIE",
    "Budgets",
    "Candidate",
    "Fillings",
    "LocalSearch",
    "Outcome",
    "PlacementBuilder",
    "SearchSpace",
    "Variants",
    "as_it_runs",
    "classic_candidates",
    "everything_resident",
    "find_best",
    "find_surest",
    "possible_homes",
    "settled",
    "spilled",
    "weigh",
]
