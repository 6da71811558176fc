"""Under autocast every operator gives the dtype that it gives in PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elixir.tracer.step_functions import replaced_functions
from tests.common.tracing import CPU, H200, Seen, cpu_trace, trace_step

OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mm": torch.mm,
    "bmm": lambda a, b: torch.bmm(a[None], b[None]),
    "addmm": lambda a, b: torch.addmm(a, a, b),
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "linear": F.linear,
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None, None], b[None, None], b[None, None]),
    "add": torch.add,
    "exp": lambda a, b: a.exp() + b,
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "index_copy": lambda a, b: a.index_copy(0, torch.arange(4, device=a.device), b.to(a.dtype)),
    "softmax": lambda a, b: a.softmax(-1) + b.softmax(-1),
    "log_softmax": lambda a, b: a.log_softmax(-1),
    "layer_norm": lambda a, b: F.layer_norm(a, (4,)),
    "sum": lambda a, b: a.sum(0),
    "prod": lambda a, b: a.prod(0),
    "cumsum": lambda a, b: a.cumsum(0),
    "mse_loss": F.mse_loss,
    "cross_entropy": lambda a, b: F.cross_entropy(a, torch.arange(4, device=a.device)),
    "smooth_l1_loss": F.smooth_l1_loss,
    "norm": lambda a, b: a.norm(),
    "conv1d": lambda a, b: F.conv1d(a[None], b[:, :, None]),
    "interpolate": lambda a, b: F.interpolate(a[None], scale_factor=2.0),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "cdist": torch.cdist,
    "baddbmm": lambda a, b: torch.baddbmm(a[None], a[None], b[None]),
}


def dtypes(first: torch.Tensor, second: torch.Tensor, low: torch.dtype) -> dict[str, str]:
    """The dtype that each operator gives; the name of the error if it refuses these."""
    found = {}
    with torch.autocast(first.device.type, low):
        for name, operator in OPERATORS.items():
            try:
                found[name] = str(operator(first, second).dtype)
            except RuntimeError as error:
                found[name] = type(error).__name__
    return found


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_operators_give_the_dtypes_of_a_real_step(low: torch.dtype, mixed: bool) -> None:
    first, second = torch.rand(4, 4).to(low if mixed else torch.float32), torch.rand(4, 4)
    seen = Seen()

    def step(model: nn.Module, inp: dict[Any, Any]) -> None:
        seen.append(dtypes(inp["first"], inp["second"], low))
        model(inp["first"].float()).sum().backward()

    cpu_trace(nn.Linear(4, 4), {"first": first, "second": second}, step)
    assert next(iter(seen)) == dtypes(first, second, low)


ON_CUDA = {
    **dict.fromkeys(("mm", "bmm", "addmm", "einsum", "linear", "attention", "conv1d", "baddbmm"), "low"),
    **dict.fromkeys(("softmax", "log_softmax", "layer_norm", "sum", "prod", "cumsum", "norm", "exp", "cdist"), "wide"),
    **dict.fromkeys(("mse_loss", "cross_entropy", "smooth_l1_loss"), "wide"),
    **dict.fromkeys(("add", "cat", "stack", "where"), "widest"),
    "interpolate": "wide",
    "index_copy": "given",
}
"""By PyTorch's table of operators that autocast to float16, to float32, or to the widest input."""


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_on_cuda_operators_give_the_dtypes_of_the_table(low: torch.dtype) -> None:
    seen = Seen()

    def step(model: nn.Module, inp: dict[Any, Any]) -> None:
        seen.append(dtypes(inp["half"], inp["half"], low) | {"of two": dtypes(inp["half"], inp["float"], low)})
        model(inp["float"]).sum().backward()

    given = {"half": torch.rand(4, 4).to(low), "float": torch.rand(4, 4)}
    trace_step(nn.Linear(4, 4), given, step, hardware=H200)
    found = next(iter(seen))
    kinds = {"low": low, "wide": torch.float32, "widest": low, "given": low}
    mixed = found.pop("of two")
    assert found == {name: str(kinds[kind]) for name, kind in ON_CUDA.items()}
    kinds["widest"] = torch.float32
    assert mixed == {name: str(kinds[kind]) for name, kind in ON_CUDA.items()}


def test_an_autocast_that_a_step_never_leaves_ends_with_the_trace() -> None:
    def step(model: nn.Module, inp: dict[Any, Any]) -> None:
        torch.autocast(inp["x"].device.type, torch.bfloat16).__enter__()
        model(inp["x"]).sum().backward()

    kept = torch._C._dispatch_tls_local_include_set().raw_repr()
    for _ in range(2):
        cpu_trace(nn.Linear(4, 4), {"x": torch.ones(2, 4)}, step)
        assert torch._C._dispatch_tls_local_include_set().raw_repr() == kept
        assert torch.autocast_increment_nesting() == 1
        assert torch.autocast_decrement_nesting() == 0
        x = torch.ones(2, 2, device="meta")
        assert (x @ x).dtype is torch.float32


def test_this_torch_has_every_function_that_a_trace_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of torch that go are left out of a trace; here it is noticed."""
    asked: dict[tuple[str, str], Any] = {}

    def noted(makers: Any) -> Any:
        asked.update(makers)
        return replaced_functions(makers)

    monkeypatch.setattr("elixir.tracer.recorder.replaced_functions", noted)
    for machine in (CPU, H200):
        trace_step(nn.Linear(2, 2), {"input": torch.ones(1, 2)}, lambda m, x: m(**x).sum().backward(), hardware=machine)
    assert len(asked) > 5
    assert [key for key in asked if not hasattr(sys.modules.get(key[0]), key[1])] == []
    with replaced_functions({("torch", "no_such_function"): lambda before: before()}):
        assert not hasattr(torch, "no_such_function")
