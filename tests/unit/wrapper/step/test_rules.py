"""The rules that step the states of a shard: Adam in one pass, and the user's class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import InputError
from elixir.kernels import HybridAdam
from elixir.kernels.adam.step import COPIED, ONE_PASS
from elixir.wrapper.step import rules
from elixir.wrapper.step.elementwise import options_of
from elixir.wrapper.step.rules import AdamRule, ClassRule
from elixir.wrapper.step.user_optimizer import has_bits_of
from tests.common import inside
from tests.common.early import chain, needs_kernel, updating_early
from tests.common.one_shard import another, class_rule, inputs_of, states_of, user_over
from tests.common.parity import Pair
from tests.common.user_optimizers import Decaying, Own, Shifting, Stacking, Swapping

ADAM = AdamRule("float32", decoupled=True)


def test_neighbours_of_one_group_at_the_same_step_are_stepped_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[int, int]] = []
    step = rules.adam_step

    def seen(gradient: torch.Tensor, *arguments: Any, at: int, into: Any) -> str:
        runs.append((at, at + gradient.numel()))
        return step(gradient, *arguments, at=at, into=into)

    monkeypatch.setattr(rules, "adam_step", seen)
    shapes, groups = ((3,), (2,), (4,), (1,), (2,), (3,), (5,)), (0, 0, 1, 1, 1, 1, 1)
    one, other = (states_of(ADAM, shapes, groups) for _ in range(2))
    into = another(one, ADAM)
    one.master.copy_(other.master)
    gradients, places = torch.linspace(-1, 1, 20), {0, 1, 2, 3, 4, 6}
    for states in (one, other):
        states.put(states.segments[3], [], {"step": torch.tensor(2.0)})
        states.tensor("exp_avg_sq").fill_(0.5)
    out = torch.zeros(20, dtype=torch.bfloat16)
    ADAM.step(one, inputs_of(one, gradients, 0.5, places=places), out, into)
    joined, runs[:] = [*runs], []
    assert [float(one.state_of(each)["step"]) for each in one.segments if each.place in places] == [0, 0, 0, 2, 0, 0]
    ADAM.step(one, inputs_of(one, gradients, 0.5, places=places))
    assert runs == joined == [(0, 5), (5, 9), (9, 10), (10, 12), (15, 20)]
    ADAM.step(other, inputs_of(other, gradients, 0.5, places=places, together=False))
    for states in (other, into):
        for mine, theirs in zip(states.segments, one.segments, strict=True):
            if mine.place in places:
                assert torch.equal(states.master[mine.part], one.master[theirs.part])
                assert float(states.state_of(mine)["step"]) == (3 if mine.place == 3 else 1)
    assert torch.equal(one.master[12:15], other.master[12:15])
    assert torch.equal(out[:12], one.master[:12].bfloat16())


@pytest.mark.parametrize("together", [False, True])
def test_a_first_step_never_has_the_states_of_a_large_weight_twice(together: bool) -> None:
    made: list[int] = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            made.append(sum(weight.numel() for group in self.param_groups for weight in group["params"]))
            return super().step(closure)

    rule = ClassRule(user_over(lambda groups: Counting(groups, lr=0.5, momentum=0.5)))
    rule.is_predictable = True
    states = states_of(rule, ((3 * 2**20,), (5,)) if together else ((3 * 2**20,),))
    rule.step(states, inputs_of(states, torch.ones(states.master.numel())))
    assert max(made) == 2**20
    assert states.tensor("momentum_buffer").numel() == states.master.numel()
    rule.step(states, inputs_of(states, torch.ones(states.master.numel())))
    assert made[-1] == states.master.numel()


def test_a_state_in_several_dtypes_is_refused() -> None:
    class Widening(Own):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group, parameters in self.stepped():
                for p in parameters:
                    mean = self.state[p].get("mean", torch.zeros_like(p, dtype=torch.bfloat16))
                    self.state[p]["mean"] = mean.to(torch.float64 if mean.any() else torch.bfloat16) + p.grad
                    p.sub_(p.grad, alpha=group["lr"])

    with pytest.raises(InputError, match="Widening keeps the state 'mean' in float32 and in float64; have it keep"):
        class_rule(Widening).kinds(torch.float32, {0})


@pytest.mark.parametrize("make", [Shifting, Swapping, Stacking, Decaying], ids=lambda each: each.__name__)
@pytest.mark.parametrize("homes", ["streamed", "mixed"])
def test_early_updates_of_any_class_have_the_bits_of_plain_pytorch(make: Any, homes: str) -> None:
    """Steps that are clipped discard them; a state that cannot be copied allows none."""
    with Pair(
        chain(), updating_early(chain(), homes), optimizer=lambda model: make(model.parameters()), max_norm=0.05
    ) as pair:
        for max_norm in (1e9, 1e-3, 1e9, 1e-3, 1e9, 1e9):
            pair.optimizer.max_norm = pair.max_norm = max_norm
            pair.train(1)
        pair.assert_same_weights()


def _of_class(name: str) -> Any:
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    return {
        "AdamW": lambda given: torch.optim.AdamW(given, fused=True, **options),
        "Adam": lambda given: torch.optim.Adam(given, fused=True, maximize=True, **options),
        "lr in a tensor": lambda given: torch.optim.AdamW(given, fused=True, **options | {"lr": torch.tensor(1e-2)}),
        "HybridAdam": lambda given: HybridAdam(given, adamw_mode=False, **options),
    }[name]


@pytest.mark.sampled(every=2)
@needs_kernel
@pytest.mark.parametrize("name", ["AdamW", "Adam", "lr in a tensor", "HybridAdam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [ONE_PASS, COPIED])
def test_one_pass_has_the_bits_of_torchs_fused_classes(
    form: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.forget(monkeypatch, "Adam kernels")
    monkeypatch.setenv("ELIXIR_COMPILE", "wait")
    if form == COPIED:
        monkeypatch.setenv("CXX", "no-such-compiler")
    make, shapes = _of_class(name), ((1,), (17,), (1000,), (70_001,))
    rule = AdamRule("float32", decoupled=name != "Adam", joins=False)
    states = states_of(rule, shapes)
    into = another(states, rule)
    states.master.copy_(torch.randn(states.master.numel(), generator=torch.Generator().manual_seed(0)))
    plain = [nn.Parameter(states.master[segment.part].clone()) for segment in states.segments]
    optimizer = make(plain)
    gradients = torch.linspace(-1, 1, states.master.numel(), dtype=dtype)
    for step, factor in enumerate((1.0, 1.0, 0.37)):
        for weight, segment in zip(plain, states.segments, strict=True):
            value = gradients[segment.part].float()
            weight.grad = value if factor == 1.0 else value * factor
        optimizer.step()
        options = [options_of(optimizer.param_groups[0])]
        inputs = replace(inputs_of(states, gradients, factor), options=options)
        out = torch.zeros(states.master.numel(), dtype=torch.bfloat16)
        if step % 2:
            assert rule.step(states, inputs, out, into) == {form}
            states, into = into, states
        else:
            rule.step(states, inputs, out)
        for weight, segment in zip(plain, states.segments, strict=True):
            assert torch.equal(states.master[segment.part], weight)
            assert torch.equal(out[segment.part], weight.bfloat16())
            for kind in states.kinds:
                assert torch.equal(states.read(kind, segment), optimizer.state[weight][kind])


@pytest.mark.parametrize(
    "refused",
    [
        {},
        {"fused": True, "amsgrad": True},
        {"fused": True, "betas": (torch.tensor(0.9), torch.tensor(0.99))},
        {"fused": True, "lr": float("nan")},
    ],
    ids=["not fused", "amsgrad", "betas in tensors", "a rate out of range"],
)
def test_other_options_are_nobody_elses_bits(refused: dict[str, Any]) -> None:
    weights = [nn.Parameter(torch.ones(3))]
    assert has_bits_of(torch.optim.AdamW(weights, fused=True))
    assert has_bits_of(HybridAdam(weights))
    assert not has_bits_of(torch.optim.SGD(weights, fused=True))
    rate = refused.pop("lr", 1e-3)
    optimizer = torch.optim.AdamW(weights, **refused)
    optimizer.param_groups[0]["lr"] = rate
    assert not has_bits_of(optimizer)
