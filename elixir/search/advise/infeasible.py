"""Advice if nothing fits: the changes that suffice, found by planning with each, and what others would save."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from elixir.errors import Lever, PlanError, how_far, readable_bytes
from elixir.plan.process_need import must_be_free_bytes
from elixir.search.advise.answer import Answer, evaluate
from elixir.search.advise.changes import Change, for_memory, in_parts, more_machine
from elixir.search.budgets import CUDA_CONTEXT_BYTES, processes_bytes
from elixir.search.planner import budgets_of, least_bytes, least_host_bytes, planned, setting_for
from elixir.search.problem.placement import Spill
from elixir.search.propose.shortage import lacks_room, live_bytes, room
from elixir.search.propose.sizes import Budgets
from elixir.search.question import Question
from elixir.step_trace import StepTrace, holders_text
from elixir.units import LARGEST_BYTES, format_bytes

MOST_HOLDERS = 3
"""Origins of memory at the peak that an error names."""
MOST_CUTS = 2
"""Cuts of the batch into more than two parts that are planned if no change is enough alone."""
MOST_PAIRS = 8
"""Pairs of changes that are planned if no change is enough alone."""


def with_levers(error: PlanError, question: Question) -> PlanError:
    """The error with levers: first what suffices, the fastest step first; then what saves most; then what is not enough
    alone.

    Args:
        error: what was found to be missing.
        question: as asked.
    """
    budgets = budgets_of(question)
    available_bytes = error.available_bytes
    short_of_device = available_bytes == budgets.device_bytes and available_bytes != budgets.given_host_bytes
    needed_bytes = error.needed_bytes
    if not short_of_device:  # the least host memory without overlap is hardly less than with it, and makes slow steps
        plans_bytes = needed_bytes - budgets.other_bytes
        needed_bytes = _enough_of_host(question, max(plans_bytes, least_host_bytes(question)))
        least = needed_bytes if _shares_memory(question) else min(error.needed_bytes, needed_bytes)
        error = PlanError(error.what, needed_bytes=least, available_bytes=available_bytes)
    size = readable_bytes(needed_bytes, up=True).replace(" ", "")
    job = list(for_memory(question))
    machine = list(more_machine(question, "device" if short_of_device else "host", size, needed_bytes))
    tried = {change: _tried(change, question) for change in (*job, *machine)}
    found, short = tried, {change: answer for change, answer in tried.items() if answer is None}
    smaller: tuple[Change, Answer] | None = None
    if len(short) == len(tried) and short_of_device:
        cuts = itertools.islice(_smaller_batches(question, budgets), MOST_CUTS)
        smaller = next(((cut, answer) for cut in cuts if (answer := _tried(cut, question)) is not None), None)
    if smaller is not None:
        cut, answer = smaller
        found, short = {cut: answer}, {each: None for each in short if each.kinds != cut.kinds}
    elif len(short) == len(tried):
        more_of_both = _with_host(machine, question) if short_of_device else ()
        found = {pair: _tried(pair, question) for pair in (*_pairs(job), *more_of_both)}
    enough = {change: answer for change, answer in found.items() if answer is not None}
    levers = [_lever(change, answer) for change, answer in (enough | short).items()]
    settled = {name for change in tried for name, _ in change.options}
    fewer_bits = any(change.kinds == ("moments",) for change in enough)
    levers += _estimated(error, question, budgets, settled, short_of_device=short_of_device, fewer_bits=fewer_bits)
    if short_of_device and not enough:
        lacking = lacks_room(question.trace, setting_for(question), budgets)
        if lacking:  # or one would cut the batch until the device does, and then learn of the host
            action = "give the host more memory as well, for weights and optimizer states"
            argument = question.request.host_option
            levers.append(Lever(action, lacking, "adds", argument=argument, comes_last=True))
    levers += _lora(question.trace, budgets)
    return PlanError(
        error.what,
        needed_bytes=error.needed_bytes,
        available_bytes=error.available_bytes,
        levers=tuple(levers),
        details=tuple(_details(error, question, budgets, needed_bytes, short_of_device=short_of_device)),
    )


def in_short(error: PlanError, question: Question) -> PlanError:
    """The error with one lever at most, counted and not planned: as much of the short memory as suffices.

    Args:
        error: what was found to be missing.
        question: as asked.
    """
    budgets, hardware = budgets_of(question), question.hardware
    option, needed_bytes = "device_memory", error.needed_bytes
    action = "let the plan have more of the device"
    if error.available_bytes != budgets.device_bytes or budgets.device_bytes == budgets.given_host_bytes:
        option, action = question.request.host_option, "give the host more memory"
        least = max(least_bytes(question, budgets.device_bytes), least_host_bytes(question))
        needed_bytes = _enough_of_host(question, least)
    elif needed_bytes > hardware.device_memory_bytes - CUDA_CONTEXT_BYTES:
        needed_bytes = 0  # the device has no more
    size = readable_bytes(needed_bytes, up=True).replace(" ", "")
    levers = [Lever(action, 0, argument=option, value=size, options=((option, size),))] if needed_bytes else []
    return PlanError(error.what, needed_bytes=error.needed_bytes, available_bytes=error.available_bytes, levers=levers)


def _shares_memory(question: Question) -> bool:
    """Whether the devices lie in the memory that was given: only a plan tells what both take, with gaps of the heap."""
    return question.hardware.device_kind == "cpu" and question.request.host_option == "host_memory"


def _enough_of_host(question: Question, host_bytes: int) -> int:
    """The value of the option that gives the host's memory with which a plan may have so many bytes of it.

    On a CPU with ``host_memory`` it is what a plan with these bytes needs in all, for the device lies there, too.
    """
    hardware, request = question.hardware, question.request
    if request.host_option == "host_budget":
        return host_bytes
    if _shares_memory(question):
        device = LARGEST_BYTES if request.device_memory is None else request.device_memory
        asked = replace(request, device_memory=device, host_memory=None, host_budget=host_bytes)
        asked = replace(asked, device_reserve=None, host_reserve=None)
        plan = planned(question._replace(request=asked), briefly=True)
        if plan is not None:
            return must_be_free_bytes(plan, hardware) - plan.predicted.checkpoint_bytes
    return host_bytes + processes_bytes(hardware, request)


def _details(
    error: PlanError, question: Question, budgets: Budgets, offered_bytes: int, *, short_of_device: bool
) -> Iterator[str]:
    """The host's shortage next to the device's, and the largest that the short memory has to hold; and why the lever of
    more of it offers more bytes than are needed."""
    if not short_of_device:
        needed, _ = room(question.trace, setting_for(question), budgets)
        yield f"weights, master weights and optimizer states are {format_bytes(needed)}, wherever they live"
        if offered_bytes > error.needed_bytes:
            offered = readable_bytes(offered_bytes, up=True)
            yield f"transfers do not overlap compute with what is needed; with {offered} there is room for that"
        return
    if question.request.placement == "cuda":
        return
    least = least_bytes(question, error.needed_bytes)
    if least > budgets.host_bytes:
        needed = least + budgets.other_bytes
        yield f"host memory is short as well ({how_far(needed, budgets.given_host_bytes)})"
    held = holders_text(question.trace, MOST_HOLDERS)
    if held:
        yield f"at the peak: {held}"


def _tried(change: Change, question: Question) -> Answer | None:
    # Exactly what was found to be needed may take sizes of chunks that are tried last.
    exactly = change.kinds == ("machine",) and "world_size" not in dict(change.request)
    return evaluate(change, question.nominal, briefly=not exactly)


def _lever(change: Change, answer: Answer | None) -> Lever:
    name, value = change.options[0]
    if answer is None:
        return Lever(change.action, 0, argument=name, options=change.options, enough=False)
    step_s = answer.plan.predicted.step_s
    first = change.kinds == ("kernels",)
    return Lever(change.action, 0, argument=name, value=value, options=change.options, step_s=step_s, comes_first=first)


def _with_host(changes: Sequence[Change], question: Question) -> Iterator[Change]:
    """The first of the changes, with as much of the host as it then takes: of two memories that lack, one was named."""
    for change in changes[:1]:
        changed = change.applied(question)
        device_bytes = budgets_of(changed).device_bytes
        needed_bytes = max(least_bytes(changed, device_bytes), least_host_bytes(changed))
        if needed_bytes:
            needed_bytes = _enough_of_host(changed, needed_bytes)
            size = readable_bytes(needed_bytes, up=True).replace(" ", "")
            yield replace(change + next(more_machine(changed, "host", size, needed_bytes)), kinds=change.kinds)


def _smaller_batches(question: Question, budgets: Budgets) -> Iterator[Change]:
    """The batch in more than two parts: the fewest first whose activations the device may hold."""
    kept, samples = question.trace.workspace_bytes, question.trace.step.samples or 0
    least = max(-(-(live_bytes(question.trace) - kept) // max(budgets.device_bytes - kept, 1)), 3)
    for parts in range(least, samples + 1):
        yield from in_parts(question, parts)


def _pairs(changes: Sequence[Change]) -> list[Change]:
    """Two changes of different kinds at once, those that save most of each kind first."""
    strongest = [change for change in changes if dict(change.options).get("moments") != "bfloat16"]
    pairs = (one + other for one, other in itertools.combinations(strongest, 2) if one.kinds != other.kinds)
    return list(itertools.islice(pairs, MOST_PAIRS))


def _estimated(
    error: PlanError,
    question: Question,
    budgets: Budgets,
    settled: Collection[str],
    *,
    short_of_device: bool,
    fewer_bits: bool,
) -> Iterator[Lever]:
    """Levers that are not planned but counted: by how much each lowers the least memory that is needed.

    Args:
        error: what was found to be missing.
        question: as asked.
        budgets: what it came to.
        settled: arguments that were tried.
        short_of_device: the device's memory is short, not the host's.
        fewer_bits: moments in fewer bits suffice, so that no disk is needed.
    """
    which, short_bytes = "device" if short_of_device else "host", error.needed_bytes - error.available_bytes
    reserve_bytes = budgets.device_reserve_bytes if short_of_device else budgets.host_reserve_bytes
    if reserve_bytes:
        enough = reserve_bytes >= short_bytes
        yield Lever(f"keep back less of the {which}", reserve_bytes, "adds", f"{which}_reserve", enough=enough)
    may_recompute = not (question.trace.checkpointed_modules or question.trace.step.forward)
    if short_of_device and may_recompute and "checkpoint" not in settled:
        yield Lever("turn on activation checkpointing and trace again", 0, argument="checkpoint")
    sliced = None if question.trace.step.fused_kernels else _without_logits(question.trace)
    ranks, request = 2 * question.request.world_size, question.request
    half = ", or the length of its sequences" if short_of_device else ", which leaves device memory to states"
    halved, more = question._replace(trace=_half_batch(question.trace)), question.hardware.ranks_per_host(ranks)
    others: list[tuple[str, str, str, Question, dict[str, Any]]] = [
        (f"halve the batch of each rank{half}", "batch", "", halved, {}),
        (f"run on {ranks} ranks", "world_size", str(ranks), question, {"world_size": ranks, "ranks_per_host": more}),
    ]
    if sliced is not None:
        action = "slice the loss, which then never holds all logits: use_fused_kernels=True (--fused-kernels)"
        others.insert(0, (action, "fused_kernels", "", question._replace(trace=sliced), {}))
    if request.search != "optimal":
        optimal = question._replace(request=replace(request, search="optimal"))
        others.append(("let optimal_search choose the chunk size", "", "", optimal, {}))
    if not short_of_device:
        on_disk = {"spill": Spill(0, LARGEST_BYTES)}
        others.append((_disk_action(question, budgets), "disk_memory", "", question, on_disk))
        if question.trace.frozen_bytes:
            action = "leave frozen weights in their safetensors files"
            others.append((action, "frozen_weights", "files", question, {"frozen_weights": "files"}))
    for action, argument, value, asked, changes in others:
        if argument not in settled:
            needed_bytes = error.needed_bytes - (0 if short_of_device else budgets.other_bytes)
            saved = needed_bytes - least_bytes(asked, None if short_of_device else budgets.device_bytes, **changes)
            if saved > 0:
                enough, last = saved >= short_bytes, fewer_bits and argument == "disk_memory"
                first = enough and argument == "fused_kernels"
                lever = Lever(action, saved, argument=argument, value=value, comes_first=first, comes_last=last)
                yield replace(lever, enough=enough)


def _disk_action(question: Question, budgets: Budgets) -> str:
    if budgets.disk_bytes:
        return "give states more of the disk (disk_memory)"
    known = question.hardware.knows_disk
    measured = "" if known else ", once `elixir hardware --measure --disk-folder DIR` has measured it"
    return f"let states live on a disk (disk_memory){measured}"


def _half_batch(trace: StepTrace) -> StepTrace:
    """The trace with inputs and activations halved; what libraries keep does not shrink with the batch."""
    kept = trace.workspace_bytes
    accesses = tuple(
        replace(access, live_bytes=min(kept, access.live_bytes) + max(access.live_bytes - kept, 0) // 2)
        for access in trace.accesses
    )
    return replace(trace, accesses=accesses, input_bytes=trace.input_bytes // 2)


def _without_logits(trace: StepTrace) -> StepTrace | None:
    """The trace as if logits were never whole, if they rule its peak; None otherwise.

    Logits are what a last layer with more outputs than inputs gives, in whose access the loss sums over them.
    """
    turn = next((at for at, access in enumerate(trace.accesses) if access.phase != "forward"), 0)
    if turn < 2:
        return None
    last, loss = trace.accesses[turn - 1], trace.accesses[turn]
    kinds = {trace.operations[index].kind for index in last.operations}
    wide = any(
        len(shape) == 2 and shape[0] > shape[1]
        for shape in (trace.parameters[index].shape for index in last.parameters)
    )
    highest = max(access.live_bytes for access in trace.accesses)
    if not wide or "reduction" not in kinds or highest > max(last.live_bytes, loss.live_bytes):
        return None
    around = max(each.live_bytes for each in (trace.accesses[turn - 2], *trace.accesses[turn + 1 : turn + 2]))
    capped = (replace(access, live_bytes=min(access.live_bytes, around)) for access in (last, loss))
    return replace(trace, accesses=(*trace.accesses[: turn - 1], *capped, *trace.accesses[turn + 1 :]))


def _lora(trace: StepTrace, budgets: Budgets) -> Iterator[Lever]:
    """Training a few added weights leaves the weights, once, and what a batch takes."""
    if not any(param.trainable for param in trace.parameters):
        return
    takes = trace.param_bytes
    live = live_bytes(trace)
    if live <= budgets.device_bytes and takes + live <= budgets.device_bytes + budgets.host_bytes:
        action = (
            f"train with LoRA (by name: --lora 16; in 4 bits: --lora 16 --quantised nf4): frozen weights take "
            f"{format_bytes(takes)} of device and host together, activations {format_bytes(live)} of the device"
        )
        yield Lever(action, 0)
