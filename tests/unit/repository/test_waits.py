"""Every wait of the runtime has a comment, which names the buffer that it protects or names the caller that uses the answer."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "elixir"
ROOMS = ("checkpoint", "chunk", "wrapper")
WAITS = frozenset({"wait", "synchronize", "wait_event", "wait_for", "wait_stream"})
LINES_BEFORE = 3
"""A comment may stand so many lines above the statement that waits, or inside of it."""


def uncommented(source: str) -> Iterator[int]:
    """Lines of waits with no comment at them."""
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and "noqa" not in token.string and "type:" not in token.string
    }
    for statement in ast.walk(ast.parse(source)):
        if not isinstance(statement, (ast.Expr, ast.Assign, ast.AnnAssign, ast.Return)):
            continue
        for call in ast.walk(statement):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            if call.func.attr not in WAITS:
                continue
            first, last = statement.lineno - LINES_BEFORE, (statement.end_lineno or statement.lineno) + 1
            if comments.isdisjoint(range(first, last + 1)):
                yield call.lineno


def test_every_wait_says_what_it_is_for() -> None:
    bare = [
        f"{path.relative_to(PACKAGE.parent)}:{line}"
        for room in ROOMS
        for path in sorted((PACKAGE / room).rglob("*.py"))
        for line in uncommented(path.read_text(encoding="utf-8"))
    ]
    assert bare == []


@pytest.mark.parametrize("bare", ["ticket.wait()", "x = stream.synchronize()"])
def test_a_bare_wait_is_found(bare: str) -> None:
    assert list(uncommented(f"x = 1\n{bare}\n")) == [2]
    assert list(uncommented(f"# it protects the block\n{bare}\n")) == []
    assert list(uncommented("lane.submit(work)\n")) == []
