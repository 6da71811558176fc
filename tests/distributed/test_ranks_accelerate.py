"""Accelerate on two ranks under a plan, compared with DDP; also as `accelerate launch` starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.common.spawn import as_launched, run_ranks

ROOT = Path(__file__).parents[2]
ROOMY = {"device_memory": "64MiB", "host_budget": "64MiB"}
PLANS = {"on the host": {**ROOMY, "placement": "cpu"}, "resident": {**ROOMY, "placement": "cuda"}}
TOLERANCE = 1e-6


def looped(rank: int, world_size: int, folder: Path, options: dict[str, Any] | None) -> Any:
    """Losses and norms of two epochs, of one more from the checkpoint between them, and the weights after two."""
    as_launched(rank, world_size)
    from accelerate import Accelerator

    from elixir.integrations.accelerate import ElixirAccelerator
    from tests.common.accelerated import Loop

    more = {"cpu": True, "gradient_accumulation_steps": 2}
    accelerator = Accelerator(**more) if options is None else ElixirAccelerator(elixir=options, **more)
    loop = Loop(accelerator, samples=12)
    found = [loop.epoch()]
    accelerator.save_state(str(folder))
    found.append(loop.epoch())
    weights = {name: value.tolist() for name, value in loop.weights().items()}
    accelerator.load_state(str(folder))
    found.append(loop.epoch())
    if options is not None:
        accelerator.elixir.module.close()
    return found, weights


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_two_ranks_loop_as_ddp_does(name: str, tmp_path: Path) -> None:
    plain = run_ranks(2, looped, tmp_path / "plain", None, wait_s=600.0)
    ours = run_ranks(2, looped, tmp_path / "ours", PLANS[name], wait_s=600.0)
    for (losses, _), (losses_of_ours, _) in zip(plain, ours, strict=True):
        assert losses_of_ours == [pytest.approx(epoch, rel=0, abs=TOLERANCE) for epoch in losses]
    weights = {name.removeprefix("module."): value for name, value in plain[0][1].items()}
    assert weights.keys() == ours[0][1].keys()
    for key, value in weights.items():
        assert torch.allclose(torch.tensor(ours[0][1][key]), torch.tensor(value), rtol=0, atol=TOLERANCE)


SCRIPT = """
from accelerate import Accelerator
from elixir.integrations.accelerate import ElixirAccelerator
from tests.common.accelerated import Loop

plain = Loop(Accelerator(cpu=True), samples=4).epoch()
ours = Loop(ElixirAccelerator(cpu=True, elixir={"device_memory": "64MiB", "host_budget": "64MiB"}), samples=4)
assert ours.accelerator.num_processes == 2
found = ours.epoch()
assert max(abs(one - other) for one, other in zip(found, plain, strict=True)) <= 1e-6, (found, plain)
print("the same on", ours.accelerator.process_index)
ours.accelerator.elixir.module.close()
ours.accelerator.end_training()
"""


@pytest.mark.slow
def test_accelerate_launches_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--main_process_port",
    ]
    # Its kind for several processes of one machine; the script and the variable say that they have no GPU.
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [*launch, "0", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", str(script)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the same on") == 2
