"""A new option of the search touches few files: dummy_option.patch adds one, which must reach the planner from
everywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common.samples import make_hardware
from tests.common.searching import SMALL
from tests.common.synthetic_trace import stack_trace

ROOT = Path(__file__).parents[3]
PATCH = Path(__file__).with_name("dummy_option.patch")
MOST_FILES = 3

RUN = """
import sys
import torch
import elixir
from elixir.cli import main

assert elixir.__file__.startswith(sys.argv[1]), elixir.__file__
memory = ["--device-memory", "8GiB", "--host-memory", "8GiB"]
assert main(["plan", "trace.json", "--hardware", "hw.json", "--brief", "--dummy", "11", *memory]) == 0
model = torch.nn.Linear(8, 8)
step = lambda model, inp: model(inp["x"]).sum().backward()
inp = {"x": torch.ones(2, 8)}
elixir.wrap(
    model, torch.optim.SGD(model.parameters(), lr=0.1), inp=inp, step_fn=step, hardware="cpu", dummy=22,
    device_memory="1GiB", host_memory="1GiB",
)[0].close()
options = dict(hardware="cpu", device_memory="1GiB", host_memory="1GiB")
elixir.search.optimal_search(torch.nn.Linear(8, 8), 1, inp=inp, step_fn=step, dummy=33, **options)
"""


@pytest.mark.skipif(shutil.which("git") is None, reason="applies a patch with git")
def test_a_new_option_reaches_the_planner_through_few_files(tmp_path: Path) -> None:
    touched = [line for line in PATCH.read_text().splitlines() if line.startswith("+++ b/elixir/")]
    assert 1 <= len(touched) <= MOST_FILES
    shutil.copytree(ROOT / "elixir", tmp_path / "elixir", ignore=shutil.ignore_patterns("__pycache__"))
    # Outside of any repository, so that git looks at nothing but the files.
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(["git", "apply", "-C1", str(PATCH)], cwd=tmp_path, env=environment, check=True, timeout=60)
    stack_trace(SMALL).save(tmp_path / "trace.json")
    make_hardware().save(tmp_path / "hw.json")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [value for value in ("11", "22", "33") if f"dummy option: {value}" in done.stderr] == ["11", "22", "33"]
