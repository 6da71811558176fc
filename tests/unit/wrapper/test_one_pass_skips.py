"""Micro-batches of one pass skip layers and draw random numbers as those of a loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from elixir.models.model_fingerprint import fingerprint
from tests.common.one_pass import (
    Stack,
    in_passes,
    plainly,
    plan_for,
    square_loss,
    vectors,
)
from tests.unit.wrapper.test_one_pass_traps import Layer, seeded, three


class Dropping(Stack):
    """Skips layers at random, but not all of them."""

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        skips = float(torch.rand(())) < 0.5 and layer is not self.layers[1]
        return x if skips else super().run(layer, x)


def dropping_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(int(batch["x"][0, 0].abs() * 1000))
    return square_loss(model, batch)


def test_6_and_7_each_micro_batch_has_its_random_numbers_and_may_skip_layers() -> None:
    steps = vectors(6)
    # The trace runs all layers, so that the plan knows them.
    plan = plan_for(seeded(lambda: Stack(three()))(), steps[0][0], square_loss, accumulation=6)
    make = seeded(lambda: Dropping(three()))
    with torch.random.fork_rng(devices=[]):
        expected = plainly(make, steps, dropping_loss)
        object.__setattr__(plan, "model_fingerprint", fingerprint(make()))
        assert in_passes(make, steps, plan, dropping_loss).same_as(expected)


class Ending(Stack):
    """Reads the output layer's weights before the last layer, which a micro-batch leaves out that begins with a
    positive number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = bool(x[0, 0] > 0)
        x = self.first(x)
        for layer in self.layers[:2]:
            x = self.run(layer, x)
        x = x + self.last(x)
        x = x if ends else self.run(self.layers[2], x)
        out: torch.Tensor = self.last(x)
        return out


@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_7_those_that_skip_the_last_layers_first_are_summed_first(home: str) -> None:
    make, steps = seeded(lambda: Ending([Layer(64) for _ in range(3)], 64)), vectors(5, width=64)
    for step in steps:
        for number, batch in enumerate(step):
            batch["x"][0, 0] = 1.0 if number < 2 else -1.0
    plan = plan_for(make(), steps[0][-1], square_loss, accumulation=5, home=home)
    assert in_passes(make, steps, plan, square_loss).same_as(plainly(make, steps, square_loss))


@pytest.mark.parametrize("draws", [False, True])
def test_6_the_random_numbers_of_the_process_go_on_only_if_a_micro_batch_has_drawn(*, draws: bool) -> None:
    steps, stayed, drawn = vectors(2), [], []
    make = seeded(lambda: Stack(three()))
    plan = plan_for(make(), steps[0][0], square_loss, accumulation=2)

    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        if draws:
            drawn.append(float(torch.rand(())))
        return square_loss(model, batch)

    @contextmanager
    def watched() -> Iterator[None]:
        before = torch.get_rng_state()
        yield
        stayed.append(torch.equal(before, torch.get_rng_state()))

    in_passes(make, steps, plan, loss, around=watched)
    assert stayed == [not draws] * len(steps)
    assert len({*drawn}) == len(drawn) == draws * sum(map(len, steps))
