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


def test_compare_begins_with_speeds_and_prices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan, prices = make_plan(4), tmp_path / "prices.csv"
    prices.write_text(
        f"machine,devices,per_hour,currency,source,read_on\n{plan.hardware_name},1,3.6,EUR,a,2026-11-09\n"
    )
    fast = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, seconds={"total": 0.5}))
    fast = dataclasses.replace(fast, step=dataclasses.replace(plan.step, tokens=1000))
    a, b = (str(made.save(tmp_path / f"{name}.json")) for name, made in (("a", plan), ("b", fast)))
    fields = json.loads(run(capsys, "compare", a, b, "--prices", str(prices), "--json")[1])["fields"]
    speed = 2000 * plan.world_size
    assert list(fields)[:3] == ["tokens_per_s", "EUR an hour", "EUR a million tokens"]
    assert fields["tokens_per_s"]["b"] == speed
    assert fields["EUR an hour"]["b"] == 3.6 * plan.world_size
    assert fields["EUR a million tokens"]["b"] == pytest.approx(3.6 * plan.world_size / 3600 / speed * 1e6)
    hardware = str(make_hardware().save(tmp_path / "hw.json"))
    assert "two plans" in fails(capsys, "compare", hardware, hardware, "--prices", str(prices))


def test_compare_of_two_kinds_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a, b = str(make_plan(2).save(tmp_path / "a.json")), str(make_hardware().save(tmp_path / "b.json"))
    assert "cannot compare a Plan with a HardwareProfile" in fails(capsys, "compare", a, b)
