"""`example/train.py` trains alone and on two ranks: the loss falls, and what moved is what the plan said."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALL = (
    "example/train.py --model opt-125m --layers 1 --batch 4 --seq 64 --steps 11 --lr 1e-3 --device-memory 64MiB".split()
)


@pytest.mark.parametrize(
    ("ranks", "more"), [(1, ["--checkpoint"]), (2, []), (1, ["--dtype", "bf16", "--weights-on-meta"])]
)
def test_the_loss_falls_and_the_plan_was_right(ranks: int, more: list[str]) -> None:
    launch = [sys.executable]
    if ranks > 1:  # standalone finds a port that is free
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*launch, *CALL, *more], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) >= 2
    assert losses[-1] < losses[0] - 1.0  # of other text, and 256 bytes vary by a few tenths
    for name in ("loads", "host_to_device", "device_to_host", "network"):
        line = re.search(rf"^{name} +(.*)$", done.stdout, re.MULTILINE)
        assert line is not None, done.stdout
        observed, predicted = re.split(r" {2,}", line[1].strip())
        assert observed == predicted, line[0]
