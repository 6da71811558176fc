"""Host memory carries Adam and transfers together, and Adam on the device moves more than its own operands."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from elixir.hardware import preset
from elixir.search.simulator import ADAM_TRAFFIC_BYTES, DEVICE_ROUNDING_BYTES, Rates
from tests.common.samples import make_hardware

NUMEL = 10_000_000
MOVED = 2 * NUMEL


def rates(host_bytes_per_s: float, adam_numel_per_s: float, moments: str = "float32") -> Rates:
    machine = replace(
        make_hardware(), fits={}, host_memory_bytes_per_s=host_bytes_per_s, host_adam_numel_per_s=adam_numel_per_s
    )
    return Rates(machine, "bfloat16", 1, 1, moments=moments)  # type: ignore[arg-type]


def test_adam_that_fills_host_memory_waits_for_what_transfers_take_of_it() -> None:
    traffic = ADAM_TRAFFIC_BYTES["float32"]
    full = rates(traffic * 1e9, 1e9)
    assert full.host_step([NUMEL], [0])[0] == pytest.approx(NUMEL / 1e9)
    assert full.host_step([NUMEL], [MOVED])[0] == pytest.approx((traffic * NUMEL + MOVED) / (traffic * 1e9))


def test_adam_that_leaves_room_is_not_slowed() -> None:
    roomy = rates(2 * ADAM_TRAFFIC_BYTES["float32"] * 1e9, 1e9)
    assert roomy.host_step([NUMEL], [MOVED])[0] == pytest.approx(NUMEL / 1e9)


def test_memory_is_never_slower_than_adam_alone_was_seen_to_use_it() -> None:
    """Two figures of one profile need not agree: the one of Adam was measured."""
    odd = rates(1e9, 1e9)
    assert odd.host_step([NUMEL], [0])[0] == pytest.approx(NUMEL / 1e9)


def test_nothing_faster_makes_adam_slower() -> None:
    steps = [1.0, 1.5, 4.0, 16.0]
    for moments in ("float32", "bfloat16", "8bit"):
        for adam in steps:
            by_memory = [rates(1e9 * m, 3e7 * adam, moments).host_step([NUMEL], [MOVED])[0] for m in steps]
            assert by_memory == sorted(by_memory, reverse=True)
            by_adam = [rates(1e9 * adam, 3e7 * m, moments).host_step([NUMEL], [MOVED])[0] for m in steps]
            assert by_adam == sorted(by_adam, reverse=True)
    assert not rates(1e9, 1e9).host_step([0], [0]).any()


def test_adam_on_the_device_counts_casts_factor_and_rounding_in_low_precision() -> None:
    h200 = Rates(preset("h200"), "bfloat16", 1, 1)
    plain, rounded = h200.device_step([NUMEL, NUMEL], [False, True])
    assert plain == pytest.approx(float(h200.device_adam(NUMEL)))
    assert rounded - plain == pytest.approx(float(h200.device_memory(DEVICE_ROUNDING_BYTES * NUMEL)))
    fewer = Rates(preset("h200"), "bfloat16", 1, 1, moments="bfloat16")
    assert np.allclose(*fewer.device_step([NUMEL, NUMEL], [False, True]))  # one pass reads and writes them all
