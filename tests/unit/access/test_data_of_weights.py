"""Writes through ``data`` of a weight that stays on the device are not lost, nor is what is set as its ``data``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from elixir.access.counted_parameter import CountedParameter
from elixir.errors import InputError
from elixir.plan.plan import Plan
from elixir.wrapper import ElixirModule
from tests.common import gpu
from tests.common.parity import Case, Pair, make_plan, square_loss

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


def test_a_gradient_with_a_loss_scale_is_read_by_all_but_what_clips() -> None:
    parameter = CountedParameter(torch.ones(2))
    parameter.elixir_gradient_is_scaled = True
    nn.utils.clip_grad_norm_([parameter], 1.0)  # there is none
    parameter.grad = given = torch.ones(2)
    for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
        with pytest.raises(InputError, match="gradients carry the loss scale"):
            clip([parameter], 1.0)
    assert torch.equal(parameter.grad, given)
    parameter.elixir_gradient_is_scaled = False
    nn.utils.clip_grad_norm_([parameter], 0.5)
    assert float(parameter.grad.norm()) == pytest.approx(0.5)


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
