"""Arguments of ``elixir sweep | fit | explain | timeline``. Like `elixir.cli.parser` it imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from elixir.cli.parser import (
    CHECKPOINT_HELP,
    MODEL_HELP,
    Parser,
    _add_brief,
    _add_json,
    _add_step,
    _count,
    _size,
    add_disk_memory,
    add_fused_kernels,
    add_moments,
    add_step_in_backward,
    checkpoint,
)


def add_questions(command: Callable[[str, str], Parser]) -> None:
    """Add the four commands; `command` makes a subparser from a name and a line of help."""
    _add_sweep(
        command("sweep", "Models x machines x world sizes x batches on paper: what fits, how fast, bound by what.")
    )
    _add_fit(command("fit", "The smallest known machine that can train a model, and how fast."))
    _add_explain(command("explain", "Why every chunk of a plan is where it is: what the step would take elsewhere."))
    _add_timeline(command("timeline", "One simulated step of a plan, drawn or as a Chrome trace."))


def _add_sweep(parser: Parser) -> None:
    parser.add_argument("models", metavar="MODEL", nargs="+", help=MODEL_HELP)
    parser.add_argument(
        "--hardware", type=_list_of(str), default=["h200"], metavar="A,B", help="presets or hw.json (default: h200)"
    )
    parser.add_argument(
        "--world-sizes", type=_list_of(_count), default=[1], metavar="N,M", help="ranks, one device each (default: 1)"
    )
    parser.add_argument(
        "--batches", type=_list_of(_count), default=[1], metavar="N,M", help="samples per rank (default: 1)"
    )
    step = parser.add_argument_group("the training step")
    step.add_argument(
        "--seq", type=_count, metavar="N", help="tokens per sample (default: 1024, or the model's maximum)"
    )
    step.add_argument("--dtype", metavar="DTYPE", help="bf16 (default), fp16, fp32, fp64, as-built")
    step.add_argument("--checkpoint", type=checkpoint, metavar="FORM", help=CHECKPOINT_HELP)
    step.add_argument("--optimizer", metavar="NAME", help="adamw (default), adam, sgd, ...")
    add_moments(step)
    add_step_in_backward(step)
    add_fused_kernels(step)
    _add_budgets(parser)
    parser.add_argument("--csv", metavar="FILE", help="save all rows and columns as CSV")
    parser.add_argument("--plot", metavar="FILE", help="draw a heat map (.png, .pdf or .svg)")
    _add_json(parser)


def _add_fit(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--hardware", type=_list_of(str), metavar="A,B", help="presets or hw.json (default: every preset with a GPU)"
    )
    parser.add_argument(
        "--world-sizes",
        type=_list_of(_count),
        metavar="N,M",
        help="numbers of devices to try (default: 1, 2, 4, ... up to a whole machine)",
    )
    _add_step(parser, optimizer_kernel=False)
    add_moments(parser)
    add_step_in_backward(parser)
    _add_budgets(parser)
    _add_json(parser)


def _add_explain(parser: Parser) -> None:
    _add_planned(parser)
    parser.add_argument("--top", type=_count, default=5, metavar="N", help="runs of chunks in the table (default: 5)")
    parser.add_argument("--no-levers", action="store_true", help="do not plan again with more memory or faster parts")
    _add_json(parser)
    _add_brief(parser)


def _add_timeline(parser: Parser) -> None:
    _add_planned(parser)
    parser.add_argument(
        "--out",
        metavar="FILE",
        required=True,
        help="a picture (.png, .pdf, .svg), or a Chrome trace for Perfetto (.json)",
    )
    parser.add_argument(
        "--accumulation", type=_count, metavar="N", help="batches per optimizer step (default: as it was planned for)"
    )
    _add_json(parser)


def _add_planned(parser: Parser) -> None:
    """A plan and the trace it was made from; of a named model the step can be traced again instead."""
    parser.add_argument("plan", metavar="plan.json")
    parser.add_argument(
        "trace",
        metavar="trace.json",
        nargs="?",
        help="what the plan was made from; a named model is traced again without",
    )
    parser.add_argument("--hardware", help="preset or hw.json (default: the preset the plan was made for)")
    _add_network(parser)
    step = parser.add_argument_group("the training step, without trace.json; as when the plan was made")
    step.add_argument("--batch", type=_count, metavar="N", help="samples per rank (default: 1)")
    step.add_argument(
        "--seq", type=_count, metavar="N", help="tokens per sample (default: 1024, or the model's maximum)"
    )
    step.add_argument("--checkpoint", type=checkpoint, metavar="FORM", help=CHECKPOINT_HELP)
    add_fused_kernels(step)


def _add_budgets(parser: Parser) -> None:
    parser.add_argument(
        "--device-memory", type=_size, metavar="SIZE", help="budget of each device (default: all of it)"
    )
    parser.add_argument(
        "--host-memory",
        type=_size,
        metavar="SIZE",
        help="of each machine, such as 512GiB (default: what its profile says, else twice that of its devices in use)",
    )
    add_disk_memory(parser)
    _add_network(parser)
    parser.add_argument("--no-overlap", action="store_true", help="transfers wait for compute: no prefetch")


def _add_network(parser: Parser) -> None:
    parser.add_argument(
        "--network",
        type=_size,
        metavar="SIZE",
        help="bytes a second between machines, per machine and direction, such as 50GB for 400 Gbit/s",
    )


def _list_of(kind: Callable[[str], object]) -> Callable[[str], list[object]]:
    """Values between commas, each once."""

    def parse(text: str) -> list[object]:
        words = [word.strip() for word in text.split(",")]
        if not all(words):
            raise argparse.ArgumentTypeError(f"expected values between commas, found {text!r}")
        return list(dict.fromkeys(kind(word) for word in words))

    return parse
