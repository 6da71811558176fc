"""The runbook as a script: each command runs, and what it hands back is small."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

HOUR = Path(__file__).parents[3] / "benchmark" / "gpu_hour.sh"
MIB = 2**20


def hour(*given: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    known = {name: value for name, value in os.environ.items() if name not in ("OUT", "WORK", "HOST_MEMORY")} | known
    command = ["bash", str(HOUR), *given]
    return subprocess.run(command, capture_output=True, text=True, env=known | environment, timeout=580, check=False)


@pytest.mark.parametrize("given", [[], ["7", "folder"], ["--toy"], ["links", "folder"], ["1"]])
def test_what_makes_no_sense_is_refused(given: list[str]) -> None:
    found = hour(*given)
    assert found.returncode == 2
    assert "gpu_hour.sh" in found.stderr or "folder for the results" in found.stderr


def test_results_come_back_in_few_and_small_files(tmp_path: Path) -> None:
    """Plans and traces stay away first, and rows never; `true` is a proof that takes no time."""
    work, out = tmp_path / "work", tmp_path / "out"
    (work / "plans").mkdir(parents=True)
    (work / "rows.jsonl").write_text('{"part": "links"}\n', encoding="utf-8")
    (work / "log.txt").write_bytes(b"last words\n".rjust(3 * MIB))
    (work / "plans" / "a.trace.json").write_bytes(os.urandom(MIB))
    (work / "plans" / "a.plan.json").write_text("{}", encoding="utf-8")
    limits = {"ARCHIVE_BYTES": str(MIB // 2), "PYTHON": "true", "WORK": str(work)}
    found = hour("3", str(out), **limits)
    assert found.returncode == 0, found.stderr
    assert {path.name for path in out.iterdir()} == {"rows.jsonl", "log.txt", "proof.tar.xz"}
    assert all(path.stat().st_size <= MIB for path in out.iterdir())
    assert (out / "log.txt").read_text(encoding="utf-8").endswith("last words\n")
    with tarfile.open(out / "proof.tar.xz") as archive:
        names = archive.getnames()
    assert "work/rows.jsonl" in names
    assert "work/plans/a.plan.json" in names
    assert "work/plans/a.trace.json" not in names
    found = hour("3", str(out), **limits | {"ARCHIVE_BYTES": "40"})
    assert "no archive" in found.stderr
    assert (out / "rows.jsonl").exists()
    assert not (out / "proof.tar.xz").exists()


def test_a_command_that_fails_hands_back_what_there_is(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    (work / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    found = hour("4", str(out), PYTHON="false", WORK=str(work))
    assert found.returncode == 1
    assert {path.name for path in out.iterdir()} == {"rows.jsonl", "proof.tar.xz"}


def test_rows_leave_while_a_proof_runs(tmp_path: Path) -> None:
    """Nothing at the end of the script may be needed for them: a process in the driver can hold it up for ever."""
    work, out, proof = tmp_path / "work", tmp_path / "out", tmp_path / "proof"
    work.mkdir()
    (work / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    proof.write_text(f"#!/bin/sh\nwhile [ ! -e {out}/rows.jsonl ]; do sleep 0.1; done\n", encoding="utf-8")
    proof.chmod(0o755)
    found = hour("3", str(out), PYTHON=str(proof), WORK=str(work), COPY_EVERY="0.1", SECONDS_GIVEN="45")
    assert found.returncode == 0, found.stderr
    assert (out / "rows.jsonl").read_text(encoding="utf-8") == "{}\n"
    assert "--minutes 0.75" in found.stdout


def test_an_archive_is_made_without_xz(tmp_path: Path) -> None:
    work, out, tools = tmp_path / "work", tmp_path / "out", tmp_path / "tools"
    work.mkdir()
    tools.mkdir()
    (work / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    for name in "basename bash dirname gzip head mkdir rm sleep tail tar true wc".split():
        (tools / name).symlink_to(shutil.which(name) or "nowhere")
    found = hour("3", str(out), PYTHON="true", WORK=str(work), PATH=str(tools))
    assert found.returncode == 0, found.stderr
    with tarfile.open(out / "proof.tar.gz") as archive:
        assert "work/rows.jsonl" in archive.getnames()


@pytest.mark.slow
@pytest.mark.parametrize("number", "123456")
def test_every_command_runs_at_toy_size(number: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = hour("--toy", number, str(out), WORK=str(tmp_path / "work"))
    assert found.returncode == 0, found.stdout + found.stderr
    with tarfile.open(out / "proof.tar.xz") as archive:
        names = archive.getnames()
    if number == "1":
        assert "work/facts.txt" in names
        assert "copies_submitted_s" in found.stdout
    else:
        assert (out / "rows.jsonl").read_text(encoding="utf-8").strip()
        assert "What is missing for an answer" in (out / "results.md").read_text(encoding="utf-8")
        assert "work/results.md" in names
