"""The arguments of every command, as one table of flags and one of commands. Imports no torch.

A flag whose name is that of a field of `elixir.search.request.SearchRequest` reaches the search by that alone.
"""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from elixir.errors import GONE, InputError, shortened
from elixir.models.activation_checkpointing import CHECKPOINT_FORMS, parse_checkpoint
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


def _batches(text: str) -> int:
    return _count(text, LARGEST_ACCUMULATION)


def _count_or_auto(text: str) -> int | str:
    return text if text == "auto" else _batches(text)


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


def _form(text: str) -> str:
    parse_checkpoint(text)
    return text


def _generation(text: str) -> tuple[int, int]:
    prompt, plus, new = text.partition("+")
    if not plus:
        raise InputError(f"expected PROMPT+NEW tokens such as 512+512, found {shortened(repr(text))}")
    return _count(prompt), _count(new)


Flag = dict[str, Any]
"""Arguments of `add_argument`."""


def _flag(help_text: str, metavar: str | None = None, kind: Callable[[str], object] = str, **more: Any) -> Flag:
    return {"help": help_text, "metavar": metavar, "type": _converter(kind), **more}


def _number(help_text: str, **more: Any) -> Flag:
    return _flag(help_text, "N", _count, **more)


def _bytes(help_text: str) -> Flag:
    return _flag(help_text, "SIZE", parse_bytes)


def _switch(help_text: str, **more: Any) -> Flag:
    return {"help": help_text, "action": "store_true", **more}


def _choice(help_text: str, *choices: str, default: str | None = None) -> Flag:
    return {"help": help_text, "choices": choices, "default": default}


_MODEL = "a name (`elixir models` lists them), a Hugging Face config.json, or module:function"
_CHECKPOINT = (
    "activation checkpointing: non-reentrant (also where nothing follows), reentrant or none; of the first 12 layers "
    "alone: non-reentrant:12"
)
FLAGS: dict[str, Flag] = {
    "model": _flag(_MODEL, "MODEL"),
    "model@plan": _flag(f"{_MODEL}, or a trace `elixir profile` saved", "MODEL|trace.json"),
    "models": _flag(_MODEL, "MODEL", nargs="+"),
    "function": _flag("returns (model, optimizer, batch, step_fn), as `elixir.wrap` takes them", "module:function"),
    "file": _flag("", "FILE"),
    "a": _flag("", "A.json"),
    "b": _flag("", "B.json"),
    "plan": _flag("", "plan.json"),
    "trace": _flag("what the plan was made from; a named model is traced again without", "trace.json", nargs="?"),
    # The machine.
    "--hardware@profile": _flag("preset or hw.json of the device to pretend (default: h200)", default="h200"),
    "--hardware@plan": _flag("preset or hw.json (default: h200; of a trace, its device)"),
    "--hardware@sweep": _flag("presets or hw.json (default: h200)", "A,B", _list_of(str), default=["h200"]),
    "--hardware@fit": _flag("presets or hw.json (default: every preset with a GPU)", "A,B", _list_of(str)),
    "--hardware": _flag("preset or hw.json (default: the preset the plan was made for)"),
    "--world-size": _number("ranks, one device each (default: 1)", default=1),
    "--world-sizes@sweep": _flag("ranks, one device each (default: 1)", "N,M", _list_of(_count), default=[1]),
    "--world-sizes@fit": _flag(
        "numbers of devices to try (default: 1, 2, 4, ... up to a whole machine)", "N,M", _list_of(_count)
    ),
    "--network": _bytes("bytes a second between machines, per machine and direction, such as 50GB for 400 Gbit/s"),
    "--devices-per-host": _number(
        "devices of each machine, such as 8 for eight cards in one box (default: what its profile says)"
    ),
    "--prices": _flag("CSV file of what machines cost an hour, as example/prices.csv: also say costs", "FILE"),
    "--tokens": _flag("with --prices: length of the run, such as 1e9 (or its samples)", "N", _amount),
    # Budgets.
    "--device-memory": _bytes("budget of each device, such as 80GiB (default: all but a reserve)"),
    "--host-memory@plan": _bytes(
        "what a machine has for the run, such as 128GiB: all that must be free counts, of all its ranks (default: what "
        "the hardware's file says; without --hardware, what is free here; of both all but a reserve)"
    ),
    "--host-memory": _bytes(
        "what each machine has for the run, such as 512GiB: all that must be free counts (default: what its profile "
        "says, otherwise twice that of its devices in use; of both all but a reserve)"
    ),
    "--host-budget": _bytes(
        "instead of --host-memory: budget of the plan's own bytes on each host; libraries and your program come on top"
    ),
    "--device-reserve": _bytes(
        "without --device-memory: of each device, kept back for what no plan counts, such as kernels that are loaded "
        "later (default: about 6 %% of it)"
    ),
    "--host-reserve": _bytes(
        "without either: of each machine, kept back likewise (default: 5 %% of it, at least what the system and "
        "the processes take)"
    ),
    "--reserve": _bytes("host memory that your program takes in each process later, such as for data workers"),
    "--disk-memory": _bytes(
        "of the disk of each machine, such as 500GiB, for states that neither devices nor host hold (default: none; "
        "the run names it with disk_folder)"
    ),
    "--disk-endurance": _bytes(
        "what may be written to the drive in its life, such as 1200TB: also say how many steps it lasts"
    ),
    # The step. None stands for "not given": a saved trace has settled these already.
    "--batch": _number("samples per rank (default: 1)"),
    "--batches": _flag("samples per rank (default: 1)", "N,M", _list_of(_count), default=[1]),
    "--seq": _number("tokens per sample (default: 1024, or the model's maximum if smaller)"),
    "--dtype": _flag("of parameters and floating inputs: bf16 (default), fp16, fp32, fp64, as-built", "DTYPE"),
    "--dtype@try": _flag(
        "of parameters and floating inputs: bf16 (default on a GPU), fp32 (default on a CPU), fp16, fp64", "DTYPE"
    ),
    "--activation-checkpointing": _flag(f"{_CHECKPOINT} (default: none)", "FORM", _form, dest="checkpoint"),
    "--optimizer": _flag("adamw (default), adam, sgd, ...", "NAME"),
    "--optimizer-kernel": _choice(
        "how its step runs (default: what torch would choose)", "default", "fused", "foreach", "for-loop"
    ),
    "--fused-kernels": _switch(
        "with fused norms, SwiGLU and loss, as a run with use_fused_kernels=True", default=None
    ),
    "--compile": _switch(
        "with the layers that the model repeats compiled, as elixir.wrap(compile=True) runs them", default=None
    ),
    "--inp": _flag("for other than Hugging Face models: returns the dict a step is fed with", "MODULE:FUNCTION"),
    "--step": _flag("function(model, inp) that runs forward, loss and backward", "MODULE:FUNCTION"),
    "--forward": _switch("evaluation: forward alone, without gradients and optimizer states", default=None),
    "--generate": _flag(
        "generation with a key-value cache: tokens of each prompt and new ones, such as 512+512", "PROMPT+NEW",
        _generation,
    ),
    "--lora": _number("train adapters of this rank over all linear layers, as peft's LoRA; the rest is frozen"),
    "--positions": _number(
        "build a named model (or config.json) with so many positions, for a --seq beyond its own; learned tables of "
        "positions grow"
    ),
    "--quantised": _flag(
        "how frozen weights of linear layers are held: nf4 or nf4-double, the 4 bits of bitsandbytes (default: in "
        "--dtype)",
        "FORM",
    ),
    # The search.
    "--moments": _choice(
        "how Adam's moments are kept (default: float32)", "float32", "bfloat16", "8bit", default="float32"
    ),
    "--early-updates": _switch(
        "CPU Adam updates chunks during backward, and keeps the old states until the norm is known (default: where "
        "that clearly shortens the step)",
        action=argparse.BooleanOptionalAction,
    ),
    "--no-clipping": _switch(
        "for a run that does not clip gradients by their norm (default: it does)",
        action="store_false", dest="clipping", default=None,
    ),
    "--frozen-weights": _choice(
        "where weights are that are not trained and do not fit the device: in host memory, or in the files that they "
        "come in (default: host)", "host", "files", default="host",
    ),
    "--weights": _flag(
        "with --frozen-weights files: their safetensors, or the folder; the plan then says if one has changed", "PATH"
    ),
    "--assume": _choice(
        "what to plan for: scenarios (the plan that loses least in all that the hardware profile thinks possible) or "
        "nominal (the fastest at its rates) (default: scenarios)", "scenarios", "nominal", default="scenarios",
    ),
    "--placement": _choice("force every chunk's home (default: auto)", "auto", "cuda", "cpu", default="auto"),
    "--no-overlap": _switch("transfers wait for compute: no prefetch", action="store_false", dest="overlap"),
    "--search-batch": _switch(
        "--batch is of a step: choose whether to cut it into several that are accumulated, and, unless "
        "--activation-checkpointing says so, whether to recompute activations, and of how many layers"
    ),
    "--accumulation": _flag("micro-batches per optimizer step, --batch samples each (default: 1)", "N", _batches),
    "--pass-size": _flag(
        "micro-batches that go through each layer before the next layer's weights are fetched, with "
        "optimizer.accumulate: a number that divides --accumulation, or auto for the fastest (default: 1)",
        "N", _count_or_auto, default=1,
    ),
    "--replicas": _flag(
        "replicas of the model, each sharded over as many neighbouring ranks, two or more: a number that divides the "
        "ranks, or auto for the fastest that fits the machines (default: 1)",
        "N", _count_or_auto, default=1,
    ),
    "--activations": _choice(
        "auto: choose for each layer which results of its forward are kept for backward and which are made again "
        "(default: as --activation-checkpointing says)", "auto",
    ),
    "--accumulation@timeline": _flag(
        "micro-batches per optimizer step (default: as it was planned for)", "N", _batches
    ),
    # Measuring.
    "--list": _switch("the presets (the default)"),
    "--show": _flag("one preset or hw.json, with the source of every number", "NAME"),
    "--measure": _switch("measure this machine"),
    "--learn": _flag(
        "fold the seconds of a run's steps into a profile: the file of `elixir try`; with --show, JSON of "
        "report.to_dict(), or a list", "FILE"
    ),
    "--quick": _switch("with --measure: fewer and smaller runs"),
    "--disk-folder": _flag(
        "with --measure: also measure the disk that DIR is on; several: their drives together", "DIR", nargs="+"
    ),
    # Checkpoints.
    "action": _choice("what to do", "show", "verify", "export", "prune"),
    "folder": _flag("a checkpoint, or a folder with several", "FOLDER"),
    "--hf": _flag("with export: the folder for the weights, as Hugging Face reads them", "OUT"),
    "--config": _flag("with export: the config.json of the model, or its folder", "FILE"),
    "--dtype@checkpoint": _flag("with export: of the weights (default: as saved)", "DTYPE"),
    "--keep": _number("with prune: how many steps stay; older ones go (default: only what was cut off goes)"),
    # Results.
    "--top": _number("rows of the table (default: 5)", default=5),
    "--no-levers@plan": _switch("do not plan again with one thing changed each"),
    "--allow": _flag(
        "take the best of these changes, which alter numerics or the step: moments, kernels, accumulation, "
        "checkpointing (default: none)", "A,B", _list_of(str)
    ),
    "--no-levers": _switch("do not plan again with more memory or faster parts"),
    "--json": _switch("print one JSON object instead of tables"),
    "--brief": _switch("only the summary, no tables"),
    "--csv": _flag("save all rows and columns as CSV", "FILE"),
    "--plot@profile": _flag("draw the memory curve (.png, .pdf or .svg)", "FILE"),
    "--plot@plan": _flag("draw the plan (.png, .pdf or .svg)", "FILE"),
    "--plot@sweep": _flag("draw a heat map (.png, .pdf or .svg)", "FILE"),
    "--out@profile": _flag("save the trace as JSON; `elixir plan` takes it for a model", "FILE"),
    "--out@hardware": _flag("save the profile as JSON (with --show or --measure)", "FILE"),
    "--out@try": _flag("save the trial as JSON, to hand on; `elixir hardware --learn` takes it", "FILE"),
    "--out@plan": _flag("save the plan as JSON", "FILE"),
    "--out@timeline": _flag(
        "a picture (.png, .pdf, .svg), or a Chrome trace for Perfetto (.json)", "FILE", required=True
    ),
}  # fmt: skip
"""Every argument by its name, or by name and command where commands differ."""

_BUDGETS = "--device-memory --host-memory --host-budget --device-reserve --host-reserve --reserve --disk-memory"
_SEARCH = "--accumulation --pass-size --replicas --moments --early-updates --no-clipping --frozen-weights --assume"
_ADAPTED = "--lora --quantised --positions"
_ASKED = (
    "--batch --seq --dtype --activation-checkpointing --optimizer --fused-kernels --compile --inp --step " + _ADAPTED
)
_TRACED = f"{_ASKED} --optimizer-kernel --forward --generate"
_AGAIN = {
    "": "plan trace --hardware --network --devices-per-host",
    RETRACED: "--batch --seq --positions --activation-checkpointing --fused-kernels --compile",
}
COMMANDS: dict[str, tuple[str, dict[str, str]]] = {
    "try": (
        "Train ten steps of a model here and compare memory and time with the prediction.",
        {
            "": "model --device-memory --host-memory --host-budget --out --json",
            STEP: "--batch --seq --dtype --activation-checkpointing --moments",
        },
    ),
    "profile": (
        "What one training step of a model needs: memory by kind, its peak, and why.",
        {"": "model --hardware --json --brief --plot --out", STEP: _TRACED},
    ),
    "hardware": (
        "What a machine can do: presets, or this one, measured.",
        {"": "--list|--show|--measure --learn --quick --disk-folder --out --json"},
    ),
    "plan": (
        "What goes where, and when, so that the step fits the machine.",
        {
            "": f"model --hardware --world-size --network --devices-per-host {_BUDGETS} --disk-endurance {_SEARCH} "
            "--weights --placement --no-overlap --activations --search-batch --allow --no-levers --json --brief "
            "--plot --out",
            STEP: _TRACED,
        },
    ),
    "check": (
        "What a smaller machine would refuse: takes two steps on the CPU, weights streamed; status 1 if anything is.",
        {"": "function --json"},
    ),
    "show": ("Show a plan, trace or hardware profile that was saved.", {"": "file --json"}),
    "compare": ("Two plans (or traces, or profiles) side by side, differences marked.", {"": "a b --prices --json"}),
    "models": ("The models known by name.", {"": "--json"}),
    "checkpoint": (
        "What a saved run holds, whether it is whole, its weights for Hugging Face, and what may go.",
        {"": "action folder --hf --config --dtype --keep --json"},
    ),
    "sweep": (
        "Models x machines x world sizes x batches on paper: what fits, how fast, bound by what.",
        {
            "": f"models --hardware --world-sizes --batches {_BUDGETS} --network --devices-per-host --no-overlap "
            "--prices --tokens --csv --plot --json",
            STEP: "--seq --dtype --activation-checkpointing --optimizer --fused-kernels --compile "
            f"{_ADAPTED} {_SEARCH} --activations",
        },
    ),
    "fit": (
        "The smallest known machine that can train a model, and how fast.",
        {
            "": f"model --hardware --world-sizes {_BUDGETS} {_SEARCH} --activations --network --devices-per-host "
            "--no-overlap --prices --tokens --json --brief",
            STEP: _ASKED,
        },
    ),
    "explain": (
        "Why every chunk of a plan is where it is: what the step would take elsewhere.",
        _AGAIN | {" ": "--top --no-levers --json --brief"},
    ),
    "timeline": (
        "One simulated step of a plan, drawn or as a Chrome trace.",
        _AGAIN | {" ": "--out --accumulation --json"},
    ),
}
"""Command -> its line of help, and its arguments by group; those between | exclude each other."""
FORMER_FLAGS = {
    "--checkpoint": "--activation-checkpointing",
    "--device": "--hardware",
    "--speculate": "--early-updates",
    "--no-speculate": "--no-early-updates",
}
"""Name of a flag in earlier versions, which is still taken -> its name today."""
EXAMPLES: dict[str, tuple[str, ...]] = {
    "try": ("elixir try opt-125m --batch 1 --seq 128", "elixir try llama-3.2-1b --device-memory 8GiB --out try.json"),
    "profile": (
        "elixir profile opt-175b --batch 8 --seq 2048 --activation-checkpointing --plot memory.png",
        "elixir profile my_models:make_model --inp my_models:batch --step my_models:train_step --out trace.json",
    ),
    "hardware": ("elixir hardware --show h200", "elixir hardware --measure --out hw.json"),
    "plan": (
        "elixir plan opt-13b --hardware h200 --host-memory 128GiB --batch 8 --activation-checkpointing --out plan.json",
        "elixir plan trace.json --hardware hw.json --device-memory 20GiB",
        "elixir plan llama-3-8b --hardware rtx4090 --generate 512+512 --batch 8",
        "elixir plan llama-3-70b --hardware rtx4090 --lora 16 --quantised nf4 --seq 4096 --activation-checkpointing",
    ),
    "check": ("elixir check my_training:program",),
    "show": ("elixir show plan.json",),
    "compare": ("elixir compare a.json b.json",),
    "models": ("elixir models",),
    "checkpoint": (
        "elixir checkpoint verify run",
        "elixir checkpoint export run --hf out --config opt-125m/config.json",
    ),
    "sweep": ("elixir sweep opt-1.3b opt-13b --hardware a100,h200 --world-sizes 1,8 --batches 1,8",),
    "fit": ("elixir fit opt-13b --batch 4 --activation-checkpointing",),
    "explain": ("elixir explain plan.json", "elixir explain plan.json trace.json --top 10"),
    "timeline": ("elixir timeline plan.json --out step.png", "elixir timeline plan.json trace.json --out step.json"),
}
"""Command -> calls that its help shows."""


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
