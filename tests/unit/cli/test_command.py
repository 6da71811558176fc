"""The command line as a process: the one test of it in the first stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_a_plan_is_made_by_a_process(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    command = [sys.executable, "-m", "elixir", "plan", "opt-125m", "--batch", "1", "--seq", "32", "--hardware", "cpu"]
    sizes = ["--device-memory", "1GiB", "--host-memory", "8GiB", "--out", str(out), "--json"]
    done = subprocess.run(
        [*command, *sizes],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert json.loads(out.read_text())["chunks"]
