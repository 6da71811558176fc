"""The seconds of compute are those of operators one by one, at measured rates of their classes or at sustained shares."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elixir.hardware.profile import HardwareProfile, preset
from elixir.hardware.rate_fit import RateFit
from elixir.search.simulator.rates import UNALIGNED_SHARE, Rates
from elixir.step_trace import Access, Operation, StepTrace
from tests.common.samples import make_trace

PEAK, BANDWIDTH = 1e12, 1e10


def machine(**changes: object) -> HardwareProfile:
    """One with round rates."""
    base = replace(
        preset("h200"), flops_per_s={"bfloat16": PEAK}, matmul_efficiency=1.0, device_memory_bytes_per_s=BANDWIDTH
    )
    plain = replace(base, sustained_flops_share=None, sustained_memory_share=None, launch_s=None)
    return replace(plain, **changes)  # type: ignore[arg-type]


def step_of(*operations: Operation) -> StepTrace:
    """One access with these operators."""
    access = Access("forward", (0,), 0, "", "", tuple(range(len(operations))), 0)
    return replace(make_trace(layers=1), operations=operations, accesses=(access,))


def seconds(hardware: HardwareProfile, *operations: Operation) -> float:
    return float(Rates(hardware, "bfloat16", 1, 1).accesses_s(step_of(*operations)).sum())


PRODUCT = Operation("tall", "bfloat16", 10**12, 10**6)
NORM = Operation("reduction", "bfloat16", 0, 10**10)
ADD = Operation("elementwise", "bfloat16", 0, 10**10)


def test_each_class_has_its_measured_rate() -> None:
    fits = {
        "matmul.bfloat16.square": RateFit(0.0, PEAK, 0.0),
        "matmul.bfloat16.tall": RateFit(0.0, PEAK / 4, 0.0),
        "attention.bfloat16": RateFit(0.5, PEAK, 0.0),
        "elementwise.bfloat16": RateFit(0.0, BANDWIDTH, 0.0),
        "reduction.bfloat16": RateFit(0.0, BANDWIDTH / 2, 0.0),
    }
    hardware = machine(fits=fits)
    assert seconds(hardware, PRODUCT) == pytest.approx(4.0)
    assert seconds(hardware, replace(PRODUCT, kind="deep")) == pytest.approx(1.0)
    assert seconds(hardware, replace(PRODUCT, kind="attention")) == pytest.approx(1.5)
    assert seconds(hardware, NORM) == pytest.approx(2.0)
    assert seconds(hardware, ADD, replace(ADD, kind="activation")) == pytest.approx(2.0)


def test_a_dtype_without_rates_takes_those_of_the_step() -> None:
    assert seconds(machine(), replace(ADD, dtype="int64")) == pytest.approx(1.0)


def test_many_small_kernels_take_their_launches() -> None:
    small = replace(ADD, moved_bytes=10)
    hardware = machine(launch_s=0.01)
    assert seconds(hardware, *[small] * 100) == pytest.approx(1.0)
    assert seconds(hardware, PRODUCT, small) == pytest.approx(1.0), "the host runs ahead of a long kernel"


def test_unaligned_products_have_their_own_rate_and_share() -> None:
    product = Operation("unaligned", "bfloat16", 10**12, 10**6)
    aligned = {"matmul.bfloat16.square": RateFit(0.5, PEAK, 0.0)}
    assert seconds(machine(), product) == pytest.approx(1.0 / UNALIGNED_SHARE)
    assert seconds(machine(fits=aligned), product) == pytest.approx(0.5 + 1.0 / UNALIGNED_SHARE)
    for other in ((8, 0), (10, 0), (12, 0)):  # where nothing was measured
        assert seconds(machine(fits=aligned, compute_capability=other), product) == pytest.approx(1.5)
    measured = aligned | {"matmul.bfloat16.unaligned": RateFit(0.0, PEAK / 10, 0.0)}
    assert seconds(machine(fits=measured), product) == pytest.approx(10.0)
