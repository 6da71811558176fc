"""Steps of chunks with random homes take the memory and the seconds that were recorded, whatever searches choose.

A commit that means to change them records them anew and says why:

    python -m tests.unit.search.test_recorded_steps

Searches choose few homes, and few of the plans that they find have several kinds of work at once. Here each chunk lives
anywhere, so that every term of the memory and of the step counts somewhere.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elixir.artifact import digest
from elixir.hardware.scenario import Scenario
from elixir.plan.plan import Plan
from elixir.search.planner import setting_for
from elixir.search.problem.activation_trace import movable_inputs, with_inputs_on_host
from elixir.search.problem.coarse_trace import pass_trace
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.placement import Placement, Spill
from elixir.search.propose.candidate import Candidate, weigh
from elixir.search.propose.family import levels_of
from elixir.search.propose.judge import Outcome
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.propose.written_plan import to_plan
from elixir.search.question import Question
from elixir.search.replan import LEAST_BUSY_S, EarlyShares, Observation, calibrated, simulated_s, worst
from elixir.search.request import SearchRequest
from elixir.search.simulator.simulated_cost import can_step
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import Form, StepTrace
from elixir.units import MIB
from tests.common.layered_steps import layered_step, some_layers
from tests.common.observed import steady
from tests.unit.search.test_recorded_parts import measured_machine
from tests.unit.search.test_recorded_plans import planned, rounded

RECORDED = Path(__file__).with_suffix(".json")
NAMES = (*(f"steps {seed}" for seed in range(36)), *(f"seen {seed}" for seed in (*range(8), 17, 51)))
ROOM = Budgets(1 << 50, 1 << 50, 1 << 50, device_reserve_bytes=7, host_reserve_bytes=9)


def some_space(draw: random.Random) -> tuple[SearchSpace, str, StepTrace]:
    """A step of layers on a machine as it is asked to run, its optimizer, and the step of one micro-batch."""
    form: Form = draw.choice(("plain", "checkpointed", "compiled"))
    layers, kind = some_layers(draw, form), draw.choice(("", "", "adapters", "copies"))
    trace = layered_step(layers, adapters=kind == "adapters", copies=kind == "copies")
    parameters = [
        replace(
            each,
            dtype=draw.choice(("bfloat16", "bfloat16", "float32")),
            grad_access=draw.choice((each.grad_access,) * 7 + (None,)),
            grad_arrivals=draw.choice((1, 1, 1, 2)),
        )
        for each in trace.parameters
    ]
    last, known = len(trace.accesses) - 1, draw.random() < 0.7
    accesses = [
        replace(
            each,
            arriving_bytes=draw.choice((0, 50 * MIB)) * (each.phase == "backward") if known else None,
            pin_until=min(each.pin_until + draw.choice((0, 0, 0, 1, 3)), last),
        )
        for each in trace.accesses
    ]
    whole = replace(trace, parameters=tuple(parameters), accesses=tuple(accesses))
    size = draw.choice((1, 2, 3)) if form == "checkpointed" else 1
    moves = size > 1 and draw.random() < 0.5
    trace = pass_trace(with_inputs_on_host(whole, movable_inputs(whole)) if moves else whole, size)
    machine, ranks = measured_machine(draw), draw.choice((1, 1, 2, 4))
    machine = replace(machine, flops_per_s=dict.fromkeys(("bfloat16", "float32"), machine.flops_per_s["bfloat16"]))
    optimizer = draw.choice(("Adam", "AdamW", "SGD", "Muon + AdamW", "Muon + AdamW"))
    options: dict[str, Any] = {
        "optimizer_type": optimizer,
        "moments": draw.choice(("float32", "bfloat16", "8bit")) if optimizer.startswith("Adam") else "float32",
        "accumulation": draw.choice((1, 1, 2, 5)) * trace.pass_size,
        "pass_size": trace.pass_size,
        "clipping": draw.choice((None, False)),
        "early_updates": draw.choice((None, True)),
        "overlap": draw.random() < 0.7,
        "frozen_weights": draw.choice(("host", "files")),
        "replicas": draw.choice((1, ranks // 2 or 1)),
    }
    setting = setting_for(Question(trace, machine, SearchRequest.of(ranks, **options)))
    return SearchSpace(trace, machine, setting, compute_scale=draw.choice((1.0, 1.3))), optimizer, whole


def some_homes(draw: random.Random, model: MemoryModel) -> Placement:
    """Homes of all kinds that the chunks may have together."""
    gathered = draw.random() < 0.4 and model.setting.world_size > 1
    early = model.setting.early_updates is not False
    levels = [levels_of(model, chunk, gathered=gathered) for chunk in range(len(model.work.chunks))]
    homes = [draw.choice(list(dict.fromkeys(three))) for three in levels]
    for chunk, home in enumerate(homes):
        able = model.work.chunks[chunk].trainable and not home.states_on_device
        if able and draw.random() < 0.2:
            homes[chunk] = home.having("disk")
        elif able and early and draw.random() < 0.4 and model.work.early_able[chunk]:
            homes[chunk] = home.having(update="early")
    return Placement(tuple(homes))


def steps_of(draw: random.Random) -> list[Any]:
    """Steps of one packing, and all that is predicted of them."""
    (space, optimizer, whole), found = some_space(draw), list[Any]()
    model = space.model(draw.choice(space.sizes(outsized=True)))
    spread = replace(space.setting, spill=Spill(1, 1 << 50))
    with_disk = MemoryModel(model.work, spread)
    for _ in range(4):
        placement, depth = some_homes(draw, model), draw.choice((0, 1, 2))
        fewest = model.work.schedule(placement.residents, depth).min_blocks
        candidate = weigh(model, placement, fewest and fewest + draw.choice((0, 0, 1, 2)), depth, space.cost)
        need = candidate.need
        found.append([need.device_bytes, need.device_parts, need.host_parts, need.disk_bytes, need.grad_blocks])
        found.append([candidate.seconds, candidate.moved, candidate.thrift[:4], with_disk.host_parts(placement)])
        found.append(simulated(draw, space, candidate, optimizer, whole))
        rest = model.device(placement.codes[None], all_stretches=True)
        found.append([rest.live.tolist(), rest.gradients.tolist(), rest.temporary.tolist(), rest.rest_bytes.tolist()])
        for spare in (1 << 50, need.host_bytes + int(model.second_set_bytes.sum() // 2)):
            plain = replace(candidate, placement=candidate.placement.updated_early(()))
            left_bytes = spare - plain.need.host_bytes
            found.append([early_chunks(candidate, space, left_bytes, rule) for rule in range(3)])
        here = space.on(Scenario(host_adam=0.5, link=0.7, clipped=draw.random() < 0.5)).cost
        found.append(candidate.seconds_by(here))
    return found


def early_chunks(candidate: Candidate, space: SearchSpace, left_bytes: int, rule: int) -> list[int]:
    """Chunks that a slow host takes in backward, where the optimizer has early updates."""
    if space.setting.early_updates is False:
        return []
    plain = candidate.placement.updated_early(())
    return sorted(space.cost.early_chunks(candidate.model, plain, speed=0.6, left_bytes=left_bytes, rule=rule))


def written(space: SearchSpace, candidate: Candidate, optimizer: str) -> Plan:
    """The candidate as a plan."""
    request = SearchRequest(world_size=space.setting.world_size, optimizer_type=optimizer)
    return to_plan(space, Outcome(candidate, 1.0), ROOM, request)


def simulated(
    draw: random.Random, space: SearchSpace, candidate: Candidate, optimizer: str, whole: StepTrace
) -> list[Any]:
    """The candidate as a plan, and the work of its steps."""
    plan = written(space, candidate, optimizer)
    clipped, steps = draw.random() < 0.5, draw.choice((None, 1, 2, 3))
    step = simulate_step(plan, whole, space.hardware, clipped=clipped, steps=steps, compute_scale=1.1)
    return [planned(plan), step, step.utilisation, step.bound_by]


def seen_of(draw: random.Random) -> list[Any]:
    """The machine as runs of a plan show it: with lanes that worked for too little to tell, or moved nothing."""
    space, optimizer, whole = some_space(draw)
    model = space.model(min(space.sizes(outsized=True)))
    placement = some_homes(draw, model)
    if model.setting.early_updates is not False and draw.random() < 0.6:
        placement = placement.updated_early(can_step(model.work, placement) - placement.state_on_disk)
    fewest = model.work.schedule(placement.residents, 0).min_blocks
    candidate = weigh(model, placement, fewest, 0, space.cost)
    plan = written(space, candidate, optimizer)

    busy = {name: draw.choice((0.0, LEAST_BUSY_S, 0.02)) for name in ("refresh", "fetch", "offload", "host_adam")}

    def one_rank(part: float) -> Observation:
        kept = draw.choice((0.0, 0.25, 1.0))
        return steady(
            plan,
            step_s=plan.predicted.step_s * draw.uniform(0.7, 2),
            busy_s={name: part * seconds for name, seconds in busy.items()},
            fetched_bytes=draw.choice((0, 10**9)),
            refreshed_bytes=draw.choice((0, 10**8)),
            offloaded_bytes=draw.choice((0, 10**9)),
            device_peak_bytes=draw.randint(1, 10**9),
            host_peak_bytes=draw.randint(1, 10**9),
            batches=draw.choice((None, 1, 2)),
            early=EarlyShares(max(kept, draw.choice((0.5, 1.0))), draw.choice((0.25, 0.75)), kept),
        )

    ranks = [one_rank(part) for part in draw.choice(((0.5, 1.0), (1.0, 0.5)))]
    machine, scale = calibrated(whole, space.hardware, plan, worst(ranks))
    here_s = [simulated_s(plan, whole, machine, each, compute_scale=1.1) for each in ranks]
    return [worst(ranks), replace(machine, learned=None), float(f"{scale:.5g}"), here_s]


def outcome(name: str) -> str:
    draw = random.Random(name)
    return digest(rounded(seen_of(draw) if name.startswith("seen") else steps_of(draw)))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_takes_what_was_recorded(name: str) -> None:
    assert outcome(name) == json.loads(RECORDED.read_text())[name]


if __name__ == "__main__":
    rows = [f" {json.dumps(name)}: {json.dumps(outcome(name))}" for name in NAMES]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
