"""`example/train.py` trains alone and on two ranks: the loss falls, and what moved is what the plan said."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elixir.checkpoint_format.saved_checkpoint import open_checkpoint
from elixir.checkpoint_format.slice_reader import verify

ROOT = Path(__file__).parents[2]
CALL = (
    "example/train.py --model opt-125m --layers 1 --batch 2 --seq 64 --steps 6 --lr 1e-3 --device-memory 64MiB".split()
)


@pytest.mark.parametrize(
    ("ranks", "more"),
    [(1, ["--activation-checkpointing", "--hardware", "cpu"]), (2, []), (1, ["--dtype", "bf16", "--weights-on-meta"])],
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


@pytest.mark.slow
def test_it_goes_on_with_the_same_bits_and_saves_when_it_is_told_to_end(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    call = [sys.executable, *CALL, "--checkpoint-folder"]

    def run(*words: str) -> None:
        done = subprocess.run(
            [*call, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr

    run(str(tmp_path / "whole"), "--steps", "6", "--every", "2")
    assert sorted(os.listdir(tmp_path / "whole")) == ["step-00000004", "step-00000006"]
    shutil.copytree(tmp_path / "whole" / "step-00000004", tmp_path / "broken" / "step-00000004")
    run(str(tmp_path / "broken"), "--steps", "6", "--every", "2", "--resume")
    with (
        open_checkpoint(tmp_path / "whole" / "step-00000006") as one,
        open_checkpoint(tmp_path / "broken" / "step-00000006") as other,
    ):
        assert one.keys() == other.keys()
        assert [key for key in one.keys() if not torch.equal(one.read(key), other.read(key))] == []  # noqa: SIM118
        assert one.index.steps == other.index.steps

    told = [*call, str(tmp_path / "told"), "--steps", "100000", "--every", "100000"]
    with subprocess.Popen(told, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "step    0" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
    assert process.returncode == 0
    (name,) = os.listdir(tmp_path / "told")
    assert verify(tmp_path / "told" / name) == ()
