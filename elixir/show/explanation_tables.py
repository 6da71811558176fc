"""An explanation for people: equal neighbours in one line, a sentence for each, tables by effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, Any

from elixir.plan.prediction import Judgement
from elixir.search.whatif.explanation import NEGLIGIBLE_SHARE, ChunkReasons, Difference, Explanation, Spot
from elixir.show.style import RESOURCE_LABELS
from elixir.show.tables import list_table
from elixir.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from elixir.search.advise.answer import Effect

_MOST_RUNS = 3


@dataclass(frozen=True)
class Option:
    """One other spot for the chunks of a group, each moved alone."""

    spot: Spot
    median_change_s: float
    least_change_s: float
    most_change_s: float
    fitting_change_s: float | None
    """The change that shortens the step most among those that fit; None where none does."""
    better_change_s: float | None
    """The same change, among those that no search would pass over."""
    passed_over: Judgement | None
    """The reason why a search would pass over the first of these two."""
    device_change_bytes: int
    """Largest change of any of the chunks; so are the next two."""
    host_change_bytes: int
    moved_change_bytes: int
    fitting: int
    """Number of chunks for which it fits the budgets."""
    of: int
    """Number of chunks that could be there at all."""
    lacks: str
    """Bytes that the chunk nearest to fitting lacks; empty if any fits."""


@dataclass(frozen=True)
class AlikeChunks:
    """Chunks that live in the same spot."""

    runs: tuple[tuple[int, int], ...]
    """First and last of each run of neighbours, in order of first use."""
    parameters: str
    weight_bytes: int
    spot: Spot
    options: tuple[Option, ...]
    """The one that shortens the step most comes first."""
    summary: str
    """The reason why the chunks are where they are, in one sentence."""

    @property
    def chunks(self) -> str:
        """The numbers of the chunks, as people write them."""
        runs = [str(first) if first == last else f"{first} to {last}" for first, last in self.runs]
        return ", ".join(runs[:_MOST_RUNS]) + (f" and {len(runs) - _MOST_RUNS} runs more" if runs[_MOST_RUNS:] else "")

    @property
    def effect_s(self) -> float:
        """The largest change that any other spot would bring, either way."""
        changes = [abs(c) for option in self.options for c in (option.least_change_s, option.most_change_s)]
        return max(changes, default=0.0)


def runs(explanation: Explanation) -> tuple[AlikeChunks, ...]:
    """Neighbours that live in the same spot, the greatest effect first."""
    return _grouped(explanation, [list(run) for _, run in groupby(explanation.chunks, key=lambda chunk: chunk.spot)])


def kinds(explanation: Explanation) -> tuple[AlikeChunks, ...]:
    """All chunks that live in the same spot, wherever they are in the order; the greatest effect first."""
    members: dict[Spot, list[ChunkReasons]] = {}
    for chunk in explanation.chunks:
        members.setdefault(chunk.spot, []).append(chunk)
    return _grouped(explanation, list(members.values()))


def _grouped(explanation: Explanation, lists: Sequence[list[ChunkReasons]]) -> tuple[AlikeChunks, ...]:
    prefix = _common_prefix([chunk.first_parameter for chunk in explanation.chunks])
    found = []
    for members in lists:
        ends = [members[0].first_parameter, members[-1].last_parameter]
        numbers = [
            list(run) for _, run in groupby(enumerate(m.chunk for m in members), key=lambda pair: pair[1] - pair[0])
        ]
        group = AlikeChunks(
            runs=tuple((run[0][1], run[-1][1]) for run in numbers),
            parameters=" to ".join(dict.fromkeys(name.removeprefix(prefix) for name in ends)),
            weight_bytes=sum(chunk.weight_bytes for chunk in members),
            spot=members[0].spot,
            options=_options(members),
            summary="",
        )
        summary = _summary(group, sum(last - first + 1 for first, last in group.runs), explanation.step_s)
        found.append(dataclasses.replace(group, summary=summary))
    return tuple(sorted(found, key=lambda group: (-round(group.effect_s, 9), group.runs)))


def explanation_record(explanation: Explanation) -> dict[str, Any]:
    """The whole explanation as one object; keys ending in ``_bytes`` and ``_s`` say units."""

    def of_change(change: Difference) -> dict[str, Any]:
        return {**dataclasses.asdict(change), "fits": change.fits}

    return {
        "step_s": explanation.step_s,
        "bound_by": explanation.bound_by,
        "critical_s": explanation.critical_s,
        "kinds": [dataclasses.asdict(group) for group in kinds(explanation)],
        "runs": [dataclasses.asdict(group) for group in runs(explanation)],
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


def summary_text(explanation: Explanation) -> str:
    """The bound of the step, then a sentence for each kind of place."""
    share = explanation.critical_s[explanation.bound_by] / explanation.step_s if explanation.step_s else 0.0
    lines = [
        f"{format_seconds(explanation.step_s)} a step at the profile's rates, "
        f"bound by {RESOURCE_LABELS[explanation.bound_by]}: "
        f"{share:.0%} of the longest chain of work"
    ]
    for group in kinds(explanation):
        several = len(group.runs) > 1 or group.runs[0][0] != group.runs[0][1]
        lines.append(f"  chunk{'s' * several} {group.chunks}: {group.summary}")
    if explanation.after_norm is not None:
        count, change = sum(chunk.early for chunk in explanation.chunks), explanation.after_norm
        lines.append(
            f"  {count} chunks are updated early, with {format_bytes(-change.host_change_bytes)} of the host; without "
            f"early updates the step would change by {_seconds(change.change_s)}"
        )
    return "\n".join(lines)


def elsewhere_table(explanation: Explanation, most: int) -> Table:
    """The `most` runs of neighbours that matter most, with every other spot for one of their chunks (rich)."""
    found = runs(explanation)
    rows = []
    for group in found[:most]:
        for number, option in enumerate(group.options):
            head = [group.chunks, group.spot.short] if not number else ["", ""]
            amounts = (
                ("device", option.device_change_bytes),
                ("host", option.host_change_bytes),
                ("moved", option.moved_change_bytes),
            )
            some = f"{option.fitting} of {option.of}" if option.fitting else option.lacks
            rows.append(
                [
                    *head,
                    option.spot.short,
                    _range(option),
                    "\n".join(f"{_signed_bytes(amount)} {what}" for what, amount in amounts if amount) or "0",
                    "yes" if option.fitting == option.of else some,
                ]
            )
    columns = ("chunks", "weights / states", "if one were", "step", "bytes", "fits")
    left = f" (the {most} of {len(found)} runs that matter most)" if len(found) > most else ""
    return list_table(f"one chunk elsewhere{left}", columns, rows)


def blocks_table(explanation: Explanation) -> Table:
    """The step with one rCache block fewer, and with one more (rich)."""
    rows = [
        [str(change.block_count), _seconds(change.change_s), _signed_bytes(change.device_change_bytes), _fits(change)]
        for change in explanation.blocks
    ]  # fmt: skip
    return list_table("one rCache block fewer or more", ("blocks", "step", "device", "fits"), rows)


def levers_table(explanation: Explanation) -> Table:
    """The gain of each change of the machine, planned again (rich)."""
    rows = [
        [lever.action, format_seconds(lever.step_s or 0.0), _percent(lever.change_s or 0.0, explanation.step_s)]
        for lever in explanation.levers
    ]
    return list_table(
        "what one lever would bring, planned again, at the profile's rates", ("lever", "step", "change"), rows
    )


def _options(members: Sequence[ChunkReasons]) -> tuple[Option, ...]:
    by_spot: dict[Spot, list[Difference]] = {}
    for chunk in members:
        for other in chunk.elsewhere:
            by_spot.setdefault(other.spot, []).append(other.change)
    found = []
    for spot, changes in by_spot.items():
        nearest = min(changes, key=_lacking)
        changes_s = [change.change_s for change in changes]
        fitting = sorted((change for change in changes if change.fits), key=lambda change: change.change_s)
        found.append(
            Option(
                spot=spot,
                median_change_s=median(changes_s),
                least_change_s=min(changes_s),
                most_change_s=max(changes_s),
                fitting_change_s=fitting[0].change_s if fitting else None,
                better_change_s=next((change.change_s for change in fitting if change.passed_over is None), None),
                passed_over=fitting[0].passed_over if fitting else None,
                device_change_bytes=max((change.device_change_bytes for change in changes), key=abs),
                host_change_bytes=max((change.host_change_bytes for change in changes), key=abs),
                moved_change_bytes=max((change.moved_change_bytes for change in changes), key=abs),
                fitting=len(fitting),
                of=len(changes),
                lacks="" if nearest.fits else _fits(nearest),
            )
        )
    return tuple(sorted(found, key=lambda option: (round(option.median_change_s, 9), str(option.spot))))


def _summary(group: AlikeChunks, count: int, step_s: float) -> str:
    here = f"{group.spot} ({group.parameters}, {format_bytes(group.weight_bytes)})"
    slight_s, one = NEGLIGIBLE_SHARE * step_s, "one of them as " if count > 1 else ""
    if not group.options:
        return f"{here}; larger than a block, so there is no other place."
    better = [(option.better_change_s, option) for option in group.options if option.better_change_s is not None]
    change_s, option = min(better, key=lambda pair: pair[0], default=(0.0, group.options[0]))
    if change_s < -slight_s:
        return f"{here}; {one}{option.spot} would fit and change the step by {_seconds(change_s)}: plan again."
    fitting = [(option.fitting_change_s, option) for option in group.options if option.fitting_change_s is not None]
    change_s, option = min(fitting, key=lambda pair: pair[0], default=(0.0, group.options[0]))
    if change_s < -slight_s and option.passed_over is not None:
        return (
            f"{here}; {one}{option.spot} would fit and change the step by {_seconds(change_s)}, but the step take "
            f"{option.passed_over.regret:.0%} more than it must if {option.passed_over.scenario}."
        )
    best = group.options[0]
    if best.median_change_s < -slight_s and not best.fitting:
        return f"{here}; {one}{best.spot} would change the step by {_range(best)}, but {best.lacks}."
    if group.effect_s <= slight_s:
        return f"{here}; another place would change the step by less than {NEGLIGIBLE_SHARE:.1%}."
    if best.median_change_s <= slight_s:
        worst = group.options[-1]
        return (
            f"{here}; no place that fits is faster by more than {NEGLIGIBLE_SHARE:.1%}: {one}{best.spot} changes the "
            f"step by {_range(best)}, {worst.spot} by "
            f"{_range(worst)}."
        )
    return f"{here}; every other place is slower, {one}{best.spot} the least: {_range(best)}."


def _fits(change: Difference) -> str:
    memories = ("device memory", "host memory", "disk")
    lacking = [
        f"{format_bytes(amount)} of {memory}"
        for memory, amount in zip(memories, _lacking(change), strict=True)
        if amount
    ]
    return f"lacks {' and '.join(lacking)}" if lacking else "yes"


def _lacking(change: Difference) -> tuple[int, int, int]:
    return change.lacks_device_bytes, change.lacks_host_bytes, change.lacks_disk_bytes


def _range(option: Option) -> str:
    return _seconds(option.least_change_s, option.most_change_s)


def _seconds(least_s: float, most_s: float | None = None) -> str:
    """A change, or a range of changes in one unit; below a microsecond they are rounding, or might as well be."""
    values = [0.0 if abs(value) < 1e-6 else value for value in (least_s, least_s if most_s is None else most_s)]
    largest = max(map(abs, values))
    size, unit = (1.0, "s") if largest >= 1 else (1e-3, "ms") if largest >= 1e-3 else (1e-6, "us")
    texts = ["0" if not value else f"{value / size:+.{2 if largest >= 1 else 1}f}" for value in values]
    if texts[0] == texts[1]:
        return texts[0] if texts[0] == "0" else f"{texts[0]} {unit}"
    return f"{texts[0]} to {texts[1]} {unit}"


def _signed_bytes(amount_bytes: int) -> str:
    return "0" if not amount_bytes else ("+" if amount_bytes > 0 else "-") + format_bytes(abs(amount_bytes))


def _percent(change_s: float, step_s: float) -> str:
    share = change_s / step_s if step_s else 0.0
    return "0" if abs(share) < 5e-4 else f"{share:+.1%}"


def _common_prefix(names: Sequence[str]) -> str:
    """The common beginning of all dotted names, up to and with the last dot in it."""
    shared = []
    for parts in zip(*(name.split(".") for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "".join(f"{part}." for part in shared) if len(set(names)) > 1 else ""
