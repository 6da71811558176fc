"""Gradients that are dropped or asked for one by one, and views that outlive their module, on several ranks alike."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elixir.errors import InputError
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


@pytest.mark.parametrize("alone", [False, True], ids=["averaged", "not yet averaged"])
@pytest.mark.parametrize("kind", ["host", "mixed", "resident"])
@on_each_rank(2)
def test_dropping_single_gradients(rank: int, world_size: int, kind: str, alone: bool) -> None:
    """Every other gradient is dropped after the first backward: nothing, one or two more follow."""
    model = tiny("gpt2", layers=1)
    twins = Twins(model, batch_of(model, rank, world_size), kind, split_number=3, optimizer=steady_adamw)
    for step in range(6):
        if alone:
            with twins.module.no_sync(), twins.plain.no_sync():
                twins.backward()
        else:
            twins.backward()
        _drop(twins, step % 2)
        assert inside.holds_gradients(twins.module)
        for _ in range(max(int(alone), step % 3)):
            twins.backward()
        twins.optimizer.step()
        twins.plain_optimizer.step()
        _drop(twins, 0, by=1)  # as good as zero_grad
        assert not inside.holds_gradients(twins.module)
    twins.finish()


@pytest.mark.slow
@on_each_rank(2)
def test_a_step_after_all_were_dropped_changes_nothing(rank: int, world_size: int) -> None:
    """A gradient that is dropped on all ranks is as if it had never come: a step changes nothing, and all go on
    alike."""
    model = tiny("gpt2", layers=1)
    twins = Twins(model, batch_of(model, rank, world_size), "mixed", optimizer=steady_adamw)
    twins.train(2)
    before = twins.module.state_dict()
    for alone in (False, True):
        with twins.module.no_sync() if alone else contextlib.nullcontext():
            twins.optimizer.backward(twins.loss(twins.module, twins.inp))
        for parameter in twins.module.parameters():
            del parameter.grad
        twins.optimizer.step()
    after = twins.module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    twins.train(2)
    twins.finish()


@pytest.mark.parametrize("kind", ["host", "mixed"])
@on_each_rank(2)
def test_hooks_that_drop_gradients(rank: int, world_size: int, kind: str) -> None:
    """Hooks drop gradients the moment they come; the ranks' data still differ."""
    model = tiny("gpt2", layers=1)
    twins = Twins(model, batch_of(model, rank, world_size), kind, split_number=3, optimizer=steady_adamw)
    for parameter in list(twins.module.parameters())[::3]:
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    for _ in range(4):
        twins.backward()
        for parameter in list(twins.plain.parameters())[::3]:  # DDP reduces first
            parameter.grad = None
        twins.step()
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


def _between_layers(side: nn.Module, inner: Any, inp: dict[str, Any]) -> torch.Tensor:
    """The gradient of one activation with respect to another, neither of them an output of the model."""
    hidden: list[torch.Tensor] = []
    handles = [
        layer.mlp.register_forward_hook(lambda module, args, output: hidden.append(output) and None)
        for layer in inner.transformer.h
    ]
    side(**inp)
    for handle in handles:
        handle.remove()
    return torch.autograd.grad(hidden[1].square().sum(), hidden[0])[0]


@pytest.mark.parametrize("kind", ["host", "mixed"])
@on_each_rank(2)
def test_backwards_that_begin_in_the_middle(rank: int, world_size: int, kind: str) -> None:
    model = tiny("gpt2")
    twins = Twins(model, batch_of(model, rank, world_size), kind, optimizer=steady_adamw)
    for _ in range(3):
        mine = _between_layers(twins.module, twins.module.module, twins.inp)
        plain = _between_layers(twins.plain.module, twins.plain.module, twins.inp)
        assert torch.allclose(mine, plain, rtol=1e-4, atol=1e-7)
        assert not any(chunk.pins for chunk in inside.chunks(twins.module))
        twins.train(1)
    twins.finish()


@on_each_rank(2)
def test_backward_and_writes_inside_gathered(rank: int, world_size: int) -> None:
    model = tiny("gpt2")
    twins = Twins(model, batch_of(model, rank, world_size), "mixed", optimizer=steady_adamw)
    for _ in range(2):
        losses = [twins.loss(side, twins.inp) for side in (twins.module, twins.plain)]
        with twins.module.gathered(write=True):
            losses[0].backward()
            for parameter, plain in zip(twins.module.parameters(), twins.plain.parameters(), strict=True):
                assert torch.allclose(parameter.detach(), plain.detach(), rtol=1e-4, atol=1e-6)
            with torch.no_grad():
                for parameter in twins.module.parameters():
                    parameter.mul_(1.25)
        losses[1].backward()
        with torch.no_grad():
            for parameter in twins.plain.parameters():
                parameter.mul_(1.25)
        twins.backward()
        twins.step()
    twins.finish()


@on_each_rank(2)
def test_writes_inside_gathered_for_reading_are_refused_or_undone(rank: int, world_size: int) -> None:
    model = tiny("gpt2")
    twins = Twins(model, batch_of(model, rank, world_size), "mixed")
    twins.train(1)
    before = twins.module.state_dict()
    with twins.module.gathered(), torch.no_grad():
        for parameter in twins.module.parameters():
            parameter.data.add_(1)
            with pytest.raises(InputError, match="write=True"):
                parameter.add_(1)
    after = twins.module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    twins.train(2)
    twins.finish()


@pytest.mark.parametrize(("kind", "wrap"), [("host", {}), ("mixed", {"reduce_always_fp32": True})])
@on_each_rank(2)
def test_the_norm_is_summed_on_the_way(rank: int, world_size: int, kind: str, wrap: dict[str, Any]) -> None:
    """Batches alone, together, and with gradients dropped in between; the norm is asked for each time."""
    model = tiny("gpt2", layers=1)
    twins = Twins(model, batch_of(model, rank, world_size), kind, split_number=3, optimizer=steady_adamw, wrap=wrap)
    shards = inside.gradients(twins.module).by_chunk
    twins.optimizer.max_norm = 0.3  # the twin is clipped below
    for alone, together, dropped in ((0, 1, False), (2, 1, False), (0, 2, False), (0, 2, True), (0, 1, True)):
        for _ in range(alone):
            with twins.module.no_sync(), twins.plain.no_sync():
                twins.backward()
        for batch in range(together):
            if dropped and batch == together - 1:
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
