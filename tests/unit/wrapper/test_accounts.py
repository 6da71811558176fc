"""A run does what its plan predicted, whatever the timing, and its failures reach the caller who asked for the work."""

from __future__ import annotations

from typing import Any

import pytest

from elixir.search import optimal_search
from elixir.wrapper.account.step_report import StepReport
from tests.common import inside
from tests.common.parity import Case, Pair, case, make_plan, report_of
from tests.common.tiny_models import FAMILIES


def surprises(report: StepReport) -> dict[str, tuple[int, int]]:
    """Leaves out the device's peak: a plan for a CPU counts no cuBLAS."""
    return {name: pair for name, pair in report.surprises().items() if name != "device_peak"}


def step_of(it: Case) -> Any:
    return lambda model, inp: it.loss(model, inp).backward()


@pytest.mark.sampled
@pytest.mark.parametrize("checkpoint", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loads_are_those_predicted(family: str, checkpoint: str) -> None:
    it = case(family, checkpoint)
    plan = make_plan(it, "streamed", allocate_factor=0.3)
    with Pair(it, plan) as pair:
        for _ in range(2):
            pair.train(1)
            counts = report_of(pair.module)
            assert counts.observed["loads"] == plan.predicted.loads
            assert counts.demand_loads == counts.deviations == 0
            assert counts.observed["host_to_device"] == plan.predicted.moved_bytes["host_to_device"]
            assert counts.observed["device_to_host"] == plan.predicted.moved_bytes["device_to_host"]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_bytes_stay_below_the_predicted_peak(share: float) -> None:
    it = case("opt", "non-reentrant", layers=4)

    def search(**options: Any) -> Any:
        return optimal_search(
            it.model, 1, inp=it.inp, step_fn=step_of(it), hardware="cpu", host_budget="64GiB", **options
        ).plan

    low, high = (
        search(placement=where, device_memory="64GiB").predicted.device_peak_bytes for where in ("cpu", "cuda")
    )
    plan = search(device_memory=int(low + share * (high - low)))
    with Pair(it, plan) as pair:
        pair.train(3)
        pair.assert_same_weights()
        report = report_of(pair.module)
        assert (
            report.observed["device_buffers"] <= report.predicted["device_buffers"] <= plan.predicted.device_peak_bytes
        )
        assert inside.peak_bytes(pair.module, "host") <= plan.predicted.host_step_bytes
        assert report.observed["loads"] == plan.predicted.loads
        assert not surprises(report)
