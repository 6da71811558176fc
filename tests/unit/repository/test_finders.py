"""Tests that recorded changes, errors, costs and the Makefile name are there."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_named_tests_are_there() -> None:
    named = set(json.loads((ROOT / "tests" / "costs.json").read_text()))
    for name, column in (("mutants", "by"), ("raises", "test")):
        with (ROOT / "benchmark" / "results" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
            named |= {row[column].partition("[")[0] for row in csv.DictReader(file) if "::" in row[column]}
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    there = {f"{path}::{test}" for path, text in files.items() for test in re.findall(r"^def (test_\w+)", text, re.M)}
    assert sorted(named - there) == []


def test_files_that_the_makefile_runs_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    named = [
        start + name + end
        for start, end, names in re.findall(r"\$\(patsubst %,(tests/\S*)%(\S*), *([^)]*)\)", makefile)
        for name in names.split()
    ]
    assert len(named) > 20
    assert not [path for path in named if not (ROOT / path).exists()]
