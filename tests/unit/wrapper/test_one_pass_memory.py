"""Micro-batches that wait for their turn: the memory that they keep on the device, as planned and as it is."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elixir.access import swapping
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import inside
from tests.common.one_pass import batches, family, hf_loss, plan_for, stepping

LAYERS = 2
LOSS_BYTES = 4
"""A plan counts two of each micro-batch that waits."""
LARGEST_GRADIENT_BYTES = 4 * 4 * 128 * 128
STATE_BYTES = torch.get_rng_state().nbytes
"""Each layer keeps a state of the generator, which no operator makes."""


class Storages:
    """Bytes of storages that operators have made, on all threads on which its mode runs."""

    def __init__(self) -> None:
        self.peak_bytes = self._live_bytes = 0
        self._known: dict[int, int] = {}
        self._lock = threading.RLock()

    def mode(self) -> TorchDispatchMode:
        storages = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                storages.see((args, kwargs), new=False)
                result = func(*args, **(kwargs or {}))
                storages.see(result, new=True)
                return result

        return Mode()

    def see(self, tree: Any, *, new: bool) -> None:
        tensors = (leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
        for storage in (tensor.untyped_storage() for tensor in tensors):
            with self._lock:
                if storage._cdata in self._known:
                    continue
                self._known[storage._cdata] = nbytes = storage.nbytes() if new else 0
                self._live_bytes += nbytes
                self.peak_bytes = max(self.peak_bytes, self._live_bytes)
                weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, key: int) -> None:
        with self._lock:
            self._live_bytes -= self._known.pop(key)


@contextmanager
def seen_by(storages: Storages, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs the sweep of a pass under the mode; the calls of step_fn enter it themselves."""
    with monkeypatch.context() as patch:
        inside.sweep_within(patch, storages.mode)
        gc.collect()
        gc.disable()
        try:
            yield
        finally:
            gc.enable()


def peaks(count: int, monkeypatch: pytest.MonkeyPatch, *, on_host: bool) -> tuple[int, int]:
    """Predicted and observed bytes of activations and of the gradient in flight; memory of the runtime is as planned."""
    make, batch = family("llama", layers=LAYERS, hidden=128), batches("llama", 1)[0][0]
    plan = plan_for(make(), batch, accumulation=count, on_host=on_host)
    module, storages = ElixirModule(make(), plan, device="cpu"), Storages()
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    inner = stepping(optimizer, hf_loss, count)

    def step_fn(model: Any, micro_batch: Any) -> Any:
        with storages.mode():
            return inner(model, micro_batch)

    optimizer.accumulate(inner, [batch] * count)
    optimizer.step()
    optimizer.zero_grad()
    with seen_by(storages, monkeypatch):
        optimizer.accumulate(step_fn, [batch] * count)
    arena = inside.arena(module)
    parts = plan.predicted.device_parts
    assert arena.peak_bytes["device"] == parts["rcache"] + parts["gradient_blocks"]
    module.settle()
    assert arena.peak_bytes["host"] == plan.predicted.host_step_bytes
    module.close()
    inputs = sum(value.nbytes for value in batch.values())
    planned = parts["activations"] + parts["gradient_in_flight"] - count * inputs
    return planned, storages.peak_bytes + count * LAYERS * STATE_BYTES


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("count", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_micro_batches_that_wait_keep_what_is_planned(
    count: int, monkeypatch: pytest.MonkeyPatch, *, on_host: bool
) -> None:
    monkeypatch.setattr(swapping, "SMALLEST_BYTES", 256)
    one, several = (peaks(number, monkeypatch, on_host=on_host) for number in (1, count))
    # A plan counts the largest gradient next to the most activations, though it comes at another moment.
    unused = one[0] - one[1]
    assert 0 <= unused <= LARGEST_GRADIENT_BYTES
    assert 0 <= several[0] - several[1] - unused <= LOSS_BYTES * count
