"""Seconds that no plan of a search can beat: a linear program over what every plan must do, and its proof by duality.

Every plan gives every parameter a home; the program lets homes be fractions, forgets about chunks, and keeps what holds
however parameters are packed: bytes that must fit, and work that each resource must do before and after backward
begins (`benchmark.certificate.program`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmark.certificate.program import KINDS, ROUNDING, Program
from elixir.errors import StateError
from elixir.search.problem.placement import Floats
from elixir.search.propose.sizes import Budgets, SearchSpace


@dataclass(frozen=True)
class LowerBound:
    """Seconds that no plan can beat."""

    step_s: float
    forward_s: float
    """Seconds of the program's solution until backward begins; with the rest it sums to `step_s`, up to rounding."""
    device_states: float
    """Share of the trained elements whose states its solution keeps on the device."""
    rows: Mapping[str, float]
    """Rows that hold the bound up, with seconds that one more unit of their right side would save."""


def lower_bound(space: SearchSpace, budgets: Budgets) -> LowerBound | None:
    """The bound for all plans of a search, whatever their chunk size, homes, blocks and prefetch depth.

    Args:
        space: what is searched; the bound is for its `SimulatedCost` with the profile's own network.
        budgets: what a plan may use.

    Returns:
        None where even fractions of parameters do not fit, so that there is no plan.
    """
    kinds = KINDS if space.setting.overlap else KINDS[:1]
    found = [_solve(Program(space, budgets, kind)) for kind in kinds]
    return min((bound for bound in found if bound is not None), key=lambda bound: bound.step_s, default=None)


def _solve(program: Program) -> LowerBound | None:
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix

    # Bytes and seconds differ by many orders of magnitude; solvers take numbers much smaller than 1 for nothing.
    dense = np.vstack(program.rows) * program.units
    scale = 1.0 / np.abs(dense).max(axis=1)
    matrix, limits = csr_matrix(dense * scale[:, None]), np.array(program.limits) * scale
    cost, upper = program.cost * program.units, program.upper / program.units
    bounds = np.column_stack((np.zeros_like(upper), upper))
    found = linprog(cost, A_ub=matrix, b_ub=limits, bounds=bounds, method="highs")
    if found.status == 2:
        return None
    if found.status != 0:
        raise StateError(f"the linear program under the search ended with status {found.status}: {found.message}")
    prices = np.minimum(found.ineqlin.marginals, 0.0)
    proven_s = _weak_duality(cost, matrix, limits, upper, prices)
    # Columns end somewhere: what takes longer than that is above any bound that does not exceed it.
    step_s = min(proven_s, float(program.upper[program.forward])) * (1 - ROUNDING)
    tight: dict[str, float] = {}
    for row, (name, price) in enumerate(zip(program.names, prices.tolist(), strict=True)):
        if price < 0:
            tight[name] = tight.get(name, 0.0) - price * float(scale[row])
    return LowerBound(
        step_s=step_s,
        forward_s=float(found.x[program.forward] * program.units[program.forward]),
        device_states=program.share_on_device(found.x),
        rows=tight,
    )


def _weak_duality(cost: Floats, matrix: object, limits: Floats, upper: Floats, prices: Floats) -> float:
    """A bound that any prices (not above 0) prove: no solver is trusted.

    For x with ``matrix x <= limits`` and ``0 <= x <= upper``: cost x >= cost x + prices (limits - matrix x), and what x
    can contribute to the right side is smallest at one of its two ends.
    """
    reduced = cost - matrix.T @ prices  # type: ignore[attr-defined]
    return float(limits @ prices + np.minimum(reduced, 0.0) @ upper)
