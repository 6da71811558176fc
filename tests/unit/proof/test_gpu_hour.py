"""The runbook as a script: its runs fit the time, go on from one machine to the next, and hand back few small files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark.proof.jobs import PARTS
from benchmark.proof.links import SPEED_PARTS, read_rows
from benchmark.proof.place import Place
from tests.common.proof_rows import assert_early_states_are_kept_unless_clipped

HOUR = Path(__file__).parents[3] / "benchmark" / "gpu_hour.sh"
MIB = 2**20


def hour(*given: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    known = {name: value for name, value in os.environ.items() if name not in ("OUT", "WORK", "HOST_MEMORY")} | known
    command = ["bash", str(HOUR), *given]
    return subprocess.run(command, capture_output=True, text=True, env=known | environment, timeout=580, check=False)


@pytest.mark.parametrize(
    "given", [[], ["4", "folder"], ["--toy"], ["--toy", "--emulated", "1"], ["links", "folder"], ["1"]]
)
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
    found = hour("2", str(out), PYTHON="false", WORK=str(work))
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
    assert re.search(r"--minutes 0\.2[35] --host-memory 104GiB", found.stdout)


def test_three_runs_and_their_starts_fit_half_an_hour() -> None:
    """The limits are those that the first lines name; a machine takes up to 90 s to start."""
    script = HOUR.read_text(encoding="utf-8")
    limits = [int(text) for text in re.findall(r"\d+", re.search(r"^limits=\((.*)\)", script, re.MULTILINE)[1])]  # type: ignore[index]
    assert limits == [int(seconds) for seconds in re.findall(r"^#   \d  \w+ +(\d+) s ", script, re.MULTILINE)]
    assert len(limits) == 3
    assert all(limit <= 600 for limit in limits)
    assert sum(limits) + 3 * 90 <= 1750


FAKE = """#!{python}
import json, os, pathlib, sys, time
if sys.argv[1].endswith("lifetime.py"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
given = dict(zip(sys.argv, sys.argv[1:]))
work = pathlib.Path(given["--out"])
(work / "plans").mkdir(exist_ok=True)
(work / "plans" / (given["--hour"] + ".plan.json")).touch()
with (work / "rows.jsonl").open("a") as file:
    print(json.dumps(dict(run=given["--hour"])), file=file)
while {hangs}:
    time.sleep(0.1)
"""


def fake(folder: Path, *, hangs: bool) -> str:
    """An interpreter for which the proof is a row and a plan, after which it may hang."""
    path = folder / f"fake_{hangs}"
    path.write_text(FAKE.format(python=sys.executable, hangs=hangs), encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def carried(out: Path) -> list[str]:
    """Names in the archive of a run; none before there is one."""
    try:
        with tarfile.open(out / "proof.tar.xz") as archive:
            return archive.getnames()
    except (OSError, tarfile.TarError):
        return []


def test_a_run_that_is_killed_has_handed_back_its_cases_and_the_next_goes_on(tmp_path: Path) -> None:
    """The machine is emptied in between: the next run gets nothing but the archive of the one before."""
    first, second, out = tmp_path / "first", tmp_path / "second", tmp_path / "out"
    environment = os.environ | {"PYTHON": fake(tmp_path, hangs=True), "WORK": str(first / "work"), "COPY_EVERY": "0.1"}
    with subprocess.Popen(["bash", str(HOUR), "2", str(out)], env=environment, stdout=subprocess.DEVNULL) as process:
        until = time.monotonic() + 60
        while "work/plans/2.plan.json" not in carried(out) and time.monotonic() < until:
            time.sleep(0.05)
        process.kill()
    assert (out / "rows.jsonl").read_text(encoding="utf-8") == '{"run": "2"}\n'
    second.mkdir()
    shutil.copy(out / "proof.tar.xz", second)
    found = hour("3", str(out), PYTHON=fake(tmp_path, hangs=False), WORK=str(second / "work"))
    assert found.returncode == 0, found.stderr
    assert "goes on from" in found.stdout
    assert (out / "rows.jsonl").read_text(encoding="utf-8") == '{"run": "2"}\n{"run": "3"}\n'
    assert {"work/plans/2.plan.json", "work/plans/3.plan.json"} <= set(carried(out))
    found = hour("3", str(out), PYTHON=fake(tmp_path, hangs=False), WORK=str(second / "work"))
    assert "goes on from" not in found.stdout, "what is there is newer than what was sent along"


def test_an_archive_is_made_without_xz(tmp_path: Path) -> None:
    work, out, tools = tmp_path / "work", tmp_path / "out", tmp_path / "tools"
    work.mkdir()
    tools.mkdir()
    (work / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    for name in "bash dirname gzip head mkdir mv nice rm sleep tail tar true wc".split():
        (tools / name).symlink_to(shutil.which(name) or "nowhere")
    found = hour("3", str(out), PYTHON="true", WORK=str(work), PATH=str(tools))
    assert found.returncode == 0, found.stderr
    with tarfile.open(out / "proof.tar.gz") as archive:
        assert "work/rows.jsonl" in archive.getnames()


@pytest.mark.slow
def test_three_runs_at_toy_size_add_up(tmp_path: Path) -> None:
    """Each on an empty machine that gets the archive of the one before."""
    out = tmp_path / "out"
    for number in "123":
        machine = tmp_path / f"machine{number}"
        machine.mkdir()
        if number > "1":
            shutil.copy(out / "proof.tar.xz", machine)
        found = hour("--toy", number, str(out), WORK=str(machine / "work"), SECONDS_GIVEN="560")
        assert found.returncode == 0, found.stdout + found.stderr
        assert ("kernels: built" in found.stdout) is (number == "1")
        assert "What is missing for an answer" in (out / "results.md").read_text(encoding="utf-8")
    names = carried(out)
    assert {"work/facts.txt", "work/results.md", "work/hardware.json"} <= set(names)
    assert any(name.startswith("work/cache/elixir/adam_") for name in names), "the kernel goes along"
    rows = read_rows(Place(tmp_path / "machine3" / "work"))
    assert {row["part"] for row in rows} == set(PARTS)
    assert_comparison_uses_every_finished_case(rows)
    assert_early_states_are_kept_unless_clipped(rows)


def assert_comparison_uses_every_finished_case(rows: list[dict[str, Any]]) -> None:
    ours = [row for row in rows if row.get("kind") == "elixir" and row["part"] in SPEED_PARTS and row["status"] == "ok"]
    (compared,) = [row for row in rows if row.get("kind") == "compare"]
    found = {(case["case"], case["contender"]) for case in compared["cases"]}
    assert found == {(f"{row['part']}/{row['case']}", row["contender"]) for row in ours}
    assert {name.partition("/")[0] for name, _ in found} == {row["part"] for row in ours} != set()
    clipped = {
        case["case"].endswith("clipped in every step"): case["early"]
        for case in compared["cases"]
        if case["contender"] == "elixir"
    }
    assert clipped.get(True, 0) == 0, "as it ran: without states that are never kept"


@pytest.mark.slow  # compiles a device, and runs some forty processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a device, on a machine that has none")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_runs_on_the_emulated_device_that_are_killed_lose_no_finished_case(tmp_path: Path) -> None:
    """Each is killed in its middle, on a machine that is then emptied; the next gets the archive, and nothing more."""
    out, rows = tmp_path / "out", []
    for number, middle in ((1, 2), (2, 3), (3, 4)):
        machine = tmp_path / f"machine{number}"
        machine.mkdir()
        if rows:
            shutil.copy(out / "proof.tar.xz", machine)
        environment = os.environ | {"PYTHON": sys.executable, "WORK": str(machine / "work"), "OMP_NUM_THREADS": "1"}
        command = ["bash", str(HOUR), "--emulated", str(number), str(out)]
        before = len(rows)
        with (
            (tmp_path / f"said{number}").open("w") as said,
            subprocess.Popen(command, env=environment, stdout=said, stderr=said) as process,
        ):
            while len(rows) < before + middle and process.poll() is None:
                time.sleep(1.0)
                rows = unpacked(out, tmp_path / "home")
            assert process.poll() is None, (tmp_path / f"said{number}").read_text(encoding="utf-8")
            process.kill()
        time.sleep(10.0)  # what it has started has ended as well
        rows = unpacked(out, tmp_path / "home")
        there = read_rows(Place(machine / "work"))
        assert len(there) - len(rows) <= 1, "at most the case that ended in the second in which it was killed"
        assert [row["status"] for row in rows if row["part"] != "links" and row["status"] != "ok"] == []
    command = [
        sys.executable,
        str(HOUR.with_name("gpu_proof.py")),
        "--compare",
        "--out",
        str(tmp_path / "home" / "work"),
    ]
    assert subprocess.run(command, check=False).returncode == 0
    rows = read_rows(Place(tmp_path / "home" / "work"))
    assert {row["part"] for row in rows} >= {"memory", "links", "resident", "offload"}
    assert_comparison_uses_every_finished_case(rows)
    assert_early_states_are_kept_unless_clipped(rows)


def unpacked(out: Path, home: Path) -> list[dict[str, Any]]:
    """Rows in the archive of a run, which is unpacked at home."""
    if carried(out):
        with tarfile.open(out / "proof.tar.xz") as archive:
            archive.extractall(home, filter="tar")
    return read_rows(Place(home / "work"))
