"""Several ranks on CUDA, over NCCL, train as DistributedDataParallel does: on pretended devices, a process each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from tests.common.ddp import LR, PLANS, batch_of, plan_for
from tests.common.gpu import needs_pretended_gpu
from tests.common.parity import hf_loss
from tests.common.spawn import on_each_rank
from tests.common.tiny_models import tiny
from tests.cuda_emulator import install_nccl

pytestmark = [needs_pretended_gpu, pytest.mark.slow]  # compiles a process group, too

STEPS = 3


@pytest.mark.parametrize("kind", PLANS)
@on_each_rank(2)
def test_ranks_train_as_under_ddp(rank: int, world_size: int, kind: str) -> None:
    install_nccl()
    # The default group is one over gloo, of tensors on the CPU: chunks have to travel in one like that which is given.
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    model = tiny("opt")
    inp = batch_of(model, rank, world_size)
    plan = plan_for(model, inp, kind)
    plain: Any = DistributedDataParallel(copy.deepcopy(model))
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=LR)
    module = ElixirModule(model, plan, group, device="cuda", debug=Debug(poison=True))
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=LR), max_norm=1.0)
    there = {name: value.cuda() for name, value in inp.items()}
    for _ in range(STEPS):
        mine, theirs = hf_loss(module, there), hf_loss(plain, inp)
        assert mine.is_cuda
        assert mine.item() == pytest.approx(theirs.item(), rel=1e-5)
        optimizer.backward(mine)
        theirs.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for stepping in (optimizer, plain_optimizer):
            stepping.step()
            stepping.zero_grad()
    state = module.state_dict()
    for name, value in plain.module.state_dict().items():
        # Adam moves a gradient that is rounding noise, as that of keys' biases is, by as much as any other.
        limit = STEPS * LR if name.endswith("k_proj.bias") else 0.05 * LR
        assert float((state[name].cpu() - value).abs().max()) <= limit, name
    module.close()
