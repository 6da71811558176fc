"""`measure_briefly`: rates of this CPU in the time that is given."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from elixir.errors import InputError
from elixir.hardware.profile import preset
from elixir.microbench import brief, measure_briefly
from elixir.tracer.trace import trace_step

ROWS = (64, 128)


def test_a_rate_is_all_work_over_all_time() -> None:
    rate = brief._Rate(lambda: time.sleep(2e-3), amount=10.0)
    rate.turn(0.01)
    rate.turn(0.0)
    assert rate.done >= 30.0
    assert rate.per_s == rate.done / rate.spent_s
    assert rate.per_s <= 10.0 / 2e-3


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


def test_slow_products_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = F.linear

    def slow(*args: torch.Tensor) -> torch.Tensor:
        time.sleep(5e-3)
        return linear(*args)

    monkeypatch.setattr(F, "linear", slow)
    profile = measure_briefly(0.05, tokens=1)
    assert profile.flops_per_s["float32"] <= 2 * 6 * 4 * 768**2 / 5e-3


def test_what_lanes_take_from_products_is_seen() -> None:
    """Products that the lane holds up for as long as it works."""
    lock = threading.Lock()

    def hold(seconds: float) -> None:
        with lock:
            time.sleep(seconds)

    held_up = brief._Rate(lambda: hold(1e-3), 1.0)
    with ThreadPoolExecutor(1) as worker:
        lane = brief._Rate(lambda: hold(0.05), 1.0)
        brief._Lane(lane, held_up, worker).turn(0.3)
    assert lane.done >= 2
    assert held_up.per_s < 0.7 / 1e-3  # a busy machine makes it fewer still


class _Block(nn.Module):
    """`brief.between_products` in a module: what is counted must be what a trace counts of it."""

    def __init__(self, bound: bool) -> None:
        super().__init__()
        self.scale, self._bound = nn.Parameter(torch.ones(ROWS[-1])), bound

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scaled = rows * self.scale
        return brief.between_products(scaled) if self._bound else scaled


def test_operators_are_counted_as_a_trace_counts_them() -> None:
    def work(bound: bool) -> tuple[int, float]:
        trace = trace_step(
            _Block(bound),
            {"rows": torch.ones(ROWS)},
            lambda model, inp: model(**inp).backward(inp["rows"]),
            hardware=preset("cpu"),
        )
        run = [trace.operations[index] for access in trace.accesses for index in access.operations]
        return len(run), sum(each.moved_bytes for each in run) / (4 * math.prod(ROWS))

    operators, passes = (with_it - bare for with_it, bare in zip(work(True), work(False), strict=True))
    assert operators == brief.BLOCK_OPERATORS
    assert passes == pytest.approx(brief.BLOCK_PASSES, rel=0.02)  # and what layer norm keeps of each row


@pytest.mark.parametrize(("seconds", "tokens"), [(0.0, 1), (float("nan"), 1), (1.0, 0)])
def test_times_and_tokens_that_make_no_sense_are_refused(seconds: float, tokens: int) -> None:
    with pytest.raises(InputError, match="expected a positive time, one token or more"):
        measure_briefly(seconds, tokens=tokens)
