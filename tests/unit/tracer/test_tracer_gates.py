"""A trace refuses what it cannot know, reports what it assumed, and leaves the user's model and process as they
were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elixir.errors import ElixirError, InputError, InputTypeError, TraceError
from elixir.tracer.trace import trace_step
from elixir.tracer.values.expert_choice import BalancedRouting, RecordedRouting
from tests.common.tracing import CPU, H200, Seen, cpu_trace, sum_step

HERE = __file__
INP = {"x": torch.ones(2, 8)}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))


# --- reported ------------------------------------------------------------------------------------------------------


# --- refused -------------------------------------------------------------------------------------------------------


class Inside(nn.Module):
    """Begins a transform while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.jacrev(self.layer)(x[0]).sum() + self.layer(x).sum()


def calls(function: Callable[[Any, dict[str, Any]], Any]) -> Any:
    return lambda: cpu_trace(mlp(), INP, function)


@torch.library.custom_op("elixir_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    """An operator without a rule for its result's shape."""
    return x.clone()


def no_meta_kernel(model: nn.Module, inp: dict[str, Any]) -> None:
    opaque(model(inp["x"])).sum().backward()


def holding(values: torch.Tensor) -> nn.Module:
    """A model with one more parameter."""
    model = mlp()
    model.register_parameter("odd", nn.Parameter(values, requires_grad=False))
    return model


OUTSIDE = nn.Linear(8, 4)

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "inp is sparse": (lambda: cpu_trace(mlp(), {"x": torch.eye(8).to_sparse()}, sum_step), InputError, "dense"),
    "step_fn is text": (lambda: cpu_trace(mlp(), INP, "step"), InputTypeError, "callable"),
    "no model": (lambda: cpu_trace("opt-125m", INP, sum_step), InputTypeError, "nn.Module"),
    "nothing to train": (
        lambda: cpu_trace(mlp().requires_grad_(False), INP, lambda m, i: m(i["x"]).sum().backward()),
        TraceError, "leave backward out"),
    "no parameters": (lambda: cpu_trace(nn.ReLU(), INP, sum_step), InputError, "no parameters"),
    "complex parameter": (lambda: cpu_trace(holding(torch.ones(2, 2) * 1j), INP, sum_step), InputError, "view_as_real"),
    "sparse parameter": (lambda: cpu_trace(holding(torch.eye(2).to_sparse()), INP, sum_step), InputError, "to_dense()"),
    "nested parameter": (
        lambda: cpu_trace(holding(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])), INP, sum_step),
        InputError, "nested tensor"),
    "unknown lengths": (
        calls(lambda m, i: F.ctc_loss(m(i["x"])[:, None].log_softmax(-1), torch.ones(1, 2, dtype=torch.int64),
              torch.full((1,), 4), m(i["x"]).sum().long()[None]).backward()), TraceError, "lengths"),
    "unknown optimizer": (lambda: cpu_trace(mlp(), INP, sum_step, optimizer="adamm"), InputError, "adam"),
    "no such kernel": (
        lambda: cpu_trace(mlp(), INP, sum_step, optimizer="RMSprop", optimizer_kernel="fused"), InputError, "fused"),
    "skew above one": (lambda: BalancedRouting(1.5), InputError, "between 0 and 1"),
    "no backward": (calls(lambda m, i: m(i["x"])), TraceError, "backward"),
    "another model": (calls(lambda m, i: OUTSIDE(i["x"]).sum().backward()), TraceError, "model it is given"),
    "another model's embedding": (
        lambda: cpu_trace(nn.Embedding(8, 4), {"x": torch.zeros(2, dtype=torch.int64)},
                          lambda m, i: (m(i["x"]) @ OUTSIDE.weight).sum().backward()), TraceError, "model it is given"),
    "raises": (calls(lambda m, i: m(i["y"])), TraceError, "KeyError"),
    "wrong shape": (calls(lambda m, i: m(i["x"][:, :3]).sum().backward()), TraceError, "step_fn raised"),
    "no meta kernel": (calls(no_meta_kernel), TraceError, "torch.library.register_fake"),
    "no meta kernel of PyTorch's": (
        calls(lambda m, i: torch.histogram(m(i["x"]).detach(), 4)), TraceError, "torch.library.register_fake"),
    "names cuda": (calls(lambda m, i: m(i["x"].cuda()).sum().backward()), TraceError, "take the device from a tensor"),
    "moves to cuda": (
        calls(lambda m, i: m(i["x"].to(device="cuda:0")).sum().backward()), TraceError, "take the device from a tensor"),
    "reads an array": (calls(lambda m, i: m(i["x"]).detach().numpy()), TraceError, "nothing can be read out of it here"),
    "reads a storage": (
        calls(lambda m, i: m(i["x"]).untyped_storage()[0]), TraceError, "nothing can be read out of it here"),
    "reads a list": (calls(lambda m, i: m(i["x"]).tolist()), TraceError, "nothing can be read out of it here"),
    "decides by any": (
        calls(lambda m, i: m(i["x"]).sum().backward() if torch._is_any_true(m(i["x"]) > 0).item() else None),
        TraceError, "decides by a number"),
    "sparse gradient": (
        lambda: cpu_trace(
            nn.Embedding(8, 4, sparse=True), {"x": torch.zeros(2, dtype=torch.int64)}, sum_step
        ), TraceError, "sparse=False"),
    "torch.func.grad": (
        calls(lambda m, i: torch.func.grad(lambda x: m(x).sum())(i["x"]).sum().backward()), ElixirError, "torch.func"),
    "torch.func.jacrev inside": (
        lambda: cpu_trace(Inside(), INP, lambda m, i: m(i["x"]).backward()), TraceError, "a transform begins"),
    "recorded too little": (
        lambda: cpu_trace(mlp(), INP, lambda m, i: m(i["x"]).topk(2)[0].sum().backward(), routing=RecordedRouting([])),
        TraceError, "recorded"),
    "recorded for another shape": (
        lambda: cpu_trace(mlp(), INP, lambda m, i: m(i["x"]).topk(2)[0].sum().backward(),
                          routing=RecordedRouting([torch.zeros(1, 5, dtype=torch.int64)])),
        TraceError, "has shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_gives_a_clear_error(name: str) -> None:
    call, error, says = REFUSED[name]
    with pytest.raises(error) as caught:
        call()
    assert says in str(caught.value), str(caught.value)
    assert isinstance(caught.value, ElixirError)
    assert "\n" not in str(caught.value).strip()
    if "step_fn raised" in str(caught.value):
        assert str(caught.value).startswith(f"{HERE}:"), str(caught.value)
        assert caught.value.__cause__ is not None, "the user's own traceback is kept"


# --- untouched -----------------------------------------------------------------------------------------------------


def test_two_traces_in_a_row_and_one_inside_another_agree() -> None:
    model = mlp()
    first = cpu_trace(model, INP, sum_step)
    inner = Seen()

    def nests(model: nn.Module, inp: dict[str, Any]) -> None:
        sum_step(model, inp)
        inner.append(cpu_trace(mlp(), {"x": torch.ones(2, 8)}, sum_step))

    outer = cpu_trace(model, INP, nests)
    assert list(inner) == [first]
    assert outer.param_bytes == first.param_bytes
    assert cpu_trace(model, INP, sum_step) == first


def test_buffers_are_cast_with_a_model_that_is_cast_as_a_whole() -> None:
    class Projects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.register_buffer("fixed", torch.ones(8, 8))
            self.register_buffer("count", torch.ones(8, dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) @ self.fixed

    for hardware in (CPU, H200):
        trace = trace_step(Projects(), INP, sum_step, hardware=hardware, dtype=torch.bfloat16)
        assert trace.buffer_bytes == 64 * 2 + 8 * 8
    # In a model that is in this dtype already, a buffer in another one is meant to be.
    built = Projects().to(torch.bfloat16)
    built.fixed = built.fixed.float()
    with pytest.raises(TraceError, match="mixed dtypes"):
        trace_step(built, INP, sum_step, hardware=CPU, dtype=torch.bfloat16)
