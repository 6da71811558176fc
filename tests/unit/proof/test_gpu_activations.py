"""`benchmark/gpu_activations.py`: its cases on the CPU, and that it sees where losses differ."""

from pathlib import Path

import pytest

from benchmark.gpu_activations import cases, run_case, unequal
from benchmark.proof.place import Place


@pytest.mark.slow
def test_kept_layers_train_as_those_that_run_again(tmp_path: Path) -> None:
    place = Place(tmp_path, True)
    names = [name for name in cases(place) if name != "t5" and "compiled" not in name]
    rows = [run_case(name, place, lambda: None) for name in names]
    assert [row["status"] for row in rows] == ["ok"] * len(names), rows
    assert unequal(rows) == []
    text = {row["case"]: row["activations"] for row in rows}
    assert any(row["activations"] for row in rows), text
