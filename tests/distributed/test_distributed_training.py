"""Training on several ranks: clipping, accumulation, dtypes, frozen weights, states, counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elixir.chunk.lanes import Emulation
from elixir.errors import InputError
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from tests.common import inside
from tests.common.ddp import LR, Twins, batch_of, plan_for, steady_adamw
from tests.common.parity import hf_loss, square_loss, take_step
from tests.common.spawn import on_each_rank, run_ranks
from tests.common.tiny_models import tiny


@pytest.mark.parametrize("kind", ["host", "mixed", "resident"])
@on_each_rank(2)
def test_micro_batches_inside_of_no_sync_train_as_ddp_does_outside_of_it(rank: int, world_size: int, kind: str) -> None:
    model = tiny("gpt2")
    whole = batch_of(model, rank, world_size, rows=6)
    twins = Twins(model, whole, kind, optimizer=steady_adamw)
    parts = [{name: value[2 * part : 2 * part + 2] for name, value in whole.items()} for part in range(3)]
    for step in range(6):
        with twins.module.no_sync():
            for part in parts[: 2 + step % 2]:
                moved = inside.counts(twins.module).network_bytes
                twins.backward(part, scale=1 / 3)
                assert inside.counts(twins.module).network_bytes > moved
        if step % 2 == 0:  # otherwise the step comes after backwards inside of it alone
            twins.backward(parts[2], scale=1 / 3)
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
            take_step(optimizer, loss)
        result = module.state_dict() | {"losses": torch.stack(losses)}
        reference = reference or result
        assert all(torch.equal(result[name], value) for name, value in reference.items()), f"seed {seed}"
        module.close()


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


@on_each_rank(2)
def test_the_users_own_collectives_do_not_interfere(rank: int, world_size: int) -> None:
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
    twins.finish()


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


@pytest.mark.parametrize("kind", ["host", "device"])
@on_each_rank(2)
def test_a_forward_writes_what_is_alike_on_all_ranks(rank: int, world_size: int, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Clamped() for _ in range(3)))
    rows = torch.randn(world_size, 4, 8)
    twins = Twins(model, {"input": rows[rank]}, kind, loss=square_loss, split_number=6)
    twins.train(4)
    twins.finish()
    torch.manual_seed(0)
    model = nn.Sequential(*(_Clamped() for _ in range(3)))
    plan = plan_for(model, {"input": rows[rank]}, kind, loss=square_loss, split_number=6)
    model[1].__class__ = _ByInput
    module = ElixirModule(model, plan, device="cpu")
    with pytest.raises(InputError, match="mul_ writes in place"):
        module(rows[rank])
    module.close()
