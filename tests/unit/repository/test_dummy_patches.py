"""A new value of a concept touches few files: a patch adds a dummy option of the search, another one a dummy way to
update chunks. Each must work from end to end."""

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
PATCHES = Path(__file__).parent

OPTION = """
import torch
from elixir.cli import main

memory = ["--device-memory", "8GiB", "--host-budget", "8GiB"]
assert main(["plan", "trace.json", "--hardware", "hw.json", "--brief", "--dummy", "11", *memory]) == 0
model = torch.nn.Linear(8, 8)
step = lambda model, inp: model(inp["x"]).sum().backward()
inp = {"x": torch.ones(2, 8)}
elixir.wrap(
    model, torch.optim.SGD(model.parameters(), lr=0.1), inp=inp, step_fn=step, hardware="cpu", dummy=22,
    device_memory="1GiB", host_budget="1GiB",
)[0].close()
options = dict(hardware="cpu", device_memory="1GiB", host_budget="1GiB")
elixir.search.optimal_search(torch.nn.Linear(8, 8), 1, inp=inp, step_fn=step, dummy=33, **options)
"""
"""The option comes from the command line, `wrap` and a search; the planner logs its value."""

UPDATE_MODE = """
from dataclasses import replace

import torch
from elixir.hardware.profile import HardwareProfile
from elixir.plan.plan import Plan
from elixir.search import plan_from_trace, simple_search
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import StepTrace

trace, hardware = StepTrace.load("trace.json"), HardwareProfile.load("hw.json")
most = plan_from_trace(trace, hardware, 1, placement="cuda", device_memory=1 << 40, host_budget=1 << 40).plan
memory = dict(device_memory=most.predicted.device_peak_bytes // 2, host_budget=1 << 40, early_updates=False)
plan = plan_from_trace(trace, hardware, 1, **memory).plan
dummies = [index for index, chunk in enumerate(plan.chunks) if chunk.update == "dummy"]
assert dummies == [index for index, chunk in enumerate(plan.chunks) if chunk.state_home == "host" and chunk.trainable]
assert dummies and plan.predicted.host_parts["gradients"] == 0
assert f"{len(dummies)} updated by dummies" in str(plan)
assert Plan.from_json(plan.to_json()) == plan
step = simulate_step(plan, trace, hardware)
assert abs(step.step_s / plan.predicted.step_s - 1) < 1e-9
assert {span.chunk for span in step.timeline if span.name == "dummy update"} == set(dummies)

def losses(update):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    run = lambda model, inp: model(inp["input"]).square().mean()
    inp = {"input": torch.ones(2, 8)}
    options = dict(inp=inp, step_fn=lambda model, inp: run(model, inp).backward(), hardware="cpu", shard_device="cpu")
    found = simple_search(model, 1, **options).plan
    chunks = tuple(replace(chunk, update=update) for chunk in found.chunks)
    module = elixir.ElixirModule(model, replace(found, chunks=chunks))
    optimizer = elixir.ElixirOptimizer(module, torch.optim.Adam(module.parameters(), lr=0.1))
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = run(module, inp)
        optimizer.backward(loss)
        optimizer.step()
        found.append(loss.item())
    module.close()
    return found

assert losses("dummy") == losses("after_norm") and len(set(losses("dummy"))) == 3
"""
"""The mode needs no host memory for gradients, so that a search prefers it; a plan says it, and a run accepts it."""

HERE = """
import sys
import elixir

assert elixir.__file__.startswith(sys.argv[1]), elixir.__file__
"""


pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="applies a patch with git")


def applied(folder: Path, name: str) -> dict[str, str]:
    """Applies a patch to the copy of the package in a folder; returns the environment that imports it."""
    # Outside of any repository, so that git looks at nothing but the files.
    environment = os.environ | {"PYTHONPATH": str(folder), "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "apply", "-C1", str(PATCHES / f"{name}.patch")]
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=60)
    return environment


@pytest.mark.parametrize(("name", "most_files"), [("dummy_option", 3), ("dummy_update_mode", 8)])
def test_a_new_value_touches_few_files(tmp_path: Path, name: str, most_files: int) -> None:
    patch = (PATCHES / f"{name}.patch").read_text()
    touched = [line for line in patch.splitlines() if line.startswith("+++ b/elixir/")]
    assert 1 <= len(touched) <= most_files
    shutil.copytree(ROOT / "elixir", tmp_path / "elixir", ignore=shutil.ignore_patterns("__pycache__"))
    applied(tmp_path, name)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "run", "said"),
    [
        ("dummy_option", OPTION, ["dummy option: 11", "dummy option: 22", "dummy option: 33"]),
        ("dummy_update_mode", UPDATE_MODE, []),
    ],
    ids=["option", "update mode"],
)
def test_a_new_value_works(tmp_path: Path, name: str, run: str, said: list[str]) -> None:
    # With what is compiled: files that the patch leaves as they are keep their times.
    shutil.copytree(ROOT / "elixir", tmp_path / "elixir")
    environment = applied(tmp_path, name)
    stack_trace(SMALL).save(tmp_path / "trace.json")
    make_hardware().save(tmp_path / "hw.json")
    done = subprocess.run(
        [sys.executable, "-c", HERE + run, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [value for value in said if value in done.stderr] == said
