"""Calls, and checkpoints of the model's own, with which a pass would give wrong gradients: refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elixir.errors import InputError
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.one_pass import Layer, Stack, in_passes, plan_for, seeded, square_loss, three, vectors


class Reentrant(Stack):
    """The model's own checkpoint around each layer: what it runs in backward is no turn of a pass."""

    checkpoints = False

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not self.checkpoints:
            return super().run(layer, x)
        found: torch.Tensor = checkpoint(layer, x, use_reentrant=True)
        return found


def test_layers_that_run_again_inside_of_backward_are_refused() -> None:
    steps, make = vectors(2, steps=1), seeded(lambda: Reentrant([Layer(), Layer()]))
    plan = plan_for(make(), steps[0][0], square_loss, accumulation=2)

    def checkpointed() -> nn.Module:
        model = make()
        model.checkpoints = True  # type: ignore[assignment]
        return model

    with pytest.raises(InputError, match="runs again in backward inside of a pass, as under a reentrant checkpoint"):
        in_passes(checkpointed, steps, plan, square_loss)


def in_step(step_fn: Callable[[ElixirModule, ElixirOptimizer, dict[str, Any]], Any]) -> list[Any]:
    """One pass of two micro-batches through a small stack."""
    make, steps = seeded(lambda: Stack(three())), vectors(2, steps=1)
    plan = plan_for(make(), steps[0][0], square_loss, accumulation=2)
    module = ElixirModule(make(), plan, device="cpu")
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    return optimizer.accumulate(lambda model, batch: step_fn(model, optimizer, batch), steps[0])


def test_a_backward_after_the_pass_is_refused() -> None:
    losses = in_step(lambda model, optimizer, batch: square_loss(model, batch))
    with pytest.raises(InputError, match=r"a backward after accumulate\(\) goes through layers"):
        sum(losses).backward()


@pytest.mark.parametrize(
    ("meddle", "message"),
    [
        (lambda model, optimizer: model.gathered(model.module.last).__enter__(), r"gathered\(\) inside of accumulate"),
        (lambda model, optimizer: optimizer.accumulate(square_loss, []), r"accumulate\(\) inside of accumulate"),
        (lambda model, optimizer: model.eval(), r"train\(\) or eval\(\) was called on the layer layers.2"),
    ],
)
def test_calls_that_a_pass_cannot_bear_are_refused(meddle: Any, message: str) -> None:
    def step(model: ElixirModule, optimizer: ElixirOptimizer, batch: dict[str, Any]) -> None:
        optimizer.backward(square_loss(model, batch))
        meddle(model, optimizer)

    with pytest.raises(InputError, match=message):
        in_step(step)
