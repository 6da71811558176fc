"""Buffers that forwards write to are taken from rank 0 where DistributedDataParallel takes them: equal bits on every
rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import InputError
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.ddp import Twins, plan_for
from tests.common.parity import take_step
from tests.common.spawn import on_each_rank, run_ranks

WIDTH = 8


class Running(nn.Module):
    """Writes to buffers of every kind, and uses what it has written."""

    kept: torch.Tensor
    replaced: torch.Tensor
    calls: torch.Tensor
    flags: torch.Tensor
    unsaved: torch.Tensor
    hidden: torch.Tensor
    halved: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.zeros(WIDTH))
        self.register_buffer("replaced", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("unsaved", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("hidden", torch.zeros(WIDTH))
        self.register_buffer("halved", torch.zeros(5, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        for _ in range(times):
            x = self.norm(self.first(x))
            with torch.no_grad():
                mean = x.mean(0)
                self.kept.lerp_(mean, 0.5)
                self.replaced = self.replaced * 0.5 + mean
                self.calls += (mean[0] > 0) + 1
                self.flags |= mean[:3] > 0
                self.unsaved.add_(mean)
                self.hidden.data.mul_(0.9).add_(mean)  # counts no write
                self.halved = (self.halved.float() + mean[:5]).bfloat16()
            used = self.kept + self.replaced + self.unsaved + self.hidden + self.flags.any() / (1 + self.calls)
            x = self.last((x - used).tanh()) + self.halved.float().sum()
        return x


class Shared(nn.Module):
    """Two modules with one buffer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        mean = torch.zeros(WIDTH)
        for layer in self.layers:
            layer.register_buffer("mean", mean)

    def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) - layer.mean
            with torch.no_grad():
                layer.mean.add_(x.mean(0))  # type: ignore[operator,union-attr]
        return x


def _loss(model: nn.Module, inp: dict[str, Any]) -> torch.Tensor:
    result: torch.Tensor = model(**inp).square().mean()
    return result


class Run:
    """A model and its twin under DDP, fed with what the ranks do not share."""

    def __init__(self, rank: int, model: type[nn.Module], kind: str) -> None:
        torch.manual_seed(0)
        self.generator = torch.Generator().manual_seed(rank)
        self.twins = Twins(model(), self.batch(), kind, loss=_loss, wrap={"poison": False})

    def batch(self, **more: Any) -> dict[str, Any]:
        return {"x": torch.randn(6, WIDTH, generator=self.generator), **more}

    @property
    def sides(self) -> tuple[nn.Module, nn.Module]:
        return self.twins.module, self.twins.plain

    def step(self) -> None:
        """Both step; what was added up in another order may differ by rounding, so both go on from the same weights."""
        self.twins.step()
        state = self.twins.module.state_dict()
        with torch.no_grad():
            for name, parameter in self.twins.plain.module.named_parameters():
                torch.testing.assert_close(state[name], parameter, rtol=1e-5, atol=1e-6)
                parameter.copy_(state[name])

    def same_buffers(self) -> None:
        mine, plain = (dict(side.named_buffers()) for side in (self.twins.module.module, self.twins.plain.module))
        assert list(mine) == list(plain)
        different = [name for name in plain if not torch.equal(mine[name], plain[name])]
        assert not different, different

    def micro(self, **more: Any) -> None:
        """Forward and backward of one batch."""
        inp = self.batch(**more)
        self.twins.backward(inp)
        mine, plain = self.twins.losses[-1]
        assert mine == plain, f"batch {len(self.twins.losses)}: loss {mine}, DDP has {plain}"
        self.same_buffers()

    def look(self, *, train: bool = False, inference: bool = False) -> None:
        """A forward without gradients."""
        inp = self.batch()
        for side in self.sides:
            side.train(train)
        with torch.inference_mode() if inference else torch.no_grad():
            mine, plain = (_loss(side, inp) for side in self.sides)
            assert torch.equal(mine, plain)
            self.same_buffers()
        for side in self.sides:
            side.train()


def plain_steps(run: Run) -> None:
    run.micro()


def accumulate(run: Run) -> None:
    for _ in range(4):
        run.micro()


def evaluate_between(run: Run) -> None:
    run.micro()
    run.look()
    run.look()
    run.step()
    run.look()
    run.micro()
    run.micro()


def look_in_training_mode(run: Run) -> None:
    """Writes that DDP does not take back, since the forward before ran without gradients."""
    run.micro()
    for _ in range(2):
        run.look(train=True)
    run.micro()
    run.micro()


def several_calls(run: Run) -> None:
    run.micro(times=3)
    run.micro(times=2)


def after_an_exception(run: Run) -> None:
    run.micro()
    for side in run.sides:
        with pytest.raises(RuntimeError):
            side(torch.ones(2, WIDTH + 1))
    run.micro()


STEPS: tuple[Callable[[Run], None], ...] = (
    plain_steps,
    accumulate,
    evaluate_between,
    look_in_training_mode,
    several_calls,
    after_an_exception,
)


def _as_ddp(rank: int, world_size: int, model: type[nn.Module], kind: str) -> dict[str, Any]:
    run = Run(rank, model, kind)
    for step in (*STEPS, *reversed(STEPS)):
        step(run)
        run.step()
    # Rank 0's are saved, whichever rank saves, and saving has written to none.
    state = run.twins.module.state_dict()
    inner = run.twins.module.module.state_dict()
    run.same_buffers()
    assert all(torch.equal(state[name], inner[name]) for name in inner)
    saved = {name: state[name].float().numpy() for name, _ in run.twins.plain.module.named_buffers() if name in state}
    if rank == 0:
        theirs = run.twins.plain.module.state_dict()
        assert all((theirs[name].float().numpy() == value).all() for name, value in saved.items())
    assert bool(run.twins.module.state_dict(rank0_only=True)) == (rank == 0)
    plain_steps(run)
    run.twins.step()
    run.twins.close()
    return saved


@pytest.mark.parametrize(
    ("model", "kind"), [(Running, "host"), (Running, "resident"), (Running, "mixed"), (Shared, "host")]
)
def test_bits_are_those_of_ddp_whatever_comes_between_steps(model: type[nn.Module], kind: str) -> None:
    first, second = run_ranks(2, _as_ddp, model, kind)
    assert all((first[name] == second[name]).all() for name in first)


class Growing(nn.Module):
    """A buffer whose size follows from a rank's data, and one that is expanded: with each of them DDP fails."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("wide", torch.ones(1).expand(WIDTH))

    def forward(self, x: torch.Tensor, length: int = 1) -> torch.Tensor:
        if len(self.cache) < length:  # type: ignore[arg-type]
            self.cache = torch.arange(float(length))
        return self.layer(x) * self.wide + self.cache[:length].sum()  # type: ignore[index,operator]


@on_each_rank(2)
def test_buffers_may_grow_alike_and_are_refused_on_all_ranks_where_they_do_not(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
    model = Growing()
    module = ElixirModule(model, plan_for(model, {"x": x}, "host", loss=_loss), device="cpu")
    optimizer = ElixirOptimizer(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for length in (2, 5, 3 + 4 * rank):
        take_step(optimizer, _loss(module, {"x": x, "length": length}))
    with pytest.raises(InputError, match=r"^cache differ between ranks 0 and 1 .*float32 \[5\] and .*float32 \[7\]"):
        module(x=x)
    assert module.last_report is not None
    module.close()


class Sharing(nn.Module):
    """An attribute in the memory of a weight that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.row = self.layers[1].weight.data[2]
        self.seen = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh() + self.row
        if not x.is_meta:  # while it is traced
            self.seen = self.row.clone()
        return x


@pytest.mark.parametrize("kind", ["streamed", "mixed", "resident"])
@on_each_rank(2)
def test_memory_that_is_shared_follows_weights_that_ranks_shard(rank: int, world_size: int, kind: str) -> None:
    torch.manual_seed(0)
    model = Sharing()
    inp = {"x": torch.randn(4, WIDTH)}
    plan = plan_for(model, inp, kind, loss=_loss)
    module = ElixirModule(model, plan)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = []
    for _ in range(3):
        rows.append(module.state_dict()["layers.1.weight"][2])
        take_step(optimizer, _loss(module, inp))
        assert torch.equal(model.seen, rows[-1])
    assert not torch.equal(rows[0], rows[-1])
    module.close()
    assert model.row.untyped_storage().data_ptr() == model.layers[1].weight.untyped_storage().data_ptr()
