"""Layers that a plan fetches as one: a pass after the search joins the accesses of units where that costs less.

The runtime intercepts every read of a streamed weight, and a layer that is fetched as one once. In exchange all weights
of the layer lie in blocks while it runs, and are waited for together.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from elixir.search.problem.joined_trace import joined_trace
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.packed_step import PackedStep
from elixir.search.problem.packing import Ints
from elixir.search.propose.candidate import Candidate
from elixir.search.propose.judge import Outcome
from elixir.search.propose.sizes import SearchSpace
from elixir.step_trace import enclosing

READ_S = 5e-6
"""Seconds of the thread that submits compute that a read of a weight takes less within a unit: `runtime_speed.py units`
on a CPU, in benchmark/results/runtime_speed.csv."""
MOST_KINDS = 4
"""Kinds of units that are tried one by one, if all together are no better."""


def with_units_as_one(space: SearchSpace, best: Outcome, *, wanted: bool = False) -> tuple[SearchSpace, Outcome]:
    """The outcome with the layers fetched as one, and the space of the step seen so.

    Homes, blocks and prefetch stay. It needs no more memory, moves no more bytes over any link, and is no slower in any
    scenario than before.

    Args:
        space: that was searched.
        best: what the search chose.
        wanted: it may be slower by what it saves the thread that submits compute, which no prediction counts.
    """
    names = _that_stream(space, best.best)
    kinds = dict.fromkeys(unit.kind for unit in space.trace.units if unit.name in names)
    found = _joined(space, best, names, wanted)
    if found is not None or len(kinds) < 2:
        return found or (space, best)
    for kind in list(kinds)[:MOST_KINDS]:
        these = {unit.name for unit in space.trace.units if unit.kind == kind} & names
        space, best = _joined(space, best, these, wanted) or (space, best)
    return space, best


def _that_stream(space: SearchSpace, best: Candidate | None) -> set[str]:
    """Units that may be fetched as one and of whose weights some are streamed."""
    able = {unit.name for unit in space.trace.units if unit.fetch == "either"}
    streamed = set[str | None]()
    for chunk, resident in zip(best.work.packing.chunks, best.placement.resident, strict=True) if best else ():
        for index in () if resident else chunk.parameters:
            param = space.trace.parameters[index]
            streamed.update(enclosing(name, able) for name in (param.name, *param.aliases))
    return {name for name in streamed if name is not None}


def _joined(
    space: SearchSpace, outcome: Outcome, names: Collection[str], wanted: bool
) -> tuple[SearchSpace, Outcome] | None:
    """The space and the outcome with these units fetched as one; None if that needs or costs more."""
    best = outcome.best
    if best is None or not names:
        return None
    trace = joined_trace(space.trace, names)
    there = SearchSpace(trace, space.hardware, space.setting, space.compute_scale)
    model = MemoryModel(PackedStep(there.facts, best.work.packing), there.setting)
    depth, blocks = best.schedule.prefetch_depth, best.schedule.blocks
    schedule = model.work.schedule(best.placement.residents, depth)
    if schedule.min_blocks > blocks:
        return None
    found = replace(best, model=model, schedule=schedule.simulate(blocks), cost=there.cost)
    total_s, saved_s = found.seconds["total"], READ_S * _reads_less(space, names) if wanted else 0.0
    if (_amounts(found) > _amounts(best)).any() or total_s > best.seconds["total"] + saved_s:
        return None
    judged = []
    for before in outcome.judgements:
        step_s = found.seconds_by(there.on(before.scenario).cost)["total"]
        if step_s > before.step_s + saved_s:
            return None
        judged.append(replace(before, step_s=step_s, best_s=min(step_s, before.best_s)))
    fastest_s = None if outcome.fastest_s is None else min(total_s, outcome.fastest_s)
    return there, replace(outcome, best=found, judgements=tuple(judged), fastest_s=fastest_s)


def _reads_less(space: SearchSpace, names: Collection[str]) -> int:
    """Reads of weights in a step that become one of a layer."""
    runs = [run for run in space.trace.unit_runs if space.trace.units[run.unit].name in names]
    reads = sum(len(access.parameters) for run in runs for access in space.trace.accesses[run.first : run.last + 1])
    return (reads - len(runs)) * space.setting.accumulation


def _amounts(of: Candidate) -> Ints:
    """Bytes of each memory, and over each link."""
    need, moved = of.need, of.moved
    links = moved.host_to_device_bytes, moved.device_to_host_bytes, moved.network_bytes, moved.file_bytes
    return np.array([need.device_bytes, need.host_bytes, need.disk_bytes, *links], dtype=np.int64)
