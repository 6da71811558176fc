"""Low precision: the bits of a reference with float32 master weights that is written here, and the loss scale."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from elixir.kernels import HybridAdam
from elixir.search import optimal_search
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from elixir.wrapper.step.rules import AdamRule
from tests.common import gpu, inside
from tests.common.parity import MODES, Case, LossFn, Pair, case, hf_loss, make_plan, take_step
from tests.common.twins import step_alike

STEPS = 10


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Parameters and floating buffers in `dtype`."""
    return model.to(dtype)


Adam = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


def plain(given: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(given, lr=1e-3, weight_decay=0.1)


def fused(given: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(given, lr=1e-3, weight_decay=0.1, fused=True)


def hybrid(given: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return HybridAdam(given, lr=1e-3, weight_decay=0.1)


class Reference:
    """Plain PyTorch with one float32 master per parameter."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, scale: float, max_norm: float, adam: Adam = plain) -> None:
        model = model.to(gpu.DEVICE)
        self._names = [name for name, _ in model.named_parameters()]
        self.masters = [p.detach().clone().requires_grad_(p.requires_grad) for p in model.parameters()]
        self.model, self.scale, self.max_norm = cast(model, dtype), scale, max_norm
        self.parameters = list(self.model.parameters())
        self.optimizer = adam(self.masters)

    def step_like(self, module: ElixirModule) -> None:
        """Steps each master on the kind of device that the plan of `module` has it stepped on."""
        step_alike(self.optimizer, module, dict(zip(self._names, self.masters, strict=True)))

    def step(self, *batches: dict[str, Any], loss: LossFn = hf_loss) -> torch.Tensor:
        for inp in batches:
            found = loss(self.model, gpu.there(inp))
            (found * self.scale).backward()
        factor = 1 / self.scale
        if self.max_norm:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            norms = torch.stack(torch._foreach_norm(gradients, 2.0, dtype=torch.float32))
            factor *= min(1.0, (self.max_norm / (norms.norm() / self.scale + 1e-6)).item())
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float() * factor
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)
                parameter.grad = None
        return found


def wrapped(
    it: Case, mode: str, dtype: torch.dtype, *, adam: Adam = plain, **options: Any
) -> tuple[ElixirModule, ElixirOptimizer]:
    module = ElixirModule(
        it.model, make_plan(it, mode, unified_dtype=dtype), dtype=dtype, device=gpu.DEVICE, debug=Debug(poison=True)
    )
    return module, ElixirOptimizer(module, adam(module.parameters()), **options)


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("max_norm", [0.0, 0.05])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("adam", [plain, fused, hybrid])
def test_same_bits_as_with_master_weights(adam: Adam, mode: str, dtype: torch.dtype, max_norm: float) -> None:
    it = case("opt")
    scale = 1024.0 if dtype == torch.float16 else 1.0
    reference = Reference(copy.deepcopy(it.model), dtype, scale, max_norm, adam)
    module, optimizer = wrapped(it, mode, dtype, initial_scale=1024.0, max_norm=max_norm, adam=adam)
    reference.step_like(module)
    in_one_pass = any(isinstance(shard.rule, AdamRule) for shard in inside.shards(module))
    for _ in range(STEPS):
        loss = hf_loss(module, it.inp)
        take_step(optimizer, loss)
        assert torch.equal(loss, reference.step(it.inp))
    assert optimizer.loss_scale == scale
    state = module.state_dict()
    for name, value in reference.model.state_dict().items():
        assert torch.equal(state[name].to(dtype), value.cpu()), name
    assert in_one_pass == (adam is not plain and mode != "resident")


def test_the_loss_scale_grows_after_steps_without_overflow() -> None:
    it = case("opt", layers=1)
    module, optimizer = wrapped(it, "streamed", torch.float16, initial_scale=64.0, growth_interval=3)
    scales = []
    for _ in range(6):
        take_step(optimizer, hf_loss(module, it.inp))
        scales.append(optimizer.loss_scale)
    assert scales == [64, 64, 128, 128, 128, 256]


def test_outputs_are_cast_where_asked() -> None:
    it = case("opt", layers=1)
    plan = make_plan(it, "streamed", unified_dtype=torch.bfloat16)
    module = ElixirModule(it.model, plan, device=gpu.DEVICE, output_fp32=True)
    output = module(**it.inp)
    assert output.logits.dtype == output.loss.dtype == torch.float32
    output.loss.backward()


@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_float64_on_the_cpu_has_the_bits_of_plain_training(mode: str) -> None:
    it = case("opt", layers=1)
    it.model.double()
    with Pair(it, make_plan(it, mode), max_norm=0.05) as pair:
        assert {chunk.dtype for chunk in pair.plan.chunks} == {"float64"}
        pair.train(3)
    plan = optimal_search(
        it.model, 1, inp=it.inp, step_fn=lambda m, i: it.loss(m, i).backward(), hardware="cpu", device_memory="1GiB",
        host_budget="1GiB",
    ).plan  # fmt: skip
    assert plan.predicted.seconds["total"] > 0
