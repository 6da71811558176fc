"""A model on meta is filled on several ranks, and weights keep their layouts: the same as on one rank."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from elixir.checkpoint import load_checkpoint, save_checkpoint
from elixir.wrapper import Debug, ElixirModule
from tests.common.ddp import PLANS, Twins, batch_of, plan_for
from tests.common.file_faults import UnsyncedFiles
from tests.common.parity import case, make_plan, square_loss
from tests.common.peaks import resident_growth
from tests.common.resuming import Run
from tests.common.spawn import on_each_rank, run_ranks, run_to_end
from tests.common.tiny_models import tiny

LARGE = {"layers": 20, "hidden": 512, "heads": 8, "vocabulary": 8192}
SLACK_BYTES = 16 * 2**20
"""Memory of an interpreter without tensors."""


def alike(rank: int, world_size: int, kind: str, dtype: str | None) -> dict[str, Any]:
    model = tiny("gpt2", device="meta")
    plan = plan_for(model, batch_of(model, rank, world_size), kind, unified_dtype=dtype)
    torch.manual_seed(7 + rank)  # rank 0 decides
    module = ElixirModule(model, plan, device="cpu", debug=Debug(poison=True))
    state = module.state_dict()
    only = module.state_dict(rank0_only=True)
    assert sorted(only) == (sorted(state) if rank == 0 else [])
    module.load_state_dict({name: value + 1 for name, value in state.items()})
    after = module.state_dict()
    assert all(torch.equal(value, state[name] + 1) for name, value in after.items())
    module.close()
    # By value: a tensor would be handed over in memory that this process takes with it.
    return {name: value.numpy() for name, value in state.items()}


@pytest.mark.parametrize(("kind", "dtype"), [("host", None), ("mixed", "bfloat16"), ("resident", "bfloat16")])
def test_same_weights_on_any_number_of_ranks(kind: str, dtype: str | None) -> None:
    states = run_ranks(2, alike, kind, dtype)
    torch.manual_seed(7)
    module = ElixirModule(tiny("gpt2", device="meta"), make_plan(case("gpt2"), "streamed"), device="cpu")
    expected = module.state_dict()
    module.close()
    for state in states:
        assert list(state) == list(expected)
        assert all(torch.equal(torch.from_numpy(state[name]), value) for name, value in expected.items())


def building(rank: int, world_size: int, folder: str | None) -> None:
    # Frozen, so that gradients and states, which every rank keeps, do not hide what is only needed to start up.
    model = tiny("opt", device="meta", positions=32, **LARGE).requires_grad_(False)
    model.model.decoder.final_layer_norm.requires_grad_(True)
    whole_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    plan = plan_for(model, batch_of(model, rank, world_size, seq=8), "host", split_number=16)
    shard_bytes = sum(chunk.weight_bytes for chunk in plan.chunks) // world_size
    chunk_bytes = max(chunk.weight_bytes for chunk in plan.chunks)
    blocks_bytes = plan.block_bytes * (plan.block_count + plan.grad_block_count)
    bound = shard_bytes + chunk_bytes + blocks_bytes + SLACK_BYTES
    assert bound < 0.8 * whole_bytes
    gc.collect()
    with resident_growth() as growth:
        module = ElixirModule(model, plan, device="cpu", weights=folder)
    assert growth.peak_bytes <= bound, f"{growth.peak_bytes:,} of {bound:,} bytes; the model has {whole_bytes:,}"
    assert growth.peak_bytes >= 0.9 * shard_bytes  # else nothing was measured
    assert growth.peak_bytes < whole_bytes
    module.close()
    dist.barrier()


@pytest.mark.parametrize("how", ["initialised", "safetensors"])
def test_no_rank_holds_the_whole_model(how: str, tmp_path: Path) -> None:
    folder = None
    if how == "safetensors":
        model = tiny("opt", positions=32, **LARGE)
        save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")
        folder = str(tmp_path)
    run_ranks(4, building, folder)


def one_file_short(rank: int, world_size: int, folder: str) -> None:
    model = tiny("opt", device="meta")
    plan = plan_for(model, batch_of(model, rank, world_size), "host")
    ElixirModule(model, plan, device="cpu", weights=folder if rank else None)


def test_a_rank_without_weights_stops_the_others(tmp_path: Path) -> None:
    outcomes = run_to_end(2, one_file_short, str(tmp_path), group_timeout_s=20.0)
    assert "no safetensors" in str(outcomes[1].error)
    assert "rank 1" in str(outcomes[0].error)
    assert outcomes[0].seconds < 60


# --- layouts --------------------------------------------------------------------------------------------------------


FILES = UnsyncedFiles()


def _train(rank: int, world_size: int, folder: str, kind: str) -> None:
    it = case("laid out")
    inp = {"input": it.inp["input"][rank::world_size].contiguous(memory_format=torch.channels_last)}
    wanted = {name: parameter.stride() for name, parameter in it.model.named_parameters()}
    twins = Twins(it.model, inp, kind, loss=square_loss, max_norm=0.5)
    twins.train(3)
    twins.check()
    assert {name: parameter.stride() for name, parameter in twins.module.module.named_parameters()} == wanted
    state = {"model": twins.module, "optimizer": twins.optimizer}
    save_checkpoint(Path(folder, "run"), state, wait=True, files=FILES)
    values = {"weights": twins.module.state_dict(), "states": twins.optimizer.state_dict()["state"]}
    if rank == 0:
        torch.save(values, Path(folder, "values.pt"))
    twins.close()


def _load(rank: int, world_size: int, folder: str) -> None:
    for turned in (False, True):
        it = case("laid out")
        if turned:
            for parameter in it.model.parameters():
                parameter.data = parameter.data.contiguous()
        plan = plan_for(it.model, it.inp, "host", loss=square_loss, split_number=3)
        with Run(it, plan, lambda model: torch.optim.AdamW(model.parameters())) as run:
            load_checkpoint(Path(folder, "run"), {"model": run.module, "optimizer": run.optimizer}, files=FILES)
            values = torch.load(Path(folder, "values.pt"))
            weights, states = run.module.state_dict(), run.optimizer.state_dict()["state"]
            assert all(torch.equal(weights[name], value) for name, value in values["weights"].items())
            for number, kinds in values["states"].items():
                assert all(torch.equal(states[number][key], value) for key, value in kinds.items())


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["mixed", *(kind for kind in PLANS if kind != "mixed")])
def test_steps_are_those_of_ddp_and_their_checkpoints_go_on_with_any_ranks_and_layout(
    kind: str, tmp_path: Path
) -> None:
    run_ranks(2, _train, str(tmp_path), kind)
    for ranks in (1, 3):
        run_ranks(ranks, _load, str(tmp_path))


@on_each_rank(2)
def test_ranks_that_lay_weights_out_differently_are_refused(rank: int, world_size: int) -> None:
    it = case("laid out")
    plan = plan_for(it.model, it.inp, "host", loss=square_loss)
    if rank == 1:
        it.model[0].weight.data = it.model[0].weight.data.contiguous()
    with pytest.raises(ValueError, match=r"0.weight.* differ between ranks 0 and 1 .*strides.*build the model"):
        ElixirModule(it.model, plan, device="cpu")
