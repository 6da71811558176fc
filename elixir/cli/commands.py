"""``elixir profile | plan | check``.

Each checks everything the user gave before the work starts, then works, then prints.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elixir.cli import files, from_flags, output
from elixir.cli.show import say_parts, say_trace
from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile, preset, preset_names
from elixir.models import user_code
from elixir.models.loading import config_of
from elixir.optimizer_states import LOOPS, matrix_family, optimizer_name
from elixir.plan.weight_file import WeightFile
from elixir.search.advise.answer import Answer, best_allowed
from elixir.search.batches import BatchChoice
from elixir.search.question import Question
from elixir.search.request import FREE_HERE, SearchRequest
from elixir.search.searches import profile_for
from elixir.search.whatif.sweep_row import with_network
from elixir.show import tables
from elixir.show.memory_curve import plot_memory
from elixir.show.plan_map import plot_plan
from elixir.step_trace import StepTrace
from elixir.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from torch import nn


def run_profile(args: argparse.Namespace) -> int:
    """Traces one training step and says what it needs."""
    files.check_outputs(pictures=[args.plot], data=[args.out])
    files.refuse_artifact(args.model)
    hardware = files.find_hardware(args.hardware)
    trace, _ = from_flags.traced(args, hardware)
    written = [trace.save(args.out)] if args.out else []
    if args.plot:
        plot_memory(trace, args.plot)
        written.append(Path(args.plot))
    if args.json:
        output.say_json(tables.trace_record(trace))
        return 0
    say_trace(trace, brief=args.brief)
    output.say_written(written)
    return 0


def run_plan(args: argparse.Namespace) -> int:
    """Traces (or reads a trace), searches, and says what goes where."""
    files.check_outputs(pictures=[args.plot], data=[args.out])
    kept = _weight_files(args)
    hardware = None if args.hardware is None else files.find_timed_hardware(args.hardware)
    trace, model = files.trace_in(args.model), None
    if args.search_batch:
        _check_search_batch(args, trace)
    if trace is None:
        config_of(args.model)  # a name that is none is refused before the memory of a machine is asked for
        hardware = hardware or profile_for(None)
    else:
        from_flags.refuse_settled(args, args.model, from_flags.STEP_FLAGS)
        hardware = hardware or _traced_hardware(trace, args.model)
        if hardware.name != trace.device:
            output.note(
                f"{args.model} was traced for {trace.device}; on {hardware.name} activations may take another size"
            )
    from elixir.search.budgets import host_memory_here, resolve_budgets, warn_if_disk_full
    from elixir.search.searches import with_passes_of

    hardware = with_network(hardware, args.network, args.devices_per_host)
    warn_if_disk_full(hardware, args.disk_memory)
    if args.host_memory is None and args.host_budget is None and args.hardware is None:
        args.host_memory = host_memory_here(hardware)
    if trace is None:
        asked = from_flags.asked(args, _optimizer(args, trace))
        resolve_budgets(hardware, asked)  # refuses before a trace is made
        asked.divisions(1)  # likewise
        if not args.search_batch:
            # One over whole matrices is planned, not traced; a plan counts states by itself.
            whole = matrix_family(optimizer_name(_optimizer(args, None))) is not None
            trace, model = from_flags.traced(args, hardware, steps=not whole)
    request = from_flags.asked(args, _optimizer(args, trace))
    if model is not None or trace is None:
        request = replace(request, activations=None)  # the trace has chosen them
    if model is not None:
        request = with_passes_of(model, request)
    choice = None
    if trace is None:
        choice, model = _search_batch(args, hardware, request)
        answer = choice.answer
    else:
        from elixir.search import plan_from_trace

        question = Question(trace, hardware, request)
        answer = plan_from_trace(*(_with_allowed(args, question) if args.allow else question))
    if model is not None:
        from elixir.models.plannable import refuse_compiled

        refuse_compiled(model, answer.plan)
    return _say_plan(args, answer, choice, kept)


def _weight_files(args: argparse.Namespace) -> tuple[WeightFile, ...]:
    """The files in which the plan leaves frozen weights, as they are now."""
    if args.weights is None:
        return ()
    if args.frozen_weights != "files":
        raise InputError("--weights names the files of --frozen-weights files; give that, too, or leave it out")
    from elixir.wrapper.assemble.frozen_weights import weight_records

    return weight_records(args.weights)


def _optimizer(args: argparse.Namespace, trace: StepTrace | None) -> str | None:
    """The optimizer of the step; a plan counts on its fused one, unless flags say otherwise. None without training."""
    if from_flags.trains_nothing(args) or (trace is not None and trace.step.forward):
        return None
    traced = "adamw" if trace is None else trace.optimizer.split(" ")[0]
    name = traced if args.optimizer is None else args.optimizer
    return f"{name} ({args.optimizer_kernel})" if args.optimizer_kernel in LOOPS and not args.fused_kernels else name


def _say_plan(
    args: argparse.Namespace, answer: Answer, choice: BatchChoice | None, kept: tuple[WeightFile, ...]
) -> int:
    """Saves, draws and prints a plan, and what would make it better."""
    plan = replace(answer.plan, weight_files=kept)
    written = [plan.save(args.out)] if args.out else []
    if args.plot:
        plot_plan(plan, args.plot)
        written.append(Path(args.plot))
    if args.json:
        output.say_json(plan.to_dict() | {"must_be_free": _need(answer)})
        return 0
    if choice is not None and not args.brief:
        output.say_tables(tables.batch_table(choice))
    output.say(str(plan))
    _say_need(answer, args.host_memory)
    if not args.brief:
        say_parts(plan)
    if plan.uses_disk:
        output.say(tables.wear(plan, args.disk_endurance))
    if not (args.brief or args.no_levers):
        output.say_tables(tables.plan_levers_table(plan, answer.levers()))
    output.say_written(written)
    return 0


def _need(answer: Answer) -> dict[str, Any]:
    """The memory that the processes of a plan take of each machine, and for what each of them takes it; libraries
    count once."""
    need, ranks = answer.process_need, answer.question.hardware.ranks_per_host(answer.plan.world_size)
    return {"machine_bytes": need.machine_bytes(ranks), "processes": ranks, "parts": need.parts}


def _say_need(answer: Answer, given: str | int | None) -> None:
    """Says how much memory the processes of a plan take of their machine, and for what."""
    need, ranks = answer.process_need, answer.question.hardware.ranks_per_host(answer.plan.world_size)
    parts = ", ".join(f"{name.replace('_', ' ')} {format_bytes(nbytes)}" for name, nbytes in need.parts.items())
    of_each = f"; each of {ranks} processes" if ranks > 1 else ""
    of_given = f" of the {format_bytes(parse_bytes(given))}" if given is not None and given != FREE_HERE else ""
    taken = f"{format_bytes(need.machine_bytes(ranks))}{of_given}"
    output.say(f"  must be free  {taken} of each machine's memory{of_each}: {parts}")


def _with_allowed(args: argparse.Namespace, question: Question) -> Question:
    """The question with the best of the changes that `--allow` names; says which were made."""

    question, taken = best_allowed(question, args.allow)
    for change in taken:
        flags = " ".join(f"{tables.flag_of(name)} {value}".rstrip() for name, value in change.options)
        output.note(f"allowed and taken: {change.action} ({flags})")
    return question


def run_check(args: argparse.Namespace) -> int:
    """Takes two steps of the user's program with everything streamed, and prints what would be refused; status 1 if
    anything is."""
    from elixir.check import refusals

    given = user_code.called(args.function, user_code.imported(args.function))
    if not isinstance(given, (tuple, list)) or len(given) != 4:
        size = f" of {len(given)}" if isinstance(given, (tuple, list)) else ""
        raise InputError(
            f"{args.function} must return (model, optimizer, batch, step_fn), got {type(given).__name__}{size}"
        )
    model, optimizer, batch, step_fn = given
    with user_code.contained(f"{args.function}: the step"):
        found = refusals(model, optimizer, batch, step_fn)
    if args.json:
        output.say_json({"refused": [vars(each) for each in found]})
    else:
        output.say("\n".join(map(str, found)) or "nothing is refused")
    return 1 if found else 0


def _search_batch(
    args: argparse.Namespace, hardware: HardwareProfile, request: SearchRequest
) -> tuple[BatchChoice, nn.Module]:
    """The fastest way to cut the samples of a step, and the model; `--activation-checkpointing` settles whether, and
    how much, to checkpoint."""
    from elixir.models.activation_checkpointing import checkpointable_layers
    from elixir.models.loading import build
    from elixir.search import search_batches

    def trace_of(batch: int, checkpoint: str) -> StepTrace:
        asked = argparse.Namespace(**{**vars(args), "batch": batch, "checkpoint": checkpoint})
        return from_flags.traced(asked, hardware)[0]

    model = build(args.model)
    layers = 0 if args.checkpoint else len(checkpointable_layers(model))
    with output.progress() as progress:
        choice = search_batches(
            trace_of,
            hardware,
            request,
            samples=args.batch or 1,
            checkpoints=[args.checkpoint] if args.checkpoint else ["none", "non-reentrant"],
            layers=layers,
            progress=progress,
        )
    return choice, model


def _check_search_batch(args: argparse.Namespace, trace: StepTrace | None) -> None:
    """Refuses what leaves no batch to search."""
    if trace is not None:
        raise InputError(f"{args.model} is a trace, which has settled the batch; name the model for --search-batch")
    if args.inp:
        raise InputError("--inp settles the input; leave out --search-batch")
    if args.activations:
        raise InputError("--search-batch chooses how many layers run again; leave out --activations")
    if args.allow:
        raise InputError("--search-batch chooses batches and checkpointing by itself; leave out --allow")
    if args.accumulation is not None:
        raise InputError("--search-batch cuts --batch into micro-batches itself; leave out --accumulation")


def _traced_hardware(trace: StepTrace, path: str) -> HardwareProfile:
    """The machine a saved trace was made for, if that is a preset."""

    if trace.device not in preset_names():
        raise InputError(f"{path} was traced for {trace.device!r}, which is no preset; give --hardware")
    return preset(trace.device)
