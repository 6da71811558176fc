"""Training on several ranks: clipping, accumulation, dtypes, frozen weights, states, counts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elixir.chunk.lanes import Emulation
from elixir.errors import InputError
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from tests.common import inside
from tests.common.ddp import LR, Twins, batch_of, parity, plan_for
from tests.common.parity import hf_loss, square_loss
from tests.common.spawn import run_ranks
from tests.common.tiny_models import tiny


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    # Where both sides round in another order (norms of shards, sums of micro-batches), the usual epsilon would blow the
    # last bit of gradients that all but vanish up to a hundredth of the learning rate.
    return torch.optim.AdamW(parameters, lr=LR, eps=1e-6)


@pytest.mark.slow  # ranks as threads hold the same
@pytest.mark.parametrize("kind", ["host", "resident"])
def test_clipping(kind: str) -> None:
    run_ranks(2, parity, "opt", kind, "none", {"max_norm": 0.3, "optimizer": _adamw})


def _norms(rank: int, world_size: int) -> None:
    model = tiny("gpt2")
    twins = Twins(model, batch_of(model, rank, world_size), "mixed")
    for _ in range(3):
        twins.backward()
        mine = twins.optimizer.clip_grad_norm_(0.5)
        plain = torch.nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.5)
        assert torch.allclose(mine, plain, rtol=1e-6, atol=0), (mine, plain)
        everywhere: list[Any] = [None] * world_size
        dist.all_gather_object(everywhere, mine.item())
        assert len(set(everywhere)) == 1
        twins.step()
    twins.close()


@pytest.mark.slow  # ranks as threads hold the same
def test_the_global_norm_is_the_unsharded_one_on_every_rank() -> None:
    run_ranks(2, _norms)


def _accumulation(rank: int, world_size: int, kind: str) -> None:
    model = tiny("llama")
    whole = batch_of(model, rank, world_size, rows=6)
    twins = Twins(model, whole, kind, optimizer=_adamw)
    for _ in range(5):
        for part in range(3):
            twins.backward({name: value[2 * part : 2 * part + 2] for name, value in whole.items()}, scale=1 / 3)
        twins.step()
    twins.check()
    twins.close()


@pytest.mark.slow  # ranks as threads hold the same
@pytest.mark.parametrize("kind", ["host", "mixed"])
def test_accumulation_adds_up_over_micro_batches(kind: str) -> None:
    run_ranks(2, _accumulation, kind)


def _without_sync(rank: int, world_size: int, kind: str) -> None:
    model = tiny("gpt2")
    whole = batch_of(model, rank, world_size, rows=6)
    twins = Twins(model, whole, kind, optimizer=_adamw)
    parts = [{name: value[2 * part : 2 * part + 2] for name, value in whole.items()} for part in range(3)]
    for step in range(6):
        with twins.module.no_sync(), twins.plain.no_sync():
            twins.backward(parts[0], scale=1 / 3)
            twins.backward(parts[1], scale=1 / 3)
            assert inside.gradients(twins.module).moved.network == 0
        if step == 5:  # nothing is reduced before the step, which has to see to it
            twins.optimizer.step()
            averaged = [p.grad for p in twins.plain.parameters()]
            for gradient in averaged:
                dist.all_reduce(gradient)
                gradient /= world_size
            twins.plain_optimizer.step()
            break
        twins.backward(parts[2], scale=1 / 3)
        assert inside.gradients(twins.module).moved.network > 0
        twins.step()
    twins.check()
    twins.optimizer.zero_grad()
    with twins.module.no_sync():
        twins.backward()
    twins.optimizer.zero_grad()
    before = twins.module.state_dict()
    twins.optimizer.step()  # with nothing
    assert all(torch.equal(value, before[name]) for name, value in twins.module.state_dict().items())
    twins.close()


@pytest.mark.parametrize("kind", ["host", "mixed", "resident"])
def test_gradients_can_wait_for_the_last_micro_batch(kind: str) -> None:
    run_ranks(2, _without_sync, kind)


def _frozen(rank: int, world_size: int) -> None:
    model = tiny("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("self_attn" in name)
    twins = Twins(model, batch_of(model, rank, world_size), "mixed")
    before = copy.deepcopy(twins.plain.module.state_dict())
    twins.train()
    twins.check()
    after = twins.module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items() if "self_attn" not in name)
    assert all(not torch.equal(after[name], value) for name, value in before.items() if "self_attn" in name)
    twins.close()


def test_frozen_weights_are_sharded_and_stay_as_they_are() -> None:
    run_ranks(2, _frozen)


def _low_precision(rank: int, world_size: int, reduce_fp32: bool) -> None:
    dtype = torch.bfloat16
    model = tiny("opt")
    inp = batch_of(model, rank, world_size)
    master = copy.deepcopy(model)  # a bf16 model stepped through float32 master weights, gradients averaged by hand
    low = copy.deepcopy(model).to(dtype)
    groups = len(dist.distributed_c10d._world.pg_map)
    plan = plan_for(model, inp, "host", unified_dtype=dtype)
    module = ElixirModule(
        model, plan, device="cpu", dtype=dtype, reduce_always_fp32=reduce_fp32, debug=Debug(poison=True)
    )
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=LR))
    plain = torch.optim.AdamW(master.parameters(), lr=LR)
    for _ in range(5):
        mine, theirs = hf_loss(module, inp), hf_loss(low, inp)
        assert torch.equal(mine, theirs)
        optimizer.backward(mine)
        theirs.backward()
        for high, parameter in zip(master.parameters(), low.parameters(), strict=True):
            assert parameter.grad is not None
            # What comes back to a bf16 gradient is bf16; the sum over ranks is in float32 only if that was asked for.
            summed = parameter.grad.float() if reduce_fp32 else parameter.grad.clone()
            summed.div_(world_size)
            dist.all_reduce(summed)
            high.grad = summed.to(dtype).float()
            parameter.grad = None
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for high, parameter in zip(master.parameters(), low.parameters(), strict=True):
                parameter.copy_(high)
    module.close()
    assert len(dist.distributed_c10d._world.pg_map) == groups


@pytest.mark.slow  # ranks as threads hold the same
@pytest.mark.parametrize("reduce_fp32", [False, True])
def test_bf16_is_stepped_through_float32_masters(reduce_fp32: bool) -> None:
    run_ranks(2, _low_precision, reduce_fp32)


def _overflow(rank: int, world_size: int) -> None:
    model = tiny("opt")
    inp = batch_of(model, rank, world_size)
    plan = plan_for(model, inp, "host", unified_dtype=torch.float16)
    module = ElixirModule(model, plan, device="cpu", debug=Debug(poison=True))
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=LR), initial_scale=256.0)
    start = module.state_dict()
    for step in range(3):
        before = module.state_dict()
        loss = hf_loss(module, inp)
        optimizer.backward(loss * float("inf") if step == 1 and rank == 1 else loss)
        optimizer.step()
        optimizer.zero_grad()
        after = module.state_dict()
        same = [torch.equal(after[name], before[name]) for name in after]
        assert all(same) if step == 1 else not all(same), f"step {step}"
        assert optimizer.loss_scale == (256.0 if step == 0 else 128.0)
    assert all(bool(value.isfinite().all()) for value in after.values())
    assert not torch.equal(start["model.decoder.embed_tokens.weight"], after["model.decoder.embed_tokens.weight"])
    module.close()


@pytest.mark.slow  # ranks as threads hold the same
def test_an_overflow_on_one_rank_leaves_out_the_step_on_all() -> None:
    run_ranks(2, _overflow)


def _states(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    model = tiny("t5")
    twins = Twins(model, batch_of(model, rank, world_size), "mixed")
    names = list(twins.plain.module.state_dict())
    twins.train(2)
    state = twins.module.state_dict()
    assert list(state) == names
    changed = {name: value + 1 for name, value in state.items()}
    twins.module.load_state_dict(changed)
    again = twins.module.state_dict()
    assert all(torch.equal(again[name], changed[name]) for name in names)
    twins.module.load_state_dict(state)
    twins.train(2)
    result = twins.module.state_dict()
    twins.close()
    return {name: value.numpy() for name, value in result.items()}


def test_every_rank_has_the_full_state_and_the_same() -> None:
    first, second = run_ranks(2, _states)
    assert all((first[name] == second[name]).all() for name in first)


def _counts(rank: int, world_size: int, kind: str, checkpoint: Any) -> None:
    model = tiny("opt", checkpoint=checkpoint, layers=3)
    twins = Twins(model, batch_of(model, rank, world_size), kind)
    for step in range(3):
        twins.backward()
        twins.step()
        report = twins.module.last_report
        assert report is not None
        predicted = twins.plan.predicted
        assert report.deviations == 0, f"step {step}"
        assert report.observed["loads"] == predicted.loads, f"step {step}"
        for link in ("host_to_device", "device_to_host", "network"):
            assert report.observed[link] == predicted.moved_bytes[link], f"step {step}: {link}"
        assert inside.gradients(twins.module).extra_blocks == 0
        # Arenas count all but activations, buffers and single gradients in flight.
        device = inside.peak_bytes(twins.module, "device")
        assert device <= predicted.device_peak_bytes, f"step {step}: {inside.bytes_by_kind(twins.module, 'device')}"
    twins.close()


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["none", "non-reentrant"])
@pytest.mark.parametrize("kind", ["host", "device", "resident"])
def test_loads_and_bytes_are_those_predicted(kind: str, checkpoint: str) -> None:
    run_ranks(2, _counts, kind, checkpoint)


def _evicting(rank: int, world_size: int) -> None:
    model = tiny("opt", checkpoint="non-reentrant")
    twins = Twins(model, batch_of(model, rank, world_size), "host", wrap={"evict_always": True})
    twins.train()
    twins.check()
    twins.close()


@pytest.mark.slow
def test_with_eviction_at_every_position() -> None:
    run_ranks(2, _evicting)


def _with_delays(rank: int, world_size: int, seeds: int) -> None:
    reference: dict[str, torch.Tensor] = {}
    for seed in range(-1, seeds):
        model = tiny("opt", checkpoint="non-reentrant")
        inp = batch_of(model, rank, world_size)
        plan = plan_for(model, inp, "host")
        # Other delays on every rank, so that each in turn is late.
        emulation = Emulation(delay_s=2e-3, seed=world_size * seed + rank) if seed >= 0 else None
        module = ElixirModule(model, plan, device="cpu", debug=Debug(poison=True, emulation=emulation))
        optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=LR), max_norm=1.0)
        losses = []
        for _ in range(3):
            loss = hf_loss(module, inp)
            losses.append(loss.detach())
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        result = module.state_dict() | {"losses": torch.stack(losses)}
        reference = reference or result
        assert all(torch.equal(result[name], value) for name, value in reference.items()), f"seed {seed}"
        module.close()


@pytest.mark.slow
def test_delays_change_no_bit() -> None:
    run_ranks(2, _with_delays, 10)


@pytest.mark.slow
def test_no_seed_of_delays_changes_a_bit() -> None:
    run_ranks(2, _with_delays, 200, wait_s=1800.0)


class _Talkative(nn.Module):
    """A model that sums over the ranks on the default group, in forward and again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            x.register_hook(lambda gradient: _average(gradient)) if x.requires_grad and not x.is_meta else None
            x = x - (_average(x.detach()) if not x.is_meta else 0)
        return x


def _average(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def _square(model: nn.Module, inp: dict[str, Any]) -> torch.Tensor:
    result: torch.Tensor = model(inp["x"]).square().mean()
    return result


def _own_collectives(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = _Talkative()
    generator = torch.Generator().manual_seed(rank)
    inp = {"x": torch.randn(4, 32, generator=generator)}
    twins = Twins(model, inp, "host", loss=_square, wrap={"emulation": Emulation(delay_s=1e-3, seed=rank)})
    for _ in range(5):
        twins.backward()
        total = torch.ones(())
        dist.all_reduce(total)
        assert total.item() == world_size
        twins.step()
    twins.check()
    twins.close()


def test_the_users_own_collectives_do_not_interfere() -> None:
    run_ranks(2, _own_collectives)


class _Clamped(nn.Module):
    """Clamps a weight in its forward, as Gemma-3n does, and keeps a moving average of it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.average = nn.Parameter(torch.zeros(8, 8), requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.before.weight.data.clamp_(-0.1, 0.1)
            with torch.no_grad():
                self.average.lerp_(self.before.weight, 0.1)
        output: torch.Tensor = self.after(self.before(input) @ self.average)
        return output


class _ByInput(_Clamped):
    """Writes what depends on this rank's rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.before.weight.mul_(input.mean())
        return super().forward(input)


def _writes_in_forward(rank: int, world_size: int, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Clamped() for _ in range(3)))
    rows = torch.randn(world_size, 4, 8)
    twins = Twins(model, {"input": rows[rank]}, kind, loss=square_loss, split_number=6)
    twins.train(4)
    twins.check()
    twins.close()
    torch.manual_seed(0)
    model = nn.Sequential(*(_Clamped() for _ in range(3)))
    plan = plan_for(model, {"input": rows[rank]}, kind, loss=square_loss, split_number=6)
    model[1].__class__ = _ByInput
    module = ElixirModule(model, plan, device="cpu")
    with pytest.raises(InputError, match="mul_ writes in place"):
        module(rows[rank])
    module.close()


@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_forward_writes_what_is_alike_on_all_ranks(kind: str) -> None:
    run_ranks(2, _writes_in_forward, kind)
