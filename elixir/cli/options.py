"""The arguments of every command, from the table in ``command_line.ini``. Imports no torch.

A flag whose name is that of a field of `elixir.search.request.SearchRequest` reaches the search by that alone.
"""

from __future__ import annotations

import argparse
import configparser
import difflib
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from elixir.errors import GONE, InputError, shortened
from elixir.models.activation_checkpointing import CHECKPOINT_FORMS, parse_checkpoint
from elixir.models.packing import Packing
from elixir.units import parse_bytes

LARGEST_COUNT = 1_000_000_000
"""Most of anything that is counted: samples, tokens, ranks, rows of a table."""
LARGEST_ACCUMULATION = 1_000
"""Every batch of a step is drawn."""
LONGEST_MESSAGE = 1_800
"""Characters of an error: a list of levers fits, a value of many digits does not."""
STEP = "the training step"
RETRACED = "the training step, without trace.json (default of each: as the plan has it)"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line on standard error, with the help of the command that was meant."""

    commands: dict[str, Parser]
    """Name -> parser, of the whole command line."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does; a flag that a command does not have is an error of that command."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = getattr(self, "commands", {}).get(getattr(parsed, "command", None) or "", self)
            command.error(f"unrecognized arguments: {' '.join(unknown)}{command.nearest(unknown[0])}")
        return parsed

    def nearest(self, word: str) -> str:
        """The flag that is most like `word`, as a question, or what a flag that is gone became; empty if none is."""
        gone = GONE.get(word.strip("-").replace("-", "_"))
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        found = difflib.get_close_matches(word.partition("=")[0], flags, 1, cutoff=0.7)
        return f"; {gone}" if gone else f"; did you mean {found[0]}?" if found else ""

    def error(self, message: str) -> NoReturn:
        """Prints one line and exits with status 2."""
        print(f"{self.prog}: error: {shortened(message, LONGEST_MESSAGE)} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def _converter(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` for argparse, which repeats the message of no other error."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _count(text: str, most: int = LARGEST_COUNT) -> int:
    try:
        value = int(text)
    except ValueError:
        raise InputError(f"expected a whole number, found {shortened(repr(text))}") from None
    if not 1 <= value <= most:
        bound = "at least 1" if value < 1 else f"at most {most:,}"
        raise InputError(f"must be {bound}, found {shortened(str(value))}")
    return value


def _amount(text: str) -> float:
    """A positive number, such as ``1e9``."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InputError(f"expected a positive number such as 1e9, found {shortened(repr(text))}")
    return value


def _list_of(kind: Callable[[str], object]) -> Callable[[str], list[object]]:
    """Values between commas, each once."""

    def parse(text: str) -> list[object]:
        words = [word.strip() for word in text.split(",")]
        if not all(words):
            raise InputError(f"expected values between commas, found {shortened(repr(text))}")
        return list(dict.fromkeys(kind(word) for word in words))

    return parse


def _generation(text: str) -> tuple[int, int]:
    prompt, plus, new = text.partition("+")
    if not plus:
        raise InputError(f"expected PROMPT+NEW tokens such as 512+512, found {shortened(repr(text))}")
    return _count(prompt), _count(new)


Flag = dict[str, Any]
"""Arguments of `add_argument`."""
_KINDS: dict[str, tuple[str | None, Callable[[str], object]]] = {
    "text": (None, str),
    "names": ("A,B", _list_of(str)),
    "count": ("N", _count),
    "counts": ("N,M", _list_of(_count)),
    "batches": ("N", partial(_count, most=LARGEST_ACCUMULATION)),
    "count or auto": ("N", lambda text: text if text == "auto" else _count(text, LARGEST_ACCUMULATION)),
    "amount": ("N", _amount),
    "size": ("SIZE", parse_bytes),
    "checkpointing": ("FORM", lambda text: parse_checkpoint(text) and text),
    "generation": ("PROMPT+NEW", _generation),
    "packing": ("N", lambda text: str(Packing.read(text))),
}
"""Kind of a value in the table -> what stands for it in a help, and what reads it."""


def _flag(section: Mapping[str, str]) -> Flag:
    """An argument as its section says it: not given it is None, unless it says otherwise."""
    flag: Flag = {"default": None, **{key: " ".join(value.split()) for key, value in section.items()}}
    if "choices" in flag:
        return flag | {"choices": flag["choices"].split()}
    if "action" in flag:
        return flag | ({"action": argparse.BooleanOptionalAction} if flag["action"] == "either" else {})
    metavar, parse = _KINDS[flag.pop("kind", "text")]
    return {"help": "", "metavar": metavar, "type": _converter(parse), **flag}


_TABLE = configparser.ConfigParser(interpolation=configparser.ExtendedInterpolation(), delimiters="=")
_TABLE.read(Path(__file__).with_name("command_line.ini"), encoding="utf-8")
_COMMANDS = {name.removeprefix("elixir "): _TABLE[name] for name in _TABLE.sections() if name.startswith("elixir ")}
_TITLES = {"arguments": "", "step": STEP, "retraced": RETRACED, "results": " "}
"""Key of a command in the table -> the title of these arguments in its help."""
FLAGS = {name: _flag(_TABLE[name]) for name in _TABLE.sections() if " " not in name and name != "groups"}
"""Every argument by its name, or by name and command where commands differ."""
COMMANDS: dict[str, tuple[str, dict[str, str]]] = {
    name: (section["help"], {title: section[key] for key, title in _TITLES.items() if key in section})
    for name, section in _COMMANDS.items()
}
"""Command -> its line of help, and its arguments by group; those between | exclude each other."""
EXAMPLES = {name: section["examples"].strip().splitlines() for name, section in _COMMANDS.items()}
"""Command -> calls that its help shows."""
RULES = {name: re.findall(r"\S.*", section.get("rules", "")) for name, section in _COMMANDS.items()}
"""Command -> lines that say which of its arguments exclude or need which others, each with the error."""
FORMER_FLAGS = {
    "--checkpoint": "--activation-checkpointing",
    "--device": "--hardware",
    "--speculate": "--early-updates",
    "--no-speculate": "--no-early-updates",
}
"""Name of a flag in earlier versions, which is still taken -> its name today."""


def normalise(argv: Sequence[str]) -> list[str]:
    """`argv` with a bare ``--activation-checkpointing`` spelled out, and today's names of flags.

    argparse would take the word that follows an option with an optional value for that value, so that in
    ``elixir profile --activation-checkpointing opt-13b`` the model would be lost.
    """
    words: list[str] = []
    for index, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        flag = FORMER_FLAGS.get(flag, flag)
        if flag == "--activation-checkpointing":
            following = argv[index + 1].split(":")[0] if index + 1 < len(argv) else ""
            bare = not equals and following not in CHECKPOINT_FORMS
            equals, value = ("=", "non-reentrant") if bare else (equals, value)
        words.append(flag + equals + value)
    return words


def check_rules(args: argparse.Namespace) -> None:
    """Refuses arguments that do not go together by the rules of the table."""

    def is_given(argument: str) -> bool:
        name, equals, value = argument.removeprefix("--").replace("-", "_").partition("=")
        found = getattr(args, name)
        return found == value if equals else found is not None

    for rule in RULES[args.command]:
        words, _, error = rule.partition(": ")
        argument, how, others = words.split()
        if is_given(argument) and any(map(is_given, others.split("|"))) == (how == "with"):
            raise InputError(error)


def build_parser() -> Parser:
    """The whole command line."""
    from elixir import __version__

    parser = Parser(
        prog="elixir",
        description="Predict the memory and time of a training step, and plan what stays on the GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"elixir {__version__}")
    parser.add_argument("--debug", action="store_true", help="raise errors with their traceback")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    parser.commands = commands.choices
    for name, (text, groups) in COMMANDS.items():
        epilog = "\n  ".join((f"example{'s' * (len(EXAMPLES[name]) > 1)}:", *EXAMPLES[name]))
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        # Suppressed, so that `elixir --debug profile` is not reset by the subcommand's own default.
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        for title, arguments in groups.items():
            group = command.add_argument_group(title) if title.strip() else command
            for words in arguments.split():
                several = words.split("|")
                place = group.add_mutually_exclusive_group() if len(several) > 1 else group
                for word in several:
                    flag = FLAGS.get(f"{word}@{name}") or FLAGS[word]
                    if title == RETRACED:
                        flag = flag | {"help": flag["help"].partition(" (default")[0]}
                    place.add_argument(word, **flag)
    return parser
