"""Plans of made-up steps on made-up machines are those that were recorded, with all that they predict and say.

A commit that means to change plans records them anew and says why:

    python -m tests.unit.search.test_recorded_plans

Other tests say what must hold for every plan. Here a term that was forgotten in a sum, or two candidates that changed
places, is seen although the plan stays consistent.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from elixir.artifact import digest
from elixir.errors import InputError, PlanError
from elixir.hardware.profile import HardwareProfile
from elixir.hardware.rate_fit import RateFit
from elixir.plan.plan import Plan
from elixir.search import plan_from_trace
from elixir.search.simulator.simulation import simulate_step
from elixir.search.whatif.explanation import explain
from elixir.step_trace import StepTrace
from elixir.units import GIB
from tests.common.samples import make_hardware
from tests.common.small_searches import small_trace

RECORDED = Path(__file__).with_suffix(".json")
SEEDS = (
    0,
    1,
    2,
    3,
    4,
    6,
    8,
    9,
    10,
    11,
    13,
    15,
    16,
    17,
    18,
    21,
    22,
    23,
    25,
    26,
    27,
    28,
    29,
    30,
    31,
    32,
    33,
    34,
    35,
    36,
    38,
)
"""Seeds below 40, without situations that take longer than others."""
WITH_LEVERS = 2
"""Explained with all levers, which takes longer, since they plan again."""


def made_up_machine(draw: random.Random) -> HardwareProfile:
    """A machine with random speeds, of which some are known as fits."""
    some = lambda: 10 ** draw.uniform(-0.7, 0.7)  # noqa: E731
    maybe = lambda value: draw.choice((None, value))  # noqa: E731
    kind = draw.choice(("cuda", "cuda", "cuda", "cpu"))
    link, fits = 1e10 * some(), {}
    if draw.random() < 0.4:
        fits = {
            "host_adam": RateFit(2e-5, 3e9 * some(), 0.1),
            "host_to_device": RateFit(1e-5, link, 0.02),
            "device_to_host": RateFit(1e-5, link * 0.9, 0.02),
            "host_to_device.both": RateFit(1e-5, link * 0.7, 0.02),
        }
    return dataclasses.replace(
        make_hardware(),
        device_kind=kind,
        compute_capability=(9, 0) if kind == "cuda" else None,
        devices_per_host=draw.choice((1, 2, 8)),
        flops_per_s={"bfloat16": 1.7e14 * some()},
        device_memory_bytes_per_s=1e12 * some(),
        host_memory_bytes_per_s=1e11 * some(),
        host_to_device_bytes_per_s=link,
        device_to_host_bytes_per_s=link * draw.choice((1.0, 0.8)),
        device_to_device_bytes_per_s=3e10 * some(),
        host_adam_numel_per_s=3e9 * some(),
        device_adam_numel_per_s=3e10 * some(),
        host_memory_bytes=512 * GIB,
        network_bytes_per_s=5e9 * some(),
        network_latency_s=2e-5,
        disk_read_bytes_per_s=3e9 * some(),
        disk_write_bytes_per_s=2e9 * some(),
        disk_free_bytes=100 * GIB,
        launch_s=maybe(5e-6),
        contention=maybe(0.2),
        sustained_flops_share=maybe(0.5),
        sustained_memory_share=maybe(0.8),
        host_adam_least=maybe(0.5),
        link_least=maybe(0.7),
        early_kept=maybe(0.9),
        fits=fits,
    )


def asked(draw: random.Random, param_bytes: int) -> dict[str, Any]:
    """Options of a search; the budgets are between too little and enough."""
    world_size = draw.choice((1, 1, 2, 4, 8))
    options: dict[str, Any] = {
        "asked": world_size,
        "device_memory": int(param_bytes * draw.uniform(0.5, 8)) + 64 * 2**20,
        "host_memory": int(param_bytes * draw.uniform(2, 20)),
        "optimizer_type": draw.choice(("Adam", "Adam", "AdamW", "SGD")),
        "overlap": draw.random() < 0.9,
        "accumulation": draw.choice((1, 1, 2, 4)),
        "clipping": draw.choice((None, True, False)),
        "early_updates": draw.choice((None, None, True, False)),
        "assume": draw.choice(("scenarios", "nominal")),
    }
    if options["optimizer_type"] != "SGD":
        options["moments"] = draw.choice(("float32", "float32", "bfloat16", "8bit"))
    if draw.random() < 0.3:
        options |= {"disk_memory": 50 * GIB, "host_memory": int(param_bytes * draw.uniform(1, 6))}
    if draw.random() < 0.3:
        options["frozen_weights"] = "files"
    if world_size >= 4 and draw.random() < 0.5:
        options["replicas"] = draw.choice(("auto", 2))
    if options["accumulation"] > 1 and draw.random() < 0.5:
        options["pass_size"] = "auto"
    return options


def rounded(value: Any) -> Any:
    """`value` as JSON gives it back, its floats to nine digits: libraries may sum in another order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: rounded(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.9g}")
    return value if value is None or isinstance(value, (str, int)) else str(value)


def outcome(seed: int) -> dict[str, Any]:
    """The outcome of one search: the plan in short and the digest of all of it, or the error."""
    draw = random.Random(seed)
    trace, machine = small_trace(draw, draw.randint(2, 7)), made_up_machine(draw)
    options = asked(draw, trace.param_bytes)
    try:
        answer = plan_from_trace(trace, machine, options.pop("asked"), **options)
    except (InputError, PlanError) as error:
        return {"error": str(error).splitlines()}
    plan = answer.plan
    found: dict[str, Any] = {
        "step_s": plan.predicted.step_s,
        "chunks": [f"{chunk.weight_home}/{chunk.state_home}/{chunk.resident}/{chunk.update}" for chunk in plan.chunks],
        "blocks": plan.block_count,
        "device_bytes": plan.predicted.device_parts,
        "host_bytes": plan.predicted.host_parts,
        "moved_bytes": plan.predicted.moved_bytes,
        "plan": digest(planned(plan)),
        "follows": digest(following(plan)),
        "step": digest(rounded(simulated(plan, trace, machine))),
    }
    explanation = explain(answer, trace, machine, levers=seed == WITH_LEVERS)
    found["explained"] = digest(rounded(explanation))
    if seed == WITH_LEVERS:
        found["levers"] = [f"{each.action}: {each.step_s:.9g}" for each in explanation.levers + explanation.changes]
    return rounded(found)  # type: ignore[no-any-return]


def planned(plan: Plan) -> Any:
    """All of a plan that a search decides."""
    left_out = ("fingerprint", "version", "created")
    data = json.loads(plan.to_json())
    return rounded({name: value for name, value in data.items() if not any(word in name for word in left_out)})


def following(plan: Plan) -> Any:
    """Everything that follows from its fields, texts included."""
    predicted = plan.predicted
    found: dict[str, Any] = {
        f"{type(each).__name__}.{name}": getattr(each, name)
        for each in (plan, predicted, plan.chunks[0], plan.chunks[-1], plan.step, *predicted.judgements)
        for name, value in sorted(vars(type(each)).items())
        if isinstance(value, (property, functools.cached_property)) and name not in ("fingerprint", "environment")
    }
    found |= {f"regret, measured {measured}": predicted.regret_text(measured) for measured in (False, True)}
    found |= {f"routes of rank {rank}": plan.routes(rank) for rank in (0, plan.world_size - 1)}
    found |= {f"for {count} micro-batches": plan.prediction_for(count) for count in (1, 3, 4)}
    return rounded(found | {"time": predicted.time_text()})


def simulated(plan: Plan, trace: StepTrace, machine: HardwareProfile) -> list[Any]:
    """Its step, clipped or not, with all spans of work."""
    return [simulate_step(plan, trace, machine, clipped=clipped) for clipped in (False, True)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_is_as_recorded(seed: int) -> None:
    assert outcome(seed) == json.loads(RECORDED.read_text())[str(seed)]


if __name__ == "__main__":
    RECORDED.write_text(json.dumps({seed: outcome(seed) for seed in SEEDS}, indent=1) + "\n")
