"""The runbook as a script: its two runs fit the time, go on from one machine to the next, and hand back few small files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

QUARTER = Path(__file__).parents[3] / "benchmark" / "gpu_quarter.sh"
MIB = 2**20
START_S = 120.0
"""A machine that starts slowly."""


def run(*given: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    known = {name: value for name, value in os.environ.items() if name not in ("OUT", "WORK", "HOST_MEMORY")} | known
    command = ["bash", str(QUARTER), *given]
    return subprocess.run(command, capture_output=True, text=True, env=known | environment, timeout=580, check=False)


def test_results_come_back_in_few_and_small_files(tmp_path: Path) -> None:
    """Plans and traces stay away first, and rows never; `true` is a proof that takes no time."""
    work, out = tmp_path / "work", tmp_path / "out"
    (work / "plans").mkdir(parents=True)
    (work / "rows.jsonl").write_text('{"part": "links"}\n', encoding="utf-8")
    (work / "log.txt").write_bytes(b"last words\n".rjust(3 * MIB))
    (work / "plans" / "a.trace.json").write_bytes(os.urandom(MIB))
    (work / "plans" / "a.plan.json").write_text("{}", encoding="utf-8")
    limits = {"ARCHIVE_BYTES": str(MIB // 2), "PYTHON": "true", "WORK": str(work)}
    found = run("2", str(out), **limits)
    assert found.returncode == 0, found.stderr
    assert {path.name for path in out.iterdir()} == {"rows.jsonl", "log.txt", "facts.txt", "proof.tar.xz"}
    assert all(path.stat().st_size <= MIB for path in out.iterdir())
    assert (out / "log.txt").read_text(encoding="utf-8").endswith("last words\n")
    with tarfile.open(out / "proof.tar.xz") as archive:
        names = archive.getnames()
    assert "work/rows.jsonl" in names
    assert "work/plans/a.plan.json" in names
    assert "work/plans/a.trace.json" not in names
    found = run("2", str(out), **limits | {"ARCHIVE_BYTES": "40"})
    assert "no archive" in found.stderr
    assert (out / "rows.jsonl").exists()
    assert not (out / "proof.tar.xz").exists()


def test_an_archive_is_made_without_xz_and_after_a_failure(tmp_path: Path) -> None:
    work, out, tools = tmp_path / "work", tmp_path / "out", tmp_path / "tools"
    work.mkdir()
    tools.mkdir()
    (work / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    for name in "bash cat dirname false free grep gzip head lscpu mkdir mv nice nproc rm sleep tail tar wc".split():
        (tools / name).symlink_to(shutil.which(name) or "nowhere")
    found = run("2", str(out), PYTHON="false", WORK=str(work), PATH=str(tools))
    assert found.returncode == 1
    with tarfile.open(out / "proof.tar.gz") as archive:
        assert "work/rows.jsonl" in archive.getnames()


FAKE = """#!{python}
import json, os, pathlib, sys, time
if sys.argv[1] == "-c":
    time.sleep({starts_s})
    sys.exit()
if sys.argv[1].endswith("lifetime.py"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
given = dict(zip(sys.argv, sys.argv[1:]))
work = pathlib.Path(given["--out"])
(work / "plans").mkdir(exist_ok=True)
(work / "plans" / (given["--quarter"] + ".plan.json")).touch()
with (work / "rows.jsonl").open("a") as file:
    print(json.dumps(dict(run=given["--quarter"], minutes=given["--minutes"])), file=file)
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while {hangs}:
    time.sleep(0.1)
"""


def fake(folder: Path, *, hangs: bool, starts_s: float = 0.0) -> str:
    """An interpreter for which the proof is a row and a plan, after which it may hang, and ignore that it is ended."""
    path = folder / f"fake_{hangs}"
    path.write_text(FAKE.format(python=sys.executable, hangs=hangs, starts_s=starts_s), encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def names_in(out: Path) -> list[str]:
    """Names in the archive of a run; none before there is one."""
    try:
        with tarfile.open(out / "proof.tar.xz") as archive:
            return archive.getnames()
    except (OSError, tarfile.TarError):
        return []


def test_a_run_ends_in_its_time_whatever_starts_slowly_or_hangs(tmp_path: Path) -> None:
    """Seconds that pass before jobs begin are taken from them."""
    work, out = tmp_path / "work", tmp_path / "out"
    began = time.monotonic()
    found = run("1", str(out), PYTHON=fake(tmp_path, hangs=True, starts_s=3.0), WORK=str(work), SECONDS_GIVEN="21")
    assert found.returncode != 0
    assert time.monotonic() - began < 21
    (row,) = (json.loads(line) for line in (out / "rows.jsonl").read_text(encoding="utf-8").splitlines())
    assert 60 * float(row["minutes"]) <= 21 - 15 - 3
    late = run("1", str(out), PYTHON=fake(tmp_path, hangs=False, starts_s=3.0), WORK=str(work), SECONDS_GIVEN="17")
    assert "no time is left of 17 s" in late.stderr


def test_a_run_that_is_killed_has_handed_back_its_cases_and_the_next_goes_on(tmp_path: Path) -> None:
    """The machine is emptied in between: the next run gets nothing but the archive of the one before."""
    first, second, out = tmp_path / "first", tmp_path / "second", tmp_path / "out"
    environment = os.environ | {"PYTHON": fake(tmp_path, hangs=True), "WORK": str(first / "work"), "COPY_EVERY": "0.1"}
    with subprocess.Popen(["bash", str(QUARTER), "1", str(out)], env=environment, stdout=subprocess.DEVNULL) as process:
        until = time.monotonic() + 60
        while "work/plans/1.plan.json" not in names_in(out) and time.monotonic() < until:
            time.sleep(0.05)
        process.kill()
    assert '"run": "1"' in (out / "rows.jsonl").read_text(encoding="utf-8")
    second.mkdir()
    shutil.copy(out / "proof.tar.xz", second)
    found = run("2", str(out), PYTHON=fake(tmp_path, hangs=False), WORK=str(second / "work"))
    assert found.returncode == 0, found.stderr
    assert "goes on from" in found.stdout
    rows = [json.loads(line)["run"] for line in (out / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows == ["1", "2"]
    assert {"work/plans/1.plan.json", "work/plans/2.plan.json"} <= set(names_in(out))
    found = run("2", str(out), PYTHON=fake(tmp_path, hangs=False), WORK=str(second / "work"))
    assert "goes on from" not in found.stdout, "what is there is newer than what was sent along"


def test_both_runs_and_their_start_fit_a_quarter_of_an_hour() -> None:
    """The limits are those that the first lines name."""
    script = QUARTER.read_text(encoding="utf-8")
    limits = [int(text) for text in re.findall(r"\d+", re.search(r"^limits=\((.*)\)", script, re.MULTILINE)[1])]  # type: ignore[index]
    assert (
        limits
        == [int(seconds) for seconds in re.findall(r"^#   \d  \w+ +(\d+) s ", script, re.MULTILINE)]
        == [560, 180]
    )
    assert sum(limits) + START_S <= 900


# Jobs -----------------------------------------------------------------------------------------------------------------
