"""`example/finetune.py` gives the numbers of plain PyTorch on one rank, and of DDP on two, within less memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark.finetune import largest

ROOT = Path(__file__).parents[2]
TOLERANCE = {1: 0.0, 2: 1e-5}
"""Most that a loss or a logit may differ, by ranks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("finetune")


def run(folder: Path, how: str, ranks: int) -> dict[str, Any]:
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    out = folder / "out.json"
    call = [*launch, "example/finetune.py", "--how", how, "--folder", str(folder), "--out", str(out)]
    # Pairs of a part of this project's own sources: reading the whole library takes longer than training.
    call += ["--text", str(ROOT / "elixir" / "search"), "--pretraining-steps", "2", "--steps", "5"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(out.read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", TOLERANCE)
def test_it_has_the_numbers_of_plain_training_in_less_memory(ranks: int, folder: Path) -> None:
    plain, ours = run(folder, "plain", ranks), run(folder, "elixir", ranks)
    assert largest(plain["losses"], ours["losses"]) <= TOLERANCE[ranks]
    assert largest(plain["logits"], ours["logits"]) <= TOLERANCE[ranks]
    assert len(ours["losses"]) == 5
    assert 0 < ours["device_buffers_bytes"] <= ours["budget_bytes"] < ours["need_bytes"]
