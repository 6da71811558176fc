"""``elixir profile | plan | check``.

Each checks everything the user gave before the work starts, then works, then prints.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from elixir.cli import files, from_flags, output
from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile, load_hardware, preset, preset_names
from elixir.models import user_code
from elixir.models.loading import config_of
from elixir.optimizer_states import LOOPS, matrix_family, optimizer_name
from elixir.plan.chunk_plan import WeightFile
from elixir.plan.plan import Plan
from elixir.runtimes.estimate import Estimate
from elixir.search.advise.answer import Answer, best_allowed
from elixir.search.batches import BatchChoice
from elixir.search.question import Question
from elixir.search.request import FREE_HERE, SearchRequest
from elixir.search.searches import profile_for
from elixir.search.whatif.explanation import explain
from elixir.search.whatif.sweep import with_network
from elixir.show import tables
from elixir.show.memory_curve import plot_memory
from elixir.show.page import View, plan_view, trace_view
from elixir.show.plan_map import plot_plan
from elixir.show.style import is_page
from elixir.show.what_to_write import YOURS, code_text, what_to_write
from elixir.step_trace import StepTrace
from elixir.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from torch import nn


def run_profile(args: argparse.Namespace) -> Iterator[output.Said]:
    """Traces one training step and says what it needs."""
    files.refuse_artifact(args.model)
    hardware = load_hardware(args.hardware)
    trace, _ = from_flags.traced(args, hardware)
    drawn = files.plotted(args.plot, lambda: [trace_view(trace)], partial(plot_memory, trace))
    written = files.written((args.out, trace.save), drawn)
    yield tables.record_of(trace)
    if trace.step_peak_bytes and not trace.step.forward:
        yield str(Estimate(trace, hardware.device_kind))
    yield tables.trace_shown(trace, brief=args.brief)
    yield from written


def run_plan(args: argparse.Namespace) -> Iterator[output.Said]:
    """Traces (or reads a trace), searches, and says what goes where."""
    if args.runtime:
        from elixir.cli import peers

        yield from peers.run_plan(args)
        return
    kept = _weight_files(args)
    hardware = None if args.hardware is None else files.find_timed_hardware(args.hardware)
    trace, model = files.trace_in(args.model), None
    if args.search_batch and trace is not None:
        raise InputError(f"{args.model} is a trace, which has settled the batch; name the model for --search-batch")
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
    optimizer = _optimizer(args, trace)
    request = from_flags.asked(args, optimizer)
    if trace is None:
        resolve_budgets(hardware, request)  # refuses before a trace is made
        request.divisions(1)  # likewise
    choice = None
    if args.search_batch:
        choice, model = _search_batch(args, hardware, replace(request, activations=None))
        answer = choice.answer
    else:
        if trace is None:
            # One over whole matrices is planned, not traced; a plan counts states by itself.
            whole = matrix_family(optimizer_name(optimizer)) is not None
            trace, model = from_flags.traced(args, hardware, steps=not whole)
            request = replace(from_flags.asked(args, _optimizer(args, trace)), activations=None)  # the trace chose them
            request = with_passes_of(model, request)
        answer = _answer(args, Question(trace, hardware, request))
    if model is not None:
        from elixir.models.plannable import refuse_compiled

        refuse_compiled(model, answer.plan)
    code = what_to_write(answer, type(model).__name__)
    yield from _plan_shown(args, answer, choice, replace(answer.plan, weight_files=kept), code)


def _answer(args: argparse.Namespace, question: Question) -> Answer:
    """The answer to a question with the best of the changes that `--allow` names; says which were made."""
    from elixir.search import plan_from_trace

    if args.allow:
        question, taken = best_allowed(question, args.allow)
        for change in taken:
            output.note(f"allowed and taken: {change.action} ({tables.flags_of(change.options)})")
    return plan_from_trace(*question)


def _weight_files(args: argparse.Namespace) -> tuple[WeightFile, ...]:
    """The files in which the plan leaves frozen weights, as they are now."""
    if args.weights is None:
        return ()
    from elixir.wrapper.assemble.frozen_weights import weight_records

    return weight_records(args.weights)


def _optimizer(args: argparse.Namespace, trace: StepTrace | None) -> str | None:
    """The optimizer of the step; a plan counts on its fused one, unless flags say otherwise. None without training."""
    if args.generate or args.forward or (trace is not None and trace.step.forward):
        return None
    traced = "adamw" if trace is None else trace.optimizer.split(" ")[0]
    name = traced if args.optimizer is None else args.optimizer
    return f"{name} ({args.optimizer_kernel})" if args.optimizer_kernel in LOOPS and not args.fused_kernels else name


def _plan_shown(
    args: argparse.Namespace, answer: Answer, choice: BatchChoice | None, plan: Plan, code: dict[str, str]
) -> Iterator[output.Said]:
    """Saves and draws a plan, and says it, with the memory that must be free, what would make it better, and the code
    that runs it."""
    with_tables = not (args.brief or args.json)
    notes = code_text(f"what to write\n{YOURS}", code).lstrip() if code else ""
    levers = answer.levers() if (with_tables or is_page(args.plot)) and not args.no_levers else ()

    def views() -> list[View]:
        trace, hardware, _ = answer.question
        said: dict[str, Any] = {"levers": levers, "must_be_free_bytes": free_bytes, "notes": notes}
        return [plan_view(plan, trace, hardware, explanation=explain(plan, trace, hardware, levers=False), **said)]

    need, ranks = answer.process_need, answer.question.hardware.ranks_per_host(plan.world_size)
    free_bytes = need.machine_bytes(ranks)
    written = files.written((args.out, plan.save), files.plotted(args.plot, views, partial(plot_plan, plan)))
    must_be_free = {"machine_bytes": free_bytes, "processes": ranks, "parts": need.parts}
    yield plan.to_dict() | {"must_be_free": must_be_free, "what_to_write": code}
    if choice is not None and not args.brief:
        yield tables.batch_table(choice)
    given = args.host_memory
    of_given = f" of the {format_bytes(parse_bytes(given))}" if given not in (None, FREE_HERE) else ""
    of_each = f"; each of {ranks} processes" if ranks > 1 else ""
    parts = ", ".join(f"{name.replace('_', ' ')} {format_bytes(nbytes)}" for name, nbytes in need.parts.items())
    yield str(plan)
    yield f"  must be free  {format_bytes(free_bytes)}{of_given} of each machine's memory{of_each}: {parts}"
    there = answer.question.hardware.host_memory_bytes
    if there is not None and free_bytes > there:
        output.note(f"that is more than the {format_bytes(there)} which {plan.hardware_name} has")
    if not args.brief:
        yield tables.plan_tables(plan)
    if plan.uses_disk:
        yield tables.wear(plan, args.disk_endurance)
    if with_tables and levers:
        yield tables.plan_levers_table(plan, levers)
    if notes and not args.brief:
        yield notes
    yield from written


def run_check(args: argparse.Namespace) -> Iterator[output.Said]:
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
    yield {"refused": [vars(each) for each in found]}
    yield "\n".join(map(str, found)) or "nothing is refused"
    yield 1 if found else 0


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


def _traced_hardware(trace: StepTrace, path: str) -> HardwareProfile:
    """The machine a saved trace was made for, if that is a preset."""

    if trace.device not in preset_names():
        raise InputError(f"{path} was traced for {trace.device!r}, which is no preset; give --hardware")
    return preset(trace.device)
