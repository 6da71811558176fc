"""Help shows calls that work, and an error names the help of the command that was meant."""

from __future__ import annotations

import argparse
import shlex

import pytest

from elixir.cli.options import COMMANDS, EXAMPLES, RULES, build_parser, check_rules, normalise
from elixir.errors import InputError
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


@pytest.mark.parametrize("command", [command for command, rules in RULES.items() if rules])
def test_every_rule_refuses_what_it_says(command: str) -> None:
    names = vars(build_parser().parse_args(normalise(shlex.split(EXAMPLES[command][0])[1:])))

    def refusal(*arguments: str) -> str:
        args = argparse.Namespace(**{**dict.fromkeys(names), "command": command})
        for argument in arguments:
            name, _, value = argument.removeprefix("--").replace("-", "_").partition("=")
            assert name in names
            setattr(args, name, value or "x")
        try:
            check_rules(args)
        except InputError as error:
            return str(error)
        return ""

    for rule in RULES[command]:
        words, _, error = rule.partition(": ")
        argument, how, others = words.split()
        for other in others.split("|"):
            assert refusal(argument, other) == error if how == "with" else refusal(argument, other) != error
        assert (refusal(argument) == error) is (how == "without")
        assert refusal(*others.split("|")) != error


@pytest.mark.parametrize("command", EXAMPLES)
def test_an_unknown_flag_points_to_the_help_of_its_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    gone, near = "; early updates have taken the place", "; did you mean --json?"
    for flag, says in (("--no-such-thing", " (see"), ("--step-in-backward", gone), ("--jsno=3", near)):
        said = run(capsys, *shlex.split(EXAMPLES[command][0])[1:], flag)[2]
        assert said.startswith(f"elixir {command}: error: unrecognized arguments: {flag}{says}")
        assert said.endswith(f"(see elixir {command} --help)\n")


def test_checkpointing_takes_a_form_or_none_and_no_model() -> None:
    for words, form in (
        ("--checkpoint opt-13b", "non-reentrant"), ("opt-13b --activation-checkpointing", "non-reentrant"),
        ("opt-13b --checkpoint --json", "non-reentrant"), ("opt-13b --activation-checkpointing reentrant", "reentrant"),
        ("--activation-checkpointing=reentrant opt-13b", "reentrant"), ("opt-13b", None),
    ):  # fmt: skip
        args = build_parser().parse_args(normalise(["profile", *words.split()]))
        assert (args.checkpoint, args.model) == (form, "opt-13b")


def test_values_between_commas_and_amounts() -> None:
    args = build_parser().parse_args("sweep a b --world-sizes 4,1,4 --hardware t4,l4 --network 2GB".split())
    assert (args.models, args.world_sizes, args.hardware) == (["a", "b"], [4, 1], ["t4", "l4"])
    assert args.network == 2e9
