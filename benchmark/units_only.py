"""The price of chunks that are cut along units, and of units that are fetched as one: block sizes and seconds of the golden questions.

    python benchmark/units_only.py [--only TEXT] [--no-record]

Each question of `golden_seconds` is planned three times, for the rates of its profile:

* ``parameters``: as the search plans today. A chunk holds consecutive parameters, and may end within a layer; a weight is fetched when it is read.
* ``joined``: the same chunks; every unit is fetched as one. A unit is a layer, and outside of the layers each module that has parameters.
* ``cut``: as ``joined``, and chunks are cut along units. A chunk holds whole units, or a part of one; parts of a unit are as equal as may be.

`least_device_bytes` is what the packing with the least need takes of the device, with everything on the host and as few blocks as a step needs
without prefetching. `blocks_bytes` are the blocks of the plan. Seconds are simulated; the time that the thread which submits work saves by fewer
reads is in none of them.

Appends to ``results/units_only.csv``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate, groupby
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.common import Row, append_rows, conditions, print_table
from elixir.errors import PlanError
from elixir.plan.chunk_plan import Home
from elixir.search.planner import plan_or_shortage, setting_for
from elixir.search.problem.joined_trace import joined_trace
from elixir.search.problem.packing import Packing, ParamTable, round_up
from elixir.search.problem.placement import Placement
from elixir.search.propose import sizes as search_sizes
from elixir.search.question import Question
from elixir.step_trace import StepTrace, enclosing
from elixir.units import MIB
from tools.golden_seconds import PLANS, question


class CutTable(ParamTable):
    """Packs along units."""

    def pack(self, capacity_bytes: int) -> Packing:
        """Chunks of at most `capacity_bytes`, each of whole units or of a part of one."""
        capacity = round_up(max(capacity_bytes, 1), self.unit_bytes)
        chunks = []
        for (dtype, trainable, *_), members in self.groups.items():
            chunks += [self._chunk([i], dtype, trainable, True) for i in members if self.aligned[i] > capacity]
            fitting = [index for index in members if self.aligned[index] <= capacity]
            chunks += [self._chunk(some, dtype, trainable, False) for some in self._parts(fitting, capacity)]
        place = {index: position for position, index in enumerate(self.order)}
        return Packing(capacity, tuple(sorted(chunks, key=lambda chunk: place[chunk.parameters[0]])))

    def _parts(self, members: Sequence[int], capacity: int) -> Iterator[list[int]]:
        """Members of one kind in chunks: units that are larger than one in parts, others together as long as they fit."""
        here: list[int] = []
        size = lambda some: sum(self.aligned[index] for index in some)  # noqa: E731
        for _, group in groupby(members, key=self._unit):
            unit = list(group)
            if here and size(here) + size(unit) > capacity:
                yield here
                here = []
            if size(unit) <= capacity:
                here += unit
            else:
                yield from self._equal(unit, capacity)
        if here:
            yield here

    def _equal(self, unit: list[int], capacity: int) -> list[list[int]]:
        """The fewest parts of one unit that fit, the largest as small as may be."""
        low, high = max(self.aligned[index] for index in unit), capacity
        fewest = len(self._filled(unit, capacity))
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(self._filled(unit, middle)) <= fewest else (middle + 1, high)
        return self._filled(unit, high)

    def _filled(self, unit: list[int], most: int) -> list[list[int]]:
        ends, start, parts = [0, *accumulate(self.aligned[index] for index in unit)], 0, []
        while start < len(unit):
            end = bisect_right(ends, ends[start] + most) - 1
            parts.append(unit[start:end])
            start = end
        return parts

    def _unit(self, index: int) -> str:
        name = self.trace.parameters[index].name
        return enclosing(name, self._names) or name.rpartition(".")[0]

    @property
    def _names(self) -> frozenset[str]:
        return frozenset(unit.name for unit in self.trace.units)


def joined(trace: StepTrace) -> StepTrace:
    """The step with all units fetched as one, those that may not be today included."""
    units = tuple(replace(unit, fetch="either") for unit in trace.units)
    able = replace(trace, step=replace(trace.step, units=units))
    return joined_trace(able, [unit.name for unit in units])


def least_device_bytes(asked: Question) -> int:
    """Bytes of a device with everything on the host and as few blocks as can be, for the packing that needs least."""
    space = search_sizes.SearchSpace(asked.trace, asked.hardware, setting_for(*asked))
    found = []
    for model in dict.fromkeys(map(space.model, space.sizes(outsized=True))):
        homes = [
            (Home.RESIDENT_HOST if c.trainable else Home.RESIDENT) if c.outsized else Home.HOST
            for c in model.work.chunks
        ]
        placement = Placement(tuple(homes))
        blocks = model.work.schedule(placement.residents, 0).min_blocks
        found.append(model.need(placement, blocks).device_bytes)
    return min(found)


def rows(case: str) -> list[Row]:
    """The plans of one question."""
    asked = question(case)
    as_one = replace(asked.request, assume="nominal", fetch="parameters")
    found: list[Row] = []
    for kind in ("parameters", "joined", "cut"):
        here = asked._replace(request=replace(asked.request, assume="nominal"))
        if kind != "parameters":
            here = asked._replace(trace=joined(asked.trace), request=as_one)
        with patch.object(search_sizes, "ParamTable", CutTable) if kind == "cut" else nullcontext():
            least_bytes = least_device_bytes(here)
            try:
                plan = plan_or_shortage(*here, moves=False)
            except PlanError:
                plan = None
        row: Row = {
            "case": case.replace(" --json", ""),
            "chunks_are": kind,
            "least_device_mib": round(least_bytes / MIB, 1),
        }
        if plan is None:
            found.append(row | dict.fromkeys(("step_s", "ratio", "chunks", "block_mib", "blocks", "blocks_mib"), ""))
            continue
        step_s, block = plan.predicted.seconds["total"], plan.block_bytes / MIB
        found.append(
            row
            | {
                "step_s": round(step_s, 5),
                "ratio": round(step_s / found[0]["step_s"], 4) if found else 1.0,
                "chunks": len(plan.chunks),
                "block_mib": round(block, 1),
                "blocks": plan.block_count,
                "blocks_mib": round(plan.block_count * block, 1),
            }
        )
    return found


def main() -> int:
    """Plans and records; 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="questions that contain this text")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    before, made = conditions(), []
    for case in PLANS:
        if args.only in case and "--placement" not in case:
            made += rows(case)
            print(made[-3:], flush=True)
    columns = [key for key in made[0] if key != "case"]
    print_table(
        "Chunks along units", ["case", *columns], [[row["case"][5:60], *(row[key] for key in columns)] for row in made]
    )
    for kind in ("joined", "cut"):
        ratios = [row["ratio"] for row in made if row["chunks_are"] == kind and row["ratio"] != ""]
        print(
            f"{kind}: seconds over today's {statistics.median(ratios):.4f} in the median, {min(ratios):.4f} to {max(ratios):.4f}, {len(ratios)} plans"
        )
    if not args.no_record:
        print(append_rows("units_only", [{**before, **row} for row in made]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
