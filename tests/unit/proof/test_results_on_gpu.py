"""The page of results on a GPU shows what the kept rows say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.proof import report

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "appendix" / "gpu_results.md").read_text(encoding="utf-8")
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
    shown = [row for row in kept("gpu_activations_h200.jsonl") if row["status"] == "ok"]
    shown = [row for row in shown if row["case"] != "kept, states on the device"]  # the same plan as without a choice
    assert len(shown) == 4
    for row in shown:
        mean, simulated, device = (row[key] for key in ("mean_s", "simulated_percent", "device_percent"))
        peak = f"{device:+.1f} %" if abs(float(str(device))) >= 0.05 else "0.000 %"
        assert f"| {mean:.3f} | {simulated:+.1f} % | {peak} |" in PAGE, row["case"]
