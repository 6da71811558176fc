"""Optimizers as users and packages write them: stepped with plain PyTorch's bits, or refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elixir.errors import InputError, StepError
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.step.elementwise import check_elementwise
from elixir.wrapper.step.user_optimizer import check_optimizer
from tests.common import gpu
from tests.common import user_optimizers as own
from tests.common.early import chain
from tests.common.parity import Pair, make_plan

Make = Callable[..., torch.optim.Optimizer]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (own.Normed, "depends on others"),
        (lambda p: own.Normed(p, lr=0.0), "depends on others"),
        (own.Clipping, "depends on others"),
        (own.Projecting, "depends on others"),
        (own.Factored, "depends on others"),
        (own.Estimating, "step changes 'd_sum' of its groups in a way that depends on the weights"),
        (own.Keyed, "keeps a state 'k' for no parameter"),
        (own.OnItself, "changes 'steps' of the object"),
        (own.OnItsTensor, "changes 'counted' of the object"),
    ],
)
def test_one_number_over_several_shards_is_refused_by_name(make: Make, why: str) -> None:
    """Also while a warm-up has the learning rate be 0, where a step would show nothing."""
    weight = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(InputError, match=rf"{type(make([weight])).__name__} is not elementwise: .*{why}"):
        check_elementwise(type(make([weight])), make)


RULES: dict[str, Callable[[int, int], float]] = {
    "not the first": lambda place, count: float(place > 0),
    "not the last": lambda place, count: float(place < count - 1),
    "another tenth": lambda place, count: 1 + (place == 9),
    "by layers": lambda place, count: 0.99**place,
    "one group": lambda place, count: 1 + (place < 6),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_by_the_position_of_a_weight_are_refused(name: str) -> None:
    """Also those for one position far from the first, and for a group's positions."""

    class Placed(own.Own):
        rule = staticmethod(RULES[name])

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            weights = [p for group in self.param_groups for p in group["params"]]
            for place, p in enumerate(weights):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=self.param_groups[0]["lr"] * self.rule(place, len(weights)))

    weights = [torch.nn.Parameter(torch.zeros([2] * (place % 3))) for place in range(12)]
    groups = [{"params": weights[:6]}, {"params": weights[6:]}]
    with pytest.raises(InputError, match="Placed is not elementwise: .*(position in its list.*an option of|on others)"):
        check_optimizer(Placed(groups, lr=0.0), "float32")


def test_a_change_that_depends_on_a_shard_after_all_is_raised() -> None:
    """The trial cannot reach everything: a step raises if a shard changes its groups in another way than the others."""

    class Late(own.Counting):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            super().step()
            for group, parameters in self.stepped():
                if group["step"] > 20:
                    group["step"] += max(int(p.grad.abs().sum() * 1e6) for p in parameters)

    it = chain()
    # A lane may report the error after other chunks have been stepped.
    with Pair(it, make_plan(it, "mixed"), optimizer=lambda model: Late(model.parameters()), alike=False) as pair:
        pair.train(20)
        with pytest.raises((InputError, StepError), match="step of Late has changed 'step' of group 0 to"):
            pair.train(2)


def test_classes_that_rewrite_weights_for_evaluation_are_refused() -> None:
    with pytest.raises(InputError, match="Averaging rewrites weights between training and evaluation"):
        check_elementwise(own.Averaging, own.Averaging)


def test_hooks_run_whenever_they_were_registered() -> None:
    """Hooks on either object, registered before wrapping or after, get the ElixirOptimizer as the optimizer."""
    it, seen = chain(), []
    plain: Any = torch.optim.AdamW(it.model.parameters(), lr=1e-2)
    plain.register_step_pre_hook(lambda opt, *_: seen.append(("before", opt)))
    gone = plain.register_step_post_hook(lambda opt, *_: seen.append(("gone", opt)))
    plain.register_step_post_hook(lambda opt, *_: seen.append(("after", opt)))
    plain.register_state_dict_post_hook(lambda opt, state: {**state, "extra": 1})
    module = ElixirModule(it.model, make_plan(it, "mixed"), device=gpu.DEVICE)
    optimizer = ElixirOptimizer(module, plain)
    optimizer.register_load_state_dict_pre_hook(lambda opt, state: seen.append(("load", state.pop("extra"))))
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append(("loaded", opt)))
    gone.remove()
    optimizer.backward(it.loss(module, gpu.there(it.inp)))
    optimizer.step()
    assert seen == [("before", optimizer), ("after", optimizer)]
    saved = optimizer.state_dict()
    assert saved["extra"] == 1
    optimizer.load_state_dict(saved)
    assert seen[2:] == [("load", 1), ("loaded", optimizer)]
    assert "extra" in saved


def test_replaced_methods_are_refused_and_those_of_schedulers_are_not() -> None:
    it = chain()
    module = ElixirModule(it.model, make_plan(it, "mixed"), device=gpu.DEVICE)
    plain = torch.optim.AdamW(module.parameters())
    torch.optim.lr_scheduler.StepLR(plain, 1)
    scheduled, original = plain.step, type(plain).step
    plain.step = functools.wraps(plain.step)(lambda *_: scheduled())  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"step of the optimizer was replaced .* subclass, or use a hook"):
        ElixirOptimizer(module, plain)
    plain.step = original.__get__(plain)  # type: ignore[method-assign]
    plain.note = print  # type: ignore[attr-defined]  # replaces nothing
    torch.optim.lr_scheduler.StepLR(plain, 1)
    ElixirOptimizer(module, plain)
