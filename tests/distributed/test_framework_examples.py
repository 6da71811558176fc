"""The examples for frameworks run, and their loss falls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALLS = {
    "trainer": "--output_dir {} --max_steps 12 --logging_steps 1 --learning_rate 1e-2 --lr_scheduler_type constant "
    '--use_cpu --report_to none --save_strategy no --elixir {{"device_memory":"14MiB"}}',
    "lora": "--output_dir {} --max_steps 12 --logging_steps 1 --learning_rate 1e-2 --lr_scheduler_type constant "
    '--use_cpu --report_to none --save_strategy no --elixir {{"placement":"cpu"}}',
    "lightning_fit": "--steps 12 --device-memory 14MiB",
    "lightning_fit on two": "--steps 12 --device-memory 14MiB --devices 2",  # which Lightning starts itself
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_it_runs_and_learns(name: str, tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    words = CALLS[name].format(tmp_path).split()
    done = subprocess.run(
        [sys.executable, str(ROOT / "example" / f"{name.split()[0]}.py"), *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"loss'?:? '?(\d+\.\d+)", done.stdout)]
    assert losses[-1] < (5.4 if name == "lora" else 5.0)  # of 256 bytes, log 256 is 5.55
    assert "observed" in done.stdout
    if not name.startswith("lightning_fit"):
        assert list(tmp_path.glob("*.safetensors"))
