"""Ranks find other memory on their machines, and one plan is made for all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from elixir.errors import InputError
from elixir.hardware import promises
from elixir.hardware.memory import free_host_bytes
from elixir.hardware.promises import MachineView, Memory, least_free, unequal
from elixir.units import GIB
from tests.common import inside


def view(machine: str, host: float, device: float = 80, name: str = "H100") -> MachineView:
    return MachineView(machine, machine, name, Memory(int(device * GIB), int(host * GIB)))


def test_what_differs_is_named_with_what_others_have() -> None:
    views = [view("a", 500), view("a", 500), view("b", 200, 40, "A100")]
    assert unequal(views) == (
        "b is a A100, the first a H100 and has 1 of the ranks, others 2 and has 200.00 GiB of host memory free, others "
        "up to 500.00 GiB and has 40.00 GiB of device memory free, others up to 80.00 GiB"
    )


def test_this_machine_is_read() -> None:
    mine = MachineView.here(torch.device("cpu"))
    assert mine.device
    assert mine.free.host_bytes > 0.5 * free_host_bytes() > 0


def test_machines_that_are_alike_are_not_named() -> None:
    views = [view("a", 500), view("a", 499), view("b", 470), view("b", 480)]
    assert unequal(views) == unequal(views[:1]) == unequal([]) == ""
    assert least_free(views) == Memory(80 * GIB, 470 * GIB)


class Promise(SimpleNamespace):
    __hash__ = object.__hash__


def test_a_plan_may_take_what_is_free_and_promised_to_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    inside.forget(monkeypatch, "promises")
    on_gpu = Promise(device="cuda:0", ranks=2, promised=Memory(10 * GIB, 8 * GIB), taken=Memory(4 * GIB, 9 * GIB))
    on_cpu = Promise(device="cpu", ranks=3, promised=Memory(5 * GIB, 4 * GIB), taken=Memory(3 * GIB, GIB))
    for each in (on_gpu, on_cpu):
        promises.enter(each)
    found = promises.outstanding("cuda:0")
    assert (found.plans, found.device_bytes, found.host_bytes) == (2, 6 * GIB, (3 + 3 * 2) * GIB)
    assert promises.outstanding("cpu", but=on_gpu).device_bytes == 2 * GIB
    assert promises.outstanding("cuda:1").device_bytes == 0
    for needed, memory in ((Memory(2 * GIB, GIB), "device"), (Memory(GIB, 2 * GIB), "host")):
        free = {"device_bytes": 7 * GIB, "host_bytes": 10 * GIB}
        promises.refuse_exceeded(Memory(GIB, GIB), Memory(**free), "cuda:0", name="net")
        with pytest.raises(
            InputError, match=rf"net takes 2.00 GiB more of {memory} .* only 1.00 GiB .*\(2\).* 1.06 GiB more s"
        ):
            promises.refuse_exceeded(needed, Memory(**free), "cuda:0", name="net")
        free[f"{memory}_bytes"] += int(1.06 * GIB)
        promises.refuse_exceeded(needed, Memory(**free), "cuda:0", name="net")
    promises.leave(on_cpu)
    promises.leave(on_cpu)
    assert promises.outstanding("cuda:0").host_bytes == 0
    with pytest.raises(InputError, match=r"1.00 GiB are free and not promised .*\(1\)"):
        promises.refuse_exceeded(Memory(0, 2 * GIB), Memory(0, GIB), "cpu", name="net")
    del on_gpu, each
    assert promises.outstanding("cuda:0").plans == 0
