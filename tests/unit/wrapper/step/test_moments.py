"""Adam's moments in fewer bits: a plan says so, its bytes are exact, and the run steps with them wherever they live."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from elixir.errors import InputError, InputTypeError
from elixir.kernels.adam.adam_rule import AdamOptions
from elixir.kernels.adam.moments import make_moments
from elixir.kernels.adam.step import adam_step
from elixir.plan.plan import Plan
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from elixir.wrapper.step.rules import AdamRule
from tests.common import gpu, inside
from tests.common.parity import MODES, Case, case, distance, make_plan, rehomed, take_step

LOW = ("bfloat16", "8bit")
KINDS = ("float32", *LOW)
LR = 1e-3


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Two groups, so that neighbours in a shard, and in a block, are of different ones."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": other, "lr": LR / 2}], lr=LR)


class Run:
    """A model under a plan with so many bits of moments."""

    def __init__(self, it: Case, plan: Plan, make: Any = adamw, **options: Any) -> None:
        self.case = it
        self.module = ElixirModule(it.model, plan, device=gpu.DEVICE, debug=Debug(poison=True), **options)
        self.optimizer = ElixirOptimizer(self.module, make(self.module.module))

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = self.case.loss(self.module, self.case.inp)
            take_step(self.optimizer, loss)
            losses.append(loss.item())
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.module.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(value, other[name]) for name, value in one.items())


@functools.cache
def _losses_of_20_steps(moments: str) -> list[float]:
    it = case("opt")
    run = Run(it, make_plan(it, "mixed", moments=moments))
    losses = run.train(20)
    run.module.close()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOW)
def test_20_steps_end_near_those_of_float32(kind: str) -> None:
    losses = {moments: _losses_of_20_steps(moments) for moments in ("float32", kind)}
    assert losses["float32"][-1] < 0.9 * losses["float32"][0]
    for one, other in zip(losses["float32"], losses[kind], strict=True):
        assert abs(one - other) < (2e-3 if kind == "bfloat16" else 2e-2) * one
    assert losses["float32"][3:] != losses[kind][3:]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", LOW)
@pytest.mark.parametrize("family", ["opt", "bert"])  # bert has parameters without a gradient
def test_homes_change_no_bit_nor_does_moving_between_them(kind: str, family: str) -> None:
    plan = make_plan(case(family), "streamed", moments=kind)
    ends = []
    for start in MODES:
        run = Run(case(family), rehomed(plan, start))
        run.train(6)
        ends.append(run.weights())
        run.module.close()
    moved = Run(case(family), rehomed(plan, "streamed"))
    for mode in ("resident", "mixed", "streamed"):
        moved.train(2)
        moved.module.rehome(rehomed(plan, mode))
    ends.append(moved.weights())
    assert all(isinstance(part.rule, AdamRule) for part in inside.shards(moved.module))
    moved.module.close()
    for end in ends[1:]:
        if gpu.DEVICE == "cpu":
            assert same(ends[0], end)
        else:  # its kernels round otherwise than those of the host: up to 1e-5 on the pretended device
            assert distance([end[name] for name in ends[0]], list(ends[0].values())) < 1e-3


def test_searches_refuse_what_makes_no_sense() -> None:
    it = case("opt", layers=1)
    for options, error, words in (
        ({"moments": "8bits"}, InputError, "did you mean"),
        ({"moments": torch.bfloat16}, InputTypeError, "'bfloat16'"),
        ({"moments": "8bit", "optimizer_type": "SGD"}, InputError, "Adam and AdamW"),
    ):
        with pytest.raises(error, match=words):
            make_plan(it, "streamed", **options)
    wide = Case(torch.nn.Linear(4, 4).double(), {"input": torch.randn(2, 4).double()}, lambda m, i: m(**i).sum())
    with pytest.raises(InputError, match="float64"):
        make_plan(wide, "streamed", moments="8bit")


def test_a_part_of_a_block_leaves_the_rest_of_it_alone() -> None:
    moments = make_moments(256, "8bit")
    master, gradient = torch.zeros(256), torch.linspace(-1, 1, 256)
    adam_step(gradient, master, None, moments, AdamOptions(), 1)
    before = [tensor.clone() for tensor in moments.tensors()]
    rest, middle = torch.cat([torch.arange(100), torch.arange(150, 256)]), slice(100, 150)
    adam_step(gradient[middle] * 1e-3, master[middle], None, moments, AdamOptions(), 2, at=100)
    avg, avg_scale, square, square_scale = moments.tensors()
    assert torch.equal(avg[rest], before[0][rest])
    assert torch.equal(square[rest], before[2][rest])
    assert torch.equal(avg_scale, before[1])  # its largest is not among the 50
    assert torch.equal(square_scale, before[3])
    assert not torch.equal(avg[middle], before[0][middle])
    with pytest.raises(InputError, match="at element 200"):
        adam_step(gradient[:100], master[:100], None, moments, AdamOptions(), 3, at=200)
