"""Counts the files of Elixir that one optimizer step of one chunk enters, so that a reader knows how many to open.

    python benchmark/files_per_step.py                         this tree
    ELIXIR_TREE=PATH python benchmark/files_per_step.py        the code in another tree

The model is one chunk in bfloat16 whose weights, masters and states live on the host; AdamW steps it, and a norm is
limited. The third step is followed, on the calling thread and on those of all lanes, from the arrival of the first
gradient until the next forward has used the new weights. Each case is a way to update the chunk. A file counts if one
of its functions is called; imports count for nothing. Rows go to `results/files_per_step.csv`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TREE = Path(os.environ.get("ELIXIR_TREE", ROOT)).resolve()
sys.path.insert(0, str(TREE))

import elixir  # noqa: E402

sys.path.insert(0, str(ROOT))  # the other tree gives elixir, this one all else

import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmark.common import Row, append_rows, conditions, print_table  # noqa: E402

CASES = {"after the norm": False, "early, kept": True}
"""Whether the host makes new states during backward."""
STAGES = ("gradient home", "step", "forward")
BACKWARD = "backward"
"""The stage before the first gradient has come, which counts for nothing."""
WARM_STEPS = 2
SIZE = 64
QUIET_S = 0.2
"""Seconds without a call on any lane after which a stage is over."""


class Walk:
    """Functions of Elixir that were called, by stage, in the order of their first call."""

    def __init__(self) -> None:
        self.stage: str | None = None
        self.calls: dict[str, dict[tuple[str, str], int]] = {stage: {} for stage in (BACKWARD, *STAGES)}
        self._folder = f"{Path(elixir.__file__).parent}{os.sep}"
        self._last_s = 0.0

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """The function that Python calls on every thread."""
        code = frame.f_code
        if self.stage is None or event != "call" or not code.co_filename.startswith(self._folder):
            return
        self._last_s = time.perf_counter()
        key = (
            code.co_filename.removeprefix(self._folder),
            f"{getattr(code, 'co_qualname', code.co_name)}:{code.co_firstlineno}",
        )
        found = self.calls[self.stage]
        found[key] = found.get(key, 0) + 1

    @contextlib.contextmanager
    def during(self, stage: str | None) -> Iterator[None]:
        """Counts what is called from here until all lanes are quiet."""
        self.stage, self._last_s = stage, time.perf_counter()
        yield
        while time.perf_counter() - self._last_s < QUIET_S:
            time.sleep(QUIET_S / 10)
        self.stage = None

    def files(self, *stages: str) -> list[str]:
        """Files that were entered, in the order of their first function."""
        return list(dict.fromkeys(file for stage in stages for file, _ in self.calls[stage]))


def wrapped(early: bool) -> tuple[Any, Any]:
    """A model of one chunk under its plan, and its optimizer."""
    from elixir.search import simple_search

    torch.manual_seed(0)
    model, inp = nn.Sequential(nn.Linear(SIZE, SIZE)), torch.randn(4, SIZE)
    found = simple_search(
        model,
        1,
        split_number=1,
        allocate_factor=1.0,
        unified_dtype=torch.bfloat16,
        shard_device="cpu",
        inp={"input": inp},
        step_fn=lambda model, inp: model(**inp).square().mean().backward(),
        hardware="cpu",
        clipping=True,
    )
    plan = getattr(found, "plan", found)  # older trees give the plan itself
    update = (
        {"update": "early" if early else "after_norm"} if hasattr(plan.chunks[0], "update") else {"speculates": early}
    )
    away = {"resident": False, "weight_home": "host", "state_home": "host", **update}
    chunks = tuple(replace(chunk, **away) for chunk in plan.chunks)
    if len(chunks) != 1:
        raise RuntimeError(f"the model has {len(chunks)} chunks, expected one")
    wish = "may_update_early" if hasattr(plan, "may_update_early") else "may_speculate"
    module = elixir.ElixirModule(model, replace(plan, chunks=chunks, **{wish: early}), device="cpu")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    return module, elixir.ElixirOptimizer(module, optimizer, max_norm=1e9)


def walked(early: bool) -> Walk:
    """Follows one step.

    Raises:
        RuntimeError: the chunk was not updated as the case says.
    """
    walk = Walk()
    threading.setprofile(walk.profile)  # for the threads that lanes start
    sys.setprofile(walk.profile)
    module, optimizer = wrapped(early)
    inp = torch.randn(4, SIZE)

    def arrived(_: torch.Tensor) -> None:
        if walk.stage == BACKWARD:
            walk.stage = STAGES[0]

    parameter = next(module.parameters())
    for step in range(WARM_STEPS + 1):
        if step == WARM_STEPS:
            parameter.register_hook(arrived)
        loss = module(inp).square().mean()
        with walk.during(BACKWARD if step == WARM_STEPS else None):
            optimizer.backward(loss)
        with walk.during("step" if step == WARM_STEPS else None):
            optimizer.step()
            optimizer.zero_grad()
        for thread in threading.enumerate():
            if thread.name.startswith("elixir-compile"):
                thread.join()  # the kernel is used from the next step on, as in any longer run
    with walk.during("forward"):
        module(inp)
    sys.setprofile(None)
    threading.setprofile(None)
    kept = module.last_report.early.kept
    module.close()
    if kept != int(early):
        raise RuntimeError(f"{kept} chunks kept states that were made in backward, expected {int(early)}")
    return walk


def commit() -> str:
    """The commit whose code runs."""
    call = ["git", "-C", str(TREE), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()


def row_of(case: str, walk: Walk) -> Row:
    files = walk.files(*STAGES)
    calls = [found for stage in STAGES for found in walk.calls[stage].items()]
    return {
        "commit": commit(),
        "update": case,
        "files": len(files),
        "packages": len({file.rpartition(os.sep)[0] for file in files}),
        "functions": len({key for key, _ in calls}),
        "calls": sum(count for _, count in calls),
        **{f"{stage.replace(' ', '_')}_files": len(walk.files(stage)) for stage in STAGES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="records no row")
    parser.add_argument("--functions", action="store_true", help="prints the functions of each file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("elixir").setLevel(logging.ERROR)  # so short a step is slower than predicted
    machine, rows = conditions(), []
    for case, early in CASES.items():
        walk = walked(early)
        for stage in STAGES:
            print(f"{case}, {stage}:")
            for file in walk.files(stage):
                names = [name for other, name in walk.calls[stage] if other == file]
                print(f"    {file}", *(names if given.functions else ()))
        rows.append(row_of(case, walk))
    print_table(f"files of {TREE}", list(rows[0]), [list(row.values()) for row in rows])
    if not given.dry:
        print(append_rows("files_per_step", [machine | row for row in rows]))


if __name__ == "__main__":
    main()
