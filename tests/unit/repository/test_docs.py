"""Promises of the documents: links lead somewhere, commands parse, examples run, pages are short, and pictures can be
made again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmark.quoted import documents
from elixir.cli import main
from elixir.cli.options import build_parser, normalise

ROOT = Path(__file__).parents[3]
DOCUMENTS = documents()
QUICKSTART = ROOT / "docs" / "quickstart.md"

MOST_WORDS = {"README.md": 1000, "docs/*.md": 1100, "docs/design/*.md": 1600, "docs/appendix/*.md": 2050}
"""Pages -> how many words each may have, as ``wc -w`` counts them."""
MOST_PAGES, MOST_WORDS_IN_ALL = 28, 20_600
"""How many docs may have as a whole."""
OF_GPUS = ("README.md", "CHANGELOG.md", "docs/gpu_results.md", "docs/appendix/gpu_bars.md", "benchmark/proof/README.md")
"""Pages that may say what has run on a GPU."""

STATE = re.compile(
    r"(?:has|have|been|was) (?:not |never )?(?:been )?(?:run|measured|checked|tried)[^.;]* on (?:a|one|any|several) "
    r"(?:GPU|H200)|GPUs?\b[^.;]*\byet\b|no valid run on a GPU|on (?:a|one) it has run",
    re.IGNORECASE,
)
"""A sentence that says or denies that something has run on a GPU."""


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


def prose(document: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(document: Path) -> set[str]:
    """Headings of a page as GitHub's links name them."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_document
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", document.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), f"{document.name} links to {link}, which is not there"
        if anchor:
            assert anchor in anchors(target), (
                f"{document.name} links to {link}; headings there: {sorted(anchors(target))}"
            )


def test_every_page_is_linked_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {
        (index.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)", index.read_text(encoding="utf-8"))
    }
    missing = [name_of(page) for page in DOCUMENTS if page.is_relative_to(index.parent) and page != index]
    assert [name for name in missing if (ROOT / name).resolve() not in linked] == []


def test_every_page_is_in_the_menu_of_the_site() -> None:
    menu = set(re.findall(r"([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in DOCUMENTS if page.is_relative_to(ROOT / "docs")}
    assert pages - menu == set()


@every_document
def test_the_state_of_the_project_is_in_two_places(document: Path) -> None:
    """README and the results say which GPUs Elixir has run on; all other pages link there."""
    if name_of(document) in OF_GPUS:
        return
    text = re.sub(r"\s+", " ", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose(document)))
    assert STATE.findall(text) == []


def test_no_page_and_no_error_installs_from_the_package_index() -> None:
    """The distribution is not there."""
    files = [*DOCUMENTS, *(ROOT / "docs" / "src").rglob("*.md"), *(ROOT / "elixir").rglob("*.py")]
    wrong = re.compile(r"pip install[^`\n]*torch-elixir|`'torch-elixir\[")
    assert [name_of(file) for file in files if wrong.search(file.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("pattern", MOST_WORDS)
def test_pages_are_short(pattern: str) -> None:
    pages = list(ROOT.glob(pattern))
    assert pages
    words = {name_of(page): len(page.read_text(encoding="utf-8").split()) for page in pages}
    assert {name: count for name, count in words.items() if count > MOST_WORDS[pattern]} == {}


def test_docs_are_read_in_an_afternoon() -> None:
    pages = [page for page in DOCUMENTS if page.is_relative_to(ROOT / "docs")]
    assert len(pages) <= MOST_PAGES
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= MOST_WORDS_IN_ALL


def plain_blocks(text: str) -> Iterator[str]:
    """Code blocks without a language: terminals and drawings."""
    for block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        if not block[0]:
            yield block[1]


def lines_in(text: str) -> list[str]:
    """Lines of the blocks of the terminal, continued lines joined."""
    return [line for block in plain_blocks(text) for line in block.replace("\\\n", " ").splitlines()]


@every_document
def test_commands_shown_are_understood(document: Path) -> None:
    """Calls of elixir are what the parser takes; scripts that are called are there."""
    for line in lines_in(document.read_text(encoding="utf-8")):
        call = line.removeprefix("$ ").split("#")[0].strip()
        for script in re.findall(r"\b((?:example|benchmark|profile)/\w+\.(?:py|sh))", call):
            assert (ROOT / script).exists(), f"{document.name} calls {script}, which is not there"
        if not call.startswith("elixir "):
            continue
        try:
            build_parser().parse_args(normalise(shlex.split(call)[1:]))
        except SystemExit:
            pytest.fail(f"{document.name} shows a command that is refused: {call}")


def test_readme_shows_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    calls = [line.split("#")[0].strip() for line in lines_in(readme)]
    first = [call for call in calls if call.startswith("make ")][:2]
    assert first == ["make quickstart", "make test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("quickstart", "test", "pictures", "figures"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_quickstart_runs_the_commands_of_its_page() -> None:
    """The commands of the Makefile, written out, are on the quickstart page."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    values = dict(re.findall(r"^(\w+)\s*[:?]?=\s*(.*)$", makefile, re.MULTILINE))
    page = QUICKSTART.read_text(encoding="utf-8")
    for name, start in {"PROFILE": "elixir ", "PLAN": "elixir ", "TRAIN": "python "}.items():
        call = values[name]
        while "$(" in call:
            call = re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], call)
        assert f"$ {start}{' '.join(call.split())}\n" in page


@pytest.mark.sampled
@pytest.mark.parametrize("command", ["plan", "profile"])
def test_quickstart_page_shows_what_is_printed(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Line for line; only the time that tracing took, and the plan's fingerprint, may differ."""
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE)
    if pinned is None or torch.__version__.split("+")[0] != pinned[1]:
        pytest.skip("the page was printed with the PyTorch that requirements.txt names; others run other operators")
    page = QUICKSTART.read_text(encoding="utf-8")
    found = re.search(rf"^\$ elixir ({command} .*)\n((?:.+\n)+)", page, re.MULTILINE)
    assert found is not None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    assert main(shlex.split(found[1])) == 0
    shown = found[2].removesuffix("```\n")
    assert without_varying(capsys.readouterr().out) == without_varying(shown)


def without_varying(text: str) -> list[str]:
    """The lines of `text` without what changes from run to run."""
    text = re.sub(r"in [0-9.]+ s, no GPU", "in ... s, no GPU", text)
    return re.sub(r"plan [0-9a-f]{16}:", "plan ...:", text).splitlines()


def test_seconds_shown_were_predicted() -> None:
    """The training run on the quickstart page took as long as its plan says, within a range that says something."""
    page = QUICKSTART.read_text(encoding="utf-8")
    (observed,) = re.findall(r"^step +([0-9.]+) s +[0-9.]+ s$", page, re.MULTILINE)
    ranges = re.findall(r"^  step +[0-9.]+ s predicted \(([0-9.]+) s if .*?, ([0-9.]+) s if all", page, re.MULTILINE)
    low, high = ranges[-1]  # the first is of the plan for another machine
    assert float(low) <= float(observed) <= float(high) <= 1.5 * float(low)


def test_sources_name_pages_that_are_there() -> None:
    missing = [
        f"{source.relative_to(ROOT)}: {page}"
        for folder in ("elixir", "tests", "benchmark", "tools", "example", "profile")
        for source in sorted((ROOT / folder).rglob("*.py"))
        for page in re.findall(r"(?:docs|benchmark)/[\w/]+\.md", source.read_text(encoding="utf-8"))
        if not (ROOT / page).exists()
    ]
    assert missing == []
