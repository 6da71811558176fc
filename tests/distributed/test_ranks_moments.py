"""Adam's moments in fewer bits on several ranks: exact bytes, near DDP, and the same bits after a move in the middle."""

from __future__ import annotations

import pytest
import torch

from tests.common import inside
from tests.common.ddp import Twins, batch_of
from tests.common.parity import mixed
from tests.common.spawn import run_ranks
from tests.common.tiny_models import tiny


def training(rank: int, world_size: int, kind: str) -> None:
    ends = []
    for moves in (False, True):
        model = tiny("opt")
        twins = Twins(model, batch_of(model, rank, world_size), "host", moments=kind)
        predicted = twins.plan.predicted.host_parts["optimizer_states"]
        twins.train(2)
        twins.module.settle()
        accounted = inside.bytes_by_kind(twins.module, "host")["optimizer_states"]
        # A shard that is padding alone is never stepped, and has no moments, though the plan counts them.
        held = [chunk for chunk in twins.plan.chunks if chunk.has_parameters_on(rank, world_size)]
        assert accounted == sum(twins.plan.state_size.nbytes(chunk.numel // world_size) for chunk in held)
        if len(held) == len(twins.plan.chunks):
            assert accounted * world_size == predicted  # that of a machine, all its ranks together
        for plan in (mixed(twins.plan), twins.plan):
            if moves:
                twins.module.rehome(plan)
            twins.train(2)
        for mine, plain in twins.losses:
            assert abs(mine - plain) <= 2e-2 * abs(plain)
        ends.append({name: value.clone() for name, value in twins.module.state_dict().items()})
        twins.close()
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.parametrize("kind", ["bfloat16", "8bit"])
def test_bytes_losses_and_moves(kind: str) -> None:
    run_ranks(2, training, kind)
