"""Help shows calls that work, and an error names the help of the command that was meant."""

from __future__ import annotations

import shlex

import pytest

from elixir.cli import main
from elixir.cli.options import COMMANDS, EXAMPLES, RULES, build_parser, normalise
from tests.common.command_line import run


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a call is refused."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err


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


@pytest.mark.parametrize("command", [command for command, rules in RULES.items() if rules])
def test_rules_are_of_arguments_that_their_command_has(command: str) -> None:
    args = build_parser().parse_args(normalise(shlex.split(EXAMPLES[command][0])[1:]))
    for rule in RULES[command]:
        words, _, error = rule.partition(": ")
        argument, how, others = words.split()
        assert how in ("with", "without")
        names = [each.partition("=")[0] for each in (argument, *others.split("|"))]
        assert {name.removeprefix("--").replace("-", "_") for name in names} <= vars(args).keys()
        assert argument in error or others in error


@pytest.mark.parametrize("command", EXAMPLES)
def test_an_unknown_flag_points_to_the_help_of_its_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, *words = shlex.split(EXAMPLES[command][0])
    error = refusal([*words, "--no-such-thing"], capsys)
    assert error.startswith(f"elixir {command}: error: unrecognized arguments: --no-such-thing")
    assert error.endswith(f"(see elixir {command} --help)\n")


def test_a_flag_that_is_nearly_right_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean --host-memory?" in refusal(["plan", "opt-13b", "--host-memroy=3GiB"], capsys)
    assert "did you mean" not in refusal(["plan", "opt-13b", "--zzz"], capsys)


def test_a_flag_that_is_gone_says_what_took_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert "early updates have taken the place" in refusal(["plan", "opt-13b", "--step-in-backward"], capsys)


def test_without_a_command_the_whole_help_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(["--no-such-thing"], capsys).endswith("(see elixir --help)\n")


def test_version_and_bare_call(capsys: pytest.CaptureFixture[str]) -> None:
    import elixir

    assert run(capsys, "--version")[1] == f"elixir {elixir.__version__}\n"
    status, out, _ = run(capsys)
    assert status == 2
    assert "COMMAND" in out
