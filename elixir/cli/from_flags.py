"""Turns flags into a training step and a search request, and errors into the words of flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from elixir.cli.files import trace_in
from elixir.errors import InputError, Lever, unknown_name
from elixir.hardware.profile import HardwareProfile
from elixir.models import user_code
from elixir.optimizer_states import WITH_AVERAGE
from elixir.search.question import StepQuestion
from elixir.search.request import OPTIONS, SearchRequest
from elixir.show.tables import flags_of
from elixir.step_trace import StepTrace

if TYPE_CHECKING:
    from torch import nn

STEP_FLAGS = (
    "batch seq packed dtype checkpoint optimizer optimizer_kernel inp step fused_kernels compile forward generate lora "
    "quantised positions"
).split()
"""Flags of the step, which a trace has settled; None where they are not given."""
_OF_THE_QUESTION = "batch seq packed checkpoint compile forward generate lora quantised positions".split()
"""Flags of the step that have the names of fields of `StepQuestion`."""
_FLAG_OF_CODE = {"pass inp": "--inp", "step_fn": "--step"}
"""Words of an error -> the flag that gives the code it asks for."""
_OF_PROFILE = " (of `elixir profile`: the trace has settled it)"
_OF_THE_STEP = {
    "batch": "halve the step: --batch or --seq",
    "checkpoint": "turn on activation checkpointing: --activation-checkpointing",
}
"""Argument -> what settles it where the step is traced."""


def asked(args: argparse.Namespace, optimizer: str | None) -> SearchRequest:
    """Options of a search by the flags that bear their names and were given."""
    given = {name: value for name, value in vars(args).items() if name in OPTIONS and value is not None}
    return SearchRequest(**{"world_size": 1, "optimizer_type": optimizer, **given})


def traced(args: argparse.Namespace, hardware: HardwareProfile, *, steps: bool = True) -> tuple[StepTrace, nn.Module]:
    """One step of the model the user named, traced for `hardware`, with its optimizer unless `steps` is false; and the
    model."""
    kernel = None if args.optimizer_kernel == "default" else args.optimizer_kernel
    optimizer = None if args.generate or args.forward or not steps else optimizer_class(args.optimizer)
    try:
        step = step_asked(args, model=args.model, optimizer=optimizer, optimizer_kernel=kernel)
        model = step.build()
        if getattr(args, "activations", None) is None:
            return step.trace(hardware, model), model
        from elixir.search.advise.activations import trace_that_keeps

        wanted = optimizer and optimizer_asked(args.optimizer)
        return trace_that_keeps(step, hardware, asked(args, wanted), model), model
    except InputError as error:
        flags = [f"{flag} module:function" for word, flag in _FLAG_OF_CODE.items() if word in str(error)]
        if flags:
            raise InputError(f"{error} (here: {', '.join(flags)})") from None
        raise


def step_asked(args: argparse.Namespace, **fields: Any) -> StepQuestion:
    """The step that the flags describe; `fields` are those of `StepQuestion` that they do not."""
    given = {name: value for name, value in vars(args).items() if name in _OF_THE_QUESTION and value is not None}
    inp, step = getattr(args, "inp", None), getattr(args, "step", None)
    if inp:
        given["inp"] = partial(user_code.called, inp, user_code.imported(inp))
    if step:
        given["step_fn"] = partial(_run, step, user_code.imported(step))
    dtype = {None: "bf16", "as-built": None}.get(args.dtype, args.dtype)
    return StepQuestion(**given, **fields, dtype=dtype, use_fused_kernels=bool(args.fused_kernels))


def _run(text: str, step: Callable[[Any, Any], Any], model: Any, inp: Any) -> Any:
    """The step that `text` names, apart from the code of its model, so that errors say which it was."""
    with user_code.contained(f"{text}: the step"):
        return step(model, inp)


def optimizer_class(name: str | None) -> str:
    """The class of `torch.optim` that is named, in any case; AdamW without a name."""
    import torch

    name = "adamw" if name is None else name.lower().removesuffix(WITH_AVERAGE.lower())
    classes = {
        found.lower(): found
        for found, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name.lower() not in classes:
        # As bitsandbytes calls them: AdamW8bit, PagedAdamW8bit.
        kept = name.lower().removesuffix("8bit").removeprefix("paged").strip("-_")
        if name.lower().endswith("8bit") and kept in ("adam", "adamw"):
            raise InputError(f"unknown optimizer {name!r}; {kept} with moments in 8 bits is --moments 8bit")
        raise unknown_name("optimizer", name, classes)
    return classes[name.lower()]


def optimizer_asked(name: str | None) -> str:
    """The class that is named, with an average of the weights if ``+ ema`` follows."""
    averaged = name is not None and name.lower().endswith(WITH_AVERAGE.lower())
    return optimizer_class(name) + WITH_AVERAGE * averaged


def refuse_settled(args: argparse.Namespace, path: str, names: Iterable[str]) -> None:
    """Refuses flags that the trace in `path` has settled."""
    given = [f"--{key.replace('_', '-')}" for key in names if getattr(args, key) is not None]
    if given:
        raise InputError(f"{path} is a trace, which has settled {', '.join(given)}; leave out, or name the model")


def in_flags(lever: Lever, args: argparse.Namespace) -> str:
    """The action of a lever, by the flag of the command wherever it has one.

    Args:
        lever: of the error that the command ended with.
        args: what it was given.
    """
    if lever.options and all(name in vars(args) for name, _ in lever.options):
        words = flags_of(lever.options)
        trace = trace_in(args.model)
        if trace is not None and trace.step.checkpoint is None and lever.argument == "activations":
            return f"{words} (name the model, not its trace)"
        settled = trace is not None and any(name in STEP_FLAGS for name, _ in lever.options)
        return f"{lever.action}: {words}{_OF_PROFILE if settled else ''}"
    if lever.argument not in vars(args) or (lever.argument == "batch" and getattr(args, "inp", None)):
        return lever.action
    if lever.argument in _OF_THE_STEP:
        again = _OF_PROFILE if trace_in(args.model) is not None else ""
        return _OF_THE_STEP[lever.argument] + again
    flag = f"--{lever.argument.replace('_', '-')} {lever.value}".rstrip()
    named = f"{lever.argument} {lever.value!r}" if lever.value else lever.argument
    return lever.action.replace(named, flag) if named in lever.action else f"{lever.action}: {flag}"
