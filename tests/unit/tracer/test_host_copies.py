"""Activations that a step moves to the host itself: bytes against real steps, and what plans make of them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

from elixir.models import default_input
from tests.common.tiny_models import tiny
from tests.common.tracing import H200, Seen, trace_step

FORMS = ("save_on_cpu", "save_on_cpu pinned", "offload_wrapper", "offloaded checkpoints")
PINNED = FORMS[1:]


class Counted:
    """Counts the copies of `save_on_cpu` in a real step on the CPU, as if it had to copy; weights are left out."""

    def __init__(self, model: nn.Module, *, pinned: bool) -> None:
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._pinned = pinned
        self._live, self._peaks = Counter[int](), Counter[int]()
        self.copied_bytes = 0

    @property
    def peak_bytes(self) -> int:
        return sum(self._peaks.values())

    def pack(self, original: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() in self._weights:
            return tensor.device, tensor
        device, copy = original(tensor)
        copy = copy.clone() if copy is tensor else copy
        nbytes = copy.numel() * copy.itemsize
        self.copied_bytes += nbytes
        taken = 1 << (nbytes - 1).bit_length() if self._pinned else nbytes
        size = taken if self._pinned else 0
        self._live[size] += taken
        self._peaks[size] = max(self._peaks[size], self._live[size])
        weakref.finalize(copy, self._live.subtract, {size: taken})
        return device, copy


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Counted], None]]:
    original = saved_tensors_hooks.__init__

    def use(counts: Counted) -> None:
        def init(self: Any, pack: Any, unpack: Any) -> None:
            ours = isinstance(self, save_on_cpu)
            original(self, (lambda tensor: counts.pack(pack, tensor)) if ours else pack, unpack)

        monkeypatch.setattr(saved_tensors_hooks, "__init__", init)

    yield use
    monkeypatch.undo()


def step_of(form: str) -> Callable[[nn.Module, dict[Any, Any]], None]:
    def step(model: nn.Module, batch: dict[Any, Any]) -> None:
        if form.startswith("save_on_cpu"):
            with save_on_cpu(pin_memory=form.endswith("pinned")):
                loss = model(**batch).loss
        else:
            loss = model(**batch).loss
        loss.backward()

    return step


def offloading(family: str, form: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    model = tiny(family, attn_implementation="eager", use_cache=False)
    if form == "offload_wrapper":
        layers = {"gpt2": "transformer.h", "llama": "model.layers", "opt": "model.decoder.layers"}[family]
        layers = model.get_submodule(layers)
        for number, layer in enumerate(layers):
            layers[number] = offload_wrapper(layer)
    if form == "offloaded checkpoints":
        if not hasattr(model, "activation_checkpointing_enable"):
            pytest.skip("this version of transformers does not offload checkpoints")
        # As on a machine with a device: a CPU cannot pin.
        monkeypatch.setattr("transformers.modeling_utils.get_current_accelerator", lambda: torch.device("cuda"))
        model.activation_checkpointing_enable(offload=True)
    return model


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
@pytest.mark.parametrize("form", FORMS)
def test_host_bytes_are_those_of_a_real_step(
    family: str, form: str, counted: Callable[[Counted], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = offloading(family, form, monkeypatch)
    batch, step = default_input(model, batch=2, seq=16), step_of(form)
    trace = trace_step(model, batch, step, hardware=H200, optimizer=None)
    counts = Counted(model, pinned=form in PINNED)
    counted(counts)
    step(model, batch)
    assert trace.transferred_bytes("device_to_host") == counts.copied_bytes > 0
    assert trace.transferred_bytes("host_to_device") == counts.copied_bytes
    assert trace.host_peak_bytes == counts.peak_bytes


class OnTheHost(nn.Module):
    """A layer on the device, a sum on the host, and a layer on the device again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 256), nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        there = hidden.to("cpu") + 1
        return self.second(there.to(device=hidden.device))


def test_what_is_computed_on_the_host_stays_there_until_it_is_sent_back() -> None:
    def step(model: nn.Module, batch: dict[Any, Any]) -> None:
        model(batch["x"]).sum().backward()

    trace = trace_step(OnTheHost(), {"x": torch.randn(4, 8)}, step, hardware=H200, optimizer=None)
    nbytes = 4 * 256 * 4
    assert [(each.direction, each.nbytes) for each in trace.transfers] == [
        ("device_to_host", nbytes),
        ("host_to_device", nbytes),
    ]
    assert trace.host_peak_bytes == 2 * nbytes  # the copy, and the sum


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_known_number_is_known_on_the_host_too(shape: tuple[int, ...]) -> None:
    """Also if it fills a tensor there, whatever that held before."""
    seen = Seen()

    def step(model: nn.Module, inp: dict[Any, Any]) -> None:
        there = torch.empty(shape, pin_memory=True)
        there.copy_(model(inp["x"]).detach()[0, 0])
        there.copy_(inp["number"])
        seen.append(bool((there.to(inp["x"].device) > 2).all()))
        model(inp["x"]).sum().backward()

    trace = trace_step(nn.Linear(4, 4), {"x": torch.rand(2, 4), "number": torch.tensor(2.5)}, step, hardware=H200)
    assert list(seen) == [True]
    assert trace.host_peak_bytes == (16 if shape else 4)  # pinned memory comes in powers of two
