"""The package has a name that is ours, its wheel is whole, and it runs where nothing but its requirements are installed."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import elixir
from tests.common.installed import TEN_STEPS, commands_run, environment, run

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


def test_the_steps_of_an_installed_wheel_import_nothing_of_the_repository_but_the_package() -> None:
    lines = (line for line in TEN_STEPS.splitlines() if line.startswith(("import ", "from ")))
    assert list(lines) == ["import elixir", "import torch"]


@pytest.mark.slow
def test_a_wheel_runs_where_only_its_requirements_are(wheel: Path, tmp_path: Path) -> None:
    commands_run(environment(wheel, tmp_path / "env", from_index=False), tmp_path)


def test_nothing_names_the_unrelated_distribution() -> None:
    """On the package index `elixir` is a mapper for SQLAlchemy."""
    foreign = re.compile(r"(?<!torch-)\belixir\[\w+\]|pip install(?: -\S+)* '?elixir\b")
    kinds = ("*.py", "*.md", "*.toml", "*.txt", "*.yml", "*.yaml", "*.cff", "Makefile")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *kinds],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert len(listed) > 300
    found = [
        f"{name}: {match[0]}"
        for name in listed
        if (ROOT / name).exists()
        for match in foreign.finditer((ROOT / name).read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("summary", "said"), [("Declarative Mapper for SQLAlchemy", True), (SUMMARY, False)], ids=["other", "ours"]
)
def test_the_unrelated_distribution_is_named_if_it_is_installed(tmp_path: Path, summary: str, said: bool) -> None:
    info = tmp_path / "Elixir-0.7.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: Elixir\nVersion: 0.7.1\nSummary: {summary}\n")
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]; import elixir"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert ("unrelated distribution 'elixir' 0.7.1 is installed" in done.stderr) is said, done.stderr
    assert ("pip uninstall elixir torch-elixir" in done.stderr) is said
