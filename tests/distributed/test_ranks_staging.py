"""Rounded weights that return through buffers in host memory, on several ranks: same bits as without, bytes as planned."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from elixir.chunk.lanes import Emulation
from elixir.plan.plan import Plan
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from tests.common import inside
from tests.common.ddp import batch_of, plan_for
from tests.common.parity import hf_loss
from tests.common.spawn import run_ranks
from tests.common.tiny_models import tiny

BF16 = torch.bfloat16
STEPS = 3


def with_weights_on_device(plan: Plan, *, resident: bool) -> Plan:
    """The same packing with weights on the device and states on the host; what it predicts is no longer meant."""
    homes: dict[str, Any] = {"resident": resident, "weight_home": "device", "state_home": "host"}
    return dataclasses.replace(plan, chunks=tuple(dataclasses.replace(chunk, **homes) for chunk in plan.chunks))


def trained(rank: int, world_size: int, plan: Plan, *, two: bool, **options: Any) -> dict[str, torch.Tensor]:
    """Masters after some steps; with `two`, of two optimizers that share chunks, one of which leaves a step out."""
    model = tiny("opt")
    inp = batch_of(model, rank, world_size)
    emulation = Emulation(delay_s=0.004, seed=rank)
    module = ElixirModule(
        model, plan, device="cpu", dtype=BF16, debug=Debug(poison=True, emulation=emulation), **options
    )
    parameters = list(module.parameters())
    parts = (parameters[::2], parameters[1::2]) if two else (parameters,)
    optimizers = [ElixirOptimizer(module, torch.optim.AdamW(part, lr=1e-2, weight_decay=0.1)) for part in parts]
    for step in range(STEPS):
        optimizers[0].backward(hf_loss(module, inp))
        for optimizer in optimizers[: 1 if step == 1 else 2]:
            optimizer.step()
        module.zero_grad()
        module.settle()
    found = {name: value.clone() for name, value in module.state_dict().items()}
    shards = [chunk.weight_bytes // world_size for chunk in plan.chunks if chunk.returns_rounded]
    assert inside.bytes_by_kind(module, "host").get("staging", 0) == min(len(shards), 2) * max(shards, default=0)
    report = module.last_report
    assert report is not None
    # Less where a shard ends in padding, which has no moments; fused, two optimizers both have those of a whole shard.
    assert two or report.observed["host_peak"] <= report.predicted["host_peak"]
    module.close()
    return found


def training(rank: int, world_size: int, fused: bool, two: bool) -> None:
    model = tiny("opt")
    streamed = plan_for(model, batch_of(model, rank, world_size), "host", unified_dtype=BF16)
    options = {"two": two, "use_fused_kernels": fused}
    expected = trained(rank, world_size, streamed, **options)
    for resident in (True, False):
        found = trained(rank, world_size, with_weights_on_device(streamed, resident=resident), **options)
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_weights_return_as_if_they_lived_with_their_masters(fused: bool, two: bool) -> None:
    run_ranks(3 if fused else 2, training, fused, two)
