"""`measure_briefly`: rates of this CPU in the time that is given."""

from __future__ import annotations

import time

import pytest
import torch

from elixir.errors import InputError
from elixir.hardware import preset
from elixir.microbench import brief, measure_briefly


def test_a_rate_is_all_work_over_all_time() -> None:
    rate = brief._Rate(lambda: time.sleep(2e-3), amount=10.0)
    rate.turn(0.01)
    rate.turn(0.0)
    assert rate.done >= 30.0
    assert rate.per_s == rate.done / rate.spent_s
    assert rate.per_s <= 10.0 / 2e-3


def test_profile_has_measured_rates_and_the_preset_for_the_rest() -> None:
    threads = torch.get_num_threads()
    profile = measure_briefly(0.2, dtype=torch.bfloat16, tokens=32)
    base = preset("cpu")
    assert torch.get_num_threads() == threads
    assert profile.device_kind == "cpu"
    assert not profile.fits
    assert profile.flops_per_s["float32"] == base.flops_per_s["float32"]
    assert profile.flops_per_s["bfloat16"] != base.flops_per_s["bfloat16"]
    assert "32 x 768 x 3072" in profile.sources["flops_per_s"]
    for field in ("host_to_device_bytes_per_s", "host_adam_numel_per_s", "host_memory_bytes_per_s"):
        assert profile.sources[field].startswith("measured for 0.2 s")
        assert getattr(profile, field) != getattr(base, field)


def test_slow_products_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", lambda rows, weights: time.sleep(5e-3))
    profile = measure_briefly(0.05, tokens=1)
    assert profile.flops_per_s["float32"] <= 2 * 768 * 3072 / 5e-3


@pytest.mark.parametrize(("seconds", "tokens"), [(0.0, 1), (float("nan"), 1), (1.0, 0)])
def test_times_and_tokens_that_make_no_sense_are_refused(seconds: float, tokens: int) -> None:
    with pytest.raises(InputError, match="expected a positive time and one token or more"):
        measure_briefly(seconds, tokens=tokens)
