"""The names of an `ElixirModule`: few are new, all others are the model's; and the phases of a step under it."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from torch import nn

from elixir.errors import InputTypeError, StateError
from elixir.wrapper import ElixirModule
from elixir.wrapper.module import PUBLIC
from elixir.wrapper.phase import Phase, StepPhase
from tests.common import gpu, inside
from tests.common.parity import Case, make_plan, square_loss

ENGINE = ("cache", "chunks", "gradients", "uses", "lanes", "optimizers", "arena", "account", "loss_scale", "staging")


class Named(nn.Module):
    """A model with attributes whose names an engine has."""

    def __init__(self, *more: str) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        for name in (*ENGINE, *more):
            setattr(self, name, f"the model's {name}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x)
        return output


def wrapped(model: nn.Module) -> ElixirModule:
    it = Case(model, {"x": torch.randn(2, 8)}, square_loss)
    return ElixirModule(model, make_plan(it, "streamed"), device=gpu.DEVICE)


def test_public_names_are_those_of_a_module_and_a_few() -> None:
    own = {name for name in dir(ElixirModule) if not name.startswith("_")} | {"module"}
    assert own - set(dir(nn.Module)) == set(PUBLIC)
    module = wrapped(Named())
    assert {name for name in vars(module) if not name.startswith("_")} <= {"training"}


def test_a_hidden_attribute_is_said_once_and_reached_through_module(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "elixir.wrapper"):
        module = wrapped(Named("plan", "settle"))
    (said,) = [record.getMessage() for record in caplog.records if "wrapped.module." in record.getMessage()]
    assert "Named" in said
    assert "(plan, settle)" in said
    assert module.module.plan == "the model's plan"
    assert module.plan is not module.module.plan


def test_only_a_wrapped_model_has_an_engine() -> None:
    with pytest.raises(InputTypeError, match="Linear"):
        inside.chunks(nn.Linear(1, 1))


# --- phases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), list(itertools.product(Phase, Phase)))
def test_only_the_changes_of_the_table_are_allowed(one: Phase, other: Phase) -> None:
    phase = StepPhase(rank=3)
    phase.now = one
    if other in inside.transitions(StepPhase)[one]:
        phase.to(other)
        assert phase.now is other
    else:
        with pytest.raises(StateError, match="rank 3"):
            phase.to(other)
        assert phase.now is one
