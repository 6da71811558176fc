"""Several micro-batches in a pass: the bits of plain accumulation, the bytes and loads of one micro-batch, and the memory of
those that wait."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import elixir
from elixir.access import activations as swapping
from elixir.errors import InputError
from elixir.hardware.profile import preset
from elixir.plan.plan import Plan
from elixir.search.problem import activation_trace
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.phase import Phase
from tests.common import inside
from tests.common.one_pass import (
    batches,
    family,
    hf_loss,
    in_passes,
    plainly,
    plan_for,
    stepping,
)
from tests.common.tiny_models import tiny

FAMILIES = ("llama", "gpt2", "t5", "mixtral")


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("name", FAMILIES)
def test_gives_the_bits_of_a_loop(name: str, max_norm: float) -> None:
    make, steps = family(name), batches(name, 4)
    assert in_passes(make, steps, max_norm=max_norm).same_as(plainly(make, steps, max_norm=max_norm))


@pytest.mark.slow
@pytest.mark.parametrize("home", ["cpu", "cuda"])
@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("name", [*FAMILIES, "opt", "bert", "vit"])
def test_gives_the_bits_of_a_loop_of_any_length(name: str, count: int, home: str) -> None:
    make, steps = family(name), batches(name, count, steps=3)
    plan = plan_for(make(), steps[0][0], accumulation=count, pass_size=max(count, 2) if count > 1 else 1, home=home)
    if count == 1:
        plan = replace(plan_for(make(), steps[0][0], accumulation=2, home=home), accumulation=1)
    assert in_passes(make, steps, plan, max_norm=0.5).same_as(plainly(make, steps, max_norm=0.5))


def test_updates_states_early() -> None:
    make, steps = family("llama"), batches("llama", 4)
    plan = _early(plan_for(make(), steps[0][0], accumulation=4))
    found = in_passes(make, steps, plan, max_norm=0.5)
    assert found.reports[-1].early.made > 0
    assert found.same_as(plainly(make, steps, max_norm=0.5))


def _early(plan: Plan) -> Plan:
    chunks = tuple(replace(chunk, update="early") if chunk.grad_entry is not None else chunk for chunk in plan.chunks)
    return replace(plan, chunks=chunks, may_update_early=True)


def test_frozen_weights_get_no_gradient() -> None:
    def make() -> torch.nn.Module:
        model = family("llama")()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name or "down_proj" in name)
        return model

    steps = batches("llama", 3)
    assert in_passes(make, steps).same_as(plainly(make, steps))


def test_an_error_in_one_micro_batch_or_a_signal_meanwhile_ends_all_and_the_next_step_is_right() -> None:
    make, steps = family("llama"), batches("llama", 4)
    plan = plan_for(make(), steps[0][0], accumulation=4)
    expected, phases = plainly(make, steps), list[Phase]()
    for broken in (0, 2):
        module = ElixirModule(make(), plan, device="cpu")
        optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=1e-2))

        def failing(model: Any, batch: Any) -> None:
            loss = hf_loss(model, batch)
            if batch is steps[0][broken]:  # noqa: B023 - called in this turn
                if broken:  # noqa: B023
                    raise ValueError("mine")
                # A signal wakes a thread that waits already; of one that is about to wait it only leaves a note.
                while not handled.is_set():  # noqa: B023
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                    handled.wait(1)  # noqa: B023
            optimizer.backward(loss)  # noqa: B023

        handled = threading.Event()

        def interrupting(*_: Any) -> None:
            handled.set()  # noqa: B023
            raise ValueError("mine")

        before = signal.signal(signal.SIGINT, interrupting)
        try:
            with pytest.raises(ValueError, match="mine"):
                optimizer.accumulate(failing, steps[0])
        finally:
            signal.signal(signal.SIGINT, before)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("micro-batch")]
        phase = partial(inside.phase, module)
        assert phase() is Phase.IDLE
        optimizer.zero_grad()
        loss = hf_loss(module, steps[0][0])
        loss.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.backward(loss)  # the next pass ends it
        losses = []
        for step in steps:
            phases.append(phase())

            def trains(model: Any, batch: Any) -> torch.Tensor:
                phases.append(phase())  # noqa: B023 - called in this turn
                return stepping(optimizer, hf_loss, 4)(model, batch)  # noqa: B023

            losses += optimizer.accumulate(trains, step)
            optimizer.step()
            optimizer.zero_grad()
        assert [phases[0], phases[1], phases[5], phases[6]] == [Phase.BACKWARD, *[Phase.IDLE] * 3]
        assert all(torch.equal(one, two) for one, two in zip(losses, expected.losses, strict=True))
        weights = module.state_dict()
        assert all(torch.equal(weights[name], value) for name, value in expected.weights.items())
        module.close()
        with pytest.raises(InputError, match="closed"):
            optimizer.accumulate(failing, steps[0])
        phases.clear()


@pytest.mark.sampled
@pytest.mark.parametrize("own", ["non-reentrant", "none"])
def test_a_search_moves_inputs_as_they_are_and_makes_layers_run_again(
    monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    for module in (swapping, activation_trace):
        monkeypatch.setattr(module, "SMALLEST_BYTES", 256)
    link = dict.fromkeys(("host_to_device_bytes_per_s", "device_to_host_bytes_per_s"), 10000000.0)

    def make() -> nn.Module:
        return tiny("llama", checkpoint=own, layers=6, hidden=64).train()

    steps = batches("llama", 8)
    plan = elixir.optimal_search(
        make(),
        1,
        inp=steps[0][0],
        step_fn=lambda model, batch: hf_loss(model, batch).backward(),
        hardware=replace(preset("cpu"), **link),
        device_memory="2MiB",
        host_budget="1GiB",
        accumulation=8,
        pass_size="auto",
        assume="nominal",
        activations="auto" if own == "none" else None,
    ).plan
    assert plan.pass_size > 1
    assert all(each.keep == () for each in plan.step.activations)
    found = in_passes(make, steps, plan, max_norm=0.5)
    report = found.reports[-1]
    assert plan.step.swap_bytes > 0
    for way in ("host_to_device", "device_to_host", "loads"):
        assert report.observed[way] == report.predicted[way]
    if plan.passes == 1:
        assert found.same_as(plainly(make, steps, max_norm=0.5))


# --- memory ---------------------------------------------------------------------------------------------------------


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
