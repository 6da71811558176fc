"""Gradients that are dropped or asked for one by one, and views that outlive their module, on several ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.common import inside
from tests.common.ddp import Twins, batch_of, steady_adamw
from tests.common.parity import report_of
from tests.common.spawn import on_each_rank, run_ranks
from tests.common.tiny_models import tiny
from tests.unit.access import test_views as views


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def _views(rank: int, world_size: int, kind: str, names: list[str], wrap: dict[str, Any]) -> None:
    for name in names:
        it = views.case_of(getattr(views, name))
        inp = {"input": torch.randn(views.WIDTH, views.WIDTH, generator=torch.Generator().manual_seed(rank))}
        unused = name in ("unpacked_and_returned", "of_a_view_of_the_data")
        twins = Twins(it.model, inp, kind, loss=it.loss, split_number=12, optimizer=_sgd, wrap=wrap, unused=unused)
        twins.train(3)
        twins.check()
        report = report_of(twins.module)
        assert report.deviations == 0, name
        twins.close()


_FORWARDS = [forward.__name__ for forward in views.FORWARDS]


@pytest.mark.parametrize(
    ("kind", "every", "wrap"), [("host", 3, {}), ("host", 1, {}), ("mixed", 1, {"evict_always": True})]
)
def test_views_that_outlive_their_module(kind: str, every: int, wrap: dict[str, Any]) -> None:
    run_ranks(2, _views, kind, _FORWARDS[::every], wrap)


def _drop(twins: Twins, start: int, by: int = 2) -> None:
    for side in (twins.module, twins.plain):
        for parameter in list(side.parameters())[start::by]:
            parameter.grad = None


@pytest.mark.parametrize("kind", ["host", "mixed", "resident"])
@on_each_rank(2)
def test_dropping_single_gradients(rank: int, world_size: int, kind: str) -> None:
    """Every other gradient is dropped after the first backward: nothing, one or two more follow."""
    model = tiny("gpt2", layers=1)
    twins = Twins(model, batch_of(model, rank, world_size), kind, split_number=3, optimizer=steady_adamw)
    for step in range(6):
        twins.backward()
        _drop(twins, step % 2)
        assert inside.holds_gradients(twins.module)
        for _ in range(step % 3):
            twins.backward()
        twins.optimizer.step()
        twins.plain_optimizer.step()
        _drop(twins, 0, by=1)  # as good as zero_grad
        assert not inside.holds_gradients(twins.module)
    twins.finish()


@pytest.mark.parametrize(
    ("kind", "checkpoint"), [("host", "non-reentrant"), ("mixed", "none"), ("mixed", "non-reentrant")]
)
@on_each_rank(2)
def test_gradients_of_some_weights(rank: int, world_size: int, kind: str, checkpoint: Any) -> None:
    model = tiny("gpt2", checkpoint=checkpoint)
    twins = Twins(model, batch_of(model, rank, world_size), kind, optimizer=steady_adamw)
    plain = twins.plain.module
    names = [name for name, parameter in plain.named_parameters() if parameter.ndim > 1][::2]
    for _ in range(3):
        found = []
        for side, inner in ((twins.module, twins.module.module), (plain, plain)):
            asked = [inner.get_parameter(name) for name in names]
            found.append(torch.autograd.grad(twins.loss(side, twins.inp), asked))
        # This rank's own, as in the model that DDP wraps.
        assert all(torch.allclose(mine, theirs, rtol=1e-4, atol=1e-7) for mine, theirs in zip(*found, strict=True))
        assert not inside.holds_gradients(twins.module)
        loss = twins.loss(twins.module, twins.inp)
        loss.backward(inputs=[twins.module.module.get_parameter(name) for name in names])
        twins.loss(plain, twins.inp).backward(inputs=[plain.get_parameter(name) for name in names])
        for name in names:
            gradient = plain.get_parameter(name).grad
            assert gradient is not None
            dist.all_reduce(gradient)
            gradient /= world_size
        twins.step()
        twins.train(1)
    twins.finish()


@pytest.mark.parametrize(("kind", "wrap"), [("host", {}), ("mixed", {"reduce_always_fp32": True})])
@on_each_rank(2)
def test_the_norm_is_summed_on_the_way(rank: int, world_size: int, kind: str, wrap: dict[str, Any]) -> None:
    """One batch, several, and with gradients dropped in between; the norm is asked for each time."""
    model = tiny("gpt2", layers=1)
    twins = Twins(model, batch_of(model, rank, world_size), kind, split_number=3, optimizer=steady_adamw, wrap=wrap)
    shards = inside.gradients(twins.module).by_chunk
    twins.optimizer.max_norm = 0.3  # the twin is clipped below
    for batches, dropped in ((1, False), (3, False), (2, False), (2, True), (1, True)):
        for batch in range(batches):
            if dropped and batch == batches - 1:
                _drop(twins, batch)
            twins.backward()
        hosted = [
            shards[c.index] for c in inside.chunks(twins.module) if c.plan.trainable and c.plan.state_home == "host"
        ]
        assert all(shard.norms is not None for shard in hosted), "summed on the way"
        mine = twins.optimizer.clip_grad_norm_(0.3)
        plain = torch.nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.3)
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=0.0)
        twins.optimizer.step()
        twins.plain_optimizer.step()
        twins.optimizer.zero_grad()
        twins.plain_optimizer.zero_grad()
    twins.finish()
