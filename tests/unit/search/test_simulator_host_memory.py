"""Host memory carries Adam and transfers together, and Adam on the device moves more than its own operands."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from elixir.hardware.profile import preset
from elixir.hardware.rate_fit import RateFit
from elixir.search.simulator.rates import Rates
from tests.common.samples import make_hardware

NUMEL = 10_000_000
MOVED = 2 * NUMEL


def rates(host_bytes_per_s: float, adam_numel_per_s: float, moments: str = "float32") -> Rates:
    machine = replace(
        make_hardware(), fits={}, host_memory_bytes_per_s=host_bytes_per_s, host_adam_numel_per_s=adam_numel_per_s
    )
    return Rates(machine, "bfloat16", 1, 1, moments=moments)  # type: ignore[arg-type]


def test_nothing_faster_makes_adam_slower() -> None:
    steps = [1.0, 1.5, 4.0, 16.0]
    for moments in ("float32", "bfloat16", "8bit"):
        for adam in steps:
            by_memory = [rates(1e9 * m, 3e7 * adam, moments).host_step([NUMEL], [MOVED])[0] for m in steps]
            assert by_memory == sorted(by_memory, reverse=True)
            by_adam = [rates(1e9 * adam, 3e7 * m, moments).host_step([NUMEL], [MOVED])[0] for m in steps]
            assert by_adam == sorted(by_adam, reverse=True)
    assert not rates(1e9, 1e9).host_step([0], [0]).any()


def test_both_directions_of_a_link_share_host_memory() -> None:
    def slowdown(host_bytes_per_s: float, fits: dict[str, RateFit] | None = None, ranks: int = 1) -> float:
        links = {"host_to_device_bytes_per_s": 25e9, "device_to_host_bytes_per_s": 25e9}
        machine = replace(
            make_hardware(), fits=fits or {}, host_memory_bytes_per_s=host_bytes_per_s, devices_per_host=4, **links
        )
        found = Rates(machine, "bfloat16", ranks, ranks)
        assert found.fetch_slowdown == found.offload_slowdown
        return found.fetch_slowdown

    assert slowdown(60e9) == 1.0
    assert slowdown(40e9) == pytest.approx(50 / 40)
    assert slowdown(120e9, ranks=4) == pytest.approx(50 / 30)
    alone, both = RateFit(0.0, 25e9, 0.0), RateFit(0.0, 20e9, 0.0)
    ways = ("host_to_device", "device_to_host")
    measured = dict.fromkeys(ways, alone) | {f"{way}.both": both for way in ways}
    assert slowdown(40e9, measured) == pytest.approx(25 / 20)  # that says more than two figures that were not together
    assert slowdown(120e9, measured, ranks=4) == pytest.approx(50 / 30)  # measured with one rank


def test_ranks_of_a_preset_have_what_its_source_measured_with_as_many() -> None:
    a100 = preset("a100")
    for ranks in (1, 2, 5, 8):
        found = Rates(a100, "bfloat16", ranks, ranks)
        assert found.fetch.per_s * ranks == pytest.approx(16.3e9 * ranks + 8.7e9)
        assert found.offload.per_s * ranks == pytest.approx(15.8e9 * ranks + 2.3e9)
    by_ranks = [Rates(a100, "bfloat16", ranks, ranks).host_adam.per_s * ranks for ranks in (1, 4, 8)]
    assert by_ranks[0] == pytest.approx(5.15e9)
    assert by_ranks[2] == pytest.approx(1.66e9 * np.log(8) + 5.15e9)
    assert by_ranks == sorted(by_ranks)
    assert by_ranks[1] == pytest.approx(1.66e9 * np.log(4) + 5.15e9, rel=0.12)
