"""A run does what its plan predicted, whatever the timing, and its failures reach the caller who asked for the work."""

from __future__ import annotations

import copy
import dataclasses
import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from elixir.chunk.lanes import Emulation
from elixir.errors import PlanError
from elixir.hardware.profile import preset
from elixir.search import optimal_search
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from elixir.wrapper.account import step_clock
from elixir.wrapper.account.step_report import StepReport
from tests.common import gpu, inside
from tests.common.parity import Case, Pair, assert_alike, case, hf_loss, make_plan, report_of, square_loss, take_step
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


def test_gradients_that_stay_with_parameters_are_none_of_the_runtimes_buffers() -> None:
    it = case("opt")
    with Pair(it, make_plan(it, "resident")) as pair:
        pair.train(2)
        report = pair.module.last_report
    assert report is not None
    buffers, gradients = report.predicted["device_buffers"], pair.module.plan.predicted.device_parts["gradients"]
    assert 0 <= buffers - report.observed["device_buffers"] < gradients


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


@pytest.mark.slow
@pytest.mark.parametrize("family", ["AdamW", "SGD"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_states_are_as_wide_as_those_that_torch_makes(dtype: torch.dtype, share: float, family: str) -> None:
    """The plan counts more by the padding of chunks and the slack of a budget, on either side, never less."""
    it = case("opt", layers=4)
    it.model.to(dtype)
    # No preset says how fast float64 is, and times do not matter here.
    machine = dataclasses.replace(preset("cpu"), flops_per_s={str(dtype).removeprefix("torch."): 1e11})

    def search(**options: Any) -> Any:
        return optimal_search(
            it.model,
            1,
            inp=it.inp,
            step_fn=step_of(it),
            hardware=machine,
            optimizer_type=family,
            host_budget="64GiB",
            **options,
        ).plan

    low, high = (
        search(placement=where, device_memory="64GiB").predicted.device_peak_bytes for where in ("cpu", "cuda")
    )
    plan = search(device_memory=int(low + share * (high - low)))
    module = ElixirModule(it.model, plan, device="cpu", debug=Debug(poison=True))
    kind = torch.optim.AdamW if family == "AdamW" else partial(torch.optim.SGD, momentum=0.9)
    optimizer = ElixirOptimizer(module, kind(module.parameters(), lr=1e-3))
    for _ in range(2):
        take_step(optimizer, it.loss(module, it.inp))
    host, states = plan.predicted.host_step_bytes, plan.predicted.device_parts["optimizer_states"]
    assert 0.95 * host <= inside.peak_bytes(module, "host") <= host
    kept = inside.bytes_by_kind(module, "device").get("optimizer_states", 0)
    assert 0.95 * states <= kept <= states
    report = report_of(module)
    assert report.predicted["host_peak"] == host
    assert report.observed["device_buffers"] <= report.predicted["device_buffers"]


def test_the_device_peak_of_a_report_is_that_of_the_plan() -> None:
    it = case("opt")
    plan = make_plan(it, "streamed")
    if gpu.DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with Pair(it, plan) as pair:
        pair.train(1)
        report = report_of(pair.module)
        peak = report.predicted["device_peak"]
        assert peak == plan.predicted.device_peak_bytes > report.predicted["device_buffers"]
        if gpu.DEVICE == "cuda":
            assert report.observed["device_peak"] >= report.observed["device_buffers"]
        else:
            assert "device_peak" not in report.observed
            assert "not measured" in str(report)


def test_a_step_far_beyond_its_range_is_remarked_upon_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = case("opt")
    plan = make_plan(it, "streamed")
    for slowest_s, remarks in ((1e-6, 1), (1e6, 0)):
        ranged = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, range_s=(0.0, slowest_s)))
        caplog.clear()
        with Pair(it, ranged) as pair:
            pair.train(1)
            first = pair.module.last_report
            assert [("a first step also makes states" in str(first)), "likely causes" in caplog.text] == [
                bool(remarks),
                False,
            ]
            pair.train(3)
            assert ("likely causes: " in str(pair.module.last_report)) == bool(remarks)
            assert pair.module.last_report is not None
            of_preset = dataclasses.replace(pair.module.last_report, hardware_name="h200")  # that nobody measured here
            assert ("likely causes: the rates of h200" in str(of_preset)) == bool(remarks)
            monkeypatch.setattr(os, "getloadavg", lambda: (3000.0,) * 3)
            busy = f"the machine is busy (load 3000 on {os.cpu_count()} cores)"
            assert (busy in str(pair.module.last_report)) == bool(remarks)
            monkeypatch.undo()
        assert caplog.text.count("likely causes: ") == remarks
        assert (f"the rates of {plan.hardware_name} are not this machine's" in caplog.text) == bool(remarks)


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


@pytest.fixture(scope="module")
def plain_weights() -> dict[str, torch.Tensor]:
    it = case("gpt2", "non-reentrant")
    optimizer = torch.optim.AdamW(it.model.parameters(), lr=1e-3)
    for _ in range(3):
        hf_loss(it.model, it.inp).backward()
        torch.nn.utils.clip_grad_norm_(it.model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return it.model.state_dict()


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 200))])
def test_delays_change_nothing(seed: int, plain_weights: dict[str, torch.Tensor]) -> None:
    it = case("gpt2", "non-reentrant")
    plan = make_plan(
        it, "mixed" if seed % 2 else "streamed", split_number=12, allocate_factor=(0.01, 0.4)[seed // 2 % 2]
    )
    delays = Emulation(delay_s=0.002, seed=seed)
    module = ElixirModule(
        it.model, plan, device="cpu", debug=Debug(poison=True, emulation=delays), prefetch=seed % 3 > 0
    )
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=1e-3), max_norm=0.1)
    for _ in range(3):
        take_step(optimizer, hf_loss(module, it.inp))
    mine = module.state_dict()
    module.close()
    assert all(torch.equal(mine[name], value) for name, value in plain_weights.items())


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


@gpu.on_the_cpu("steps are timed by the host's clock")
def test_a_forward_that_fails_begins_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch)
    it = case("opt", layers=1)
    with Pair(it, make_plan(it, "streamed")) as pair:
        failing = pair.module.module.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pair.module(**it.inp)
        failing.remove()
        fake.now += 100.0
        pair.train(1)
        assert pair.module.last_report is not None
        assert pair.module.last_report.step_s == 0.0


def test_the_device_times_steps_that_it_runs_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            told.append(f"record on {stream}")

        def synchronize(self) -> None:
            told.append("synchronize")

        def elapsed_time(self, other: Event) -> float:
            return 2500.0  # ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    timed = step_clock.StepClock(torch.device("cuda", 1))
    timed.start()
    span = timed.stop()
    assert span is not None
    assert told == ["record on stream of cuda:1"] * 2  # nobody waits until the time is asked for
    assert span.seconds() == 2.5
    assert told[2:] == ["synchronize"]
    assert timed.stop() is None


def test_what_an_evaluation_moved_is_not_the_steps(caplog: pytest.LogCaptureFixture) -> None:
    it = case("opt")
    with Pair(it, make_plan(it, "streamed")) as pair:
        for _ in range(3):
            with torch.no_grad():
                for _ in range(3):
                    hf_loss(pair.module, it.inp)
            pair.module.state_dict()
            pair.train(1)
            report = report_of(pair.module)
            assert report.observed["host_to_device"] == pair.plan.predicted.moved_bytes["host_to_device"]
            assert report.observed["loads"] == pair.plan.predicted.loads
            assert report.demand_loads == 0
            assert not surprises(report)
    assert gpu.DEVICE != "cpu" or "differs from its plan" not in caplog.text


class HugeTable(nn.Module):
    """A table larger than everything else together, tied; and a layer that the step never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4000, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.unused = nn.Linear(7, 7)
        self.head = nn.Linear(32, 4000, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("spare_kib", [0, 40, 400])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_gradient_larger_than_a_block_and_one_that_never_comes_fit_the_prediction(
    overlap: bool, spare_kib: int
) -> None:
    torch.manual_seed(0)
    model, ids = HugeTable(), torch.randint(0, 4000, (2, 8))
    plain = gpu.there(copy.deepcopy(model))

    def search(device_memory: int) -> Any:
        return optimal_search(
            model, 1, inp={"ids": ids}, step_fn=lambda m, inp: m(**inp).backward(), hardware="cpu", overlap=overlap,
            device_memory=device_memory, host_budget="1GiB", assume="nominal",
        ).plan  # fmt: skip

    with pytest.raises(PlanError) as caught:
        search(0)
    plan = search(caught.value.needed_bytes + spare_kib * 1024)
    table = next(chunk for chunk in plan.chunks if chunk.parameters[0].name == "table.weight")
    assert table.resident
    assert table.state_home == "host"
    assert table.weight_bytes > plan.block_bytes
    module = ElixirModule(model, plan, device=gpu.DEVICE, debug=Debug(poison=True))
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters()))
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    for _ in range(2):
        for one, stepping in ((module, optimizer), (plain, plain_optimizer)):
            one(ids=gpu.there(ids)).backward()
            stepping.step()
            stepping.zero_grad()
    report = report_of(module)
    assert report.observed["device_buffers"] <= report.predicted["device_buffers"]
    assert inside.gradients(module).extra_blocks == 0
    assert_alike(module, plain)
