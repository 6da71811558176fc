"""The stage in which a test runs: by what it cost and what it was first to find, as `tests/costs.json` has it.

1. ``make test``: a test of one process that costs at most `LIMIT_S`, or `LIMIT_OF_FINDERS_S` if it was first to find a
   recorded change or reaches an error; and the two `SAMPLES` of tests that start processes.
2. ``make test-more``, marked `more`: everything else that is not slow.
3. ``make test-all``, marked `slow`.

``pytest --write-costs`` measures; see `Costs`. A test that is not in the file counts as one that costs nothing.
"""

from __future__ import annotations

import csv
import functools
import json
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any, TypedDict

import pytest

from tests.common import spawn
from tests.common.tiny_models import FAMILIES, tiny

ROOT = Path(__file__).resolve().parents[2]
COSTS = ROOT / "tests" / "costs.json"
LIMIT_S, LIMIT_OF_FINDERS_S = 0.3, 1.0
"""Processor seconds that a test of the first stage may take."""
KEPT_S = 0.05
"""Seconds below this are not kept."""
LEFT_OUT = ("tests/distributed", "tests/gpu", "tests/machines", "tests/unit/proof", "tests/unit/repository")
"""Ranks, devices, and what is not about the product's code: never in the first stage."""
RECORDED = "test_recorded_"
"""Files of recorded outcomes, which guard changes of shape and promise nothing: never in the first stage."""
FIRST_STAGE = "not slow and not more"
"""The expression after pytest's -m in ``make test``."""
SAMPLES = (
    "tests/distributed/test_ddp_parity.py::test_two_ranks",
    "tests/unit/cli/test_command.py::test_a_plan_is_made_by_a_process",
)
"""One test of ranks and one of a command as a process: their first cases are in the first stage."""
STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn", "multiprocessing.Process")
"""Audit events of a test that starts processes; `tests.common.spawn` raises the last."""


class Cost(TypedDict, total=False):
    """The record of a test; a number that is left out is zero."""

    cpu_s: float
    """Processor seconds of its dearest quick case, ended children and ranks included."""
    found: int
    """Number of recorded changes that it was first to notice, and of errors that it reaches."""
    processes: bool
    """Whether it starts processes."""


@functools.cache
def costs() -> dict[str, Cost]:
    """All recorded costs, by the test's id without parameters."""
    found: dict[str, Cost] = json.loads(COSTS.read_text())
    return found


def is_first_stage(test: str, cost: Cost) -> bool:
    """Whether the quick cases of a test, given without parameters, run in ``make test``."""
    path = test.partition("::")[0]
    if path.startswith(LEFT_OUT) or path.rpartition("/")[2].startswith(RECORDED) or cost.get("processes"):
        return False
    return cost.get("cpu_s", 0.0) <= (LIMIT_OF_FINDERS_S if cost.get("found") else LIMIT_S)


def mark_later_stages(items: list[pytest.Item]) -> None:
    """Marks the quick tests that ``make test`` leaves out."""
    known, seen = costs(), Counter[str]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        first_sample = test in SAMPLES and seen[test] == 0
        seen[test] += 1
        if not first_sample and not is_first_stage(test, known.get(test, {})):
            item.add_marker(pytest.mark.more)


@functools.cache
def later_files() -> frozenset[Path]:
    """Files of tests of which ``make test`` runs none: in a folder or of a kind that it leaves out."""
    samples = {ROOT / test.partition("::")[0] for test in SAMPLES}
    return frozenset(
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if path not in samples and not is_first_stage(str(path.relative_to(ROOT)), {})
    )


class Costs:
    """The plugin of ``--write-costs``: measures each test, and writes `COSTS` in the end.

    Takes what tests have found from `benchmark/results/mutants.csv` and `raises.csv`. Costs of tests that did not run
    stay as they were; those of files that are gone do not.
    """

    def __init__(self) -> None:
        self._seconds = defaultdict[str, float](float)
        self._processes = set[str]()
        self._running = ""
        sys.addaudithook(self._notice)

    def pytest_collection_finish(self) -> None:
        """Imports what models need, so that no test pays for all."""
        for family in FAMILIES:
            tiny(family)

    def _notice(self, event: str, _: Any) -> None:
        if event in STARTS and self._running:
            self._processes.add(self._running)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._running, before = item.nodeid.partition("[")[0], _used_s()
        try:
            return (yield)
        finally:
            self._seconds[self._running] = max(self._seconds[self._running], _used_s() - before)
            self._running = ""

    def pytest_sessionfinish(self) -> None:
        kept = {test: cost for test, cost in costs().items() if (ROOT / test.partition("::")[0]).exists()}
        found = first_finders()
        for test in {*kept, *self._seconds, *found}:
            if not (ROOT / test.partition("::")[0]).exists():
                continue
            cost = kept.setdefault(test, {})
            if test in self._seconds:
                cpu_s = round(self._seconds[test], 2)
                cost |= {"cpu_s": cpu_s if cpu_s >= KEPT_S else 0.0, "processes": test in self._processes}
            cost["found"] = found[test]
        rows = {test: {key: value for key, value in cost.items() if value} for test, cost in kept.items()}
        lines = (f"{json.dumps(test)}: {json.dumps(row)}" for test, row in sorted(rows.items()) if row)
        COSTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def first_finders() -> Counter[str]:
    """How many recorded changes each test was first to notice, and how many errors it reaches."""
    found = Counter[str]()
    for name, column in (("mutants", "by"), ("raises", "test")):
        with (ROOT / "benchmark" / "results" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
            found.update(row[column].partition("[")[0] for row in csv.DictReader(file) if "::" in row[column])
    return found


def _used_s() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + spawn.USED_S[0]
