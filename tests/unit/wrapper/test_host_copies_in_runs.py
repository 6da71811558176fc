"""Steps that move activations to the host themselves, under a plan: weights stay, with the numbers of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from elixir.search import optimal_search
from elixir.step_trace import StepTrace
from elixir.tracer.trace import trace_step
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import gpu
from tests.common.parity import hf_loss
from tests.common.tiny_models import tiny
from tests.common.tracing import H200
from tests.common.twins import step_alike


def _step(model: Any, batch: dict[str, Any], backward: Any = None) -> torch.Tensor:
    with save_on_cpu(pin_memory=True):
        loss = hf_loss(model, batch)
    (backward or torch.Tensor.backward)(loss)
    return loss.detach()


@pytest.fixture
def moved_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    original = saved_tensors_hooks.__init__

    def init(self: Any, pack: Any, unpack: Any) -> None:
        def counted(tensor: torch.Tensor) -> Any:
            sizes.append(tensor.numel() * tensor.itemsize)
            return pack(tensor)

        original(self, counted if isinstance(self, save_on_cpu) else pack, unpack)

    monkeypatch.setattr(saved_tensors_hooks, "__init__", init)
    return sizes


@pytest.mark.parametrize("placement", ["cuda", "cpu"])
def test_weights_stay_and_the_rest_is_as_traced(placement: Any, moved_bytes: list[int]) -> None:
    plain, planned = (tiny("gpt2", attn_implementation="eager", use_cache=False, layers=4) for _ in range(2))
    plain = gpu.there(plain)
    batch: dict[str, Any] = {"input_ids": torch.arange(32).reshape(2, 16), "labels": torch.arange(32).reshape(2, 16)}
    trace: StepTrace = trace_step(planned, batch, _step, hardware=H200)
    moved_bytes.clear()
    asked = {"hardware": H200, "device_memory": "1GiB", "host_budget": "1GiB", "assume": "nominal"}
    search = optimal_search(trace, 1, placement=placement, **asked)
    model = ElixirModule(planned, search)
    optimizer = ElixirOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    step_alike(reference, model, dict(plain.named_parameters()))
    assert {chunk.resident for chunk in search.plan.chunks} == {placement == "cuda"}
    for _ in range(3):
        moved_bytes.clear()
        loss = _step(model, batch, optimizer.backward)
        assert sum(moved_bytes) == trace.transferred_bytes("device_to_host") > 0
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(loss, _step(plain, gpu.there(batch)))
        reference.step()
        reference.zero_grad()
    weights = model.state_dict()
    assert all(torch.equal(weights[name].cpu(), value.cpu()) for name, value in plain.state_dict().items())
    model.close()
