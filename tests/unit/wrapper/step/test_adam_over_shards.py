"""`use_fused_kernels=True`: Adam over whole shards in one pass, the same rule to rounding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from elixir.errors import InputError
from elixir.kernels import HybridAdam
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from elixir.wrapper.step.rules import AdamRule
from tests.common import gpu, inside
from tests.common.parity import Case, case, make_plan, mixed, report_of, square_loss

STEPS = 10
LR = 1e-3


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Norms and biases without decay and with another rate, so that stretches of one group are short."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0, "lr": LR / 2}]


OPTIMIZERS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=LR, weight_decay=0.1),
    "groups": lambda model: torch.optim.AdamW(groups(model), lr=LR, betas=(0.8, 0.95)),
    "HybridAdam": lambda model: HybridAdam(model.parameters(), lr=LR, weight_decay=0.1),
}


def wrapped(it: Case, mode: str, make: Any, **options: Any) -> tuple[ElixirModule, ElixirOptimizer]:
    plan = make_plan(it, mode, unified_dtype=options.pop("dtype", None))
    module = ElixirModule(it.model, plan, device=gpu.DEVICE, debug=Debug(poison=True), use_fused_kernels=True)
    return module, ElixirOptimizer(module, make(module.module), **options)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("mode", ["streamed", "mixed"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_follows_torch_to_rounding(name: str, mode: str) -> None:
    it = case("bert")  # has parameters without a gradient
    plain = copy.deepcopy(it.model)
    theirs = OPTIMIZERS[name](plain)
    module, optimizer = wrapped(it, mode, OPTIMIZERS[name], max_norm=1.0)
    assert (
        sum(isinstance(part.rule, AdamRule) for part in inside.shards(module)) >= len(list(inside.shards(module))) // 2
    )
    schedulers = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, STEPS) for o in (optimizer, theirs)]
    for step in range(STEPS):
        losses = [it.loss(model, it.inp) for model in (module, plain)]
        assert abs(losses[0] - losses[1]) < 1e-5 * losses[1]
        for loss in losses:
            loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for stepping in (optimizer, theirs, *schedulers):
            stepping.step()
        optimizer.zero_grad()
        theirs.zero_grad()
        if step == 4:
            module.rehome(mixed(module.plan))
    state = module.state_dict()
    for key, value in plain.state_dict().items():
        if value.is_floating_point() and not key.endswith("key.bias"):  # their gradient is rounding noise
            assert (state[key] - value).norm() <= 1e-5 * value.norm() + 1e-3 * LR * value.numel() ** 0.5, key


def test_saved_options_that_cannot_be_fused_are_refused() -> None:
    module, optimizer = wrapped(case("opt", layers=1), "streamed", OPTIMIZERS["AdamW"])
    state = optimizer.state_dict()
    state["param_groups"][0]["amsgrad"] = True
    with pytest.raises(
        InputError, match=r"\(amsgrad=True\) are none with which Adam steps over whole shards; load them"
    ):
        optimizer.load_state_dict(state)
    module.close()


@pytest.mark.parametrize("mode", ["streamed", "resident"])
@pytest.mark.parametrize("moments", ["bfloat16", "8bit", "float32"])
def test_several_optimizers_take_as_much_memory_as_one_and_give_its_bits(moments: str, mode: str) -> None:
    ends = []
    for number in (1, 2, 4):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
        it = Case(model, {"input": torch.randn(3, 32)}, square_loss)
        plan = make_plan(it, mode, split_number=2, moments=moments)
        assert max(len(chunk.parameters) for chunk in plan.chunks) > 2
        module = ElixirModule(model, plan, device=gpu.DEVICE, use_fused_kernels=True, debug=Debug(poison=True))
        parameters = list(model.parameters())
        parts = [parameters[index::number] for index in range(number)]
        optimizers = [ElixirOptimizer(module, torch.optim.AdamW(part, lr=LR)) for part in parts]
        for _ in range(3):
            optimizers[0].backward(it.loss(module, gpu.there(it.inp)))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        report = report_of(module)
        for what in ("host_peak", "device_buffers"):
            assert report.observed[what] <= 1.002 * report.predicted[what], (number, what)
        states = [state for optimizer in optimizers for state in optimizer.state_dict()["state"].values()]
        by_size = sorted(float(state["exp_avg"].double().norm()) for state in states)
        ends.append((module.state_dict(), by_size, report.observed["host_peak"], report.observed["device_buffers"]))
        module.close()
    for weights, *others in ends[1:]:
        assert others == list(ends[0][1:])
        assert all(torch.equal(value, ends[0][0][name]) for name, value in weights.items())
