"""A model under a plan on several ranks, compared with the same model in DistributedDataParallel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.models.mixtral import modeling_mixtral  # noqa: F401  slow to import; ranks are forked after it
from transformers.models.opt import modeling_opt  # noqa: F401

import elixir.tracer  # noqa: F401  the same
from elixir.access.whole import holds_others
from elixir.models.quantised import flat
from elixir.models.step import default_input
from elixir.plan.plan import Plan
from elixir.search import optimal_search, simple_search
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.debug import debugged
from tests.common.parity import hf_loss, mixed
from tests.common.tiny_models import tiny

LossFn = Callable[[nn.Module, dict[str, Any]], torch.Tensor]
LR = 1e-3
PLANS = ("host", "device", "mixed", "resident")
"""Shards on the host, shards on the device, chunks of every kind in turn, everything gathered on the device for
good."""


def batch_of(model: nn.Module, rank: int, world_size: int, *, rows: int = 2, seq: int | None = 24) -> dict[str, Any]:
    """This rank's rows of a batch that all ranks share."""
    whole = default_input(model, batch=rows * world_size, seq=seq)
    return {name: value[rank * rows : (rank + 1) * rows] for name, value in whole.items()}


def plan_for(
    model: nn.Module,
    inp: dict[str, Any],
    kind: str,
    *,
    loss: LossFn = hf_loss,
    split_number: int = 8,
    accumulation: int = 1,
    **options: Any,
) -> Plan:
    """A plan of one of `PLANS`, made on rank 0 and sent to the others."""

    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        loss(model, inp).backward()

    texts: list[str | None] = [None]
    if dist.get_rank() == 0:
        common = {"inp": inp, "step_fn": step, "hardware": "cpu"} | options
        if kind == "resident":
            memory = {"device_memory": "64GiB", "host_budget": "64GiB", "assume": "nominal"}
            plan = optimal_search(model, dist.get_world_size(), **memory, **common).plan
        else:
            plan = simple_search(
                model,
                dist.get_world_size(),
                split_number=split_number,
                allocate_factor=0.01,
                shard_device="cuda" if kind == "device" else "cpu",
                **common,
            ).plan
        plan = replace(plan, accumulation=accumulation)
        texts = [(mixed(plan) if kind == "mixed" else plan).to_json()]
    dist.broadcast_object_list(texts, src=0)
    return Plan.from_json(str(texts[0]))


class Twins:
    """One model under a plan and its copy under DDP, each with AdamW.

    Args:
        model: taken over.
        inp: this rank's batch.
        kind: of plan.
        max_norm: both sides clip to it.
        unused: some rank may leave parameters unused.
        wrap: further arguments of `ElixirModule`.
    """

    def __init__(
        self,
        model: nn.Module,
        inp: dict[str, Any],
        kind: str,
        *,
        loss: LossFn = hf_loss,
        max_norm: float | None = None,
        unused: bool = False,
        wrap: dict[str, Any] | None = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        **options: Any,
    ) -> None:
        make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=LR))
        self.inp, self.loss, self.max_norm = inp, loss, max_norm
        self.plan = plan_for(model, inp, kind, loss=loss, **options)
        plain = copy.deepcopy(model)
        # DDP broadcasts no tensor that holds others, and fails.
        names = [name for name, each in plain.named_parameters() if holds_others(each)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, names)
        self.plain = DistributedDataParallel(plain, find_unused_parameters=unused)
        self.plain_optimizer = make(self.plain.parameters())
        self.module = ElixirModule(model, self.plan, device="cpu", **debugged(wrap or {}, poison=True))
        self.optimizer = ElixirOptimizer(self.module, make(self.module.parameters()), max_norm=max_norm)
        self.losses: list[tuple[float, float]] = []

    def backward(self, inp: dict[str, Any] | None = None, scale: float = 1.0) -> None:
        """Forward and backward of both."""
        inp = self.inp if inp is None else inp
        mine, plain = self.loss(self.module, inp), self.loss(self.plain, inp)
        self.optimizer.backward(mine * scale)
        (plain * scale).backward()
        self.losses.append((mine.item(), plain.item()))

    def step(self) -> None:
        """Both optimizers step."""
        if self.max_norm:
            torch.nn.utils.clip_grad_norm_(self.plain.parameters(), self.max_norm)
        self.optimizer.step()
        self.plain_optimizer.step()
        self.optimizer.zero_grad()
        self.plain_optimizer.zero_grad()

    def train(self, steps: int = 5) -> None:
        """Trains `steps` steps on the same batch."""
        for _ in range(steps):
            self.backward()
            self.step()

    def check(self) -> None:
        """Losses within 1e-5 relative; weights within 1e-3 x LR, key biases, whose gradient is noise, within 5e-2."""
        for step, (mine, plain) in enumerate(self.losses):
            assert abs(mine - plain) <= 1e-5 * abs(plain), f"loss {step}: {mine}, DDP has {plain}"
        state = dict(part for each in self.module.state_dict().items() for part in flat(*each))
        for name, value in (part for each in self.plain.module.state_dict().items() for part in flat(*each)):
            limits = torch.full_like(value, 1e-3 * LR, dtype=torch.float32)
            if name.endswith(("k_proj.bias", "key.bias")):
                limits.fill_(5e-2 * LR)
            elif name.endswith(("c_attn.bias", "in_proj_bias")):
                limits[len(limits) // 3 : 2 * len(limits) // 3] = 5e-2 * LR
            if torch.equal(state[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)):
                continue  # packed numbers in a floating tensor may look like NaN
            apart = (state[name].float() - value.float()).abs()
            assert bool((apart <= limits).all()), f"{name} differs by up to {apart.max().item():g}"

    def finish(self) -> None:
        """Checks, and stops lanes and groups."""
        self.check()
        self.close()

    def close(self) -> None:
        """Stops lanes and groups."""
        self.module.close()


def steady_adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW where both sides round in another order (norms of shards, sums of micro-batches): the usual epsilon would
    blow the last bit of gradients that all but vanish up to a hundredth of the learning rate."""
    return torch.optim.AdamW(parameters, lr=LR, eps=1e-6)


def parity(rank: int, world_size: int, family: str, kind: str, checkpoint: Any, options: dict[str, Any]) -> None:
    """Five steps of a Hugging Face family, compared."""
    model = tiny(family, checkpoint=checkpoint, layers=2)
    inp = batch_of(model, rank, world_size, seq=None if family == "vit" else 24)
    twins = Twins(model, inp, kind, **options)
    twins.train()
    twins.finish()
