"""Help shows calls that work, and an error names the help of the command that was meant."""

from __future__ import annotations

import shlex

import pytest

from elixir.cli.options import COMMANDS, EXAMPLES, build_parser, normalise
from tests.common.command_line import run


def test_every_command_has_examples() -> None:
    assert set(EXAMPLES) == set(COMMANDS)


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_shows_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args([command, "--help"])
    shown = capsys.readouterr().out
    for example in EXAMPLES[command]:
        assert f"  {example}\n" in shown
        program, *words = shlex.split(example)
        assert program == "elixir"
        assert build_parser().parse_args(normalise(words)).command == command


def test_version_and_bare_call(capsys: pytest.CaptureFixture[str]) -> None:
    import elixir

    assert run(capsys, "--version")[1] == f"elixir {elixir.__version__}\n"
    status, out, _ = run(capsys)
    assert status == 2
    assert "COMMAND" in out
