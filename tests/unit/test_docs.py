"""What the documents promise exists: links lead to files, and every command shown is one the parser takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from elixir.cli import main
from elixir.cli.parser import build_parser, normalise

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8")):
        if "://" not in link:
            assert (document.parent / link).exists(), f"{document.name} links to {link}, which is not there"


def commands_in(text: str) -> list[str]:
    """Lines of code blocks that call elixir, without comments and with what an ellipsis stands for left out."""
    lines = "\n".join(re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ").splitlines()
    calls = [line.removeprefix("$ ").split("#")[0].strip() for line in lines]
    return [call.removesuffix(" ...") for call in calls if call.startswith("elixir ")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_shown_are_understood(document: Path) -> None:
    for call in commands_in(document.read_text(encoding="utf-8")):
        try:
            build_parser().parse_args(normalise(shlex.split(call)[1:]))
        except SystemExit:
            pytest.fail(f"{document.name} shows a command that is refused: {call}")


def test_readme_begins_with_the_two_commands() -> None:
    start = (ROOT / "README.md").read_text(encoding="utf-8").split("```")[1]
    assert [line.split("#")[0].strip() for line in start.strip().splitlines()] == ["make quickstart", "make test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^quickstart:", makefile, re.MULTILINE)
    assert re.search(r"^test:", makefile, re.MULTILINE)


def test_quickstart_runs_what_the_readme_shows() -> None:
    """The commands of the Makefile, written out, stand in README."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    values = dict(re.findall(r"^(\w+)\s*[:?]=\s*(.*)$", makefile, re.MULTILINE))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("PROFILE", "PLAN"):
        call = values[name]
        for inner in ("STEP", "OUT"):
            call = call.replace(f"$({inner})", values[inner])
        assert f"$ elixir {' '.join(call.split())}\n" in readme
    assert f"$ python {values['TRAIN'].strip()}\n" in readme


@pytest.mark.parametrize("command", ["profile", "plan"])
def test_readme_shows_what_the_quickstart_prints(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Line for line; only the time that tracing took, and the plan's fingerprint, may differ."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^\$ elixir ({command} .*)\n((?:.+\n)+)", readme, re.MULTILINE)
    assert found is not None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    assert main(shlex.split(found[1])) == 0
    shown = found[2].removesuffix("```\n")
    assert without_varying(capsys.readouterr().out) == without_varying(shown)


def without_varying(text: str) -> list[str]:
    """The lines of `text`, what changes from run to run left out."""
    text = re.sub(r"in [0-9.]+ s, no GPU", "in ... s, no GPU", text)
    return re.sub(r"plan [0-9a-f]{16}:", "plan ...:", text).splitlines()
