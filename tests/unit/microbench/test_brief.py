"""`measure_briefly`: rates of this CPU in the time that is given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elixir.errors import InputError
from elixir.hardware.profile import preset
from elixir.microbench import brief, measure_briefly
from elixir.microbench.brief import BLOCK_OPERATORS, CUDA_BLOCK_OPERATORS, between_products
from elixir.tracer.trace import trace_step
from tests.common import inside


class Clock:
    """Seconds that pass only when work says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(brief.time, "perf_counter", made)
    return made


def test_a_rate_is_all_work_over_all_time(clock: Clock) -> None:
    rate = inside.rate_of_work(lambda: clock.work(0.25), 10.0)
    rate.turn(rate, 1.0)
    clock.work(100.0)  # others have their turns
    rate.turn(rate, 0.0)
    assert (rate.runs, rate.spent_s) == (5, 1.25)
    assert rate.per_s == 40.0
    assert rate.run_s == 0.25


def test_profile_has_measured_rates_and_the_preset_for_the_rest() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    profile = measure_briefly(0.2, dtype=torch.bfloat16, tokens=32, hidden=256)
    base = preset("cpu")
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state), "dropout drew from the caller's random numbers"
    assert profile.device_kind == "cpu"
    assert not profile.fits
    assert profile.flops_per_s["float32"] == base.flops_per_s["float32"]
    assert profile.flops_per_s["bfloat16"] != base.flops_per_s["bfloat16"]
    assert "32 x 256 x 1024" in profile.sources["flops_per_s"]
    for field in ("host_to_device_bytes_per_s", "host_adam_numel_per_s", "host_memory_bytes_per_s", "contention"):
        assert profile.sources[field].startswith("measured for 0.2 s")
        assert getattr(profile, field) != getattr(base, field)
    assert profile.launch_s is not None
    assert 1e-7 < profile.launch_s < 0.1


@pytest.mark.parametrize(("seconds", "tokens"), [(0.0, 1), (float("nan"), 1), (1.0, 0)])
def test_times_and_tokens_that_make_no_sense_are_refused(seconds: float, tokens: int) -> None:
    with pytest.raises(InputError, match="expected a positive time, one token or more"):
        measure_briefly(seconds, tokens=tokens)


@pytest.mark.parametrize(("hardware", "operators"), [("cpu", BLOCK_OPERATORS), ("h200", CUDA_BLOCK_OPERATORS)])
def test_calls_are_of_the_operators_that_a_trace_counts(hardware: str, operators: int) -> None:
    def step(model: nn.Module, inp: object) -> None:
        between_products(model.weight).backward(model.weight.detach())

    with torch.device("meta"):
        rows = nn.Embedding(1, 8)
    trace = trace_step(rows, {"x": torch.ones(1)}, step, hardware=preset(hardware), optimizer=None)
    assert sum(len(access.operations) for access in trace.accesses) == operators
