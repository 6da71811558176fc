"""Tests reach the runtime by public names and through tests/common/inside.py."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.unit.integrations.test_private_names import PRIVATE_NAMES

ROOT = Path(__file__).resolve().parents[3]
DOOR = ROOT / "tests" / "common" / "inside.py"
MOST = 10
"""Files that may still know what is private."""
WHOLE_RUNTIME = {"engine_of", "stepper_of"}


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _named(tree: ast.AST) -> Iterator[str]:
    """Names that a file gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def ours() -> set[str]:
    """Private names of the package that neither PyTorch nor a library that the integrations extend has."""
    files = (ast.parse(path.read_text()) for path in (ROOT / "elixir").rglob("*.py"))
    names = {name for tree in files for name in _named(tree) if _private(name)}
    torchs = re.findall(r'"(_\w+)"', (ROOT / "pyproject.toml").read_text())  # names that ruff is to let pass
    libraries = set[str]().union(*PRIVATE_NAMES.values())
    of_tuples = set(vars(NamedTuple("Nothing", [])))  # `_replace` and the like, which every NamedTuple has
    torchs += ["_engine_run_backward", "_should_skip_dynamo", "_ddp_params_and_buffers_to_ignore"]
    return names - libraries - of_tuples - {*torchs}


def reaches(path: Path, private: set[str]) -> set[str]:
    """The private names that a test file reads: attributes, imported names, and names in text that are patched."""
    tree = ast.parse(path.read_text())
    own = set(_named(tree))
    pieces = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found |= {node.attr} if not of_itself and node.attr not in own else set()
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            found |= {node.value.rpartition(".")[2]} - own
        elif isinstance(node, ast.Name) and node.id in WHOLE_RUNTIME:
            found.add(node.id)
    return found & (private | WHOLE_RUNTIME)


def test_few_files_know_what_is_private() -> None:
    private = ours()
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path not in (DOOR, Path(__file__).resolve())]
    known = {str(path.relative_to(ROOT)): found for path in paths if (found := reaches(path, private))}
    assert len(known) <= MOST, "\n".join(f"{path}: {sorted(found)}" for path, found in sorted(known.items()))
