"""Optimizers that keep numbers in their groups, on several ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.common import user_optimizers as own
from tests.common.ddp import PLANS, Twins, batch_of
from tests.common.spawn import run_ranks
from tests.common.tiny_models import tiny


def _averaging(rank: int, world_size: int, kind: str) -> None:
    model = tiny("gpt2", layers=1)
    twins = Twins(model, batch_of(model, rank, world_size), kind, optimizer=lambda p: own.Averaging(p, lr=0.01))
    both: tuple[Any, Any] = (twins.optimizer, twins.plain_optimizer)
    for _ in range(2):
        twins.train(3)
        for optimizer in both:
            optimizer.eval()
        twins.check()
        for optimizer in both:
            optimizer.train()
    for optimizer in both:
        optimizer.state.clear()
    twins.train(2)
    twins.check()
    mine, plain = (optimizer.param_groups[0] for optimizer in both)
    assert all(mine[key] == plain[key] for key in ("k", "weight_sum", "train_mode"))
    twins.close()


@pytest.mark.parametrize("kind", PLANS)
def test_numbers_in_groups_go_on_from_step_to_step(kind: str) -> None:
    run_ranks(2, _averaging, kind)
