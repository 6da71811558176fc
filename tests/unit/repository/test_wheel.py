"""The package has a name that is ours, its wheel is whole, and it runs where nothing but its requirements are installed."""

from __future__ import annotations

import email
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

import elixir
from tests.common.installed import commands_run, environment, run

ROOT = Path(__file__).parents[3]
(SUMMARY,) = re.findall(r'^description = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    leave_out = shutil.ignore_patterns(
        ".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "tests", "benchmark"
    )
    shutil.copytree(ROOT, folder / "source", ignore=leave_out)  # building leaves files next to the sources
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    run(*pip, "-w", folder, folder / "source", cwd=folder)
    shutil.rmtree(folder / "source")
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_every_file_of_the_package_and_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (path,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(path))
    assert wheel.name == f"torch_elixir-{elixir.__version__}-py3-none-any.whl"
    ours = [file for file in (ROOT / "elixir").rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert {file.relative_to(ROOT).as_posix() for file in ours} == {
        name for name in names if name.startswith("elixir/")
    }
    assert (metadata["Name"], metadata["Version"]) == ("torch-elixir", elixir.__version__)
    assert metadata["Summary"] == SUMMARY
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_a_wheel_runs_where_only_its_requirements_are(wheel: Path, tmp_path: Path) -> None:
    commands_run(environment(wheel, tmp_path / "env", from_index=False), tmp_path)
