"""The arguments of every command. Imports nothing but argparse and the leaves without torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from elixir.checkpointing import CHECKPOINT_FORMS, parse_checkpoint
from elixir.errors import ElixirError

OPTIMIZER_KERNELS = ("default", "fused", "foreach", "for-loop")
PLACEMENTS = ("auto", "cuda", "cpu")
MOMENTS = ("float32", "bfloat16", "8bit")

CHECKPOINT_HELP = (
    "activation checkpointing: non-reentrant (also where nothing follows), reentrant or none; of the first 12 layers "
    "alone: non-reentrant:12"
)
MODEL_HELP = "a name (`elixir models` lists them), a Hugging Face config.json, or module:function"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line on standard error."""

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with status 2."""
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def normalise(argv: Sequence[str]) -> list[str]:
    """`argv` with a bare ``--checkpoint`` spelled out.

    argparse would take the word that follows an option with an optional value for that value, so that in
    ``elixir profile --checkpoint opt-13b`` the model would be lost.
    """
    words: list[str] = []
    for index, word in enumerate(argv):
        if word == "--checkpoint" and (index + 1 == len(argv) or argv[index + 1].split(":")[0] not in CHECKPOINT_FORMS):
            word = "--checkpoint=non-reentrant"
        words.append(word)
    return words


def build_parser() -> Parser:
    """The whole command line."""
    from elixir import __version__

    parser = Parser(prog="elixir", description="From a model to a memory plan, without a GPU.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"elixir {__version__}")
    parser.add_argument("--debug", action="store_true", help="raise errors with their traceback")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    common = Parser(add_help=False)
    # Suppressed, so that `elixir --debug profile` is not reset by the subcommand's own default.
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    def command(name: str, text: str) -> Parser:
        return commands.add_parser(name, help=text, description=text, parents=[common], allow_abbrev=False)

    _add_profile(command("profile", "What one training step of a model needs: memory by kind, its peak, and why."))
    _add_hardware(command("hardware", "What a machine can do: presets, or this one, measured."))
    _add_plan(command("plan", "What goes where, and when, so that the step fits the machine."))
    show = command("show", "Show a plan, trace or hardware profile that was saved.")
    show.add_argument("file", metavar="FILE")
    _add_json(show)
    compare = command("compare", "Two plans (or traces, or profiles) side by side, differences marked.")
    compare.add_argument("a", metavar="A.json")
    compare.add_argument("b", metavar="B.json")
    _add_json(compare)
    _add_json(command("models", "The models known by name."))
    from elixir.cli.question_parser import add_questions  # it builds on the pieces below

    add_questions(command)
    return parser


def _add_profile(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    _add_step(parser)
    parser.add_argument("--device", default="h200", help="preset or hw.json of the device to pretend (default: h200)")
    _add_json(parser)
    _add_brief(parser)
    parser.add_argument("--plot", metavar="FILE", help="draw the memory curve (.png, .pdf or .svg)")
    parser.add_argument("--out", metavar="FILE", help="save the trace as JSON; `elixir plan` takes it for a model")


def _add_hardware(parser: Parser) -> None:
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--list", action="store_true", help="the presets (the default)")
    action.add_argument("--show", metavar="NAME", help="one preset or hw.json, with the source of every number")
    action.add_argument("--measure", action="store_true", help="measure this machine")
    parser.add_argument("--quick", action="store_true", help="with --measure: fewer and smaller runs")
    parser.add_argument("--disk-folder", metavar="DIR", help="with --measure: also measure the disk that DIR is on")
    parser.add_argument(
        "--no-spawn", action="store_true", help="with --measure: without torchrun, start no ranks for collectives"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="draw measured points and fits (with --show or --measure; .png, .pdf or .svg)"
    )
    parser.add_argument("--out", metavar="FILE", help="save the profile as JSON (with --show or --measure)")
    _add_json(parser)


def _add_plan(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL|trace.json", help=f"{MODEL_HELP}, or a trace `elixir profile` saved")
    parser.add_argument("--hardware", help="preset or hw.json (default: h200; of a trace, its device)")
    parser.add_argument("--world-size", type=_count, default=1, metavar="N", help="ranks, one device each (default: 1)")
    parser.add_argument(
        "--device-memory", type=_size, metavar="SIZE", help="budget of each device, such as 80GiB (default: all of it)"
    )
    parser.add_argument(
        "--host-memory",
        type=_size,
        metavar="SIZE",
        help="budget of the host for all its ranks, such as 128GiB (default: what the hardware's file says; "
        "without --hardware, what is free here)",
    )
    add_disk_memory(parser)
    _add_step(parser)
    add_moments(parser)
    add_step_in_backward(parser)
    parser.add_argument(
        "--placement", choices=PLACEMENTS, default="auto", help="force every chunk's home (default: auto)"
    )
    parser.add_argument("--no-overlap", action="store_true", help="transfers wait for compute: no prefetch")
    parser.add_argument(
        "--search-batch",
        action="store_true",
        help="--batch is of a step: choose whether to cut it into several that are accumulated, and, unless --checkpoint "
        "says so, whether to checkpoint, and how many layers",
    )
    _add_json(parser)
    _add_brief(parser)
    parser.add_argument("--plot", metavar="FILE", help="draw the plan (.png, .pdf or .svg)")
    parser.add_argument("--out", metavar="FILE", help="save the plan as JSON")


def _add_step(parser: Parser, *, optimizer_kernel: bool = True) -> None:
    """What the training step is. None stands for "not given": a saved trace has settled these already."""
    step = parser.add_argument_group("the training step")
    step.add_argument("--batch", type=_count, metavar="N", help="samples per rank (default: 1)")
    step.add_argument(
        "--seq", type=_count, metavar="N", help="tokens per sample (default: 1024, or the model's maximum if smaller)"
    )
    step.add_argument(
        "--dtype", metavar="DTYPE", help="of parameters and floating inputs: bf16 (default), fp16, fp32, fp64, as-built"
    )
    step.add_argument(
        "--checkpoint",
        type=checkpoint,
        metavar="FORM",
        help=CHECKPOINT_HELP + " (default: none)",
    )
    step.add_argument("--optimizer", metavar="NAME", help="adamw (default), adam, sgd, ...")
    if optimizer_kernel:  # only plain PyTorch has one to choose
        step.add_argument(
            "--optimizer-kernel", choices=OPTIMIZER_KERNELS, help="how its step runs (default: what torch would choose)"
        )
    add_fused_kernels(step)
    step.add_argument(
        "--inp",
        metavar="MODULE:FUNCTION",
        help="for other than Hugging Face models: returns the dict a step is fed with",
    )
    step.add_argument(
        "--step", metavar="MODULE:FUNCTION", help="function(model, inp) that runs forward, loss and backward"
    )


def add_fused_kernels(step: argparse._ArgumentGroup) -> None:
    """Whether the run will be given them. None where it is not given, as for all options of the step."""
    step.add_argument(
        "--fused-kernels",
        action="store_const",
        const=True,
        help="with fused norms, SwiGLU and loss, as a run with use_fused_kernels=True",
    )


def add_moments(parser: argparse._ActionsContainer) -> None:
    """How the optimizer keeps Adam's moments."""
    parser.add_argument(
        "--moments", choices=MOMENTS, default="float32", help="how Adam's moments are kept (default: float32)"
    )


def add_step_in_backward(parser: argparse._ActionsContainer) -> None:
    """When the host's updates begin."""
    parser.add_argument(
        "--step-in-backward",
        action="store_true",
        help="the host updates chunks while backward still runs: for one backward a step, no clipping, not fp16",
    )


def _add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def add_disk_memory(parser: Parser) -> None:
    """The budget of the disk."""
    parser.add_argument(
        "--disk-memory",
        type=_size,
        metavar="SIZE",
        help="of the disk of each machine, such as 500GiB, for states that neither devices nor host hold (default: none; such "
        "a plan is predicted, and not run yet)",
    )


def _add_brief(parser: Parser) -> None:
    parser.add_argument("--brief", action="store_true", help="only the summary, no tables")


def checkpoint(text: str) -> str:
    """`text` as it is, if it is a form of checkpointing."""
    try:
        parse_checkpoint(text)
    except ElixirError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, found {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {value}")
    return value


def _size(text: str) -> int:
    # Units come with torch, which only a command that plans should have to import.
    from elixir.errors import InputError
    from elixir.units import parse_bytes

    try:
        value = parse_bytes(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value
