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
from tests.common.one_shard import another, class_rule, inputs_of, sgd, states_of, user_over
from tests.common.parity import Pair
from tests.common.user_optimizers import Decaying, Numbering, Own, Replacing, Shifting, Stacking, Swapping

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


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "8bit"])
def test_a_step_into_other_states_is_the_step_in_place_and_changes_nothing_else(kind: Any) -> None:
    rule, shapes = AdamRule(kind, decoupled=True), ((3,), (2,), (700,))
    one, other = (states_of(rule, shapes) for _ in range(2))
    gradients = torch.linspace(-1, 1, 705)
    for states in (one, other):
        rule.step(states, inputs_of(states, gradients))
    kept = one.master.clone()
    into = another(one, rule)
    one.master.copy_(kept)
    before = [tensor.clone() for tensor in (one.master, *one.tensors.values())]
    out, there = (torch.zeros(705, dtype=torch.bfloat16) for _ in range(2))
    rule.step(one, inputs_of(one, gradients, 0.5), out, into)
    rule.step(other, inputs_of(other, gradients, 0.5), there)
    assert all(map(torch.equal, before, (one.master, *one.tensors.values())))
    assert {float(one.state_of(segment)["step"]) for segment in one.segments} == {1}
    assert torch.equal(out, there)
    for tensor, expected in ((into.master, other.master), *((into.tensor(k), other.tensor(k)) for k in other.kinds)):
        assert torch.equal(tensor, expected)
    assert {float(into.state_of(segment)["step"]) for segment in into.segments} == {2}


def test_a_class_multiplies_gradients_and_leaves_them_as_they_are() -> None:
    for factor in (1.0, 0.5, torch.tensor(0.5)):
        rule = class_rule(lambda groups: torch.optim.SGD(groups, lr=1.0))
        states = states_of(rule, ((3,), (2,)))
        before, gradient = states.master.clone(), torch.ones(5)
        inputs = inputs_of(states, gradient, factor, places={0})
        rule.step(states, inputs)
        assert (before - states.master).tolist() == [float(factor)] * 3 + [0.0] * 2
        assert gradient.tolist() == [1] * 5
        assert [segment.weights.grad for segment in states.segments] == [None, None]
        with rule.with_gradients(states, inputs.arrived):
            first, second = (segment.weights.grad for segment in states.segments)
            assert second is None
            assert first is not None
            assert first.data_ptr() == gradient.data_ptr()


CLASSES: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "amsgrad": lambda groups: torch.optim.Adam(groups, amsgrad=True),
    "SGD": sgd,
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, initial_accumulator_value=0.25),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.5, centered=True),
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    **{each.__name__: each for each in (Replacing, Shifting, Swapping, Numbering, Decaying, Stacking)},
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_over_a_shard_has_the_bits_of_the_class_over_weights(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_FIRST_NUMEL", 7)  # first steps in several pieces
    rule = class_rule(CLASSES[name])
    states = states_of(rule)
    plain = [nn.Parameter(states.master[segment.part].clone()) for segment in states.segments]
    optimizer = CLASSES[name](plain)
    for step in range(4):
        gradients = torch.linspace(-1.0, 1.0 + step, 25)
        places = {0, 1} if step == 0 else {0, 1, 2}  # the first gradient of one is late
        for segment, weight in zip(states.segments, plain, strict=True):
            weight.grad = gradients[segment.part].clone() if segment.place in places else None
        rule.step(states, inputs_of(states, gradients, places=places))
        optimizer.step()
        for segment, weight in zip(states.segments, plain, strict=True):
            assert torch.equal(states.master[segment.part], weight)
            if segment.place not in places:
                continue  # what a constructor makes comes with the first step here
            theirs = optimizer.state[weight]
            assert {each.kind for each in states.to_save() if each.name == segment.name} == {
                kind for kind, value in theirs.items() if kind != "step" and getattr(value, "shape", ()) == weight.shape
            }
            for kind in states.kinds_of(segment):
                assert torch.equal(states.read(kind, segment), theirs[kind])
            for kind, value in states.numbers(segment).items():
                same = torch.equal if isinstance(value, torch.Tensor) else lambda one, other: one == other
                assert same(value, theirs[kind]), kind


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


def test_what_a_class_shows_by_trial_is_what_it_keeps() -> None:
    for dtype in (torch.float32, torch.float64):
        assert {kind: each.dtype for kind, each in class_rule().kinds(dtype, {0}).items()} == {
            "exp_avg": dtype,
            "exp_avg_sq": dtype,
        }
    assert class_rule(lambda groups: torch.optim.SGD(groups, lr=1.0)).kinds(torch.float32, {0}) == {}
    two = user_over(lambda groups: torch.optim.SGD(groups, lr=1.0), {}, {"momentum": 0.5})
    assert [list(two.kinds(torch.float32, groups)) for groups in ({0}, {1}, {0, 1})] == [
        [], ["momentum_buffer"], ["momentum_buffer"]
    ]  # fmt: skip


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


def test_a_weight_without_a_loaded_state_has_the_one_of_the_constructor() -> None:
    rule = class_rule(Decaying)
    states = states_of(rule)
    rule.step(states, inputs_of(states, torch.ones(25)))
    assert not (states.tensor("sum") == 1).any()
    states.load(lambda name: None, lambda: None)
    rule.begin_anew(states)
    assert (states.tensor("sum") == 1).all()
    assert [float(states.state_of(segment)["step"]) for segment in states.segments] == [0.0] * 3
