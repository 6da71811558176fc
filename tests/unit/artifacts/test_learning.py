"""Steps of runs are folded into a profile, so that the next plan's seconds are theirs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from elixir.cli import main
from elixir.errors import InputError
from elixir.hardware.learning import learn
from elixir.hardware.profile import HardwareProfile, load_hardware, preset
from elixir.hardware.rate_fit import RateFit
from elixir.hardware.scenario import extremes
from elixir.search import plan_from_trace
from elixir.wrapper.account.step_report import EarlyCounts, StepReport
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


def test_the_disk_is_learned_from_the_seconds_in_which_it_worked() -> None:
    """Two ranks that share the disk teach its rate as well."""
    before = replace(preset("h100"), disk_read_bytes_per_s=2e9, disk_write_bytes_per_s=1e9)
    # 4 GB either way take 2 and 4 s; the disk took half as long again.
    moved = {"disk_read_bytes": 4 * 10**9, "disk_write_bytes": 4 * 10**9, "busy_disk_s": 9.0}
    ratio = {"step_s": 1.1, "predicted_step_s": 1.0}
    after = learn(before, [ratio | moved] * 2)
    assert after.disk_read_bytes_per_s == pytest.approx(2e9 / 1.5)
    assert after.disk_write_bytes_per_s == pytest.approx(1e9 / 1.5)
    assert after.host_adam_numel_per_s == pytest.approx(before.host_adam_numel_per_s / 1.1)
    assert "1.500 times" in after.sources["disk_read_bytes_per_s"]
    of_two = learn(before, [ratio | moved | {"world_size": 2}])
    assert of_two.disk_read_bytes_per_s == pytest.approx(2e9 / 0.75)
    first_step = learn(before, [ratio | moved | {"disk_read_bytes": 0}])  # states were zero, and nothing was read
    assert first_step.disk_read_bytes_per_s == pytest.approx(2e9 / 1.1)
    fits = {"disk_read": RateFit(1e-3, 2e9, 0.0), "disk_write": RateFit(1e-3, 1e9, 0.0)}
    fitted = learn(replace(before, fits=fits), [ratio | moved])
    assert fitted.rate("disk_write").per_s == pytest.approx(1e9 / 1.5)


def counted(kept: int, planned: int = 4, **more: float) -> dict[str, float]:
    return {"early_planned_chunks": planned, "early_made_chunks": kept, "early_kept_chunks": kept, **more}


def test_how_often_early_states_were_kept_is_remembered() -> None:
    before = preset("h200")
    assert before.early_kept is None
    run = {"step_s": 1.1, "predicted_step_s": 1.0}
    after = learn(before, [counted(4, **run), counted(0), counted(2), counted(0, planned=0)])
    assert (after.early_kept, after.early_steps) == (0.5, 3)
    again = learn(after, [counted(4, **run), counted(4, **run), counted(4, **run)])
    assert (again.early_kept, again.early_steps) == (0.75, 6)
    assert HardwareProfile.from_json(again.to_json()) == again
    assert "early: 6" in again.sources["early_kept"]
    assert replace(after, early_kept=0.0).fingerprint != after.fingerprint == replace(after, early_steps=9).fingerprint
    assert learn(after, [run]).early_kept == after.early_kept


def test_clipped_steps_say_nothing_about_rates() -> None:
    before = preset("h200")
    clipped = counted(0, step_s=1.6, predicted_step_s=1.0)
    after = learn(before, [clipped, clipped])
    assert (after.early_kept, after.early_steps, after.step_range) == (0.0, 2, before.step_range)
    assert extremes(after) == extremes(before)
    with pytest.raises(InputError, match="learned before"):
        learn(after, [clipped, clipped])
    assert after.host_adam_numel_per_s == before.host_adam_numel_per_s
    mixed = learn(before, [clipped, counted(4, step_s=1.2, predicted_step_s=1.0)])
    assert mixed.host_adam_numel_per_s == pytest.approx(before.host_adam_numel_per_s / 1.2)
    assert mixed.early_kept == 0.5


def test_a_machine_whose_runs_keep_none_is_planned_for_without() -> None:
    def early(hardware: HardwareProfile) -> int:
        trace = stack_trace(StackShape(1024, 6, 4096, 5000, 512), batch=2, seq=512)
        plan = plan_from_trace(trace, hardware, 1, host_budget="64GiB", assume="nominal").plan
        return sum(chunk.home.early for chunk in plan.chunks)

    plain = preset("h200")
    assert early(plain) == early(learn(plain, [counted(4)])) > 0
    assert early(learn(plain, [counted(0)])) == 0


@pytest.mark.parametrize("report", [counted(5), counted(-1), counted(1, planned=0)])
def test_counts_that_make_no_sense_are_refused(report: dict[str, float]) -> None:
    with pytest.raises(InputError, match="early_kept_chunks"):
        learn(preset("a100"), [report])


def test_a_report_of_a_run_teaches_what_it_kept() -> None:
    found = StepReport(
        observed={}, predicted={}, demand_loads=0, deviations=0, waited_s={}, busy_s={}, refreshed_bytes=0, span=None,
        predicted_step_s=None, early=EarlyCounts(planned=5, made=5, kept=1),
    )  # fmt: skip
    assert learn(preset("a100"), [found.to_dict()]).early_kept == pytest.approx(0.2)


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
