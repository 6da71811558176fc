"""Steps of runs are folded into a profile, so that the next plan's seconds are theirs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from elixir.cli import main
from elixir.errors import InputError
from elixir.hardware.learning import LEARNED_RANGE, learn
from elixir.hardware.profile import HardwareProfile, load_hardware, preset
from elixir.hardware.rate_fit import RateFit
from elixir.search import plan_from_trace
from tests.common.synthetic_trace import StackShape, stack_trace

TRACE = stack_trace(StackShape(1024, 6, 4096, 5000, 512))
GIVEN = {"device_memory": "1GiB", "host_budget": "64GiB"}


def step_s(hardware: HardwareProfile) -> float:
    return plan_from_trace(TRACE, hardware, 1, assume="nominal", **GIVEN).predicted.step_s


def test_the_next_plan_has_the_seconds_of_the_run() -> None:
    before = preset("h100")
    now_s = step_s(before)
    after = learn(before, [{"step_s": 1.5 * now_s, "predicted_step_s": now_s}] * 3, today="2026-01-31")
    assert step_s(after) == pytest.approx(1.5 * now_s, rel=0.02)
    assert after.learned is not None
    assert (after.learned.steps, after.learned.date) == (3, "2026-01-31")
    assert after.fingerprint != before.fingerprint


def counted(kept: int, planned: int = 4, **more: float) -> dict[str, float]:
    return {"early_planned_chunks": planned, "early_made_chunks": kept, "early_kept_chunks": kept, **more}


def test_every_rate_is_scaled_by_the_mean_ratio_and_a_disks_by_its_own_seconds() -> None:
    fits = {key: RateFit(1e-3, 2e9, 0.1) for key in ("host_to_device.both", "matmul.bfloat16.square", "disk_write")}
    disk = {"disk_read_bytes_per_s": 2e9, "disk_write_bytes_per_s": 1e9}
    before = replace(preset("h100"), fits=fits, **disk, launch_s=1e-5, network_latency_s=2e-5)  # type: ignore[arg-type]
    # 4 GB either way take 2 s; the disk took twice as long. Two ranks share it.
    moved = {"disk_read_bytes": 4 * 10**9, "disk_write_bytes": 4 * 10**9, "busy_disk_s": 8.0}
    reports = [{"step_s": 1.6, "predicted_step_s": 1.0} | moved, {"step_s": 2.5, "predicted_step_s": 1.0} | moved]
    after = learn(before, reports)
    keys = ("host_to_device.both", "device_to_host", "matmul.bfloat16.square", "matmul.float16", "host_adam.2",
            "device_adam", "host_memory", "elementwise.bfloat16", "all_gather.4", "all_gather.1", "attention.bfloat16")  # fmt: skip
    for key in keys:
        assert after.seconds(key, 1e9) == pytest.approx(2 * before.seconds(key, 1e9)), key
    for key in ("disk_read", "disk_write"):
        assert after.seconds(key, 1e9) == pytest.approx(2 * before.seconds(key, 1e9)), key
    for name in ("launch_s", "network_latency_s"):
        assert getattr(after, name) == pytest.approx(2 * getattr(before, name))
    assert after.network_bytes_per_s == pytest.approx((before.network_bytes_per_s or 0.0) / 2)
    assert "2.000 times" in after.sources["disk_read_bytes_per_s"]
    assert after.step_range == pytest.approx((0.8, 1.25))  # of the steps around their mean
    assert learn(before, [reports[0]]).step_range == LEARNED_RANGE
    of_two = learn(before, [reports[0] | {"world_size": 2}])
    assert of_two.seconds("disk_read", 1e9) == pytest.approx(before.seconds("disk_read", 1e9))
    unread = learn(before, [reports[0] | {"disk_read_bytes": 0}])  # states were zero, and nothing was read
    assert unread.seconds("disk_write", 1e9) == pytest.approx(1.6 * before.seconds("disk_write", 1e9))
    again = learn(after, [{"step_s": 3.0, "predicted_step_s": 2.0}])
    assert (again.learned.steps, again.learned.factor) == (3, pytest.approx(3.0))  # type: ignore[union-attr]
    for share, known in ((0.11, 1.0), (0.09, None)):
        busy = {"step_s": 2.0, "predicted_step_s": 1.0, "busy_fetch_s": share, "busy_offload_s": share}
        assert learn(before, [busy | {"busy_host_adam_s": 2 * share}]).host_adam_least == known
        assert learn(before, [busy]).link_least == known
        assert learn(before, [busy]).host_adam_least is None


def test_early_states_are_counted_and_clipped_steps_say_nothing_about_rates() -> None:
    before, run = preset("h200"), {"step_s": 1.2, "predicted_step_s": 1.0}
    after = learn(before, [counted(4, **run), counted(0, **run), counted(2), counted(0, planned=0)])
    assert (after.early_kept, after.early_steps) == (0.5, 3)
    assert after.host_adam_numel_per_s == pytest.approx(before.host_adam_numel_per_s / 1.2)
    again = learn(after, [counted(4)] * 3)
    assert (again.early_kept, again.early_steps) == (0.75, 6)
    assert "early: 6" in again.sources["early_kept"]
    clipped = learn(before, [counted(0, step_s=1.6, predicted_step_s=1.0)])
    assert (clipped.early_kept, clipped.step_range) == (0.0, before.step_range)
    assert replace(clipped, learned=None, early_kept=None, early_steps=None, sources=before.sources) == before


@pytest.mark.parametrize("report", [counted(5), counted(-1), counted(1, planned=0)])
def test_counts_that_make_no_sense_are_refused(report: dict[str, float]) -> None:
    with pytest.raises(InputError, match="early_kept_chunks"):
        learn(preset("a100"), [report])


def test_what_cannot_be_learned_is_refused() -> None:
    report = {"step_s": 1.2, "predicted_step_s": 1.0}
    after = learn(preset("a100"), [report])
    with pytest.raises(InputError, match="learned before"):
        learn(after, [report])
    with pytest.raises(InputError, match="no step of the report"):
        learn(preset("a100"), [{"loads": 3}])
    with pytest.raises(InputError, match="no run of the machine"):
        learn(preset("a100"), [{"step_s": 100.0, "predicted_step_s": 1.0}])
    with pytest.raises(InputError, match="'step_s'"):
        learn(preset("a100"), [{"step_s": -1.0, "predicted_step_s": 1.0}])


def test_the_command_writes_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, out = tmp_path / "report.json", tmp_path / "hw.json"
    report.write_text(json.dumps([{"step_s": 2.0, "predicted_step_s": 1.0}]))
    assert main(["hardware", "--show", "l4", "--learn", str(report), "--out", str(out)]) == 0
    assert "2.000 times" in capsys.readouterr().out
    found = load_hardware(str(out))
    assert found.host_adam_numel_per_s == pytest.approx(preset("l4").host_adam_numel_per_s / 2)
    assert main(["hardware", "--learn", str(report)]) != 0
    report.write_text("[1]")
    assert main(["hardware", "--show", "l4", "--learn", str(report), "--out", str(out)]) != 0
