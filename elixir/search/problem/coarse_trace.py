"""Traces with coarser accesses: micro-batches that pass each layer together, and units that are fetched as one.

To the search, a pass is one step with coarser accesses: each layer, and all that lies between two layers, is one access
in forward and one in backward, with the work of all micro-batches. So packing, memory, loads and seconds of a pass
follow from the same code as those of a single micro-batch, and the order of uses does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from elixir.errors import InputError
from elixir.plan.activations import keeps_state
from elixir.step_trace import Access, StepTrace, Transfer, enclosing


class _Stage(NamedTuple):
    """Successive accesses of a trace that one stage of a pass stands for."""

    forward: bool
    layer: str | None
    accesses: list[Access]


def pass_trace(trace: StepTrace, size: int) -> StepTrace:
    """The step of `size` micro-batches in one pass; with 1, the trace as it is.

    Of the micro-batches that do not run, each keeps what it has kept at the beginning or the end of the stage.

    Raises:
        InputError: the step has no layers that run again or changes what a module keeps, or the trace is one of a
            pass already.
    """
    if size == trace.pass_size:
        return trace
    if trace.pass_size > 1:
        raise InputError(f"the trace is of {trace.pass_size} micro-batches in a pass, not of one")
    if trace.step.forward:
        raise InputError("pass_size is for training; an evaluation has no micro-batches to take through a layer")
    layers = trace.step.checkpointed
    if not layers:
        raise InputError(
            f"several micro-batches pass {trace.model_name} layer by layer, which takes layers that run again in "
            "backward and are not compiled; turn on activation checkpointing (checkpoint='non-reentrant'), or plan "
            "with pass_size=1"
        )
    if trace.step.changed_state is not None:
        raise keeps_state(trace.step.changed_state)
    stages = _stages(trace, layers)
    stage_of = [number for number, stage in enumerate(stages) for _ in stage.accesses]
    parameters = [{index for access in stage.accesses for index in access.parameters} for stage in stages]
    turn = next((number for number, stage in enumerate(stages) if not stage.forward), len(stages))
    firsts = [stage_of.index(number) for number in range(len(stages))]
    kept = [
        max(trace.accesses[first].kept_bytes - trace.workspace_bytes - _fetched_bytes(trace, first), trace.input_bytes)
        for first in firsts
    ]
    kept.append(trace.input_bytes)
    before, after = kept[:-1], kept[1:]  # of each stage
    if 0 < turn < len(stages) and stages[turn - 1].layer is None and stages[turn].layer is None:
        # Micro-batch by micro-batch, forward and backward alternate here.
        parameters[turn - 1] = parameters[turn] = parameters[turn - 1] | parameters[turn]
        after[turn - 1], before[turn] = after[turn], before[turn - 1]
    accesses = []
    for number, stage in enumerate(stages):
        pin = stage_of[max(access.pin_until for access in stage.accesses)] if stage.forward else number
        waiting = (size - 1) * max(before[number], after[number])
        accesses.append(
            Access(
                phase="forward" if stage.forward else "backward",
                parameters=tuple(sorted(parameters[number])),
                pin_until=max(number, min(pin, turn - 1)) if stage.forward else pin,
                module=stage.layer or "",
                operator="",
                operations=tuple(number for access in stage.accesses for number in access.operations) * size,
                live_bytes=max(access.live_bytes for access in stage.accesses) + waiting,
                kept_bytes=size * kept[number],
                parts=tuple(len(access.operations) for access in stage.accesses) * size,
            )
        )
    return replace(
        trace,
        accesses=tuple(accesses),
        parameters=tuple(
            info if info.grad_access is None else replace(info, grad_access=stage_of[info.grad_access])
            for info in trace.parameters
        ),
        input_bytes=size * trace.input_bytes,
        pass_size=size,
        transfers=tuple(_together(each, size, stages, stage_of) for each in trace.transfers),
        host_peak_bytes=size * trace.host_peak_bytes,
        step=replace(
            trace.step,
            activations=tuple(replace(each, swap_bytes=size * each.swap_bytes) for each in trace.step.activations),
        ),
    )


def _fetched_bytes(trace: StepTrace, position: int) -> int:
    """Bytes that the plan has begun to bring back from the host for `position` or later. Micro-batches that wait for
    their turn have theirs brought back one micro-batch ahead."""
    back = (each for each in trace.transfers if each.planned and each.direction == "host_to_device")
    return sum(each.nbytes for each in back if each.begins < position <= each.ends + 1)


def _together(each: Transfer, size: int, stages: list[_Stage], stage_of: list[int]) -> Transfer:
    """The copies of all micro-batches as one. Each micro-batch's leaves while that one computes; it comes back while
    the one before computes, so that all have to be there when the last one begins."""
    begins, ends = stage_of[each.begins], stage_of[each.ends]
    if not each.planned:
        return replace(each, nbytes=size * each.nbytes, begins=begins, ends=ends, begins_after=0, ends_after=0)
    begins = ends if each.direction == "device_to_host" else max(ends - 1, 0)
    of_begin, of_end = (sum(len(access.operations) for access in stages[number].accesses) for number in (begins, ends))
    if each.direction == "device_to_host":
        begins_after, ends_after = 0, size * of_end
    else:
        begins_after, ends_after = (size - 1) * of_begin, (size - 1) * of_end
    return Transfer(each.direction, size * each.nbytes, begins, ends, True, begins_after, ends_after)


def _stages(trace: StepTrace, layers: tuple[str, ...]) -> list[_Stage]:
    modules = {access.module for access in trace.accesses}
    layer_of = {name: enclosing(name, layers) for name in modules}
    runs = groupby(trace.accesses, lambda access: (access.phase == "forward", layer_of[access.module]))
    return [_Stage(*place, list(run)) for place, run in runs]


def joined_trace(trace: StepTrace, names: Collection[str]) -> StepTrace:
    """The same step, in which the units with these names are fetched as one (`elixir.step_trace.Fetch`).

    The first access of each of their runs has all their parameters, pinned until the run ends.

    Raises:
        InputError: one of them may not be, or is no unit.
    """
    wanted = {unit.name for unit in trace.units if unit.name in names and unit.fetch != "one"}
    refused = {*names} - {unit.name for unit in trace.units if unit.fetch != "parameters"}
    if refused:
        raise InputError(f"{sorted(refused)[0]} is no unit of {trace.model_name} that can be fetched as one")
    if not wanted:
        return trace
    members: dict[str, list[int]] = {name: [] for name in wanted}
    for index, param in enumerate(trace.parameters):
        for unit in dict.fromkeys(enclosing(name, wanted) for name in (param.name, *param.aliases)):
            if unit is not None:
                members[unit].append(index)
    accesses = list(trace.accesses)
    for run in trace.unit_runs:
        inside = trace.accesses[run.first : run.last + 1]
        read = [index for access in inside for index in access.parameters]
        name = trace.units[run.unit].name
        if name not in wanted or not read:
            continue
        accesses[run.first : run.last + 1] = [replace(access, parameters=()) for access in inside]
        accesses[run.first] = replace(
            inside[0],
            parameters=tuple(dict.fromkeys([*read, *members[name]])),
            pin_until=max(run.last, *(access.pin_until for access in inside)),
        )
    units = tuple(replace(unit, fetch="one") if unit.name in wanted else unit for unit in trace.units)
    return replace(trace, accesses=tuple(accesses), step=replace(trace.step, units=units))
