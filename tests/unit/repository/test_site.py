"""The site is built strictly, and its reference leaves no public name out and says what each takes and raises."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import elixir
from elixir.cli.options import COMMANDS, build_parser
from elixir.search.request import SearchRequest

ROOT = Path(__file__).parents[3]
NAMES = [name for name in elixir.__all__ if name != "__version__"]
FUNCTIONS = [name for name in NAMES if name[0].islower()]


@pytest.fixture(scope="module")
def site_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / ".ci" / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def own_text(value: Any) -> str:
    """The docstring of a function, or of a class and its `__init__`."""
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value) and "__init__" in vars(value):
        text += "\n" + (inspect.getdoc(value.__init__) or "")
    return text


def described_fields(kind: type) -> set[str]:
    """Fields with a docstring under them, those of bases included."""
    found = set()
    for base in kind.__mro__[:-1]:
        try:
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):
            continue
        assert isinstance(body, ast.ClassDef)
        for before, after in zip(body.body, body.body[1:], strict=False):
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if said and isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
                found.add(before.target.id)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_says_what_it_is_and_what_its_methods_are(name: str) -> None:
    value = getattr(elixir, name)
    assert own_text(value).strip()
    if inspect.isclass(value):
        public = {key: member for key, member in vars(value).items() if not key.startswith("_")}
        members = {key: member for key, member in public.items() if callable(member) or isinstance(member, property)}
        assert [key for key, member in members.items() if not inspect.getdoc(member)] == []


@pytest.mark.parametrize("name", NAMES)
def test_parameters_have_types_and_are_described(name: str) -> None:
    value = getattr(elixir, name)
    if name == "Saving" or (inspect.isclass(value) and issubclass(value, Exception)):
        return  # Elixir makes and raises these
    by_type = inspect.signature(value).parameters.values()
    parameters = [each for each in by_type if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    assert [each.name for each in parameters if each.annotation is inspect.Parameter.empty] == []
    text = own_text(value)
    if inspect.isfunction(value) and "optimal_search" in text:
        text += own_text(elixir.optimal_search)
    known = described_fields(value) if inspect.isclass(value) else described_fields(SearchRequest)
    if name == "wrap":
        text += own_text(elixir.ElixirModule)
    missing = [each.name for each in parameters if not re.search(rf"\b{each.name}\b", text) and each.name not in known]
    assert missing == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_say_what_they_raise(name: str) -> None:
    text = own_text(getattr(elixir, name))
    assert "Raises:" in text or "Raises:" in own_text(elixir.optimal_search)


def test_the_reference_has_every_public_name_and_every_command(site_pages: ModuleType) -> None:
    listed = [name for _, names in site_pages.GROUPS.values() for name in names]
    assert sorted(listed) == sorted(NAMES)
    page = site_pages.command_page()
    parser = build_parser()
    for command in COMMANDS:
        section = page.partition(f"\n## elixir {command}\n")[2].partition("\n## ")[0]
        flags = [flag for action in parser.commands[command]._actions for flag in action.option_strings]
        assert [flag for flag in flags if flag != "--debug" and f"`{flag}`" not in section] == []


def test_links_out_of_the_site_become_text_and_terms_are_linked_once(site_pages: ModuleType) -> None:
    index, training = ROOT / "docs" / "index.md", ROOT / "docs" / "training.md"
    known = site_pages.pages()
    text = "[a](training.md#x), [b](../README.md), [c](../tests/conftest.py), [d](https://example.org)"
    moved = site_pages.links_moved(text, index, known)
    assert moved == "[a](training.md#x), [b](index.md), c, [d](https://example.org)"
    linked = site_pages.glossary_linked("`chunk` # no\n# A chunk\nTwo chunks, one chunk.", known[training], ["chunk"])
    assert linked == "`chunk` # no\n# A chunk\nTwo [chunks](glossary.md#chunk), one chunk."


@pytest.mark.slow
def test_the_site_is_built_strictly() -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    subprocess.run([sys.executable, ".ci/site_pages.py"], cwd=ROOT, check=True, timeout=300)
    words = (sys.executable, "-m", "mkdocs", "build", "--strict", "-q")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    built = (ROOT / "out" / "site" / "reference" / "train.html").read_text(encoding="utf-8")
    for name in ("wrap", "ElixirModule", "ElixirOptimizer", "HybridAdam"):
        assert f'.{name}"' in built
