"""The memory of a machine that a plan may still take, from sizes of the process that are written down by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from elixir.errors import InputError
from elixir.hardware import promises
from elixir.hardware.process_memory import HEAP, MAPS_VARIABLE, Resident
from elixir.units import GIB, MIB
from elixir.wrapper import ElixirModule
from tests.common import inside
from tests.common.parity import Case, make_plan, square_loss

PLACE = "elixir.wrapper.account.plan_promise"


class Net(nn.Module):
    """A layer with buffers, one of them sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("scale", torch.ones(1000))
        few = torch.sparse_coo_tensor([[1, 5]], [1.0, 2.0], (900,), check_invariants=True)
        self.register_buffer("few", few, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale[0]


class Machine:
    """The memory of a process and of its machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: Resident | None = Resident(GIB, 100 * MIB, 2 * GIB)
        self.free_bytes: int | None = 64 * GIB
        self.asked: list[str] = []
        monkeypatch.setattr(f"{PLACE}.give_back_freed", lambda: self.asked.append("give back"))
        monkeypatch.setattr(f"{PLACE}.resident", self.resident)
        monkeypatch.setattr(f"{PLACE}.free_host_bytes", self.free)

    def resident(self) -> Resident | None:
        self.asked.append("resident")
        return self.held

    def free(self) -> int:
        if self.free_bytes is None:
            raise InputError("this operating system does not tell it")
        return self.free_bytes


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    inside.forget(monkeypatch, "promises")
    monkeypatch.delenv(MAPS_VARIABLE, raising=False)
    yield Machine(monkeypatch)
    HEAP.forget()


@pytest.fixture
def module(machine: Machine) -> Iterator[ElixirModule]:
    it = Case(Net(), {"x": torch.randn(2, 64)}, square_loss)
    module = ElixirModule(it.model, make_plan(it, "streamed"), device="cpu")
    yield module
    module.close()


def test_a_plan_takes_of_a_device_what_it_does_not_hold_yet(
    machine: Machine, module: ElixirModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    promise = inside.promise(module)
    later = module.plan.predicted.device_peak_bytes - inside.live_bytes(module, "device")
    assert later > 0
    with monkeypatch.context() as there:
        inside.pretend_device(there, module, torch.device("cuda", 0))
        there.setattr(promise, "device", "cuda:0")
        there.setattr(f"{PLACE}.free_device_bytes", lambda device: later)
        promise.refuse_exceeded(module.plan)
        there.setattr(f"{PLACE}.free_device_bytes", lambda device: later - 1)
        with pytest.raises(InputError, match="more of device memory"):
            promise.refuse_exceeded(module.plan)
    machine.held = None
    machine.free_bytes = 0
    promise.refuse_exceeded(module.plan)  # nothing is known of the process


def test_the_peak_of_a_device_is_known_once_a_step_of_the_only_plan_has_raised_it(
    module: ElixirModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    promise, other, peak = inside.promise(module), inside.other_promise(module), {"bytes": 100}
    promise.note_device_peak()
    assert promise.device_peak() is None, "a CPU has none"
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak["bytes"])
    with monkeypatch.context() as there:
        inside.pretend_device(there, module, torch.device("cuda", 0))
        promise.note_device_peak()
        assert promise.device_peak() is None, "that of something before"
        peak["bytes"] = 200
        promise.note_device_peak()  # before a step that is not the first
        assert promise.device_peak() == 200
        promise.forget_device_peak()
        promise.note_device_peak()
        assert promise.device_peak() is None
        peak["bytes"] = 300
        promises.enter(other)
        assert promise.device_peak() is None, "whose memory is it?"
        promises.leave(other)
        assert promise.device_peak() == 300
