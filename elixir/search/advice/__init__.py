"""Advice: what a plan that does not fit lacks, what would be enough, and what would make one that fits faster.

`changes` lists what may be changed. `infeasible` turns a search without an outcome into a `PlanError` with levers,
`what_suffices` finds the changes with which a plan fits, and `levers` plans each change of a step that fits already.
"""

from __future__ import annotations

from elixir.search.advice.infeasible import Case, moments_instead, shortage
from elixir.search.advice.levers import PlanLever, best_allowed, plan_levers, samples_per_s
from elixir.search.advice.what_suffices import Tries, lacks_device, lacks_room, settled_arguments, with_what_suffices

__all__ = [
    "Case",
    "PlanLever",
    "Tries",
    "best_allowed",
    "lacks_device",
    "lacks_room",
    "moments_instead",
    "plan_levers",
    "samples_per_s",
    "settled_arguments",
    "shortage",
    "with_what_suffices",
]
