"""All that a report says, word by word, of steps written down by hand."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from elixir.wrapper.account.step_report import EarlyCounts, Span, StepReport

MIB = 2**20
BYTES = {"host_to_device": 100 * MIB, "device_buffers": 20 * MIB, "host_peak": 100 * MIB, "device_peak": 200 * MIB}


def took(seconds: float) -> Span:
    return Span(0.0, seconds)


def report(**changes: Any) -> StepReport:
    """A step as it was planned, apart from the changes; those of `observed` are by name."""
    observed = {"loads": 40, "hits": 7, **BYTES} | changes.pop("observed", {})
    fields: dict[str, Any] = {
        "predicted": {"loads": 40, "hits": 9, **BYTES},
        "demand_loads": 0,
        "deviations": 0,
        "waited_s": {"fetch": 0.0, "host_adam": 0.0},
        "busy_s": {"fetch": 0.25},
        "stream_waited_s": {"fetch": 0.125},
        "refreshed_bytes": 0,
        "span": None,
        "predicted_step_s": None,
    }
    return StepReport(observed=observed, **(fields | changes))


def test_nothing_moved_where_nothing_was_planned_is_no_surprise() -> None:
    plan = {"predicted": {"loads": 0, "network": 0}, "observed": {"loads": 0, "network": 0}}
    assert StepReport(**{**vars(report()), **plan}).surprises() == {}
    assert StepReport(**{**vars(report()), **plan, "observed": {"loads": 1}}).surprises() == {"loads": (1, 0)}


def test_the_text_of_a_step_of_which_much_can_be_said() -> None:
    early = EarlyCounts(planned=5, made=4, kept=1)
    full = report(
        micro_batches=3,
        span=took(0.5),
        predicted_step_s=0.4,
        demand_loads=2,
        deviations=1,
        waited_s={"fetch": 0.0005, "host_adam": 0.00049, "offload": 0.25},
        early=early,
        early_so_far=early + EarlyCounts(5, 5, 5),
        not_compared="it was evaluated",
        host_forms={"compiled": 3, "in pieces": 2, "plain": 1, "by its class": 4, "one pass": 5},
    )
    lines = str(full).splitlines()
    assert lines[0].endswith("predicted  per optimizer step of 3 micro-batches")
    assert lines[7:] == [
        "step                   0.500 s       0.400 s",
        "demand loads 2, deviations from the recorded order 1",
        "early updates: 1 of 5 chunks kept, 3 discarded; in all steps so far 6 of 10 chunks kept, 3 discarded",
        "compute waited for fetch 0.001 s, offload 0.250 s",
        "shards stepped on the host: 3 by the C++ kernel, 2 by torch's fused Adam, 1 by PyTorch's operators, "
        "4 by its class, 5 by the C++ kernel, early",
        "loads and bytes cannot be compared with the plan: it was evaluated",
    ]
    paused = replace(full, early=EarlyCounts(5, 0, 0))
    assert "no chunk is updated early any more" in str(paused)
    assert "no chunk is updated early any more" not in str(replace(paused, early_so_far=EarlyCounts(5, 0, 0)))
    assert "step                   0.500 s\n" in str(replace(full, predicted_step_s=None))


def test_a_step_is_slow_from_twice_the_end_of_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (8.0, 99.0, 99.0))
    slow = report(span=took(0.4), slowest_s=0.2, hardware_name="mine")
    assert slow.times_slowest == 2.0
    assert replace(slow, span=took(0.39)).times_slowest is None
    assert replace(slow, span=None).times_slowest is None
    assert replace(slow, slowest_s=None).times_slowest is None
    rates = "the rates of {} are not this machine's: plan with those that `elixir hardware --measure --out hw.json` finds here"
    begins = "the step took 2.0 times the 0.200 s at which its prediction ends; likely causes: "
    assert slow.slow_text() == begins + rates.format("mine")
    assert str(slow).splitlines()[-1] == slow.slow_text()
    monkeypatch.setattr(os, "getloadavg", lambda: (8.1, 0.0, 0.0))
    much = replace(
        slow,
        span=took(0.04),
        slowest_s=0.0199,
        first=True,
        early=EarlyCounts(3, 2, 2),
        waited_s={"fetch": 0.01, "offload": 0.02},
    )
    first = "a first step also makes states, compiles kernels and touches memory"
    python = "Python's own work, which is not predicted, is most of so short a step"
    others = [
        "the machine is busy (load 8 on 8 cores)",
        "of 3 chunks that the plan updates early, 2 were kept",
        "compute waited longest for offload (0.020 s)",
    ]
    assert much.slow_text().partition("causes: ")[2] == "; ".join([first, python, *others, rates.format("mine")])
    preset = replace(much, hardware_name="a100", slowest_s=0.02, early=EarlyCounts(3, 3, 3), waited_s={}, first=False)
    assert preset.slow_text().partition("causes: ")[2] == "; ".join([rates.format("a100"), others[0]])


def test_flat_numbers() -> None:
    numbers = report(
        span=took(0.5), predicted_step_s=0.25, tokens=100, world_size=2, grad_norm=torch.tensor(3.0), refreshed_bytes=5
    ).to_dict()
    assert numbers == {
        "loads": 40,
        "hits": 7,
        **{f"{name}_bytes": value for name, value in BYTES.items()},
        "predicted_loads": 40,
        "predicted_hits": 9,
        **{f"predicted_{name}_bytes": value for name, value in BYTES.items()},
        **{"demand_loads": 0, "deviations": 0, "micro_batches": 1, "refreshed_bytes": 5, "world_size": 2},
        **{f"{of}early_{name}_chunks": 0 for of in ("", "run_") for name in ("planned", "made", "kept")},
        **{"waited_for_fetch_s": 0.0, "waited_for_host_adam_s": 0.0, "busy_fetch_s": 0.25},
        "stream_waited_for_fetch_s": 0.125,
        **{"step_s": 0.5, "predicted_step_s": 0.25, "tokens": 100, "tokens_per_s": 400.0, "grad_norm": 3.0},
    }
    unknown = report().to_dict()
    assert not {"step_s", "predicted_step_s", "tokens", "tokens_per_s", "grad_norm"} & set(unknown)
    assert report(tokens=100).tokens_per_s is None
    assert report(span=took(0.5)).tokens_per_s is None
