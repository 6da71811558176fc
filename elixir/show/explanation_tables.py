"""An explanation for people: a line for all chunks that live alike, with the best other place for one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, Any

from elixir.search.whatif.explanation import NEGLIGIBLE_SHARE, ChunkReasons, Difference, Explanation, Spot
from elixir.show.style import RESOURCE_LABELS
from elixir.show.tables import list_table
from elixir.units import format_bytes, format_seconds, number_ranges

if TYPE_CHECKING:
    from rich.table import Table

    from elixir.search.advise.answer import Effect

_MOST_RUNS = 3


@dataclass(frozen=True)
class AlikeChunks:
    """Chunks that live in the same spot, and the best other spot for one of them."""

    runs: tuple[tuple[int, int], ...]
    """First and last of each run of neighbours, in order of first use."""
    parameters: str
    weight_bytes: int
    spot: Spot
    elsewhere: Spot | None
    """None without any other spot."""
    least_change_s: float
    """The change of the step if one of them were there, at least and at most."""
    most_change_s: float
    verdict: str
    """Whether a plan could have that, and what it lacks otherwise."""
    effect_s: float
    """The largest change that any other spot would bring, either way."""

    @property
    def chunks(self) -> str:
        """The numbers of the chunks, as people write them."""
        runs = [str(first) if first == last else f"{first} to {last}" for first, last in self.runs]
        return ", ".join(runs[:_MOST_RUNS]) + (f" and {len(runs) - _MOST_RUNS} runs more" if runs[_MOST_RUNS:] else "")


def kinds(explanation: Explanation) -> list[AlikeChunks]:
    """All chunks that live in the same spot, wherever they are in the order; the greatest effect first."""
    chunks = sorted(explanation.chunks, key=lambda chunk: str(chunk.spot))
    groups = [_alike(spot, list(members), explanation) for spot, members in groupby(chunks, key=lambda each: each.spot)]
    return sorted(groups, key=lambda group: (-round(group.effect_s, 9), group.runs))


def _alike(spot: Spot, members: Sequence[ChunkReasons], explanation: Explanation) -> AlikeChunks:
    changes: dict[Spot, list[Difference]] = {}
    for member in members:
        for other in member.elsewhere:
            changes.setdefault(other.spot, []).append(other.change)
    elsewhere, verdict = _best(changes, NEGLIGIBLE_SHARE * explanation.step_s)
    there = [change.change_s for change in changes.get(elsewhere, ())] if elsewhere else [0.0]
    return AlikeChunks(
        runs=tuple(number_ranges(member.chunk for member in members)),
        parameters=" to ".join(dict.fromkeys((members[0].first_parameter, members[-1].last_parameter))),
        weight_bytes=sum(member.weight_bytes for member in members),
        spot=spot,
        elsewhere=elsewhere,
        least_change_s=min(there),
        most_change_s=max(there),
        verdict=verdict,
        effect_s=max((abs(change.change_s) for each in changes.values() for change in each), default=0.0),
    )


def _best(changes: dict[Spot, list[Difference]], slight_s: float) -> tuple[Spot | None, str]:
    """The spot that would shorten the step most, among those that fit if one does by more than `slight_s`; and what is
    to be said of it."""
    if not changes:
        return None, "larger than a block, so there is no other place"
    spots = sorted(changes, key=lambda spot: (round(median(each.change_s for each in changes[spot]), 9), str(spot)))
    fitting = [(change.change_s, spot, change) for spot in spots for change in changes[spot] if change.fits]
    # A search passes over what loses too much in another scenario; what it would not pass over comes first.
    fitting.sort(key=lambda each: (each[2].passed_over is not None, each[0]))
    for change_s, spot, change in fitting:
        if change_s < -slight_s:
            left = change.passed_over
            but = "" if left is None else f", but {left.regret:.0%} slower than necessary if {left.scenario}"
            return spot, f"would be {format_seconds(-change_s)} faster here{but}" if but else "yes: plan again"
    return spots[0], fits_text(min(changes[spots[0]], key=_lacking))


def explanation_record(explanation: Explanation) -> dict[str, Any]:
    """The whole explanation as one object; keys ending in ``_bytes`` and ``_s`` say units."""

    def of_change(change: Difference) -> dict[str, Any]:
        return {**dataclasses.asdict(change), "fits": change.fits}

    return {
        "step_s": explanation.step_s,
        "bound_by": explanation.bound_by,
        "critical_s": explanation.critical_s,
        "kinds": [dataclasses.asdict(group) for group in kinds(explanation)],
        "chunks": [
            {
                **dataclasses.asdict(dataclasses.replace(chunk, elsewhere=())),
                "elsewhere": [
                    {**dataclasses.asdict(other.spot), **of_change(other.change)} for other in chunk.elsewhere
                ],
            }
            for chunk in explanation.chunks
        ],
        "blocks": [of_change(change) for change in explanation.blocks],
        "after_norm": None if explanation.after_norm is None else of_change(explanation.after_norm),
        "levers": [{name: getattr(lever, name) for name in _OF_MACHINE} for lever in explanation.levers],
        "changes": [_of_training(lever) for lever in explanation.changes],
    }


_OF_MACHINE = ("action", "step_s", "change_s")
"""Fields of a lever of the machine in a record."""


def _of_training(lever: Effect) -> dict[str, Any]:
    record: dict[str, Any] = {"action": lever.action, "options": dict(lever.options), "samples_gain": lever.gain}
    if lever.plan is not None:
        predicted = lever.plan.predicted
        record |= {"step_s": predicted.step_s, "tokens_per_s": lever.plan.tokens_per_s}
        record |= {"device_peak_bytes": predicted.device_peak_bytes, "host_peak_bytes": predicted.host_peak_bytes}
    return record


def explanation_shown(explanation: Explanation, most: int) -> Iterator[str | Table]:
    """The bound of the step, and what early updates bring; then tables of the `most` kinds of places that matter most,
    of rCache blocks, and of levers. No table if `most` is 0."""
    share = explanation.critical_s[explanation.bound_by] / explanation.step_s if explanation.step_s else 0.0
    yield (
        f"{format_seconds(explanation.step_s)} a step at the profile's rates, bound by "
        f"{RESOURCE_LABELS[explanation.bound_by]}: {share:.0%} of the longest chain of work"
    )
    if explanation.after_norm is not None:
        count, change = sum(chunk.early for chunk in explanation.chunks), explanation.after_norm
        yield (
            f"{count} chunks are updated early, with {format_bytes(-change.host_change_bytes)} of the host; without "
            f"early updates the step would change by {_seconds(change.change_s)}"
        )
    if not most:
        return
    yield places_table(explanation, most)
    if explanation.blocks:
        rows = [
            [str(each.block_count), _seconds(each.change_s), _signed_bytes(each.device_change_bytes), fits_text(each)]
            for each in explanation.blocks
        ]
        yield list_table("one rCache block fewer or more", ("blocks", "step", "device", "fits"), rows)
    if explanation.levers:
        yield levers_table(explanation)


def places_table(explanation: Explanation, most: int) -> Table:
    """The `most` kinds of places that matter most, each with the best other one for one of its chunks (rich)."""
    found = kinds(explanation)
    rows = [
        [
            group.chunks,
            format_bytes(group.weight_bytes),
            group.spot.short,
            "-" if group.elsewhere is None else group.elsewhere.short,
            _seconds(group.least_change_s, group.most_change_s),
            group.verdict,
        ]
        for group in found[:most]
    ]
    left = f" (the {most} of {len(found)} places that matter most)" if len(found) > most else ""
    columns = ("chunks", "size", "weights / states", "if one were", "step", "fits")
    return list_table(f"one chunk elsewhere{left}", columns, rows)


def levers_table(explanation: Explanation) -> Table:
    """The gain of each change of the machine, planned again (rich)."""
    rows = []
    for lever in explanation.levers:
        share = (lever.change_s or 0.0) / explanation.step_s if explanation.step_s else 0.0
        rows.append([lever.action, format_seconds(lever.step_s or 0.0), "0" if abs(share) < 5e-4 else f"{share:+.1%}"])
    title = "what one lever would bring, planned again, at the profile's rates"
    return list_table(title, ("lever", "step", "change"), rows)


def fits_text(change: Difference) -> str:
    lacking = [
        f"{format_bytes(amount)} of {memory}"
        for memory, amount in zip(("device memory", "host memory", "disk"), _lacking(change), strict=True)
        if amount
    ]
    return f"lacks {' and '.join(lacking)}" if lacking else "yes"


def _lacking(change: Difference) -> tuple[int, int, int]:
    return change.lacks_device_bytes, change.lacks_host_bytes, change.lacks_disk_bytes


def _seconds(least_s: float, most_s: float | None = None) -> str:
    """A change, or a range of changes in one unit; below a microsecond they are rounding, or might as well be."""
    values = [0.0 if abs(value) < 1e-6 else value for value in (least_s, least_s if most_s is None else most_s)]
    largest = max(map(abs, values))
    size, unit = (1.0, "s") if largest >= 1 else (1e-3, "ms") if largest >= 1e-3 else (1e-6, "us")
    texts = ["0" if not value else f"{value / size:+.{2 if largest >= 1 else 1}f}" for value in values]
    return " to ".join(dict.fromkeys(texts)) + (f" {unit}" if any(values) else "")


def _signed_bytes(amount_bytes: int) -> str:
    return "0" if not amount_bytes else ("+" if amount_bytes > 0 else "-") + format_bytes(abs(amount_bytes))
