"""Gradients live with the optimizer states: a caller that asks a parameter for one gets an answer, never a silent None."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from elixir.errors import InputError
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import gpu, inside
from tests.common.parity import Case, Pair, case, make_plan, square_loss


@pytest.fixture
def pair() -> Iterator[Pair]:
    it = case("gpt2", layers=1)
    with Pair(it, make_plan(it, "streamed")) as made:
        made.train(1)
        yield made


def test_hooks_on_parameters_see_their_gradients(pair: Pair) -> None:
    seen: list[torch.Tensor] = []
    for model in (pair.module.module, pair.plain):
        weight = model.transformer.h[0].mlp.c_fc.weight
        weight.register_hook(lambda gradient: gradient * 2)
        weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    pair.backward()
    assert torch.equal(seen[0], seen[1])
    pair.step()


def test_a_clip_does_not_outlive_the_gradients(pair: Pair) -> None:
    for clears in (pair.optimizer, pair.module):
        pair.backward()
        pair.module.clip_grad_norm_(1e-3)
        clears.zero_grad()
        pair.plain_optimizer.zero_grad()
        pair.train(1)
        pair.assert_same_weights()
    pair.assert_same_weights()
    pair.backward(scale=float("inf"))
    with pytest.raises(RuntimeError, match="norm"):
        pair.module.clip_grad_norm_(1.0, error_if_nonfinite=True)


CLIPPERS: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "norm": lambda weights: torch.nn.utils.clip_grad_norm_(weights, 1.0),
    "norm, each": lambda weights: torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=False),
    "value": lambda weights: torch.nn.utils.clip_grad_value_(weights, 0.1),
    "given norm": lambda weights: torch.nn.utils.clip_grads_with_norm_(weights, 1.0, torch.tensor(2.0)),
    "norm of what is read": lambda weights: torch.nn.utils.get_total_norm(weight.grad for weight in weights),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_functions_of_torch_clip_only_gradients_without_a_loss_scale(dtype: str) -> None:
    it = Case(nn.Linear(8, 4), {"input": torch.randn(2, 8)}, lambda model, inp: square_loss(model, inp).float())
    optimizer = ElixirOptimizer(
        module := ElixirModule(it.model, make_plan(it, "resident", unified_dtype=dtype), device=gpu.DEVICE),
        torch.optim.SGD(it.model.parameters(), lr=0.1),
        initial_scale=64.0,
    )
    optimizer.backward(it.loss(module, gpu.there(it.inp)))
    weights = list(module.parameters())
    before = [weight.grad.clone() for weight in weights if weight.grad is not None]  # may be read
    for clip in CLIPPERS.values() if dtype == "float16" else ():
        with pytest.raises(InputError, match=r"the loss scale until step\(\).*clip with max_norm= or model\.clip_grad"):
            clip(weights)
    if dtype == "bfloat16":
        torch.nn.utils.clip_grad_value_(weights, 0.0)
        assert not any(weight.grad.any() for weight in weights if weight.grad is not None)
        return
    assert all(map(torch.equal, before, [weight.grad for weight in weights if weight.grad is not None]))
    optimizer.step()
    optimizer.zero_grad()
    CLIPPERS["norm"](weights)  # there is none
    module.close()
    assert {type(weight) for weight in weights} == {nn.Parameter}
    assert not any(vars(weight) for weight in weights)


def test_clipping_needs_an_optimizer() -> None:
    it = case("opt", layers=1)
    module = ElixirModule(it.model, make_plan(it, "streamed"), device=gpu.DEVICE)
    with pytest.raises(InputError, match="needs an ElixirOptimizer"):
        module.clip_grad_norm_(1.0)


@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_zeros_in_the_place_of_gradients_are_refused_and_gradients_stay(mode: str) -> None:
    it = case("gpt2", layers=1)
    with Pair(it, make_plan(it, mode)) as pair:
        pair.backward()
        for each in (pair.module, pair.module.module, pair.optimizer):
            with pytest.raises(InputError, match=r"call zero_grad\(\), which drops gradients"):
                each.zero_grad(set_to_none=False)
        pair.step()
        pair.assert_same_weights()


def test_a_dropped_gradient_is_none(pair: Pair) -> None:
    weights = list(pair.module.parameters())
    pair.backward()
    weights[0].grad = None
    assert weights[0].grad is None
    with pytest.raises(InputError, match="clip_grad_norm_"):
        weights[1].grad  # noqa: B018
    pair.module.zero_grad()


def test_a_forward_that_is_captured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    it = case("opt", layers=1)
    module = ElixirModule(it.model, make_plan(it, "streamed"), device=gpu.DEVICE)
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        if gpu.DEVICE == "cpu":
            assert module(**it.inp).loss.isfinite()  # the graph is of something else
        inside.pretend_device(patched, module, torch.device("cuda"))
        with pytest.raises(InputError, match="CUDA graph"):
            module(**it.inp)
