"""The trace of a step in which some units are fetched as one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from elixir.errors import InputError
from elixir.step_trace import StepTrace, enclosing


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
