"""Phrases over which readers stumble do not come back: in docs, docstrings, comments, messages and help texts."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("elixir", "tests", "benchmark", "tools", "example", "profile")

PHRASES: dict[str, str] = {
    r"\bbesides?\b": "next to, while, compared with, apart from",
    r"\bshall\b": "will, must, or the imperative",
    r"\bof (?:its|their|his|your|our) own\b": "separate, private, or leave it out",
    r"\bstands? in\b": "is in; replaces",
    r"\b(?:held|hold|holds) against\b": "compared with, compare with",
    r"\bwhere there (?:is|are)\b": "if",
    r"(?<!thing)(?<!body)(?<!where)(?<!what)(?<!one)(?<!\ball),? else(?=[.;:,)]|$)": "otherwise, at the front",
    r"\bwhoever\b": "name the thread or function",
    r"(?<!left )(?<!fell )(?<!nothing )(?<!file )(?<!read )\bbehind\b": "after; otherwise, the thing that is there",
    r"\bin the place of\b": "instead of",
    r"\bthose (?:with|in|of|by) which\b": "the noun, and what it does",
    r"\bas where\b": "as if, as when",
    r"\bof then\b": "name the time",
    r"\bwho (?:asks|wants|needs|gets|calls)\b": "name the caller, thread or function",
    r"\bthat of it\b": "the part that",
    r"\bhears? of\b": "learns of, is notified of",
}
"""Pattern -> what to write instead."""

ANY = re.compile("|".join(PHRASES), re.IGNORECASE)
"""Finds text that has any of them, in one look: hardly any has."""

OPENINGS = re.compile(
    r"(?:Of|What|Whose|Who|Which|That|Those|They|Their|Have|Be|Let|As|Where|When|So|Why|Because|Likewise|With|Without|For"
    r"|To|Against|Around|Instead|Between|From)\b"
)
"""No docstring begins with these: it begins with a verb in the third person, or with the noun that it describes."""

IMPERATIVES = re.compile(
    r"(?:Add|Begin|Build|Bring|Check|Clear|Close|Copy|Draw|Drop|Fill|Find|Finish|Follow|Forget|Get|Give|Go|Hand|Keep"
    r"|Leave|Make|Move|Print|Put|Raise|Refuse|Remove|Return|Run|Say|Send|Stop|Take|Tell|Wait|Write)\b"
)
"""No docstring of a function begins with these: its subject is the function."""

SCRIPT = re.compile(r"^(?:import|from) \w", re.MULTILINE)
"""A string that is a program has code in it, not text."""

STRING_OR_COMMENT = re.compile(
    r"""\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*""", re.DOTALL
)
"""Finds comments in a ninth of the seconds that `tokenize` takes."""


@functools.lru_cache(maxsize=1)
def nodes(source: str) -> list[ast.AST]:
    """All nodes of a Python source."""
    return list(ast.walk(ast.parse(source)))


def texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every comment block and string of a Python source, f-strings included."""
    block: list[str] = []
    first = last = at = 0
    line = 1
    for piece in STRING_OR_COMMENT.finditer(source):
        if not piece[0].startswith("#"):
            continue
        line += source.count("\n", at, piece.start())
        at = piece.start()
        if block and line != last + 1:
            yield first, " ".join(block)
            block = []
        if not block:
            first = line
        last = line
        block.append(piece[0].lstrip("# "))
    if block:
        yield first, " ".join(block)
    for node in nodes(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not SCRIPT.search(node.value):
            yield node.lineno, node.value


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of docstrings, those of attributes included."""
    for node in nodes(source):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def found_in(text: str) -> list[str]:
    """Finds the phrases in `text`, code between backquotes left out: each as found, with what to write instead."""
    if "`" in text or "<!--" in text:
        text = re.sub(r"```.*?```|``?[^`]*``?|<!--.*?-->", "", text, flags=re.DOTALL)
    plain = " ".join(text.split())
    if not ANY.search(plain):
        return []
    return [
        f"{match[0]!r} (write: {instead})"
        for pattern, instead in PHRASES.items()
        for match in re.finditer(pattern, plain, re.IGNORECASE)
    ]


def problems(path: Path) -> list[str]:
    """Lists where a file has a phrase, or a docstring with a wrong beginning."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return [f"{path.relative_to(ROOT)}: {found}" for found in found_in(text)]
    where = path.relative_to(ROOT)
    found = [f"{where}:{line}: {phrase}" for line, piece in texts(text) for phrase in found_in(piece)]
    return found + [
        f"{where}:{line}: a docstring begins with {piece.split()[0]!r}"
        for line, piece in docstrings(text)
        if OPENINGS.match(piece) or IMPERATIVES.match(piece)
    ]


def files() -> list[Path]:
    """All pages and sources, but for this one, which names the phrases."""
    sources = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return sorted(path for path in (*sources, *pages) if path != Path(__file__))


def test_text_is_plain() -> None:
    assert [found for path in files() for found in problems(path)] == []


@pytest.mark.parametrize(
    "text",
    [
        "it runs beside the forward",
        "it has a lane of its own",
        "a number where there is one, else.",
        "where there are two",
        "it shall wait",
    ],
)
def test_a_phrase_is_found(text: str) -> None:
    assert found_in(text)


@pytest.mark.parametrize(
    "text", ["it waits, or else it fails", "code such as `x if y else z`.", "`beside`", "something else is there"]
)
def test_plain_text_passes(text: str) -> None:
    assert found_in(text) == []


def test_an_opening_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    source = tmp_path / "a.py"
    source.write_text('A = 1\n"""Of the first."""\ndef f():\n    """What it does."""\n# it runs\n# beside\n')
    assert len(problems(source)) == 3
