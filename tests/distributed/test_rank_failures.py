"""Ranks that fall apart end with an error that says so, whatever the group's timeout; none hangs, none trains on."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from elixir.errors import ArtifactError, InputError
from elixir.plan.plan import Plan
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from tests.common.ddp import LR, batch_of, plan_for
from tests.common.parity import hf_loss, take_step
from tests.common.spawn import ALONE, Outcome, on_each_rank, run_to_end
from tests.common.tiny_models import tiny


def _train(rank: int, world_size: int, trouble: Any, kind: str, replicas: int = 1) -> None:
    model = tiny("opt")
    inp = batch_of(model, rank, world_size)
    module = ElixirModule(model, plan_for(model, inp, kind, replicas=replicas), device="cpu", debug=Debug(poison=True))
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=LR))
    for step in range(4):
        if step == 2:
            trouble(rank, module)
        loss = hf_loss(module, inp)
        take_step(optimizer, loss)
    module.close()


def _on_layer_1(module: ElixirModule, act: Any) -> None:
    layers = module.module.model.decoder.layers  # type: ignore[union-attr]
    layers[1].register_forward_pre_hook(act)  # type: ignore[index,operator]


def _raise(*_: Any) -> None:
    raise ValueError("bad batch")


def raises_in_forward(rank: int, module: ElixirModule) -> None:
    if rank == 1:
        _on_layer_1(module, _raise)


def raises_in_backward(rank: int, module: ElixirModule) -> None:
    if rank == 1:
        _on_layer_1(module, lambda layer, args: args[0].register_hook(_raise) and None)


def dies(rank: int, module: ElixirModule) -> None:
    if rank == 1:
        _on_layer_1(module, lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def asks_alone_for_the_state(rank: int, module: ElixirModule) -> None:
    if rank == 1:
        module.state_dict()


def runs_forward_once_more(rank: int, module: ElixirModule) -> None:
    if rank == 1:
        with torch.no_grad():
            module(input_ids=torch.ones(2, 24, dtype=torch.int64))


def uses_alone_what_the_plan_does_not(rank: int, module: ElixirModule) -> None:
    if rank == 1:
        # The first layer again in the middle of the second: nothing in the order says so.
        first = module.module.model.decoder.layers[0].fc1  # type: ignore[union-attr,index]
        _on_layer_1(module, lambda layer, args: first(args[0]) is None and None)  # type: ignore[operator]


def _check(outcomes: list[Outcome], expected: str) -> None:
    for outcome in outcomes:
        assert outcome.error is not None, f"rank {outcome.rank} went on as if nothing had happened"
    assert "RankError" in str(outcomes[0].error), outcomes[0].error
    assert expected in str(outcomes[1].error), outcomes[1].error


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [
        (raises_in_forward, "bad batch"),
        (raises_in_backward, "bad batch"),
        (dies, "ended without an answer"),
        (asks_alone_for_the_state, "RankError"),
        (runs_forward_once_more, "RankError"),
        (uses_alone_what_the_plan_does_not, "RankError"),
    ],
)
def test_the_others_end_with_a_clear_error(trouble: Any, expected: str) -> None:
    _check(run_to_end(2, _train, trouble, "host", **ALONE), expected)


@pytest.mark.parametrize("trouble", [raises_in_forward, raises_in_backward, dies])
def test_also_where_nothing_is_streamed(trouble: Any) -> None:
    expected = "ended without an answer" if trouble is dies else "bad batch"
    _check(run_to_end(2, _train, trouble, "resident", **ALONE), expected)


@pytest.mark.parametrize(
    ("world_size", "kind", "replicas"),
    [
        (2, "host", 1),
        (4, "device", 2),
        pytest.param(3, "device", 1, marks=pytest.mark.slow),
        pytest.param(3, "resident", 1, marks=pytest.mark.slow),
        pytest.param(4, "resident", 2, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_ends_all_others(world_size: int, kind: str, replicas: int) -> None:
    outcomes = run_to_end(world_size, _train, dies, kind, replicas, **ALONE)
    killed, others = outcomes[1], [outcome for outcome in outcomes if outcome.rank != 1]
    assert killed.error == "the process ended without an answer"
    assert all("RankError" in str(outcome.error) for outcome in others), [outcome.error for outcome in others]


@on_each_rank(2)
def test_an_exception_on_all_ranks_leaves_the_module_usable(rank: int, world_size: int) -> None:
    model = tiny("opt")
    inp = batch_of(model, rank, world_size)
    module = ElixirModule(model, plan_for(model, inp, "host"), device="cpu", debug=Debug(poison=True))
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=LR))
    expected = hf_loss(module, inp)
    handle = module.module.model.decoder.layers[1].register_forward_pre_hook(_raise)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="bad batch"):
        module(**inp)
    handle.remove()
    loss = hf_loss(module, inp)
    assert torch.equal(loss, expected)
    take_step(optimizer, loss)
    assert hf_loss(module, inp) < loss
    module.close()


@on_each_rank(2)
def test_ranks_with_different_plans_refuse(rank: int, world_size: int) -> None:
    model = tiny("opt")
    inp = batch_of(model, rank, world_size)
    plans = [plan_for(model, inp, "host", split_number=number) for number in (8, 4)]
    with pytest.raises(InputError, match="plan on one rank and send"):
        ElixirModule(model, plans[rank], device="cpu")


@on_each_rank(2)
def test_a_rank_with_another_model_makes_all_refuse(rank: int, world_size: int) -> None:
    model = tiny("opt")
    plan: Plan = plan_for(model, batch_of(model, rank, world_size), "host")
    if rank == 1:
        model = tiny("opt", layers=3)
    error, match = (ArtifactError, "model_fingerprint") if rank == 1 else (InputError, "rank 1 cannot run")
    with pytest.raises(error, match=match):
        ElixirModule(model, plan, device="cpu")
