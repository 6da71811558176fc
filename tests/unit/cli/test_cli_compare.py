"""`elixir compare`: two artifacts of one kind, value by value, with tokens/s and prices first."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.common.command_line import fails, run
from tests.common.samples import make_hardware, make_plan


def test_compare_marks_what_differs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a = str(make_plan(4).save(tmp_path / "a.json"))
    b = str(dataclasses.replace(make_plan(4, resident=0.6), start_up_s=5.0).save(tmp_path / "b.json"))
    status, out, _ = run(capsys, "compare", a, b)
    assert status == 0
    marked = [line for line in out.splitlines() if line.lstrip().startswith("*")]
    assert any("resident chunks" in line for line in marked)
    assert not any("world size" in line for line in marked)
    record = json.loads(run(capsys, "compare", a, b, "--json")[1])
    assert record["fields"]["resident_chunks"] == {"a": 2, "b": 3, "differs": True}
    assert record["fields"]["start_up_s"] == {"a": 0.0, "b": 5.0, "differs": True}
    assert record["fields"]["world_size"]["differs"] is False
    # Chunks 0 and 1 are resident in one, 0 to 2 in the other, and their states follow half as far.
    assert record["placed_differently"] == ["layers.1.weight", "layers.2.weight"]


def test_compare_of_two_kinds_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a, b = str(make_plan(2).save(tmp_path / "a.json")), str(make_hardware().save(tmp_path / "b.json"))
    assert "cannot compare a Plan with a HardwareProfile" in fails(capsys, "compare", a, b)


def test_a_trial_is_shown_if_all_its_figures_can_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figure = {"name": "seconds a step", "unit": "seconds", "predicted": 2.0, "measured": 2.5}
    trial = {
        "artifact": "trial",
        "plan": make_plan(2).to_dict(),
        "hardware": make_hardware().to_dict(),
        "compared": [figure],
    }
    path = tmp_path / "try.json"
    path.write_text(json.dumps(trial))
    status, out, _ = run(capsys, "show", str(path))
    assert (status, "+25.0%" in out) == (0, True)
    for bad in (None, {}, figure, [3], [figure, figure | {"measured": "2"}], [figure | {"unit": "m"}]):
        path.write_text(json.dumps(trial | {"compared": bad}))
        assert "field 'compared' must list figures" in fails(capsys, "show", str(path))
