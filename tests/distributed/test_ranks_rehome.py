"""Chunks, new weights on their way back, and moments in fewer bits: homes on several ranks change no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elixir.chunk.lanes import Emulation
from elixir.errors import InputError
from elixir.plan.plan import Plan
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from tests.common import inside
from tests.common.ddp import Twins, batch_of, plan_for
from tests.common.parity import hf_loss, mixed, rehomed, report_of
from tests.common.spawn import on_each_rank, run_ranks, run_to_end
from tests.common.tiny_models import tiny


@on_each_rank(2)
def test_weights_are_those_of_ddp_wherever_they_live(rank: int, world_size: int) -> None:
    model = tiny("llama")
    twins = Twins(model, batch_of(model, rank, world_size), "host", max_norm=1.0)
    plan = twins.plan
    for kind in ("resident", "mixed", "device", "streamed", "mixed"):
        twins.train(2)
        twins.module.rehome(rehomed(plan, kind))
    twins.train(2)
    twins.finish()


def disagreeing(rank: int, world_size: int) -> None:
    model = tiny("opt")
    twins = Twins(model, batch_of(model, rank, world_size), "host")
    with pytest.raises(InputError, match="has plan"):
        twins.module.rehome(rehomed(twins.plan, "device" if rank else "resident"))
    twins.train(1)
    twins.close()


def test_ranks_must_have_the_same_plan() -> None:
    assert [outcome.error for outcome in run_to_end(2, disagreeing)] == [None, None]


# --- new weights on their way back ----------------------------------------------------------------------------------


BF16 = torch.bfloat16
STEPS = 3


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
    report = report_of(module)
    # Less where a shard ends in padding, which has no moments; fused, two optimizers both have those of a whole shard.
    assert two or report.observed["host_peak"] <= report.predicted["host_peak"]
    module.close()
    return found


def training(rank: int, world_size: int, fused: bool, two: bool) -> None:
    model = tiny("opt")
    streamed = plan_for(model, batch_of(model, rank, world_size), "host", unified_dtype=BF16)
    options = {"two": two, "use_fused_kernels": fused}
    expected = trained(rank, world_size, streamed, **options)
    for homes in ("states", "device, states"):
        found = trained(rank, world_size, rehomed(streamed, homes), **options)
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_weights_return_as_if_they_lived_with_their_masters(fused: bool, two: bool) -> None:
    run_ranks(3 if fused else 2, training, fused, two)


# --- moments in fewer bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bfloat16", "8bit"])
@on_each_rank(2)
def test_bytes_losses_and_moves(rank: int, world_size: int, kind: str) -> None:
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
