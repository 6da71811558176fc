"""From flags to a training step and a search request, and errors in the words of flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from elixir.cli.files import trace_in
from elixir.errors import InputError, Lever, PlanError, unknown_name
from elixir.models import user_code
from elixir.show.tables import flag_of

if TYPE_CHECKING:
    from elixir.hardware import HardwareProfile
    from elixir.search.request import SearchRequest
    from elixir.search.whatif import TrainingStep
    from elixir.step_trace import StepTrace

STEP_DEFAULTS = {
    "batch": 1, "seq": None, "dtype": "bf16", "checkpoint": "none", "optimizer": "adamw", "optimizer_kernel": "default",
    "inp": None, "step": None, "fused_kernels": False,
}  # fmt: skip
"""Flag -> what it means where it is not given."""
_OF_PROFILE = " (of `elixir profile`: the trace has settled it)"
_OF_THE_STEP = {
    "batch": "halve the step: --batch or --seq",
    "checkpoint": "turn on activation checkpointing: --activation-checkpointing",
}
"""Argument -> what settles it where the step is traced."""


def asked(args: argparse.Namespace, optimizer: str) -> SearchRequest:
    """Options of a search by the flags that bear their names."""
    from elixir.search.request import OPTIONS, SearchRequest

    given = {name: value for name, value in vars(args).items() if name in OPTIONS}
    if given.get("accumulation", 1) is None:
        del given["accumulation"]
    return SearchRequest(**{"world_size": 1, "optimizer_type": optimizer, **given})


def traced(args: argparse.Namespace, hardware: HardwareProfile) -> StepTrace:
    """One step of the model the user named, traced for `hardware`."""
    from elixir.units import parse_dtype

    if args.inp and (args.batch or args.seq):
        raise InputError("--inp settles the input; leave out --batch and --seq")
    step: dict[str, Any] = dict(STEP_DEFAULTS)
    step.update({key: getattr(args, key) for key in step if getattr(args, key) is not None})
    optimizer = optimizer_class(step["optimizer"])
    dtype = None if step["dtype"] == "as-built" else parse_dtype(step["dtype"])
    step_fn = user_code.imported(step["step"]) if step["step"] else None
    from elixir.models import build, default_step, find, refused_overflow

    shape = find(args.model)
    model = build(args.model, dtype=dtype, checkpoint=step["checkpoint"])
    inp = _input(model, step)
    from elixir.tracer import trace_step

    with user_code.contained(f"{step['step'] or args.model}: the step"), refused_overflow():
        return trace_step(
            model,
            inp,
            step_fn or default_step,
            dtype=dtype,
            hardware=hardware,
            optimizer=optimizer,
            optimizer_kernel=None if step["optimizer_kernel"] == "default" else step["optimizer_kernel"],
            model_name=shape.name if shape else args.model,
            use_fused_kernels=step["fused_kernels"],
            checkpoint=None if step["inp"] or step["step"] else step["checkpoint"],
        )


def training_step(args: argparse.Namespace) -> TrainingStep:
    """The step of every combination that a question tries."""
    from elixir.search.whatif import TrainingStep

    inp, step = getattr(args, "inp", None), getattr(args, "step", None)
    return TrainingStep(
        seq=args.seq,
        dtype=args.dtype or "bf16",
        checkpoint=args.checkpoint or "none",
        use_fused_kernels=bool(args.fused_kernels),
        inp=partial(user_code.called, inp, user_code.imported(inp)) if inp else None,
        step_fn=_contained_step(step),
    )


def optimizer_class(name: str) -> str:
    """The class of `torch.optim` that is named, in any case."""
    import torch

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


def refuse_settled(args: argparse.Namespace, path: str, names: Iterable[str]) -> None:
    """Refuse flags that the trace in `path` has settled."""
    given = [f"--{key.replace('_', '-')}" for key in names if getattr(args, key) is not None]
    if given:
        raise InputError(f"{path} is a trace, which has settled {', '.join(given)}; leave out, or name the model")


def in_flags(error: PlanError, args: argparse.Namespace) -> str:
    """The message of `error`, whose levers name the flag of the command wherever it has one.

    Args:
        error: what the command ended with.
        args: what it was given.
    """
    return error.in_words(lambda lever: _action(lever, args))


def _action(lever: Lever, args: argparse.Namespace) -> str:
    if lever.options and all(name in vars(args) for name, _ in lever.options):
        words = " ".join(f"{flag_of(name)} {value}".rstrip() for name, value in lever.options)
        settled = trace_in(args.model) is not None and any(name in STEP_DEFAULTS for name, _ in lever.options)
        return f"{lever.action}: {words}{_OF_PROFILE if settled else ''}"
    if lever.argument not in vars(args) or (lever.argument == "batch" and args.inp):
        return lever.action
    if lever.argument in _OF_THE_STEP:
        again = _OF_PROFILE if trace_in(args.model) is not None else ""
        return _OF_THE_STEP[lever.argument] + again
    flag = f"--{lever.argument.replace('_', '-')} {lever.value}".rstrip()
    named = f"{lever.argument} {lever.value!r}" if lever.value else lever.argument
    return lever.action.replace(named, flag) if named in lever.action else f"{lever.action}: {flag}"


def _input(model: Any, step: dict[str, Any]) -> dict[str, Any]:
    """The input of the step: from the caller's function, or the default of a Hugging Face model."""
    from elixir.models import input_to_trace

    if step["inp"] is None:
        try:
            return input_to_trace(model, batch=step["batch"], seq=step["seq"])
        except InputError as error:
            raise InputError(
                f"{error} (here: --inp module:function)" if "pass inp" in str(error) else str(error)
            ) from None
    inp: dict[str, Any] = user_code.called(step["inp"], user_code.imported(step["inp"]))
    return inp


def _contained_step(text: str | None) -> Callable[[Any, Any], Any]:
    """The step of every combination; its model's own code runs in it as well."""
    from elixir.models import default_step

    step = user_code.imported(text) if text else default_step

    def run(model: Any, inp: Any) -> Any:
        with user_code.contained(f"{text}: the step" if text else f"{type(model).__name__}: its step"):
            return step(model, inp)

    return run
