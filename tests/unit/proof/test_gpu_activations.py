"""`benchmark/gpu_activations.py`: its cases on the CPU, and that it sees where losses differ."""

from pathlib import Path

import pytest

from benchmark import gpu_activations
from benchmark.gpu_activations import cases, run_case, unequal
from benchmark.proof.place import Place


@pytest.mark.parametrize(
    ("others", "differ"),
    [
        ({"kept": [6.2, 6.101, 6.0, 5.9, 5.0], "compiled": [6.21, 6.1, 6.0, 5.9]}, False),
        ({"kept": [6.2001, 6.1, 6.0, 5.9]}, True),
        ({"compiled": [6.2, 6.17, 6.14, 6.11]}, True),  # of the H200, on which compiled layers had no gradients
    ],
)
def test_losses_that_differ_are_found(others: dict[str, list[float]], differ: bool) -> None:
    losses = {"again": [6.2, 6.1, 6.0, 5.9], **others}
    rows = [
        {
            "case": name,
            "status": "ok",
            "group": "states on the device",
            "compiled": name == "compiled",
            "losses": losses[name],
        }
        for name in losses
    ]
    assert bool(unequal(rows)) == differ


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
