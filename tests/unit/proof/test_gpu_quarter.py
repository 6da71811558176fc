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
from typing import Any

import pytest
import torch

from benchmark.proof import carried, quarter
from benchmark.proof.jobs import Job
from benchmark.proof.links import read_rows
from benchmark.proof.place import Place
from tests.common.proof_rows import assert_early_states_are_kept_unless_clipped

QUARTER = Path(__file__).parents[3] / "benchmark" / "gpu_quarter.sh"
MIB = 2**20
START_S = 120.0
"""A machine that starts slowly."""


def run(*given: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    known = {name: value for name, value in os.environ.items() if name not in ("OUT", "WORK", "HOST_MEMORY")} | known
    command = ["bash", str(QUARTER), *given]
    return subprocess.run(command, capture_output=True, text=True, env=known | environment, timeout=580, check=False)


@pytest.mark.parametrize("given", [[], ["3", "folder"], ["--emulated"], ["--toy", "1"], ["links", "folder"], ["1"]])
def test_what_makes_no_sense_is_refused(given: list[str]) -> None:
    found = run(*given)
    assert found.returncode == 2
    assert "gpu_quarter.sh" in found.stderr or "folder for the results" in found.stderr


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


@pytest.mark.parametrize("card", quarter.CARDS)
def test_what_decides_most_comes_first_and_pairs_do_the_same_work(card: str) -> None:
    first, second = (quarter.jobs_of_quarter(number, card) for number in (1, 2))
    begun = [job.contender for job in first["decisive"] if not job.unless]
    assert [name.partition(",")[0] for name in begun] == [
        "elixir", "zero-3 offload chunked-loss tuned", "zero-3 offload chunked-loss tuned ratio-0.65",
        "fsdp2 offload keep chunked-loss", "elixir", "elixir", "elixir", "plain", "elixir", "plain",
    ]  # fmt: skip
    assert sum(job.expected_s for job in first["decisive"] if not job.unless) + 25 + 20 <= 560 + 45
    assert sum(job.expected_s for jobs in second.values() for job in jobs) <= 180 - 25 - 10
    assert ("links" in {job.part for job in second["last"]}) is (card == "h100")
    cases: dict[str, set[str]] = {}
    for job in [job for part in (first, second) for jobs in part.values() for job in jobs]:
        assert Job.from_dict(json.loads(json.dumps(job.to_dict()))) == job
        assert job.expected_s < job.limit_s
        if job.work == "speed":
            same = {
                key: job.options.get(key) for key in ("model", "batch", "seq", "precision", "max_norm", "budget_bytes")
            }
            assert job.options["case"] == job.case
            cases.setdefault(job.case, set()).add(json.dumps(same))
    assert {case: len(found) for case, found in cases.items() if len(found) > 1} == {}
    with pytest.raises(ValueError, match="runs 1 and 2"):
        quarter.jobs_of_quarter(3, card)


def test_plans_made_before_are_found_until_what_they_depend_on_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 64, "vocabulary": 512, "positions": 64}
    options: dict[str, Any] = {
        "model": "opt-125m", "changes": toy, "batch": 2, "seq": 16, "micros": [2], "fused_kernels": True, "case": "a",
        "precision": "fp32", "checkpoint": "none", "planned_device_bytes": 10**8, "kind": "elixir", "measure_s": 1.0,
    }  # fmt: skip
    jobs = [Job(part="offload", case="a", contender="elixir", work="speed", options=options)]
    monkeypatch.setattr(carried, "CARDS", {"h200": carried.CARDS["h200"]})
    assert carried.prepare(tmp_path, jobs, 10**9) == 1
    there = carried._Ahead(folder=tmp_path, host_bytes=10**9, carried=tmp_path, profile=carried.CARDS["h200"]())
    choice = carried.choice_for({**options, "case": "b"}, there)
    assert choice is not None
    assert (choice.made, choice.micro, choice.kernels) == ("before", 2, True)
    assert choice.plan.predicted.device_peak_bytes <= 10**8
    assert carried.choice_for({**options, "batch": 4}, there) is None
    assert "planned in" in capsys.readouterr().out
    carried.prepare(tmp_path, jobs, 10**9)
    assert "planned in" not in capsys.readouterr().out, "it is up to date"
    monkeypatch.setattr(carried, "_planners", lambda: "another search")
    assert carried.choice_for(options, there) is None
    carried.prepare(tmp_path, jobs, 10**9)
    assert len([*(tmp_path / "plans").glob("*.plan.gz")]) == 1, "those that are outdated are gone"


@pytest.mark.slow  # compiles a device, and runs some thirty processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a device, on a machine that has none")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("card", quarter.CARDS)
def test_runs_on_the_emulated_device_that_are_killed_lose_no_finished_case(card: str, tmp_path: Path) -> None:
    """Both are killed in their middle, on a machine that is then emptied; the next gets the archive, and the last ends.

    Toys may end faster than archives are made: those that have ended at some moment have to come back while others run.
    """
    out, home = tmp_path / "out", tmp_path / "home"
    ahead = tmp_path / "ahead"
    assert run("--emulated", "prepare", WORK=str(ahead / "work")).returncode == 0
    rows: list[dict[str, Any]] = []
    for number, kills_after in ((1, 6), (2, 1), (2, None)):
        wanted, finished = len(rows) + (kills_after or 1), 0
        machine = tmp_path / f"machine{number}{'' if kills_after else ' again'}"
        shutil.copytree(ahead / "quarter_carry", machine / "quarter_carry")
        if rows:
            shutil.copy(out / "proof.tar.xz", machine)
        known = {"PYTHON": sys.executable, "WORK": str(machine / "work"), "OMP_NUM_THREADS": "1", "CARD": card}
        known["SECONDS_GIVEN"] = "1800"  # importing takes minutes on a busy machine
        command = ["bash", str(QUARTER), "--emulated", str(number), str(out)]
        with (
            (tmp_path / f"said{number}").open("w") as said,
            subprocess.Popen(command, env=os.environ | known, stdout=said, stderr=said) as process,
        ):
            while process.poll() is None and not (kills_after and len(rows) >= finished >= wanted):
                time.sleep(1.0)
                rows = unpacked(out, home)
                if finished < wanted:
                    finished = len(read_rows(Place(machine / "work")))
            if kills_after:
                assert process.poll() is None, (tmp_path / f"said{number}").read_text(encoding="utf-8")
                process.kill()
        time.sleep(10.0)  # what it has started has ended as well
        rows = unpacked(out, home)
        assert not kills_after or len(rows) >= finished
    assert rows == read_rows(Place(machine / "work"))
    assert_rows_are_usable(rows)
    assert ("links" in {row["part"] for row in rows}) is (card == "h100")


def assert_rows_are_usable(rows: list[dict[str, Any]]) -> None:
    assert {row["status"] for row in rows} <= {"ok", "not run"}, [row for row in rows if row["status"] == "failed"]
    absent = {row["why"] for row in rows if row["status"] == "not run"}
    assert all("not installed" in why or why.startswith("no pool") for why in absent), absent
    ours = [row for row in rows if row.get("kind") == "elixir"]
    assert {row["planned"] for row in ours} == {"before"}
    assert all({"fetch", "offload"} <= set(row["stream_waited_s_per_step"]) for row in ours)
    assert "tests" in {row["part"] for row in rows}
    if any(row["case"].endswith("clipped in every step") for row in ours):
        assert_early_states_are_kept_unless_clipped(rows)


def unpacked(out: Path, home: Path) -> list[dict[str, Any]]:
    """Rows in the archive of a run, which is unpacked at home."""
    if names_in(out):
        with tarfile.open(out / "proof.tar.xz") as archive:
            archive.extractall(home, filter="tar")
    return read_rows(Place(home / "work"))
