"""Writes checkpoints and a profile by the Elixir that is imported, with the values that they hold.

    PYTHONPATH=<tree of the commit> python tests/old_files/make.py tests/old_files/<commit>

Later commits must read these files with equal bits (`tests/unit/checkpoint/test_old_files.py`), so files of a commit
are made once and then kept.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

HOMES = ((False, "host", "host"), (True, "device", "device"), (True, "device", "host"))
RUNS: dict[str, dict[str, Any]] = {
    "one_rank": {},
    "two_ranks": {"ranks": 2},
    "disk": {"homes": ((False, "host", "disk"), (True, "device", "disk"))},
    "8bit": {"dtype": "bfloat16", "moments": "8bit"},
    "fp16": {"dtype": "float16"},
}
"""Name of a checkpoint -> options of the plan under which it is made."""
STEPS = 4


def model() -> nn.Module:
    """A small model with buffers and a frozen weight; its weights are replaced by those of a checkpoint."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 10), nn.Linear(10, 3))
    made[0].bias.requires_grad_(False)
    return made


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"input": torch.randn(4, 6)}


def loss_of(module: nn.Module, inp: dict[str, torch.Tensor]) -> torch.Tensor:
    dtype = next(module.parameters()).dtype
    output: torch.Tensor = module(inp["input"].to(dtype))
    return output.float().square().mean()


def plan_of(ranks: int = 1, dtype: str = "float32", moments: str = "float32", homes: Any = HOMES) -> Any:
    """A plan whose chunks have these homes in turn."""
    from elixir import errors
    from elixir.search import simple_search

    # Commits before the name changed know the option as `speculate`.
    early = "early_updates" if "speculate" in getattr(errors, "GONE", {}) else "speculate"
    plan = simple_search(
        model(), ranks, split_number=4, unified_dtype=getattr(torch, dtype), shard_device="cpu", hardware="cpu",
        inp=batch(), step_fn=lambda module, inp: loss_of(module, inp).backward(), moments=moments, **{early: False},
    ).plan  # fmt: skip
    chunks = []
    for index, chunk in enumerate(plan.chunks):
        resident, weights, states = homes[index % len(homes)]
        states = states if chunk.trainable else weights
        chunks.append(dataclasses.replace(chunk, resident=resident, weight_home=weights, state_home=states))
    return dataclasses.replace(plan, chunks=tuple(chunks))


def wrapped(plan: Any, disk_folder: str) -> tuple[Any, Any]:
    from elixir import ElixirModule, ElixirOptimizer

    module = ElixirModule(model(), plan, device="cpu", disk_folder=disk_folder if plan.uses_disk else None)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return module, ElixirOptimizer(module, torch.optim.AdamW(trained, lr=1e-2), max_norm=1.0)


def user_state() -> dict[str, Any]:
    return {"epoch": 3, "best": torch.tensor(0.97), "names": ["a", None, 1.5]}


def write(rank: int, name: str, folder: str, scratch: str) -> None:
    """One rank of a run that writes a checkpoint; rank 0 writes the values that it holds as plain torch files."""
    from elixir import save_checkpoint

    options = RUNS[name]
    torch.set_num_threads(1)
    ranks = options.get("ranks", 1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/group", rank=rank, world_size=ranks)
    plan = plan_of(**options)
    module, optimizer = wrapped(plan, scratch)
    for _ in range(STEPS):
        optimizer.backward(loss_of(module, batch()))
        optimizer.step()
        optimizer.zero_grad()
    target = Path(folder, name)
    save_checkpoint(target, {"model": module, "optimizer": optimizer, **user_state()}, step=STEPS, wait=True)
    held = {"weights": module.state_dict(), "optimizer": optimizer.state_dict()}
    if rank == 0:
        torch.save(held, target.with_suffix(".pt"))
    module.close()
    if ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    from elixir.hardware.profile import preset

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    for name, options in RUNS.items():
        with tempfile.TemporaryDirectory() as scratch:
            given = (name, str(folder), scratch)
            torch.multiprocessing.spawn(write, given, nprocs=options.get("ranks", 1))
    preset("a100").save(folder / "profile.json")
    print(json.dumps(sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))))


if __name__ == "__main__":
    main()
