"""Says which quick test reaches each error of the package, in any process, and lists the errors that none reaches.

python tools/raises.py                             all quick tests; benchmark/results/raises.csv has the tests
python tools/raises.py tests/unit/cli -k plan      arguments of pytest

A row has the function and the text of an error, which outlive its line.
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


def functions(tree: ast.Module) -> dict[ast.AST, str]:
    """The name of the innermost function or class around each node."""
    names: dict[ast.AST, str] = {}

    def name_all(node: ast.AST, name: str) -> None:
        names[node] = name
        for inner in ast.iter_child_nodes(node):
            is_named = isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            name_all(inner, f"{name}.{inner.name}".strip(".") if is_named else name)

    name_all(tree, "")
    return names


@contextlib.contextmanager
def repository_copy() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(".git", ".venv*", "out", "*_cache")
        yield Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=ignored))


def mark_errors(copy: Path) -> dict[str, tuple[str, str]]:
    """Has each ``raise`` in a copy of the repository write down its line and the running test first; gives the function
    and the text of all, by line."""
    errors = {}
    (copy / "sitecustomize.py").write_text(WRITE_RAISED.format(path=str(copy / "raised")))
    for path, text in in_package():
        lines, tree = text.splitlines(keepends=True), ast.parse(text)
        names = functions(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise):
                place, line = f"{path}:{node.lineno}", lines[node.lineno - 1]
                errors[place] = f"{path}:{names[node]}", ast.unparse(node)
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
    rows = []
    for line, (place, error) in errors.items():
        test = found.get(line, "").rpartition(" ")[0]
        rows.append((place, shortened(error, 80), test))
        if not test:
            print(f"{line}: {error}")
    if not sys.argv[1:]:
        with (RESULTS / "raises.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([("place", "error", "test"), *rows])


if __name__ == "__main__":
    main()
