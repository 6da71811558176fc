"""Lessons of runs about a machine: its rates, brought to the seconds that steps took."""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from elixir.artifact import NOT_NEGATIVE, POSITIVE, digest
from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile, Learned
from elixir.hardware.rate_fit import PLAIN_FIELDS, RateFit

LEARNED_RANGE = (0.93, 1.07)
"""The multiples of the predicted seconds between which steps of other plans are expected after a run on the machine.

Assumption: what a run does not tell is how compute, links and CPU Adam share its error; steps of the same plan scatter
by less."""
LARGEST_FACTOR = 20.0
"""A run that is this many times slower, or faster, than predicted was no run of such a machine."""
TELLING_SHARE = 0.1
"""A resource that was busy for less of the steps has no part in their seconds that would tell its rate."""

_LANES = {"host_adam_least": ("host_adam",), "link_least": ("fetch", "offload", "refresh")}
"""Field that says how little is known of a rate -> lanes of a report that work at this rate."""
_DISK_RATES = ("disk_read_bytes_per_s", "disk_write_bytes_per_s")
_TIMES = ("launch_s", "network_latency_s")


def learn(
    profile: HardwareProfile, reports: Sequence[Mapping[str, Any]], *, today: str | None = None
) -> HardwareProfile:
    """The profile with which the runs would have been predicted right, and which knows how often early states are kept.

    All rates but the disk's are scaled by one factor, the geometric mean of measured over predicted seconds: a step
    does not tell which of them was off, and choices that depend on how they compare stay as they were measured. A
    disk's are scaled by its own seconds where the reports have them: what it moved, and for how long, is known. Steps
    that did not keep all states which the host was to make early were longer than predicted for that reason, so no rate
    is learned from them. CPU Adam, and links, are known afterwards if they were busy for `TELLING_SHARE` of the steps:
    runs that have not used them leave them as uncertain as before.

    Args:
        profile: by which the plans of the runs were made.
        reports: `StepReport.to_dict` of steps; those without ``step_s`` and ``predicted_step_s`` teach no rates.
        today: ISO date; None: today.

    Raises:
        InputError: no report has both seconds, or counts of early updates; a number makes no sense; or the same reports
            were learned before.
    """
    kept = [_kept(report) for report in reports]
    early = [share for share in kept if share is not None]
    steps = zip(reports, map(_ratio, reports), kept, strict=True)
    timed = [(report, ratio) for report, ratio, share in steps if ratio is not None and share in (None, 1.0)]
    ratios = [ratio for _, ratio in timed]
    if not (ratios or early):
        raise InputError(
            "no step of the report has both 'step_s' and 'predicted_step_s'; save `model.last_report.to_dict()` of a "
            "steady step as JSON"
        )
    before, mark = profile.learned or Learned("", 0, 1.0, ()), digest([dict(report) for report in reports])
    if mark in before.reports:
        raise InputError(f"these steps were learned before, on {before.date}; give the report of another run")
    profile = _with_early(profile, early)
    factor = statistics.geometric_mean(ratios) if ratios else 1.0
    learned = Learned(
        date=today or datetime.date.today().isoformat(),
        steps=len(ratios) + before.steps,
        factor=factor * before.factor,
        reports=(*before.reports, mark),
    )
    if not ratios:
        return dataclasses.replace(profile, learned=learned)
    spread = max(max(ratios) / factor, factor / min(ratios))
    of_disk = _disk_factor(profile, reports)
    disk_factor = factor if of_disk is None else of_disk
    factors = dict.fromkeys((*PLAIN_FIELDS.values(), "network_bytes_per_s"), 1 / factor)
    factors |= dict.fromkeys(_DISK_RATES, 1 / disk_factor)
    factors |= dict.fromkeys(_TIMES, factor)
    known = {name: getattr(profile, name) for name in factors}
    changed: dict[str, Any] = {name: value * factors[name] for name, value in known.items() if value is not None}
    changed |= {name: 1.0 for name, lanes in _LANES.items() if _used([report for report, _ in timed], lanes)}
    said = f"{learned.steps} steps of runs took {learned.factor:.3f} times the seconds predicted before any was known"
    learned_from = {"learned": said, "step_range": "learned from runs on the machine"}
    if of_disk is not None:
        learned_from |= {
            name: f"{profile.sources.get(name, 'given')}; the disk of runs took {of_disk:.3f} times as long"
            for name in _DISK_RATES
        }

    def fitted(key: str, fit: RateFit) -> RateFit:
        own = disk_factor if key.startswith("disk_") else factor
        return RateFit(fit.latency_s * own, fit.per_s / own, fit.error)

    return dataclasses.replace(
        profile,
        flops_per_s={dtype: rate / factor for dtype, rate in profile.flops_per_s.items()},
        fits={key: fitted(key, fit) for key, fit in profile.fits.items()},
        step_range=(min(LEARNED_RANGE[0], 1 / spread), max(LEARNED_RANGE[1], spread)),
        learned=learned,
        sources=profile.sources | learned_from,
        **changed,
    )


def _with_early(profile: HardwareProfile, shares: Sequence[float]) -> HardwareProfile:
    """The profile after steps that kept these shares of their early updates."""
    if not shares:
        return profile
    before = profile.early_steps or 0
    steps = before + len(shares)
    kept = (before * (profile.early_kept or 0.0) + math.fsum(shares)) / steps
    said = f"steps of runs whose plans update chunks early: {steps}"
    return dataclasses.replace(
        profile, early_kept=min(kept, 1.0), early_steps=steps, sources=profile.sources | {"early_kept": said}
    )


def _kept(report: Mapping[str, Any]) -> float | None:
    """The share of the early updates of a step that were kept; None if none was planned."""
    planned, kept = (report.get(f"early_{name}_chunks", 0) for name in ("planned", "kept"))
    if not (NOT_NEGATIVE.allows(planned) and NOT_NEGATIVE.allows(kept) and kept <= planned):
        raise InputError(
            f"'early_kept_chunks' of a report must be from 0 to its 'early_planned_chunks' {planned!r}, found {kept!r}"
        )
    return float(kept / planned) if planned else None


def _ratio(report: Mapping[str, Any]) -> float | None:
    taken_s, predicted_s = report.get("step_s"), report.get("predicted_step_s")
    if taken_s is None or predicted_s is None:
        return None
    for name, value in (("step_s", taken_s), ("predicted_step_s", predicted_s)):
        if not POSITIVE.allows(value):
            raise InputError(f"'{name}' of a report must be a positive finite number, found {value!r}")
    ratio = float(taken_s / predicted_s)
    if not 1 / LARGEST_FACTOR <= ratio <= LARGEST_FACTOR:
        raise InputError(
            f"a step took {taken_s:.3g} s where {predicted_s:.3g} s were predicted; that is no run of the machine that "
            "the plan was made for"
        )
    return ratio


def _used(reports: Sequence[Mapping[str, Any]], lanes: Sequence[str]) -> bool:
    """Whether lanes were busy for enough of the steps, all together, to tell their rate."""
    busy_s = (report.get(f"busy_{lane}_s", 0.0) for report in reports for lane in lanes)
    return math.fsum(filter(NOT_NEGATIVE.allows, busy_s)) >= TELLING_SHARE * math.fsum(
        report["step_s"] for report in reports
    )


def _disk_factor(profile: HardwareProfile, reports: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds of the disk in all steps together over those that the profile gives; None where none has moved states."""
    if not profile.knows_disk:
        return None
    taken_s = expected_s = 0.0
    for report in reports:
        moved = [report.get(f"{way}_bytes", 0) for way in ("disk_read", "disk_write")]
        busy_s = report.get("busy_disk_s", 0.0)
        if all(map(POSITIVE.allows, (*moved, busy_s))):
            ranks = profile.ranks_per_host(int(report.get("world_size", 1)))  # share a disk
            rates = [profile.rate(way).per_s / ranks for way in ("disk_read", "disk_write")]
            expected_s += sum(nbytes / rate for nbytes, rate in zip(moved, rates, strict=True))
            taken_s += busy_s
    return taken_s / expected_s if expected_s else None
