"""Counts lines of code: what is left of a file without blank lines, comments and docstrings.

python tools/code_lines.py                 elixir/, a line per room
python tools/code_lines.py FOLDER ...      other folders
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_NO_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
)


def code_lines(path: Path) -> int:
    """Number of lines of a Python file that hold code; a docstring is any statement that is only a string."""
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in _NO_CODE]
    lines = {line for token in tokens if token.string for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> None:
    for folder in [Path(name) for name in sys.argv[1:]] or [ROOT / "elixir"]:
        rooms: Counter[str] = Counter()
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).parts
            rooms[parts[0] if len(parts) > 1 else "."] += code_lines(path)
        for room, count in sorted(rooms.items()):
            print(f"{count:7,}  {folder.name}/{room}")
        print(f"{sum(rooms.values()):7,}  {folder.name}, whole")


if __name__ == "__main__":
    main()
