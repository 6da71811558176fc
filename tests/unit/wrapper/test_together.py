"""Several models under one plan train as in plain PyTorch, one budget holds them, and each call of one is a pass."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import elixir
from benchmark.observe import observe
from elixir.errors import InputError, InputTypeError
from elixir.hardware.profile import preset
from elixir.models.together import Together
from elixir.search import plan_from_trace
from elixir.search.request import SearchRequest
from elixir.search.searches import with_passes_of
from elixir.torch_private import MEMORY_MOVES
from tests.common import inside
from tests.common.tiny_models import tiny
from tests.common.tracing import cpu_trace

MEMORY: dict[str, dict[str, str]] = {
    "streamed": {"device_memory": "1GiB", "placement": "cpu"},
    "mixed": {"device_memory": "2500KiB"},
    "resident": {"device_memory": "1GiB", "placement": "cuda"},
}
Step = Callable[[Any, dict[str, torch.Tensor]], torch.Tensor]


def models(*, critic: bool = False) -> Together:
    policy = tiny("llama", layers=3, positions=64)
    other = tiny("llama", layers=4, positions=64, seed=1).requires_grad_(critic)
    return elixir.together(policy=policy, critic=other) if critic else elixir.together(policy=policy, reference=other)


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 128, (2, 24), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def preference(models: Any, inp: dict[str, torch.Tensor]) -> torch.Tensor:
    """The reference comes after the policy, as in DPO."""
    loss: torch.Tensor = models.policy(**inp).loss
    with torch.no_grad():
        reference = models.reference(**inp).loss
    return (loss - reference + 0.1) ** 2


def distillation(models: Any, inp: dict[str, torch.Tensor]) -> torch.Tensor:
    """The teacher comes before the student."""
    with torch.no_grad():
        teacher = models.reference(input_ids=inp["input_ids"]).logits.log_softmax(-1)
    student = models.policy(input_ids=inp["input_ids"]).logits.log_softmax(-1)
    return nn.functional.kl_div(student, teacher, log_target=True, reduction="batchmean")


def pairs(models: Any, inp: dict[str, torch.Tensor]) -> torch.Tensor:
    """Two calls of one model before a backward, each with gradients; and two of the reference."""
    halves = [{name: value[row : row + 1] for name, value in inp.items()} for row in (0, 1)]
    chosen, rejected = (models.policy(**half).loss for half in halves)
    with torch.no_grad():
        first, second = (models.reference(**half).loss for half in halves)
    return -nn.functional.logsigmoid(rejected - second - chosen + first)


def actor_critic(models: Any, inp: dict[str, torch.Tensor]) -> torch.Tensor:
    """Both are trained."""
    value = models.critic(**inp).loss
    loss: torch.Tensor = models.policy(**inp).loss
    return loss * value.detach() + value


def recomputed(models: Any, inp: dict[str, torch.Tensor]) -> torch.Tensor:
    """The whole policy runs again in backward, where its call is no pass."""
    loss: torch.Tensor = checkpoint(lambda ids: models.policy(ids, labels=ids).loss, inp["labels"], use_reentrant=False)
    return loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)


def trained(model: Any, optimizer: Any, step: Step, *, accumulation: int, steps: int = 4) -> list[float]:
    losses = []
    for number in range(steps):
        for micro in range(accumulation):
            loss = step(model, batch(number * accumulation + micro)) / accumulation
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def wrapped(step: Step, memory: str, accumulation: int = 1, **options: Any) -> tuple[Any, Any]:
    model = models(critic=step is actor_critic)

    def traced(models: Any, inp: dict[str, torch.Tensor]) -> None:
        (step(models, inp) / accumulation).backward()

    return elixir.wrap(
        model, optimizer_of(model), inp=batch(0), step_fn=traced, hardware="cpu", host_budget="1GiB",
        accumulation=accumulation, assume="nominal", **MEMORY[memory], **options,
    )  # fmt: skip


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("step", [preference, pairs, distillation, actor_critic, recomputed])
def test_several_models_train_as_in_plain_pytorch(step: Step, memory: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = models(critic=step is actor_critic)
    expected = trained(plain, optimizer_of(plain), step, accumulation=2)
    model, optimizer = wrapped(step, memory, 2, replan=False)
    with caplog.at_level(logging.WARNING):
        assert trained(model, optimizer, step, accumulation=2) == expected
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
    assert {chunk.resident for chunk in model.plan.chunks} == {"streamed": {False}, "resident": {True}}.get(
        memory, {False, True}
    )
    report = model.last_report
    assert report.not_compared == ""
    assert report.demand_loads == report.deviations == 0
    assert (report.micro_batches, report.observed["loads"]) == (2, report.predicted["loads"])
    assert report.observed["host_to_device"] == report.predicted["host_to_device"]
    assert report.observed["device_buffers"] <= report.predicted["device_buffers"]
    assert report.observed["host_peak"] <= report.predicted["host_peak"] <= model.plan.predicted.host_peak_bytes
    assert "differs from its plan" not in caplog.text


def test_the_budget_holds_all_models_and_real_steps_stay_below_it() -> None:
    """Bytes that torch's profiler sees on the CPU, where device and host are one memory."""
    alone = models()
    weights = [sum(each.nbytes for each in model.parameters()) for _, model in alone.models()]
    model, optimizer = wrapped(distillation, "streamed", replan=False)
    predicted = model.plan.predicted
    assert sum(weights) <= predicted.host_parts["weights"] < 1.01 * sum(weights)
    trained(model, optimizer, distillation, accumulation=1, steps=1)
    arena = inside.arena(model)
    resting = arena.live_bytes("device") + arena.live_bytes("host")
    seen = observe(lambda: trained(model, optimizer, distillation, accumulation=1, steps=1))
    twice = 0 if MEMORY_MOVES else predicted.device_parts["rcache"]  # blocks that take memory anew
    assert resting + seen.peak_bytes - twice <= predicted.device_peak_bytes + predicted.host_peak_bytes


def test_calls_are_passes_after_a_move_too() -> None:
    plain = models()
    expected = trained(plain, optimizer_of(plain), preference, accumulation=1, steps=3)
    model, optimizer = wrapped(preference, "streamed", replan=False)
    losses = trained(model, optimizer, preference, accumulation=1, steps=1)
    moved = [
        replace(chunk, weight_home="device") if chunk.trainable and not chunk.resident else chunk
        for chunk in model.plan.chunks
    ]
    model.rehome(replace(model.plan, chunks=tuple(moved)))
    batches = [batch(number) for number in (1, 2)]
    for each in batches:
        loss = preference(model, each)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        report = model.last_report
        assert (report.not_compared, report.demand_loads, report.deviations) == ("", 0, 0)
    assert losses == expected
    weight = model.policy.lm_head.weight

    def stale(**_: torch.Tensor) -> torch.Tensor:
        row = weight[0]
        with torch.no_grad():
            weight.mul_(1.0)
        return row

    model.policy.forward = stale
    assert torch.equal(model.policy(**batch(0)), model.state_dict()["policy.lm_head.weight"][0].to(weight.dtype))
    del model.policy.forward


def test_names_and_models_that_cannot_be_together_are_refused() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(InputError, match="takes models by name"):
        elixir.together()
    with pytest.raises(InputTypeError, match="policy is a str"):
        elixir.together(policy="llama")  # type: ignore[arg-type]
    for name in ("forward", "plan", "first"):
        with pytest.raises(InputError, match=f"'{name}' is an attribute"):
            elixir.together(**{name: layer})
    with pytest.raises(InputError, match=r"reference is policy, or a part of it"):
        elixir.together(policy=nn.Sequential(layer), reference=layer)


def test_models_together_take_no_pass_of_several_micro_batches() -> None:
    model = elixir.together(policy=tiny("llama", layers=2, positions=64, checkpoint="non-reentrant"))

    def step(models: Any, inp: dict[str, torch.Tensor]) -> None:
        (models.policy(**inp).loss / 2).backward()

    options: dict[str, Any] = {
        "inp": batch(0), "step_fn": step, "hardware": "cpu", "accumulation": 2, "device_memory": "1GiB",
        "host_budget": "1GiB", "placement": "cpu", "replan": False,
    }  # fmt: skip
    said = "several models under one plan cannot share a pass yet; plan with pass_size=1"
    with pytest.raises(InputError, match=said):
        elixir.wrap(model, optimizer_of(model), pass_size=2, **options)
    trace = cpu_trace(model, batch(0), step)
    plan = plan_from_trace(trace, preset("cpu"), 1, accumulation=2, pass_size=2, placement="cpu").plan
    module, optimizer = elixir.wrap(model, optimizer_of(model), plan=plan)
    with pytest.raises(InputError, match=said):
        optimizer.accumulate(step, [batch(0), batch(1)])
    module.close()


def test_passes_of_models_together_are_never_chosen(caplog: pytest.LogCaptureFixture) -> None:
    model = elixir.together(policy=tiny("llama", layers=1, positions=64, checkpoint="non-reentrant"))
    with caplog.at_level("INFO"):
        asked = with_passes_of(model, SearchRequest(world_size=1, accumulation=4, pass_size="auto"))
    assert asked.pass_size == 1
    assert "one by one: several models under one plan" in caplog.text
    counting = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(InputError, match="1 updates running statistics"):
        with_passes_of(counting, replace(asked, pass_size=2))
    assert with_passes_of(counting.eval(), replace(asked, pass_size=2)).pass_size == 2
