"""`benchmark/gpu_activations.py`: its cases on the CPU, and that it sees where losses differ."""

from pathlib import Path

import pytest

from benchmark import gpu_activations
from benchmark.gpu_activations import DETERMINISTIC_STEPS, cases, run_case, unequal
from benchmark.proof.place import Place


def test_losses_that_differ_after_a_step_are_found() -> None:
    same = [6.2, 6.1, 6.0, 5.9]
    assert len(same) > DETERMINISTIC_STEPS + 1
    rows = [
        {"case": name, "status": "ok", "group": "states on the device", "compiled": compiled, "losses": losses}
        for name, compiled, losses in (
            ("again", False, same),
            ("kept", False, [*same[: DETERMINISTIC_STEPS + 1], 5.0]),
            ("compiled", True, [6.3]),
        )
    ]
    assert unequal(rows) == []
    rows[1]["losses"] = [*same[:DETERMINISTIC_STEPS], 6.01]
    (found,) = unequal(rows)
    assert "states on the device" in found
    assert "6.01" in found


@pytest.mark.slow
def test_kept_layers_train_as_those_that_run_again(tmp_path: Path) -> None:
    place = Place(tmp_path, True)
    names = [name for name in cases(place) if name != "t5" and "compiled" not in name]
    rows = [run_case(name, place, lambda: None) for name in names]
    assert [row["status"] for row in rows] == ["ok"] * len(names), rows
    assert unequal(rows) == []
    text = {row["case"]: row["activations"] for row in rows}
    assert any(row["activations"] for row in rows), text


def test_a_case_that_cannot_run_has_a_row_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(gpu_activations, "timed", fails)
    row = run_case("again, states on the host", Place(tmp_path, True), lambda: None)
    assert row["status"] == "failed"
    assert row["why"] == "RuntimeError: no such luck"
