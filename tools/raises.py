"""Says which quick test reaches each error of the package, in any process, and lists the errors that none reaches.

python tools/raises.py                             all quick tests; benchmark/results/raises.csv has the tests
python tools/raises.py tests/unit/cli -k plan      arguments of pytest
"""

from __future__ import annotations

import ast
import contextlib
import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.common import RESULTS
from elixir.errors import shortened

ROOT = Path(__file__).resolve().parent.parent
WRITE_RAISED = """
import builtins, os
def _raised(place):
    with open({path!r}, "a") as file:
        file.write(f"{{place}}\\t{{os.environ.get('PYTEST_CURRENT_TEST', '')}}\\n")
builtins.__raised__ = _raised
"""
"""Python runs it in each process that has the copy in its path."""


def in_package(folder: str = "") -> Iterator[tuple[str, bytes]]:
    """All files of a room, with their text."""
    for path in sorted((ROOT / "elixir" / folder).rglob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_bytes()


@contextlib.contextmanager
def repository_copy() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(".git", ".venv*", "out", "*_cache")
        yield Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=ignored))


def mark_errors(copy: Path) -> dict[str, str]:
    """Has each ``raise`` in a copy of the repository write down its place and the running test first; gives all."""
    errors = {}
    (copy / "sitecustomize.py").write_text(WRITE_RAISED.format(path=str(copy / "raised")))
    for path, text in in_package():
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Raise):
                place, line = f"{path}:{node.lineno}", lines[node.lineno - 1]
                errors[place] = ast.unparse(node)
                mark = f'__raised__("{place}"); '.encode()
                lines[node.lineno - 1] = line[: node.col_offset] + mark + line[node.col_offset :]
        (copy / path).write_bytes(b"".join(lines))
    return errors


def main() -> None:
    with repository_copy() as copy:
        errors = mark_errors(copy)
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadfile", "-m", "not slow"]
        for arguments in [sys.argv[1:]] if sys.argv[1:] else [["tests"], ["--cuda", "tests/gpu"]]:
            subprocess.run([*command, *arguments], cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, check=False)
        found = dict(line.split("\t") for line in sorted((copy / "raised").read_text().splitlines()))
    rows = [(place, shortened(error, 80), found.get(place, "").rpartition(" ")[0]) for place, error in errors.items()]
    for place, _, test in rows:
        if not test:
            print(f"{place}: {errors[place]}")
    if not sys.argv[1:]:
        with (RESULTS / "raises.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([("place", "error", "test"), *rows])


if __name__ == "__main__":
    main()
