"""A wheel installs, and both commands run outside of the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run(*words: str, cwd: Path, **environment: str) -> str:
    """Standard output of a command that must succeed."""
    own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONUNBUFFERED")}
    done = subprocess.run(words, cwd=cwd, env=own | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_runs_both_commands_outside_of_the_tree(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip")
    source, folder, site = tmp_path / "source", tmp_path / "wheels", tmp_path / "site"
    leave_out = shutil.ignore_patterns(
        ".git", ".venv*", "build", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, source, ignore=leave_out)  # building leaves files next to the sources
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source), cwd=tmp_path)
    shutil.rmtree(source)
    (wheel,) = folder.glob("*.whl")
    run(*pip, "install", "-q", "--no-deps", "--no-index", "--target", str(site), str(wheel), cwd=tmp_path)
    where = {"PYTHONPATH": str(site)}
    code = "import elixir, os; print(os.path.dirname(elixir.__file__))"
    assert run(sys.executable, "-c", code, cwd=tmp_path, **where).strip() == str(site / "elixir")
    words = ("plan", "opt-125m", "--seq", "64", "--host-memory", "64GiB", "--brief")
    for command in ((sys.executable, "-m", "elixir"), (str(site / "bin" / "elixir"),)):
        assert "opt-125m (bfloat16) on 1 x h200" in run(*command, *words, cwd=tmp_path, **where)
