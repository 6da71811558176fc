"""A run does what its plan predicted, whatever the timing, and its failures reach the caller who asked for the work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elixir.search import optimal_search
from elixir.wrapper.account import step_report as step_clock
from elixir.wrapper.account.step_report import StepReport
from tests.common import gpu, inside
from tests.common.parity import Case, Pair, case, hf_loss, make_plan, report_of, square_loss
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


def test_a_report_counts_the_token_ids_of_all_micro_batches() -> None:
    it, numbers = case("opt"), Case(nn.Linear(4, 4), {"input": torch.randn(2, 4)}, square_loss)
    with Pair(it, make_plan(it, "streamed"), max_norm=0.05) as pair:
        pair.backward()
        pair.backward()
        pair.step()
        found = report_of(pair.module).to_dict()
        assert (found["tokens"], found["micro_batches"]) == (2 * it.inp["input_ids"].numel(), 2)
        assert found["grad_norm"] > 0
        assert "predicted_step_s" not in found  # of two micro-batches nothing was predicted
    with Pair(numbers, make_plan(numbers, "resident")) as pair:
        pair.train(1)
        report = report_of(pair.module)
        assert report.tokens is report.tokens_per_s is None
        assert "grad_norm" not in report.to_dict()


class FakeTime:
    """A clock that only moves when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(step_clock, "time", self)

    def perf_counter(self) -> float:
        return self.now

    def pass_in(self, model: torch.nn.Module, forward_s: float, backward_s: float) -> None:
        """Device bytes that a forward and a backward take."""

        def pass_forward(*_: Any) -> None:
            self.now += forward_s

        def pass_backward(module: Any, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: setattr(self, "now", self.now + backward_s))

        model.lm_head.register_forward_pre_hook(pass_forward)  # type: ignore[union-attr,operator]
        model.lm_head.register_forward_hook(pass_backward)  # type: ignore[union-attr,operator]


@gpu.on_the_cpu("steps are timed by the host's clock")
def test_a_step_takes_no_time_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step lasts from the first forward with gradients to the end of the optimizer's step: 2 x (1 s + 2 s) + 4 s."""
    fake = FakeTime(monkeypatch)
    it = case("opt", layers=1)
    with Pair(it, make_plan(it, "streamed"), alike=False) as pair:
        fake.pass_in(pair.module.module, 1.0, 2.0)
        pair.optimizer.register_step_pre_hook(lambda *_: setattr(fake, "now", fake.now + 4.0))
        pair.optimizer.step()
        assert pair.module.last_report is not None
        assert pair.module.last_report.step_s is None  # there was none
        for _ in range(3):
            fake.now += 100.0
            with torch.no_grad():
                hf_loss(pair.module, it.inp)
            for _ in range(2):
                pair.optimizer.backward(hf_loss(pair.module, it.inp))
            pair.optimizer.step()
            assert pair.module.last_report.step_s == 2 * (1.0 + 2.0) + 4.0
            fake.now += 100.0
            pair.optimizer.zero_grad()
