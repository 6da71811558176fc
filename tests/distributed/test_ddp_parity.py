"""Several ranks under a plan train as DistributedDataParallel does: losses and weights after five AdamW steps."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elixir.search import simple_search
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from tests.common.ddp import LR, PLANS, Twins, batch_of, parity
from tests.common.parity import assert_as_planned, case, hf_loss
from tests.common.quantised import TORCHAO, quantised_case
from tests.common.spawn import run_ranks
from tests.common.tiny_models import FAMILIES, tiny

CHECKPOINTS = ("none", "non-reentrant", "reentrant")
FIRST = ("opt", "host", "non-reentrant")


def _in_a_smaller_group(rank: int, world_size: int) -> list[float]:
    """Ranks in pairs, each with another model; the pairs do not run alike."""
    group, _ = dist.new_subgroups(2)
    pair = rank // 2
    model = tiny("opt", seed=pair)
    inp = batch_of(model, rank, world_size)
    plan = simple_search(model, 2, 8, 0.01, shard_device="cpu", inp=inp, hardware="cpu").plan
    plain = DistributedDataParallel(copy.deepcopy(model), process_group=group)
    module = ElixirModule(model, plan, group, device="cpu", debug=Debug(poison=True))
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=LR))
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=LR)
    losses = []
    for _ in range(4 + pair):
        mine, theirs = hf_loss(module, inp), hf_loss(plain, inp)
        assert abs(mine.item() - theirs.item()) <= 1e-5 * theirs.item()
        optimizer.backward(mine)
        theirs.backward()
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
        losses.append(mine.item())
    module.close()
    return losses


@pytest.mark.slow
def test_a_group_that_is_not_the_default_one() -> None:
    losses = run_ranks(4, _in_a_smaller_group)
    assert [len(each) for each in losses] == [4, 4, 5, 5]


@pytest.mark.parametrize(
    ("family", "kind", "checkpoint"), sorted(itertools.product(FAMILIES, PLANS, CHECKPOINTS), key=FIRST.__ne__)
)
def test_two_ranks(family: str, kind: str, checkpoint: str) -> None:
    run_ranks(2, parity, family, kind, checkpoint, {})


def _others(rank: int, world_size: int, name: str, kind: str) -> dict[str, Any]:
    it = case(name)
    generator = torch.Generator().manual_seed(rank)
    inp = {
        key: value + torch.randn(value.shape, generator=generator) / 4
        if value.is_floating_point()
        else value.roll(rank)
        for key, value in it.inp.items()
    }
    # Biases before a batch norm have gradients of rounding noise alone, of which AdamW would make whole steps.
    options = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=LR)} if name == "cnn" else {}
    twins = Twins(it.model, inp, kind, loss=it.loss, **options)
    for _ in range(5):
        twins.train(2)
        for side in (twins.module, twins.plain):
            side.eval()
        with torch.no_grad():  # with the running statistics of rank 0, which DDP sends at the next forward
            mine, plain = (it.loss(side, inp).item() for side in (twins.module, twins.plain))
        assert abs(mine - plain) <= 1e-5 * abs(plain)
        for side in (twins.module, twins.plain):
            side.train()
    twins.check()
    buffers = {name: buffer.numpy().copy() for name, buffer in it.model.named_buffers()}
    twins.close()
    return buffers


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cnn", "host"),
        ("cnn", "resident"),
        ("encoder", "mixed"),
        ("attention", "host"),
        ("recurrent", "mixed"),
        ("albert", "device"),
    ],
)
def test_two_ranks_other_models(name: str, kind: str) -> None:
    first, second = run_ranks(2, _others, name, kind)
    assert all((first[buffer] == second[buffer]).all() for buffer in first)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), [(f, PLANS[i % len(PLANS)]) for i, f in enumerate((*FAMILIES, "opt"))])
def test_four_ranks(family: str, kind: str) -> None:
    # Reduce-scatter and DDP's all-reduce add four ranks up in another order. For ViT's key biases, whose gradient is
    # such rounding and nothing else (1e-10), AdamW's usual epsilon would make 7e-2 of the learning rate of it.
    run_ranks(4, parity, family, kind, "none", {"optimizer": _larger_epsilon} if family == "vit" else {})


def _larger_epsilon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, eps=1e-7)


# --- fused kernels --------------------------------------------------------------------------------------------------


# --- frozen weights in 4 bits ---------------------------------------------------------------------------------------


def _train(rank: int, world_size: int, form: str, kind: str, checkpoint: str) -> None:
    it = quantised_case(form, checkpoint)
    inp = {name: value[rank::world_size].contiguous() for name, value in it.inp.items()}
    twins = Twins(it.model, inp, kind, max_norm=0.5)
    twins.train(4)
    twins.check()
    assert_as_planned(twins.module, ("loads", "network"))
    twins.close()


FORMS = ("nf4", "nf4 double", "nf4 in bfloat16", "fp4 in float32", *TORCHAO)
QUICK = {("nf4 double", "host", "non-reentrant"), ("torchao int8", "mixed", "non-reentrant")}


@pytest.mark.parametrize(
    ("form", "kind", "checkpoint"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
        for each in itertools.product(FORMS, ("host", "mixed", "resident"), ("none", "non-reentrant"))
    ],
)
def test_steps_are_those_of_ddp(form: str, kind: str, checkpoint: str) -> None:
    pytest.importorskip("torchao" if form in TORCHAO else "bitsandbytes")
    run_ranks(2, _train, form, kind, checkpoint)


# --- optimizers of users --------------------------------------------------------------------------------------------
