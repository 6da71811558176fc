"""A second plan from what the first steps showed: the same chunks, other homes.

The time model is corrected by what was observed: the links by bytes over busy seconds, the host's Adam by elements over
busy seconds, compute by the one factor that makes the present plan's simulated step as long as the measured one. Steps
are simulated as they went: with early states kept, discarded, or not made. Where few are kept, none are planned. The
budgets are corrected by how far the memory predicted was off. Then the same search runs over the same packing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from elixir.errors import InputError, PlanError
from elixir.hardware.profile import HardwareProfile
from elixir.plan.plan import HasPlan, Plan, plan_of
from elixir.search.advise.answer import Answer
from elixir.search.planner import plan_in
from elixir.search.problem.from_plan import packed_step_of, placement_of, setting_of, trace_under
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.placement import Setting
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.simulator.rates import adam_share, average_share, out_of_place_share
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import StepTrace

MEMORY_TOLERANCE = 0.03
"""Observed peaks may differ from predicted ones by this share before a plan is made again."""
WORTHWHILE = 0.05
"""A new plan must be predicted to be faster by this share."""
LEAST_BUSY_S = 1e-3
"""A resource that worked for less in a step tells nothing about its speed."""
LEAST_KEPT = 0.5
"""A second plan updates nothing early if a smaller share of the new states was kept."""
_SCALES = (1e-4, 1e4)
"""The least and the largest factor on compute times."""
_SCALE_TOLERANCE = 1e-7
"""Relative distance of the factor that is found from the exact one."""


@dataclass(frozen=True)
class EarlyShares:
    """How early updates went, as shares of those that the plan foresees; if it foresees none, how they would have."""

    made: float = 1.0
    """Updates that were asked for during backward."""
    run: float = 1.0
    """Updates that CPU Adam made; it begins none that was discarded before."""
    kept: float = 1.0
    """Updates whose new states were right."""


@dataclass(frozen=True)
class Observation:
    """Observations of one rank in its steady steps, per step."""

    step_s: float
    busy_s: Mapping[str, float]
    """By lane: ``fetch``, ``offload``, ``host_adam``, ``refresh``."""
    fetched_bytes: float
    refreshed_bytes: float
    """Host to device, by the host's Adam."""
    offloaded_bytes: float
    device_peak_bytes: int
    host_peak_bytes: int
    """Host bytes of this rank."""
    batches: int | None = None
    """Backwards per step, those of a pass together; None: as many as the plan is for."""
    early: EarlyShares = field(default_factory=EarlyShares)


@dataclass(frozen=True)
class Correction:
    """The consequences of observations."""

    plan: Plan | None
    """The plan to go on with; None to stay."""
    reason: str


def worst(observations: list[Observation]) -> Observation:
    """One for all ranks: the slowest step, the fullest memories, the slowest of each resource, the fewest early states
    kept."""
    first, least = observations[0], min(observations, key=lambda seen: seen.early.kept)
    lanes = sorted(first.busy_s)
    return Observation(
        step_s=max(seen.step_s for seen in observations),
        busy_s={lane: max(seen.busy_s[lane] for seen in observations) for lane in lanes},
        fetched_bytes=first.fetched_bytes,
        refreshed_bytes=first.refreshed_bytes,
        offloaded_bytes=first.offloaded_bytes,
        device_peak_bytes=max(seen.device_peak_bytes for seen in observations),
        host_peak_bytes=max(seen.host_peak_bytes for seen in observations),
        batches=max((seen.batches for seen in observations if seen.batches is not None), default=None),
        early=least.early,
    )


def calibrated(
    trace: StepTrace, hardware: HardwareProfile, plan: Plan, seen: Observation
) -> tuple[HardwareProfile, float]:
    """The machine as it showed itself, and the factor on compute times."""
    rates: dict[str, float] = {}
    fetch, offload, adam, refresh = (seen.busy_s[lane] for lane in ("fetch", "offload", "host_adam", "refresh"))
    up, up_bytes = fetch + refresh, seen.fetched_bytes + seen.refreshed_bytes
    if up > LEAST_BUSY_S and up_bytes:
        rates["host_to_device_bytes_per_s"] = up_bytes / up
    if offload > LEAST_BUSY_S and seen.offloaded_bytes:
        rates["device_to_host_bytes_per_s"] = seen.offloaded_bytes / offload
    ranks = hardware.ranks_per_host(plan.world_size)
    setting = setting_of(plan, ranks, hardware.device_kind)
    stepped = _stepped_numel(plan, setting, seen)
    if adam > LEAST_BUSY_S and stepped:
        # A profile's rate is that of float32 moments, from which `Rates` makes the plan's again.
        rates["host_adam_numel_per_s"] = stepped * ranks / adam / adam_share(plan.moments) * average_share(setting)
    measured = {name.removesuffix("_bytes_per_s").removesuffix("_numel_per_s") for name in rates}
    fits = {key: fit for key, fit in hardware.fits.items() if key.split(".")[0] not in measured}
    # What was seen is no longer uncertain; scenarios differ in the rest.
    least = {"host_adam": "host_adam_least", "host_to_device": "link_least", "device_to_host": "link_least"}
    known: dict[str, float] = {least[name]: 1.0 for name in sorted(measured)}
    machine = replace(hardware, fits=fits, early_kept=seen.early.kept, **rates, **known)  # type: ignore[arg-type]
    return machine, _compute_scale(trace, machine, plan, seen)


def _stepped_numel(plan: Plan, setting: Setting, seen: Observation) -> float:
    """Elements that CPU Adam of one rank could have stepped in place by the work of one step.

    New states that were made early and discarded are work, too, after which it steps the chunk in place.
    """
    numel = {
        early: sum(c.numel for c in plan.chunks if c.trainable and c.update_home == "host" and c.home.early == early)
        for early in (False, True)
    }
    in_place = numel[False] + (1 - seen.early.kept) * numel[True]
    out_of_place = max(seen.early.run, seen.early.kept) * numel[True]
    return (in_place + out_of_place * out_of_place_share(setting)) / plan.world_size


def simulated_s(
    plan: Plan, trace: StepTrace, hardware: HardwareProfile, seen: Observation, *, compute_scale: float = 1.0
) -> float:
    """Seconds of a step of the plan if early states are made, kept and discarded as often as was observed.

    Args:
        plan: the one that was observed, or another.
        trace, hardware, compute_scale: those of `simulate_step`.
        seen: how often early states were made and kept.
    """
    early = seen.early if any(chunk.home.early for chunk in plan.chunks) else EarlyShares()
    kinds = (
        (early.kept, plan, False),
        (early.made - early.kept, plan, True),
        (1 - early.made, _without_early(plan), False),
    )
    return math.fsum(
        share * simulate_step(each, trace, hardware, compute_scale=compute_scale, clipped=discarded).step_s
        for share, each, discarded in kinds
        if share > 0
    )


def _without_early(plan: Plan) -> Plan:
    """The plan as it runs while nothing is updated early."""
    return replace(plan, chunks=tuple(replace(chunk, update="after_norm") for chunk in plan.chunks))


def correct(
    trace: StepTrace, hardware: HardwareProfile, plan: Plan | HasPlan, observations: list[Observation], optimizer: str
) -> Correction:
    """Whether to go on with another plan, and with which.

    Args:
        trace: what `plan` was made from.
        hardware: the machine it was made for.
        plan: which has run.
        observations: of every rank, in order of rank.
        optimizer: family, as in the plan.
    """
    plan, seen = plan_of(plan), worst(observations)
    trace = trace_under(plan, trace)
    ranks = hardware.ranks_per_host(plan.world_size)
    asked = plan
    if seen.batches is not None and seen.batches != plan.passes:
        plan = _for_batches(plan, trace, hardware, seen.batches)
    host_seen, predicted = seen.host_peak_bytes * ranks, plan.predicted
    # On a CPU only what exceeds the plan is seen, so the rest is the plan's own number.
    foreseen = (asked if hardware.device_kind == "cpu" else plan).predicted.device_peak_bytes
    device_off = seen.device_peak_bytes - foreseen
    host_off = host_seen - predicted.host_step_bytes
    budgets = Budgets(
        plan.device_budget_bytes - device_off,
        plan.host_budget_bytes - host_off,
        device_reserve_bytes=plan.device_reserve_bytes,
        host_reserve_bytes=plan.host_reserve_bytes,
    )
    machine, scale = calibrated(trace, hardware, plan, seen)
    setting = setting_of(plan, ranks, hardware.device_kind)
    keeps = seen.early.kept >= LEAST_KEPT
    if not keeps:
        setting = replace(setting, early_updates=False)
    found = _best_with_packing(SearchSpace(trace, machine, setting, scale), budgets, plan, optimizer)
    if found is None:
        return Correction(None, "no other plan of the same chunks fits what was observed")
    now_s, then_s = (simulated_s(each, trace, machine, seen, compute_scale=scale) for each in (plan, found))
    gain = 1 - then_s / now_s
    over = _too_full(seen.device_peak_bytes, foreseen, plan.device_budget_bytes)
    over = over or _too_full(host_seen, predicted.host_step_bytes, plan.host_budget_bytes)
    what = f"step {seen.step_s:.4g} s where {predicted.seconds['total']:.4g} s was predicted"
    if not keeps:
        what += f"; of the early updates {seen.early.kept:.0%} were kept, so none are planned"
    found = replace(found, weight_files=plan.weight_files)
    if found.chunks == plan.chunks and found.block_count == plan.block_count:
        return Correction(None, f"{what}; the plan stays the best")
    if over:
        return Correction(found, f"memory peaks are above the plan's; {what}")
    if gain > WORTHWHILE:
        return Correction(found, f"{what}; another plan is predicted to take {1 - gain:.0%} of it")
    return Correction(None, f"{what}; another plan would gain {max(gain, 0.0):.1%}")


def _for_batches(plan: Plan, trace: StepTrace, hardware: HardwareProfile, batches: int) -> Plan:
    """The plan as it runs with so many batches a step: gradients wait longer, and move more often."""
    setting = setting_of(plan, hardware.ranks_per_host(plan.world_size), hardware.device_kind)
    setting = replace(setting, accumulation=batches)
    need = MemoryModel(packed_step_of(plan, trace), setting).need(placement_of(plan), plan.block_count)
    predicted = replace(
        plan.prediction_for(batches),
        device_peak_bytes=need.device_bytes,
        device_parts=need.device_parts,
        host_peak_bytes=need.host_bytes,
        host_parts=need.host_parts,
    )
    return replace(plan, accumulation=batches * plan.pass_size, predicted=predicted)


def _too_full(seen: int, predicted: int, budget: int) -> bool:
    """Above what was predicted, and so much that the budget does not cover it."""
    return seen > (1 + MEMORY_TOLERANCE) * predicted and seen > budget


def _best_with_packing(space: SearchSpace, budgets: Budgets, plan: Plan, optimizer: str) -> Plan | None:
    """The plan of the same chunks that answers the question of `plan`, scenarios included."""
    asked = Answer.of(plan, space.trace, space.hardware).question.request
    request = replace(asked, optimizer_type=optimizer, chunks_of=plan)
    try:
        return plan_in(space, budgets, request)
    except (PlanError, InputError):  # nothing fits, or no chunk size makes these chunks, which were made by hand
        return None


def _compute_scale(trace: StepTrace, hardware: HardwareProfile, plan: Plan, seen: Observation) -> float:
    """The factor on compute times with which the simulated step takes as long as the observed; it grows with the
    factor."""
    step_s = seen.step_s
    if not (math.isfinite(step_s) and step_s > 0):
        raise InputError(f"a measured step must take a finite time above 0 s, found {step_s}")
    from scipy.optimize import brentq  # late: a plan is corrected once in a run

    @cache
    def too_long(log_scale: float) -> float:
        """How much longer than the observed step the simulated one is, as a logarithm: almost a line."""
        scale = math.exp(log_scale)
        return math.log(simulated_s(plan, trace, hardware, seen, compute_scale=scale) / step_s)

    least, most = (math.log(scale) for scale in _SCALES)
    if too_long(least) >= 0:
        return _SCALES[0]
    if too_long(most) <= 0:
        return _SCALES[1]
    return math.exp(brentq(too_long, least, most, xtol=_SCALE_TOLERANCE))
