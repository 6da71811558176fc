"""Every model family: the predicted peak of a step on the CPU is the peak of a real one.

The residue of a few bytes is the Python scalars that autograd keeps as 0-dim tensors, 8 bytes each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmark.observe import observe_step
from elixir.models.step import default_input, default_step
from elixir.tracer.trace import trace_step
from elixir.tracer.values.expert_choice import RecordedRouting
from tests.common.tiny_models import FAMILIES, tiny
from tests.common.tracing import H200, predicted_bytes, real_routing

SCALARS_BYTES = 8 * 8
CHECKPOINTS = ("none", "reentrant", "non-reentrant")
QUICK_DROPOUT = {("opt", "reentrant"), ("gpt2", "none"), ("t5", "non-reentrant"), ("bert", "none")}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Steps are tiny: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batch_for(family: str, model: torch.nn.Module, batch: int = 2) -> dict[str, Any]:
    return default_input(model, batch=batch, seq=None if family == "vit" else 16)


def routing_for(family: str, model: torch.nn.Module, inp: dict[str, Any]) -> RecordedRouting | None:
    return real_routing(model, inp, default_step) if family == "mixtral" else None


def cases() -> list[Any]:
    return [
        pytest.param(
            family,
            checkpoint,
            dropout,
            marks=[pytest.mark.slow] if dropout and (family, checkpoint) not in QUICK_DROPOUT else [],
            id=f"{family}-{checkpoint}-dropout{dropout}",
        )
        for family in FAMILIES
        for checkpoint in CHECKPOINTS
        for dropout in (0.0, 0.1)
    ]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("family", "checkpoint", "dropout"), cases())
def test_predicted_peak_is_the_real_one(family: str, checkpoint: str, dropout: float) -> None:
    model = tiny(family, dropout=dropout, checkpoint=checkpoint)
    inp = batch_for(family, model)
    routing = routing_for(family, model, inp)
    predicted = predicted_bytes(model, inp, default_step, routing=routing)
    real = observe_step(model, inp, default_step).peak_bytes
    assert abs(predicted - real) <= SCALARS_BYTES, f"predicted {predicted}, real {real}"
    assert abs(predicted - real) <= 0.002 * real


@pytest.mark.parametrize("family", ["opt", "llama", "vit", "mixtral"])
def test_a_longer_batch_keeps_the_prediction(family: str) -> None:
    """Past 32 rows the CPU's attention works in tiles, whose buffers must be right as well."""
    model = tiny(family, layers=1)
    inp = default_input(model, batch=3, seq=None if family == "vit" else 48)
    routing = routing_for(family, model, inp)
    predicted = predicted_bytes(model, inp, default_step, routing=routing)
    real = observe_step(model, inp, default_step).peak_bytes
    assert abs(predicted - real) <= 0.002 * real, f"predicted {predicted}, real {real}"


@pytest.mark.parametrize("family", ["opt", "t5", "vit"])
def test_a_meta_model_traces_as_the_real_one(family: str) -> None:
    real = tiny(family)
    inp = batch_for(family, real)
    meta = tiny(family, device="meta")
    options: dict[str, Any] = {"hardware": H200, "dtype": torch.bfloat16}
    assert trace_step(real, inp, default_step, **options) == trace_step(meta, inp, default_step, **options)


@pytest.mark.parametrize("family", ["gpt2", "bert", "mixtral"])
def test_every_parameter_gets_its_gradient_and_every_module_runs(family: str) -> None:
    model = tiny(family)
    inp = batch_for(family, model)
    trace = trace_step(model, inp, default_step, hardware=H200)
    default_step(model, inp)
    without = tuple(name for name, parameter in model.named_parameters() if parameter.grad is None)
    assert trace.unused_parameters == without
    used = {index for event in trace.accesses for index in event.parameters}
    for index, parameter in enumerate(trace.parameters):
        assert (parameter.grad_access is None) == (parameter.name in without), parameter.name
        assert index in used or parameter.name in without, parameter.name
