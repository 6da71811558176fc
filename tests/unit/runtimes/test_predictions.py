"""Predictions of other runtimes agree with what was measured of them on an H200, and choices fit what they are given."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark.peer_runtimes import PEAK_PERCENT, SECONDS_PERCENT, compared, peer_rows
from elixir.errors import InputError
from elixir.hardware.profile import preset
from elixir.runtimes import RUNTIMES, Setting, Work, choices, predict
from elixir.runtimes.estimate import with_margin
from elixir.step_trace import StepTrace
from tests.common.tracing import Step, sum_step

GIB = 2**30
ROWS = Path(__file__).parents[3] / "benchmark" / "results" / "gpu_proof_h200.jsonl"


@pytest.mark.parametrize(
    "contender", ["fsdp2 offload keep chunked-loss", "zero-3 offload chunked-loss", "zero-offload chunked-loss", "ddp"]
)
def test_peaks_and_seconds_are_those_that_an_h200_measured(contender: str) -> None:
    rows = [row for row in map(json.loads, ROWS.read_text().splitlines()) if row["contender"].startswith(contender)]
    row = next(row for row in peer_rows(rows) if "tuned" not in row["contender"])
    found = compared(row)
    assert abs(found["device_percent"]) <= PEAK_PERCENT
    assert abs(found["seconds_percent"]) <= SECONDS_PERCENT


def test_all_measured_rows_are_within_their_bars() -> None:
    """The recorded comparison has every row of a peer, and none is further off than is promised."""
    import csv

    with (ROWS.parent / "peer_runtimes.csv").open(newline="", encoding="utf-8") as file:
        recorded = list(csv.DictReader(file))
    measured = peer_rows([json.loads(line) for line in ROWS.read_text().splitlines()])
    assert {(row["case"], row["contender"]) for row in recorded} == {
        (row["case"], row["contender"]) for row in measured
    }
    assert all(abs(float(row["device_percent"])) <= PEAK_PERCENT for row in recorded)
    assert all(abs(float(row["seconds_percent"])) <= SECONDS_PERCENT for row in recorded)


class Layers(torch.nn.Module):
    """Four layers of 1.1 million weights, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(4))
        self.head = torch.nn.Linear(1024, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


@functools.cache
def traced(samples: int) -> StepTrace:
    step: Step = sum_step
    from elixir.tracer.trace import trace_step

    with torch.device("meta"):
        model = Layers().bfloat16()
    x = torch.ones(samples, 1024, dtype=torch.bfloat16)
    return trace_step(model, {"x": x}, step, hardware=preset("h100"), optimizer=None)


def work(samples: int = 8, ranks: int = 4) -> Work:
    trace = traced(samples)
    return Work(trace, preset("h100"), ranks, [1e-3 * samples] * len(trace.accesses))


def device(ranks: int = 4, **setting: Any) -> int:
    return predict(work(ranks=ranks), Setting(**setting)).device_bytes


def test_more_sharding_and_more_offload_take_less_of_the_device() -> None:
    ddp, fsdp2 = device(runtime="ddp"), [device(runtime="fsdp2", keep=keep) for keep in (True, False)]
    zero = [device(runtime="deepspeed", stage=stage) for stage in (1, 2, 3)]
    assert ddp > fsdp2[0] > fsdp2[1] > device(runtime="fsdp2", offload=True)
    assert ddp > zero[0] >= zero[1]
    assert zero[1] > device(runtime="deepspeed", stage=2, offload=True)
    assert device(runtime="fsdp2", ranks=8) < device(runtime="fsdp2", ranks=2)


def test_what_leaves_the_device_is_on_the_host_and_costs_seconds() -> None:
    kept, away = (predict(work(), Setting(runtime="fsdp2", offload=offload)) for offload in (False, True))
    assert (kept.host_bytes, kept.device_bytes > away.device_bytes, kept.step_s < away.step_s) == (0, True, True)
    assert away.host_bytes >= 16 * traced(8).numel
    assert sum(away.seconds.values()) == away.step_s
    assert sum(away.parts.values()) == away.device_bytes


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_choices_that_fit_are_the_fastest_first_and_fit(runtime: str) -> None:
    def work_of(name: str, micro: int, checkpoint: bool) -> Work:
        assert name == runtime
        return work(micro)

    found = choices(runtime, work_of, samples=8, world_size=4, device_bytes=4 * GIB, host_bytes=64 * GIB)
    fitting = [each for each in found if each.fits]
    assert fitting
    assert found[: len(fitting)] == fitting
    assert [each.prediction.step_s for each in fitting] == sorted(each.prediction.step_s for each in fitting)
    nothing = choices(runtime, work_of, samples=8, world_size=4, device_bytes=GIB, host_bytes=64 * GIB)
    assert not any(each.fits for each in nothing)
    assert nothing[0].device_short > 0


def test_smaller_micro_batches_are_tried_where_the_whole_does_not_fit() -> None:
    def work_of(name: str, micro: int, checkpoint: bool) -> Work:
        return work(micro)

    enough = with_margin(predict(work(2048), Setting(runtime="ddp", accumulation=2)).device_bytes)
    best = choices("ddp", work_of, samples=4096, world_size=4, device_bytes=enough, host_bytes=0)[0]
    assert best.fits
    assert (best.prediction.setting.micro, best.prediction.setting.accumulation) == (2048, 2)


def test_a_runtime_that_is_none_is_named() -> None:
    with pytest.raises(InputError, match="deepspeed"):
        predict(work(), Setting(runtime="deepsped"))
