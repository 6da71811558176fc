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
