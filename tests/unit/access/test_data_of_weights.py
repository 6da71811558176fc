"""Writes through ``data`` of a weight that stays on the device are not lost, nor is what is set as its ``data``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from elixir import save_checkpoint
from elixir.checkpoint_format.slice_reader import open_checkpoint
from elixir.errors import InputError
from elixir.plan.plan import Plan
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import gpu
from tests.common.parity import Case, Pair, adamw, make_plan, square_loss, take_step

FACTOR = 1.03125  # exact in bfloat16
Write = Callable[[list[nn.Parameter]], object]


class Net(nn.Module):
    """Linear layers and a weight without dimensions, which is stepped as a copy even where others are plain."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            input = input + layer(input.to(layer.weight.dtype)).tanh()
        return input * self.scale


def _case() -> Case:
    torch.manual_seed(0)
    return Case(Net(), {"input": torch.randn(4, 8)}, square_loss)


def _plan(it: Case, state_home: str = "device", *, early: bool = False, **options: Any) -> Plan:
    plan = make_plan(it, "resident", **options)
    home = {
        "resident": True,
        "weight_home": "device",
        "state_home": state_home,
        "update": "early" if early else "after_norm",
    }
    chunks = tuple(replace(chunk, **home) for chunk in plan.chunks)  # type: ignore[arg-type]
    return replace(plan, chunks=chunks, may_update_early=early)


def _assign(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data = parameter.data * FACTOR


WRITES: dict[str, Write] = {
    "assigned": _assign,
    "data": lambda ps: [p.data.mul_(FACTOR) for p in ps],
    "view": lambda ps: [p.data.view(-1).mul_(FACTOR) for p in ps],
    "several at once": lambda ps: torch._foreach_mul_([p.data for p in ps], FACTOR),
    "copied over": lambda ps: [p.data.copy_(p.data * FACTOR) for p in ps],
}


def _inference(write: Write) -> Write:
    def written(parameters: list[nn.Parameter]) -> None:
        with torch.inference_mode():
            write(parameters)

    return written


WRITES["without a count"] = _inference(WRITES["data"])


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("between", [False, True], ids=["before the forward", "after backward"])
@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("home", ["device", "host", "early", "disk"])
def test_writes_through_data_have_the_bits_of_plain_pytorch(
    home: str, how: str, between: bool, look: bool, tmp_path: Any
) -> None:
    it = _case()
    plan = _plan(it, "host" if home == "early" else home, early=home == "early")
    options = {"disk_folder": tmp_path} if home == "disk" else {}
    with Pair(it, plan, **options) as pair:
        pair.train(2)
        if between:
            pair.backward()
        mine, plain = (list(model.parameters()) for model in (pair.module.module, pair.plain))
        if how == "assigned" and home != "device":
            with pytest.raises(InputError, match=r"\.data .* parameter\.copy_"):
                WRITES[how](mine)
            return
        WRITES[how](mine)
        WRITES[how](plain)
        if look:
            pair.assert_same_weights()
        if between:
            pair.step()
        pair.train(2)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", WRITES)
def test_masters_follow_as_they_follow_a_write_to_the_weight(how: str, fused: bool) -> None:
    states = []
    for write in (lambda ps: [p.mul_(FACTOR) for p in ps], WRITES[how]):
        it = _case()
        module = ElixirModule(
            it.model, _plan(it, unified_dtype=torch.bfloat16), use_fused_kernels=fused, device=gpu.DEVICE
        )
        optimizer = ElixirOptimizer(module, adamw(module.module))
        inp = gpu.there(it.inp, module.device)
        for step in range(3):
            if step == 1:
                with torch.no_grad():
                    write(list(module.module.parameters()))
            take_step(optimizer, square_loss(module, inp))
        states.append(module.state_dict())
        module.close()
        assert all(type(parameter) is nn.Parameter for parameter in it.model.parameters())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_swapped_in_by_assignment_are_read_and_come_back(dtype: torch.dtype) -> None:
    """The memory before, which somebody keeps, must not change while others look at the weights."""
    it = _case()
    plan, moved = (_plan(it, home, unified_dtype=dtype) for home in ("device", "host"))
    module = ElixirModule(it.model, plan, device=gpu.DEVICE)
    optimizer = ElixirOptimizer(module, adamw(module.module))
    take_step(optimizer, square_loss(module, gpu.there(it.inp, module.device)))
    before = module.state_dict()
    parameters = list(module.module.parameters())
    kept = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = torch.full_like(parameter, 0.5)
    assert all((value == 0.5).all() for value in module.state_dict().values())
    with module.gathered():
        assert all((parameter == 0.5).all() for parameter in parameters)
    assert all((parameter == 0.5).all() for parameter in parameters)
    for parameter, data in zip(parameters, kept, strict=True):
        parameter.data = data
    after = module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for parameter in parameters:
        parameter.data = torch.full_like(parameter, 0.25)
    module.rehome(moved)
    assert all((value == 0.25).all() for value in module.state_dict().values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [False, True])
def test_two_weights_may_exchange_their_memory(dtype: torch.dtype, steps: bool, tmp_path: Any) -> None:
    it = _case()
    module = ElixirModule(it.model, _plan(it, unified_dtype=dtype), device=gpu.DEVICE)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(module.parameters(), lr=0.0))
    first, second = (layer.weight for layer in module.module.layers[:2])
    values = first.detach().clone(), second.detach().clone()
    first.data, second.data = second.data, first.data
    if steps:
        take_step(optimizer, square_loss(module, gpu.there(it.inp, module.device)))
    save_checkpoint(tmp_path / "saved", {"model": module, "optimizer": optimizer}, wait=True)
    with open_checkpoint(tmp_path / "saved") as saved:
        weights = saved.weights()
        assert torch.equal(weights["layers.0.weight"].to(dtype), values[1].cpu())
        assert torch.equal(weights["layers.1.weight"].to(dtype), values[0].cpu())
    model = module.release()
    assert torch.equal(model.layers[0].weight.to(dtype), values[1].cpu())
    assert torch.equal(model.layers[1].weight.to(dtype), values[0].cpu())


def test_other_values_than_the_plan_has_are_refused_by_the_step() -> None:
    it = _case()
    module = ElixirModule(it.model, _plan(it, unified_dtype=torch.bfloat16), device=gpu.DEVICE)
    optimizer = ElixirOptimizer(module, adamw(module.module))
    weight = module.module.layers[1].weight
    optimizer.backward(square_loss(module, gpu.there(it.inp, module.device)))
    weight.data = weight.data.float()
    with pytest.raises(InputError, match=r"layers\.1\.weight was given"):
        optimizer.step()
    weight.data = weight.data.bfloat16()


class Router(nn.Module):
    """Casts its weights to the dtype that they have in every forward, as those of Switch and NLLB-MoE do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.layer = self.layer.to(torch.float32)
        self.layer.weight.data = self.layer.weight.data
        return input + self.layer(input).tanh()


@pytest.mark.parametrize("mode", ["streamed", "mixed", "resident"])
def test_setting_the_memory_that_is_there_changes_nothing(mode: str) -> None:
    torch.manual_seed(0)
    it = Case(nn.Sequential(*(Router() for _ in range(4))), {"input": torch.randn(4, 8)}, square_loss)
    with Pair(it, make_plan(it, mode)) as pair:
        pair.train(2)
        weight = pair.module.module[1].layer.weight
        weight.data = weight
        pair.train(1)
        pair.backward()  # the second finds gradients of the first, which `to` looks for
        pair.backward()
        pair.step()


def test_a_copy_of_a_part_of_the_model_is_an_ordinary_one() -> None:
    it = _case()
    module = ElixirModule(it.model, _plan(it, unified_dtype=torch.bfloat16), device=gpu.DEVICE)
    layer = module.module.layers[0]
    copied = copy.deepcopy(layer.weight)
    assert type(copied) is nn.Parameter
    assert torch.equal(copied, layer.weight)
