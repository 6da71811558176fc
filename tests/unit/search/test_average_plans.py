"""Plans for optimizers that keep an average of the weights: its bytes and seconds are counted, wherever it lives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elixir.cli.from_flags import optimizer_asked
from elixir.errors import InputError
from elixir.optimizer_states import (
    MATRIX_STATES,
    MomentKind,
    optimizer_name,
    state_size,
    with_average,
    without_average,
)
from elixir.plan.plan import Plan
from elixir.search import Answer
from elixir.search.simulator.rates import ADAM_TRAFFIC_BYTES, AVERAGE_TRAFFIC_BYTES
from elixir.search.simulator.simulation import simulate_step
from elixir.units import GIB
from tests.common.searching import HARDWARE, plan
from tests.common.synthetic_trace import StackShape, stack_trace

STACK = stack_trace(StackShape(hidden=256, layers=4, ffn=1024, vocab=2048, positions=256), batch=2, seq=256)


@pytest.mark.parametrize("placement", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [("Adam", "float32"), ("AdamW (foreach)", "float32"), ("Adam", "8bit"), ("SGD", "float32"), ("Muon", "float32")],
)
def test_the_bytes_and_the_seconds_of_an_average_are_planned(
    optimizer: str, moments: MomentKind, placement: str
) -> None:
    asked = {"moments": moments, "placement": placement, "device": GIB, "host": GIB}
    made = plan(STACK, optimizer_type=optimizer.lower() + " + ema", **asked)
    assert made.optimizer == optimizer_name(optimizer) + " + EMA" == optimizer_name(made.optimizer)
    chunks = [chunk for chunk in made.chunks if chunk.trainable]
    parts = made.predicted.host_parts if placement == "cpu" else made.predicted.device_parts
    assert parts["optimizer_states"] == sum(
        4 * chunk.numel + made.states_of(chunk).nbytes(chunk.numel, 2) for chunk in chunks
    )
    without = replace(made, optimizer=without_average(made.optimizer), state_size=state_size(optimizer, moments))
    numel = sum(chunk.numel for chunk in chunks)
    assert (
        sum(
            made.states_of(chunk).nbytes(chunk.numel, 2) - without.states_of(chunk).nbytes(chunk.numel, 2)
            for chunk in chunks
        )
        == 4 * numel
    )
    lane = "host_adam" if placement == "cpu" else "compute"
    seconds = [simulate_step(each, STACK, HARDWARE).busy_s[lane] for each in (without, made)]
    if placement == "cpu" and optimizer != "Muon":
        share = 1 + AVERAGE_TRAFFIC_BYTES / ADAM_TRAFFIC_BYTES[moments]
        assert seconds[1] == pytest.approx(share * seconds[0])
    assert seconds[1] > seconds[0]
    assert Plan.from_json(made.to_json()) == made
    assert Answer.of(made, STACK, HARDWARE).question.request.optimizer_type == made.optimizer


def test_early_updates_have_an_average_in_both_sets() -> None:
    asked = {"early_updates": True, "placement": "cpu", "device": GIB, "host": GIB}
    made = plan(STACK, optimizer_type="AdamW + EMA", **asked)
    early = [chunk for chunk in made.chunks if chunk.home.early]
    assert early
    assert made.predicted.host_parts["new_states"] == sum(chunk.numel * (4 + 2 + 8 + 4) for chunk in early)


def test_names_say_whether_there_is_an_average() -> None:
    assert optimizer_name("muon + EMA") == "Muon + AdamW + EMA"
    assert optimizer_name("AdamW + ema (for-loop)") == optimizer_name("adamw (for-loop) + EMA")
    assert with_average("AdamW (for-loop)") == optimizer_name("adamw (for-loop) + EMA") == "AdamW (for-loop) + EMA"
    assert [optimizer_asked(name) for name in (None, "adam", "SGD + ema")] == ["AdamW", "Adam", "SGD + EMA"]
    assert state_size("Adam + EMA").nbytes(10) == 120
    assert state_size("Adam + EMA", "8bit").nbytes(512) == state_size("Adam", "8bit").nbytes(512) + 4 * 512
    assert MATRIX_STATES.averaged.nbytes(10) == 80
    with pytest.raises(InputError, match="optimizer type"):
        optimizer_name("EMA")
