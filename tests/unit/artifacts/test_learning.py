"""Steps of runs are folded into a profile, so that the next plan's seconds are theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elixir.cli import main
from elixir.errors import InputError
from elixir.hardware.learning import learn
from elixir.hardware.profile import HardwareProfile, load_hardware, preset
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
