"""Advice: what would make a plan faster, and what would make one fit.

`changes` lists what may be changed, `answer` asks again with a change, and `infeasible` adds to the error of a search
without a plan what would suffice.
"""

from __future__ import annotations

from elixir.search.advise.answer import Answer, Effect, best_allowed, evaluate
from elixir.search.advise.changes import Change, faster
from elixir.search.advise.infeasible import with_levers

__all__ = ["Answer", "Change", "Effect", "best_allowed", "evaluate", "faster", "with_levers"]
