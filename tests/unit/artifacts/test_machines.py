"""Ranks find other memory on their machines, and one plan is made for all."""

from __future__ import annotations

import torch

from elixir.hardware.memory import free_host_bytes
from elixir.hardware.promises import MachineView, Memory, unequal
from elixir.units import GIB


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
