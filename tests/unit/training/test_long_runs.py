"""A long run under a streamed plan ends with no more memory and no more open files than it had at its beginning."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.parity import Case, make_plan, square_loss, take_step

WARM_UP, STEPS = 500, 5000
GROWTH_BYTES = 5 * 2**20
WIDTH = 16


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    """File descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells how much memory a process has")
@pytest.mark.parametrize("mode", ["streamed", "mixed"])
def test_memory_and_files_do_not_grow(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    it = Case(model, {"input": torch.randn(2, WIDTH)}, square_loss)
    plan = make_plan(it, mode, split_number=4)
    module = ElixirModule(model, plan, device="cpu")
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=1e-4), max_norm=1.0)
    before, files = 0, 0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            before, files = resident_bytes(), open_files()
        take_step(optimizer, it.loss(module, it.inp))
    grown = resident_bytes() - before
    assert open_files() <= files
    assert grown < GROWTH_BYTES, f"{STEPS} steps took {grown / 2**20:.1f} MiB"
