"""How many steps fell into the ranges that are printed, and how wide these are: counted from recorded rows.

    python benchmark/interval_coverage.py

* `preset`: published runs, each left out of the fit of its card (``results/published.csv``). The range of a preset was
  set by these runs, so that it contains them all; `others' range` is made anew for each point, by the same rule, from
  the other points alone.
* `other card`: the same, with shares that runs of other cards give.
* `calibrated`: plans on emulated links, whose machine was measured and brought to two other runs
  (``results/simulated_vs_measured.csv``), against the range of a measured machine, and that of one that has learned;
  the newest run of each case, and all that are recorded.

A measured step is a median of few. How far it may be off itself follows from how its steps scattered: of each step that
fell out of the range after a run, this is shown next to it.

Nothing is measured here. Fails if a bar of coverage or width is missed.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.common import RESULTS, print_table
from elixir.hardware.learning import LEARNED_RANGE
from elixir.hardware.scenario import MEASURED_RANGE

COVERED, COVERED_OTHER_CARD = 0.9, 0.8
MARGIN = 1.01
"""A range reaches this many times beyond the runs that it is made from."""


STEP_COLUMNS = ("model", "homes", "transfers_over_compute")
P80_LESS_P20, MEDIAN_OVER_MEAN = 1.683, 1.253
"""Standard deviations of a normal distribution between these; and the error of a median over that of a mean."""


class Covered(NamedTuple):
    """Ranges of one kind: steps that fell into theirs, of how many; median width; the least share, the largest width."""

    kind: str
    within: int
    count: int
    width: float
    bar: float
    widest: float | None

    @property
    def holds(self) -> bool:
        """Whether both bars are reached."""
        return self.within >= self.bar * self.count and (self.widest is None or round(self.width, 2) <= self.widest)


def recorded(name: str) -> list[dict[str, str]]:
    """All rows of a benchmark."""
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def newest(name: str, key: Sequence[str]) -> list[dict[str, str]]:
    """The last row for each value of these columns."""
    return list({tuple(row[column] for column in key): row for row in recorded(name)}.values())


def ratio_of(row: dict[str, str]) -> float:
    """Measured over simulated seconds."""
    return float(row["measured_s"]) / float(row["simulated_s"])


def own_error(row: dict[str, str]) -> float:
    """Standard error of the measured median, over the simulated seconds."""
    deviation_s = (float(row["p80_s"]) - float(row["p20_s"])) / P80_LESS_P20
    return MEDIAN_OVER_MEAN * deviation_s / math.sqrt(int(row["n"])) / float(row["simulated_s"])


def others_ranges(ratios: Sequence[float]) -> list[tuple[float, float]]:
    """The range for each case, fitted to all others."""
    others = [[*ratios[:index], *ratios[index + 1 :]] for index in range(len(ratios))]
    return [(min(rest) / MARGIN, max(rest) * MARGIN) for rest in others]


def counted(kind: str, ratios: Sequence[float], ranges: Sequence[tuple[float, float]], widest: float) -> Covered:
    """Steps over predicted seconds against a range each."""
    within = sum(low <= ratio <= high for ratio, (low, high) in zip(ratios, ranges, strict=True))
    width = statistics.median(high / low for low, high in ranges)
    return Covered(kind, within, len(ratios), width, COVERED, widest)


def main() -> int:
    """Count and compare with the bars; 1 if one is missed."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    published = newest("published", ["point"])
    found = []
    for kind, column, bar, widest in (
        ("preset", "left_out", COVERED, 1.6),
        ("other card", "card_out", COVERED_OTHER_CARD, None),
    ):
        within = sum(row[f"{column}_contains"] == "True" for row in published)
        width = statistics.median(float(row[f"{column}_width"]) for row in published)
        found.append(Covered(kind, within, len(published), width, bar, widest))
    # Tokens/s predicted over published ones are seconds published over predicted ones.
    ratios = [float(row["left_out"]) for row in published]
    found.append(counted("preset, others' range", ratios, others_ranges(ratios), 1.6))
    steps, every = newest("simulated_vs_measured", STEP_COLUMNS), recorded("simulated_vs_measured")
    for which, rows in (("", steps), (", all recorded", every)):
        ratios = [ratio_of(row) for row in rows]
        for kind, between, widest in (
            ("range of a measured machine", MEASURED_RANGE, 1.25),
            ("range after a run", LEARNED_RANGE, 1.15),
        ):
            found.append(counted(f"calibrated, {kind}{which}", ratios, [between] * len(ratios), widest))
    print_table(
        "steps within the printed range",
        ("range", "within", "of", "share", "bar", "median width", "bar of width"),
        [
            (c.kind, c.within, c.count, f"{c.within / c.count:.0%}", f"{c.bar:.0%}", f"{c.width:.3f}", c.widest or "-")
            for c in found
        ],
    )
    low, high = LEARNED_RANGE
    print_table(
        "steps outside of the range after a run",
        (*STEP_COLUMNS, "measured over simulated", "standard error of it", "steps"),
        [
            (*(row[column] for column in STEP_COLUMNS), f"{ratio_of(row):.3f}", f"{own_error(row):.3f}", row["n"])
            for row in steps
            if not low <= ratio_of(row) <= high
        ],
    )
    return int(not all(each.holds for each in found))


if __name__ == "__main__":
    raise SystemExit(main())
