"""Whatever the ranks built, they train one model: rank 0's, as under DDP; or they are told what is wrong."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import InputError
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.ddp import plan_for
from tests.common.spawn import run_ranks


class Small(nn.Module):
    """Weights, a transposed one, one in bfloat16, a tied one, and a buffer that is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 16)
        self.second = nn.Linear(16, 24, bias=False)
        self.transposed = nn.Parameter(torch.randn(16, 24).t())
        self.second.weight = nn.Parameter(torch.randn(24, 16))
        self.third = nn.Linear(16, 24, bias=False)
        self.third.weight = self.second.weight
        self.register_buffer("drawn", torch.randn(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.third(self.first(self.second(self.first(x)) + self.drawn))
        return (hidden @ self.transposed).square().mean()


def loss(model: nn.Module, inp: dict[str, Any]) -> torch.Tensor:
    return model(inp["x"])


def planned(model: nn.Module, kind: str) -> Any:
    return plan_for(model, {"x": torch.randn(4, 24)}, kind, loss=loss, split_number=3)


def seeded_apart(rank: int, world_size: int, kind: str, together: bool) -> dict[str, Any]:
    torch.manual_seed(3 if together else 3 + rank)
    model = Small()
    module = ElixirModule(model, planned(model, kind), device="cpu")
    values = module.state_dict()
    with torch.no_grad():
        values["output"] = module(torch.ones(2, 24))
    module.close()
    return {name: value.numpy() for name, value in values.items()}


@pytest.mark.parametrize("kind", ["host", "resident"])
@pytest.mark.parametrize("together", [True, False])
def test_all_ranks_train_the_model_of_rank_0(kind: str, together: bool) -> None:
    torch.manual_seed(3)
    expected = Small()
    output = expected(torch.ones(2, 24))
    for values in run_ranks(2, seeded_apart, kind, together):
        torch.testing.assert_close(torch.from_numpy(values.pop("output")), output.detach())
        for name, value in expected.state_dict().items():
            assert torch.equal(torch.from_numpy(values[name]), value), name


def given_apart(rank: int, world_size: int) -> None:
    """Any mapping of tensors is in each rank's memory, so rank 0's counts; buffers of another layout are refused."""
    torch.manual_seed(3)
    model = Small()
    plan = planned(model, "host")
    given = {name: torch.full_like(value, 1.0 + rank) for name, value in model.state_dict().items()}
    module = ElixirModule(model, plan, device="cpu", weights=MappingProxyType(given))
    assert all(torch.equal(value, torch.ones_like(value)) for value in module.state_dict().values())
    module.close()
    model.register_buffer("identity", torch.eye(3).to_sparse() if rank else torch.eye(3), persistent=False)
    before = model.first.weight.detach().clone()
    with pytest.raises(InputError, match=r"^identity differ between ranks 0 and 1 .*sparse_coo"):
        ElixirModule(model, plan, device="cpu")
    assert torch.equal(model.first.weight, before)


def test_a_mapping_of_weights_is_rank_0s_and_a_refusal_changes_nothing() -> None:
    run_ranks(2, given_apart)


def refused(rank: int, world_size: int) -> None:
    torch.manual_seed(3)
    model = Small()
    plan = planned(model, "host")
    weights = {name: value + rank * (name == "transposed") for name, value in model.state_dict().items()}
    weights["transposed"] = weights["transposed"].to(torch.float64 if rank else torch.float32)
    with pytest.raises(
        InputError, match=r"^transposed differ between ranks 0 and 1 .*; build the model and give weights="
    ):
        ElixirModule(model, plan, device="cpu", weights=weights)
    with torch.device("meta" if rank else "cpu"):
        other = Small()
    with pytest.raises(InputError, match=r"^transposed, first.weight, first.bias and 3 more differ .* on meta"):
        ElixirModule(other, plan, device="cpu")
    module = ElixirModule(model, plan, device="cpu")
    optimizer = ElixirOptimizer(module, torch.optim.SGD([{"params": [each]} for each in module.parameters()], lr=0.1))
    before = module.state_dict()
    module(torch.ones(2, 24)).backward()
    state = optimizer.state_dict()
    state["param_groups"] = state["param_groups"][: 4 - rank]
    message = "rank 1: " * (rank == 0) + r"the state dict has groups of \[1, 1, 1\] parameters, this optimizer of"
    with pytest.raises(InputError, match=f"^{message}"):
        optimizer.load_state_dict(state)
    optimizer.zero_grad()
    module(torch.ones(2, 24)).backward()
    optimizer.step()
    assert not torch.equal(module.state_dict()["first.weight"], before["first.weight"])
    module.close()


def test_what_one_rank_does_otherwise_is_refused_on_all_ranks() -> None:
    run_ranks(2, refused)


def _stepped_apart(rank: int, world_size: int, kind: str, apart: str) -> str:
    """A step by options of each rank alone, which nobody makes; what was said of it. The next one is made."""
    torch.manual_seed(3)
    model = Small()
    module = ElixirModule(model, planned(model, kind), device="cpu")
    parameters = list(module.parameters())
    rest = [] if apart == "groups" and rank else parameters[2:]
    groups = [{"params": parameters[:2]}, {"params": rest, "lr": torch.tensor(0.1)}]
    optimizer = ElixirOptimizer(module, torch.optim.SGD(groups, lr=0.1))
    before = module.state_dict()
    module(torch.ones(2, 24)).backward()
    if apart == "lr":
        optimizer.param_groups[1]["lr"].mul_(1 + rank)
    elif apart == "max_norm":
        optimizer.max_norm = 1.0 + rank
    with pytest.raises(InputError) as raised:
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    if apart == "lr":  # as two libraries may give it
        optimizer.param_groups[1]["lr"].fill_(0.1)
        optimizer.param_groups[0]["lr"] *= 1 + rank * 1e-15
        optimizer.step()
        assert not torch.equal(module.state_dict()["first.weight"], before["first.weight"])
    module.close()
    return str(raised.value)


@pytest.mark.parametrize("kind", ["host", "resident"])
@pytest.mark.parametrize(
    ("apart", "told"),
    [
        ("lr", "lr of group 1 is 0.1"),
        ("max_norm", "the limit of the norm is 1.0 on rank 0, 2.0 on rank 1"),
        ("groups", "the groups of its parameters is SGD"),
    ],
)
def test_ranks_step_by_the_same_options(kind: str, apart: str, told: str) -> None:
    assert all(told in said for said in run_ranks(2, _stepped_apart, kind, apart))
