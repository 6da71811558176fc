"""Models that ranks have built, each a thread here: whose values they train, whose plan, and whose buffers."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elixir.chunk.group import Group
from elixir.errors import InputError
from elixir.plan.plan import Plan
from elixir.wrapper import ElixirModule
from elixir.wrapper.assemble.agreement import agree_on_values
from tests.common.rank_threads import on_ranks, results
from tests.unit.wrapper.test_rank_threads import Rank, Situation, batch_of, loss_of, model_of


def built(offset: float, *, only: str = "") -> nn.Module:
    """The model, with the values of some tensors changed."""
    model = model_of().eval()
    with torch.no_grad():
        for name, each in (*model.named_parameters(), *model.named_buffers()):
            if each.is_floating_point() and only in name:
                each.add_(offset)
    return model


@pytest.mark.parametrize(("only", "named"), [("", "0.weight"), ("4.bias", "4.bias"), ("running", "5.running_mean")])
def test_all_train_the_model_of_rank_0(only: str, named: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = built(0.0).state_dict()

    def work(rank: int) -> None:
        module = ElixirModule(built(float(rank), only=only), Situation(size=3).plan, device="cpu")
        assert all(torch.equal(each, expected[name]) for name, each in module.state_dict().items())
        module.close()

    results(3, work)
    said = [record.message for record in caplog.records if "the ranks built different models" in record.message]
    assert len(said) == 1
    assert named in said[0]


def test_models_that_are_alike_are_not_remarked_upon(caplog: pytest.LogCaptureFixture) -> None:
    results(2, lambda rank: ElixirModule(built(0.0), Situation().plan, device="cpu").close())
    assert "different models" not in caplog.text


def test_what_ranks_cannot_share_is_refused_on_all() -> None:
    def on_meta(rank: int) -> None:
        model = built(0.0)
        ElixirModule(model.to("meta") if rank else model, Situation().plan, device="cpu")

    found = on_ranks(2, on_meta)
    assert all(isinstance(each, InputError) for each in found)
    assert all(str(each).startswith("some ranks built 0.weight, ") for each in found)

    def given(rank: int) -> None:
        weights = {name: each + rank * (name == "2.weight") for name, each in built(0.0).state_dict().items()}
        ElixirModule(built(0.0), Situation().plan, device="cpu", weights=weights)

    found = on_ranks(2, given)
    assert all(isinstance(each, InputError) for each in found)
    assert all("the weights given are not the same on all ranks (2.weight)" in str(each) for each in found)


def test_values_are_compared_place_by_place_and_only_where_none_are_given(caplog: pytest.LogCaptureFixture) -> None:
    def work(rank: int) -> list[list[int]]:
        found = []
        for changed, weights, strict in (("counts", None, True), ("bias", {"weight": 1}, False), ("bias", {}, True)):
            model = nn.Module()
            model.weight, model.bias = (nn.Parameter(torch.zeros(3)) for _ in range(2))
            model.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
            getattr(model, changed).data[2] = rank
            given = None if weights is None else {name: torch.ones(3) for name in weights}
            agree_on_values(Group(), model, given, strict=strict)
            found.append(getattr(model, changed).tolist())
        return found

    of_0 = [[0, 0, 0]] * 3
    assert results(2, work) == [of_0, [*of_0[:2], [0, 0, 1]]]
    said = [each.message for each in caplog.records if "the ranks built different models" in each.message]
    assert [each.partition(")")[0].partition("(")[2] for each in said] == ["counts", "bias"]


def planned(rank: int, plans: list[Plan]) -> str:
    try:
        module = ElixirModule(built(0.0), plans[rank], device="cpu")
    except InputError:
        assert len(dist.distributed_c10d._world.pg_map) == 1, "no group is left but the caller's"
        raise
    name = module.plan.fingerprint
    module.close()
    return name


def test_of_plans_for_different_memory_all_run_the_first_that_fits(caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 found more memory than rank 1, whose plan also fits there."""
    plan = Situation(size=3, homes="host").plan
    needed = plan.predicted.host_peak_bytes
    large = replace(plan, read_budgets=("host",), host_budget_bytes=needed + 10)
    less = replace(large, host_budget_bytes=needed)
    with caplog.at_level(logging.INFO, "elixir.wrapper.assemble.agreement"):
        assert results(3, lambda rank: planned(rank, [large, less, less])) == [large.fingerprint] * 3
    assert caplog.text.count(f"so all run plan {large.fingerprint} of rank 0") == 1
    short = replace(large, host_budget_bytes=needed - 1)
    found = on_ranks(3, lambda rank: planned(rank, [large, less, short]))
    assert all(isinstance(each, InputError) for each in found)
    assert all(f"plan with host_budget={needed - 1} (" in str(each) for each in found)


def test_plans_that_differ_otherwise_are_refused_with_the_difference() -> None:
    plan = Situation(homes="host").plan
    other = replace(plan, accumulation=2)
    found = on_ranks(2, lambda rank: planned(rank, [plan, other]))
    assert all(isinstance(each, InputError) for each in found)
    assert all("which differs in accumulation (2, on rank 0 1); plan on one rank" in str(each) for each in found)


def test_buffers_are_those_of_rank_0_before_each_forward() -> None:
    """DistributedDataParallel does the same."""
    mine: Any = [built(0.0) for _ in range(2)]
    for number in range(3):
        mine[1][5].load_state_dict(mine[0][5].state_dict())
        for rank, each in enumerate(mine):
            each[5].train()
            each(batch_of(rank, number))

    def work(rank: int) -> dict[str, torch.Tensor]:
        run = Rank(Situation(homes="host"), rank)
        inner: Any = run.module.module
        inner[5].train()
        for number in range(3):
            assert loss_of(run.module, batch_of(rank, number)).isfinite()
        own = {name: each.clone() for name, each in inner[5].named_buffers()}
        shown = run.module.state_dict()
        assert all(torch.equal(shown[f"5.{name}"], each) for name, each in own.items()) or rank
        run.module.close()
        return own

    found = results(2, work)
    for rank in range(2):
        for name, each in mine[rank][5].named_buffers():
            torch.testing.assert_close(found[rank][name], each, rtol=1e-5, atol=1e-6)
