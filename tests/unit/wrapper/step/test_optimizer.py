"""`ElixirOptimizer`: arguments, refusals and attributes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import InputError, InputTypeError
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import gpu, inside
from tests.common.parity import Pair, case, hf_loss, make_plan


@pytest.fixture
def module() -> Iterator[ElixirModule]:
    it = case("opt", layers=1)
    made = ElixirModule(it.model, make_plan(it, "streamed"), device=gpu.DEVICE)
    yield made
    made.close()


class Lamb2(torch.optim.Optimizer):
    """A user's own with a trust ratio, under a name that tells nothing to a list of names."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * p.norm() / p.grad.norm()))


class Rows(Lamb2):
    """Normalises each row of a matrix."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm(dim=-1, keepdim=True), alpha=group["lr"])


class MyLBFGS(torch.optim.LBFGS):
    """Derived from one that is refused."""


def adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params)


class MyMuon(torch.optim.Muon):
    """Derived from one over whole matrices, and may do more."""

    def __init__(self, params: Any) -> None:
        super().__init__([each for each in params if each.ndim == 2])


@pytest.mark.parametrize("make", [torch.optim.LBFGS, MyLBFGS, adafactor, MyMuon, Lamb2, Rows])
def test_what_is_not_elementwise_is_refused(make: Callable[..., torch.optim.Optimizer], module: ElixirModule) -> None:
    with pytest.raises(InputError, match="not elementwise.*AdamW"):
        ElixirOptimizer(module, make(list(module.parameters())))


def test_arguments_that_make_no_sense(module: ElixirModule) -> None:
    optimizer = torch.optim.AdamW(module.parameters())
    with pytest.raises(InputTypeError, match="ElixirModule"):
        ElixirOptimizer(module.module, optimizer)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="torch optimizer"):
        ElixirOptimizer(module, ElixirOptimizer(module, optimizer))
    with pytest.raises(InputTypeError, match="torch optimizer"):
        ElixirOptimizer(module, torch.optim.AdamW)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="1 parameters of the optimizer are not"):
        ElixirOptimizer(module, torch.optim.AdamW([*module.parameters(), nn.Parameter(torch.ones(2))]))


def test_a_parameter_has_one_optimizer(module: ElixirModule) -> None:
    parameters = list(module.parameters())
    ElixirOptimizer(module, torch.optim.AdamW(parameters[:3]))
    with pytest.raises(InputError, match="2 parameters of the optimizer have an ElixirOptimizer already"):
        ElixirOptimizer(module, torch.optim.AdamW(parameters[1:]))
    ElixirOptimizer(module, torch.optim.SGD(parameters[3:], lr=0.1))


def test_one_that_has_stepped_is_refused() -> None:
    it = case("opt", layers=1)
    for make in (torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)):
        optimizer = make(list(it.model.parameters()))
        hf_loss(it.model, it.inp).backward()
        optimizer.step()
        optimizer.zero_grad()
        module = ElixirModule(copy.deepcopy(it.model), make_plan(it, "streamed"), device=gpu.DEVICE)
        with pytest.raises(InputError, match="stepped already"):
            ElixirOptimizer(module, optimizer)
        module.close()


def test_a_closure_is_run_once_with_gradients_on() -> None:
    it = case("opt", layers=1)
    with Pair(it, make_plan(it, "mixed")) as pair:
        inp = pair.case.inp
        for _ in range(3):

            def closure() -> torch.Tensor:
                loss = hf_loss(pair.module, inp)
                pair.optimizer.backward(loss)
                return loss

            mine = pair.optimizer.step(closure)
            plain = hf_loss(pair.plain, inp)
            plain.backward()
            pair.plain_optimizer.step()
            assert torch.equal(mine, plain)
            pair.optimizer.zero_grad()
            pair.plain_optimizer.zero_grad()


def test_every_scheduler_of_torch_takes_it(module: ElixirModule) -> None:
    optimizer = ElixirOptimizer(module, torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9))
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ]
    optimizer.step()
    for scheduler in schedulers[:3]:
        scheduler.step()
    schedulers[3].step(1.0)  # type: ignore[call-arg]
    assert all(scheduler.optimizer is optimizer for scheduler in schedulers)


def test_sums_of_gradients_of_several_loss_scales_are_not_stepped_with(caplog: pytest.LogCaptureFixture) -> None:
    """One optimizer adds up while the other one's overflow changes the scale that both share."""
    it = case("opt", layers=1)
    module = ElixirModule(it.model, make_plan(it, "mixed", unified_dtype="float16"), device=gpu.DEVICE)
    parameters, inp = list(module.parameters()), gpu.there(it.inp)
    first, second = (
        ElixirOptimizer(module, torch.optim.SGD(part, lr=0.1), initial_scale=256.0)
        for part in (parameters[::2], parameters[1::2])
    )

    def second_moves(*, overflows: bool) -> bool:
        for number in range(2):
            if overflows and not number:
                first.backward(it.loss(module, inp) * float("inf"))
                second.zero_grad()  # nothing overflows in its part
            first.backward(it.loss(module, inp))
            first.step()
            assert first.step_was_skipped == (overflows and not number)
            first.zero_grad()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        second.step()
        moved = any(not torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert moved != second.step_was_skipped
        for parameter in parameters:  # as good as zero_grad
            parameter.grad = None
        return moved

    with caplog.at_level(logging.INFO):
        assert [second_moves(overflows=overflows) for overflows in (False, True, False)] == [True, False, True]
    assert caplog.text.count("the loss scale has changed while its gradients were added up") == 1
    assert first.loss_scale == 128.0


@pytest.mark.parametrize("mode", ["streamed", "mixed"])
def test_a_gradient_set_by_hand_is_not_passed_over(mode: str) -> None:
    it = case("opt", layers=1)
    with Pair(it, make_plan(it, mode)) as pair:
        pair.train(1)
        tracked = next(c for c in inside.chunks(pair.module) if not inside.is_ordinary(pair.module, c)).slots[0]
        tracked.parameter.grad = torch.ones(tracked.shape, device=pair.module.device)
        with pytest.raises(InputError, match="set by hand"):
            pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.train(1)


def test_thawing_needs_another_plan() -> None:
    it = case("opt", layers=1)
    frozen = it.model.model.decoder.embed_positions.weight.requires_grad_(False)
    with Pair(it, make_plan(it, "mixed")) as pair:
        pair.train(1)
        frozen.requires_grad_(True)
        with pytest.raises(InputError, match="frozen when the model was planned"):
            pair.optimizer.step()


@pytest.mark.parametrize(("options", "told"), [({}, True), ({"fused": True}, False)], ids=["plain", "fused"])
def test_a_slow_class_on_the_host_is_said(
    options: dict[str, Any], told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    it = case("opt", layers=1)
    plan = make_plan(it, "streamed")
    inside.limit(monkeypatch, slow_numel=sum(chunk.numel for chunk in plan.chunks))
    with Pair(it, plan, optimizer=lambda m: torch.optim.AdamW(m.parameters(), **options)):
        assert ("as long as with fused=True" in caplog.text) == told
