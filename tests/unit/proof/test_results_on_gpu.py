"""The page of results on a GPU shows what the kept rows say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.proof import report

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "appendix" / "gpu_bars.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmark" / "results"


def kept(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def verdict_lines() -> list[str]:
    text = report.markdown(kept("gpu_proof_h200.jsonl"))
    return [line for line in text.partition("All rows:")[0].splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("line", verdict_lines())
def test_every_bar_is_on_the_page(line: str) -> None:
    assert line in PAGE


def test_steps_with_chosen_activations_are_on_the_page() -> None:
    rows = {row["case"]: row for row in kept("gpu_activations_h200.jsonl")}
    compared = rows.pop("t5")
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert len(rows) == 6
    for case, row in rows.items():
        mean, simulated, device = (row[key] for key in ("mean_s", "simulated_percent", "device_percent"))
        peak = f"{device:+.1f} %" if abs(float(str(device))) >= 0.05 else "0.000 %"
        assert f"| {mean:.3f} | {simulated:+.1f} % | {peak} |" in PAGE, case
    off, plain, above = (
        float(str(compared[key])) for key in ("worst_gradient_off", "plain_gradient_off", "compiled_percent")
    )
    assert f"{100 * off:.2f} % from those in float64 both ways; peaks are {-above:.2f} % above" in PAGE
    assert f"{off:.4f}" == f"{plain:.4f}"
