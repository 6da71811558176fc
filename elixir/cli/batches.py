"""``elixir plan --search-batch``: every way to cut a step's samples into batches, traced and planned."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elixir.errors import InputError

if TYPE_CHECKING:
    from elixir.hardware import HardwareProfile
    from elixir.search.batches import BatchChoice
    from elixir.tracer.step_trace import StepTrace

Trace = Callable[[argparse.Namespace, "HardwareProfile"], "StepTrace"]


def check(args: argparse.Namespace, trace: StepTrace | None) -> None:
    """Refuse what leaves no batch to search."""
    if trace is not None:
        raise InputError(f"{args.model} is a trace, which has settled the batch; name the model for --search-batch")
    if args.inp:
        raise InputError("--inp settles the input; leave out --search-batch")
    if args.step_in_backward:
        raise InputError("--step-in-backward is for steps of one batch; leave out --search-batch")


def search(args: argparse.Namespace, hardware: HardwareProfile, options: dict[str, Any], trace: Trace) -> BatchChoice:
    """The fastest way; `--checkpoint` settles whether, and how much, to checkpoint."""
    options = {
        name: value for name, value in options.items() if name != "step_in_backward"
    }  # which `check` has refused
    from elixir.checkpointing import checkpointable_layers
    from elixir.models import build
    from elixir.search import search_batches

    def trace_of(batch: int, checkpoint: str) -> StepTrace:
        return trace(argparse.Namespace(**{**vars(args), "batch": batch, "checkpoint": checkpoint}), hardware)

    return search_batches(
        trace_of,
        hardware,
        args.world_size,
        samples=args.batch or 1,
        checkpoints=[args.checkpoint] if args.checkpoint else ["none", "non-reentrant"],
        layers=0 if args.checkpoint else len(checkpointable_layers(build(args.model))),
        optimizer_type=args.optimizer or "adamw",
        **options,
    )
