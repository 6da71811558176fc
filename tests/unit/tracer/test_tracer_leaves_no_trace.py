"""Torch, Python and other threads are after a trace, and during it, as they were before it."""

from __future__ import annotations

import random
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmark.observe import observe_step
from elixir.access.interception import Interception
from elixir.errors import TraceError
from elixir.tracer.ledger import Ledger
from elixir.tracer.trace import trace_step
from elixir.tracer.use_order import UseOrder
from tests.common.tracing import CPU, H200, Seen, cpu_trace, on_meta_now, predicted_bytes

MODULES = (
    "torch torch.nn torch.nn.functional torch.autograd torch.autograd.graph torch.amp torch.amp.autocast_mode "
    "torch.random "
    "torch.utils.checkpoint torch.cuda torch.cuda.amp torch.compiler torch.library torch.optim torch.overrides "
    "torch._C "
    "torch.nn.modules.module torch._tensor torch.storage torch.serialization torch._prims_common random warnings"
).split()
REPLACED = [
    *(("torch", f"{does}_autocast_{what}") for does, what in (("is", "enabled"), ("set", "enabled"), ("get", "dtype"))),
    ("torch", "set_autocast_dtype"),
    ("torch", "clear_autocast_cache"),
    ("torch", "get_rng_state"),
    ("torch.amp", "is_autocast_available"),
    ("torch.amp.autocast_mode", "is_autocast_available"),
    ("torch.autograd", "_engine_run_backward"),
    ("torch.cuda", "is_bf16_supported"),
]
CLASSES = (
    torch.Tensor, torch.nn.Parameter, torch.nn.Module, torch.nn.Linear, torch.autocast, torch.SymInt, torch.SymFloat,
    torch.SymBool, torch.Generator, torch.autograd.Function, torch.optim.Optimizer, torch._C.TensorBase, torch.Size,
)  # fmt: skip


def names() -> dict[str, dict[str, int]]:
    """The object of every name in torch's modules and classes."""
    found = {name: vars(sys.modules[name]) for name in MODULES}
    found |= {cls.__qualname__: dict(vars(cls)) for cls in CLASSES}  # type: ignore[dict-item]
    return {owner: {name: id(value) for name, value in held.items()} for owner, held in found.items()}


def behaviour() -> list[Any]:
    zero = torch.tensor(3)
    q = torch.empty(1, 2, 16, 8, device="meta", requires_grad=True)
    attended = F.scaled_dot_product_attention(q, q, q)
    return [
        torch.tensor([zero, zero]).tolist(),
        torch.as_tensor([zero, zero]).tolist(),
        torch.LongTensor([zero, zero]).tolist(),
        f"{torch.tensor(1.5):.2f}",
        torch.arange(4)[[0, 1]].tolist(),
        attended.grad_fn.name(),  # type: ignore[union-attr]
        F.dropout(q, 0.5).grad_fn.name(),  # type: ignore[union-attr]
        torch.tensor([1], device="meta").device.type,
    ]


def settings() -> list[Any]:
    return [
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        [
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda", "privateuseone")
        ],
        torch.is_autocast_cache_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_anomaly_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._get_torch_function_state(),
        torch._C._dispatch_tls_local_include_set().raw_repr(),
        torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        len(torch.nn.modules.module._global_forward_hooks),
        [id(entry) for entry in warnings.filters],
        [repr(entry) for entry in warnings.filters],
    ]


def generators() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), [str(part) for part in np.random.get_state()]]  # noqa: NPY002


def assert_names(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> None:
    for owner, held in before.items():
        for name, value in held.items():
            assert after[owner].get(name) == value, f"{owner}.{name}"
        for name in after[owner].keys() - held.keys() - {"__warningregistry__"}:  # what torch imports late
            assert isinstance(getattr(sys.modules.get(owner), name, None), types.ModuleType), f"{owner}.{name} is new"


class Odd(nn.Module):
    """Takes every way that used to need torch changed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        with torch.autocast(device_type=x.device.type, dtype=torch.bfloat16, enabled=True):
            h = self.layer(h).float()
        h = checkpoint(self.inner, h, use_reentrant=False)
        h = checkpoint(self.inner, h, use_reentrant=True)
        position = torch.tensor([torch.tensor(1), torch.tensor(2)], device=x.device)
        h = h[[0, 1]] + h[position]
        f"{h.sum().item():.3f} {h.sum():.2f}"
        if torch.rand(()) > 2 or random.random() > 2 or np.random.rand() > 2:  # noqa: NPY002
            h = h * 2
        return F.dropout(F.scaled_dot_product_attention(h[None], h[None], h[None]), 0.5)

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(()) > 0.5
        assert torch.tensor([1, 2], device=h.device).tolist() == [1, 2]
        if kept:
            h = self.layer(h)
        return h[:, [1, 0, 2, 3, 4, 5, 6, 7]]


class Settled(Odd):
    """Its regions draw nothing: where a checkpoint of another thread runs again, it sets the generator of all threads."""

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return self.layer(h)[:, [1, 0, 2, 3, 4, 5, 6, 7]]


def works(model: nn.Module, inp: dict[str, Any]) -> None:
    during.append(names())
    model(inp["x"]).sum().backward()


def fails(error: BaseException) -> Callable[..., None]:
    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.set_grad_enabled(False)
        torch.manual_seed(5)
        torch.set_autocast_enabled("cpu", True)
        warnings.simplefilter("error")
        model(inp["x"].double().float())
        raise error

    return step


during = Seen()
STEPS = {"works": works, "raises": fails(ValueError("no")), "is interrupted": fails(KeyboardInterrupt())}


@pytest.mark.parametrize("hardware", [CPU, H200], ids=["cpu", "h200"])
@pytest.mark.parametrize("name", STEPS)
def test_torch_and_python_are_as_before(name: str, hardware: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A thread that an earlier test left behind does nothing, but what threads share is put back only without others.
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    list(during)  # what another test has left
    behaviour()
    known, set_to, answers, drawn = names(), settings(), behaviour(), generators()
    model, inp = Odd(), {"x": torch.randn(4, 8)}
    drawn = generators()
    if name == "works":
        trace_step(model, inp, STEPS[name], hardware=hardware)
        changed = next(iter(during))
        for module, function in REPLACED:
            changed[module][function] = known[module][function]  # for other threads, these do what they did
        assert_names(known, changed)
    else:
        with pytest.raises((TraceError, KeyboardInterrupt)):
            trace_step(model, inp, STEPS[name], hardware=hardware)
    assert_names(known, names())
    assert settings() == set_to
    assert behaviour() == answers
    assert generators() == drawn


def test_indices_and_constants_of_python_are_known_in_a_region_that_runs_again() -> None:
    """The region of `Odd` asserts what it reads; it draws whether to run its layer, and must draw the same again."""
    for seed in range(4):
        torch.manual_seed(seed)
        cpu_trace(Odd(), {"x": torch.randn(4, 8)}, works)


def trained(steps: int, go: threading.Event | None = None) -> list[torch.Tensor]:
    """Plain PyTorch with a checkpoint, which draws from a generator of this thread."""
    drawn = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1, generator=drawn)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        if go is not None:
            go.set()
        x = torch.randn(8, 16, generator=drawn)
        loss = checkpoint(model, x, use_reentrant=False)[[0, 1]].square().sum() + torch.tensor([x[0, 0], x[0, 1]]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_thread_that_trains_meanwhile_gets_the_same_bits() -> None:
    inp = {"x": torch.randn(4, 8)}
    trace_step(Settled(), inp, works, hardware=CPU)
    expected = trained(150)
    go, found = threading.Event(), []
    thread = threading.Thread(target=lambda: found.append(trained(150, go)))
    models = [Settled() for _ in range(40)]
    thread.start()
    go.wait()
    traces = 0
    for model in models:
        if thread.is_alive():
            trace_step(model, inp, works, hardware=CPU)
            traces += 1
    thread.join()
    assert traces > 2
    assert all(torch.equal(a, b) for a, b in zip(expected, found[0], strict=True))


def test_states_of_the_generator_in_checkpoints_are_counted() -> None:
    class Regions(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.reentrant = reentrant
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=self.reentrant, preserve_rng_state=self.preserve)
            return x

    # Each region keeps a state, and one that runs again keeps the state of that moment meanwhile.
    for reentrant in (True, False):
        for preserve in (True, False):
            model = Regions(reentrant)
            model.preserve = preserve  # type: ignore[assignment]
            inp = {"x": torch.randn(2, 8, requires_grad=True)}
            predicted = predicted_bytes(model, inp, lambda m, i: m(i["x"]).sum().backward())
            real = observe_step(model, inp, lambda m, i: m(i["x"]).sum().backward()).peak_bytes
            assert abs(predicted - real) <= 64


def test_an_activation_that_a_running_model_shares_can_be_traced_in_another() -> None:
    shared = nn.GELU()
    running = nn.Sequential(nn.Linear(8, 8), shared)
    shared.state_dict = lambda: {}  # type: ignore[method-assign, assignment]
    inp = {"x": torch.randn(4, 8)}
    other = nn.Sequential(nn.Linear(8, 8), shared)
    alone = cpu_trace(nn.Sequential(nn.Linear(8, 8), nn.GELU()), inp, works)
    access = Interception(running, UseOrder(on_meta_now(nn.Linear(1, 1, device="meta")), Ledger(int), {}))
    try:
        assert cpu_trace(other, inp, works).backward_peak_bytes == alone.backward_peak_bytes
        with pytest.raises(TraceError, match="runs under a plan"):
            cpu_trace(running, inp, works)
    finally:
        access.remove()


def test_hooks_on_gradients_that_a_step_registers_stay_with_their_parameter() -> None:
    told = Seen()

    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        handle = model.weight.register_post_accumulate_grad_hook(lambda parameter: told.append(parameter.shape))  # type: ignore[union-attr, operator]
        model(inp["x"]).sum().backward()
        handle.remove()

    model = nn.Linear(4, 2, device="meta")
    trace = cpu_trace(model, {"x": torch.ones(3, 4)}, step)
    assert list(told) == [torch.Size([2, 4])]
    assert [parameter.grad_arrivals for parameter in trace.parameters] == [1, 1]
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
