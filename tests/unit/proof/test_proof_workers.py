"""The proof's processes: they end with the process that started them, and what they have written counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path

import pytest

from benchmark.proof import runner
from benchmark.proof.jobs import Job
from benchmark.proof.links import read_rows
from benchmark.proof.place import SETTINGS, Place

ROOT = Path(__file__).parents[3]
PROOF = ROOT / "benchmark" / "gpu_proof.py"
LIFETIME = ROOT / "benchmark" / "proof" / "lifetime.py"
GONE_S = 30.0
"""The kernel ends orphans at once; a machine with other work takes its time to say so."""


def job(case: str, part: str = "memory") -> Job:
    return Job(part=part, case=case, contender="x", work="memory", expected_s=5.0)


def alive(mark: str) -> dict[int, str]:
    """Processes with `mark` in their environment, whichever their parent is by now, and their commands."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                if mark.encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:  # it has ended
                continue
    return found


def wait_until(true: object, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if true():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")


@linux_only
def test_a_process_ends_with_the_parent_that_it_was_told() -> None:
    mark = uuid.uuid4().hex
    child = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom benchmark.proof.lifetime import end_with\n"
    child += "import time; end_with(int(sys.argv[1])); print('tied', flush=True); time.sleep(60)"
    parent = "import os, subprocess, sys, time\n"
    parent += f"subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())]); time.sleep(60)"
    environment = os.environ | {"ELIXIR_TEST_MARK": mark}
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "tied\n"
        process.kill()
        process.wait()
        assert wait_until(lambda: not alive(mark), GONE_S), alive(mark)


@linux_only
def test_a_process_whose_parent_has_ended_already_does_not_begin() -> None:
    """The kernel says nothing of a parent that went before it was asked."""
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    command = [sys.executable, str(LIFETIME), ended.stdout.decode().strip(), "60", "echo", "begun"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert found.stdout == ""
    assert found.returncode == 128 + signal.SIGTERM


@linux_only
def test_a_command_ends_after_its_time() -> None:
    command = [sys.executable, str(LIFETIME), str(os.getpid()), "1", "sleep", "60"]
    began = time.monotonic()
    assert subprocess.run(command, check=False, timeout=30).returncode == -signal.SIGALRM
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("given", [[], ["1", "2"], ["0", "1", "true"], ["1", "soon", "true"]])
def test_a_lifetime_that_makes_no_sense_is_refused(given: list[str]) -> None:
    found = subprocess.run([sys.executable, str(LIFETIME), *given], capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "usage" in found.stderr


# Workers: a script that speaks as a worker does, and loads nothing.

SPEAKS = """
import json, os, sys, time
sys.path.insert(0, {root!r})
from benchmark.proof.lifetime import end_with
end_with(int(sys.argv[2]))
open(sys.argv[3], "w").close()
line = sys.stdin.readline()
if line.strip():
    request = json.loads(line)
    def write(**row):
        with open(request["result"] + ".part", "w") as file:
            json.dump({{"status": "ok", "pid": os.getpid(), **row}}, file)
        os.replace(request["result"] + ".part", request["result"])
{body}
"""


def speaking(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    script = folder / "speaks.py"
    script.write_text(SPEAKS.format(root=str(ROOT), body=textwrap.indent(body, "    ")), encoding="utf-8")
    monkeypatch.setattr(runner, "ENTRY", script)


@pytest.mark.parametrize("end", ["time.sleep(60)", "os.kill(os.getpid(), 9)", "sys.exit(3)"])
def test_a_row_counts_once_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Giving a hundred gigabytes of pinned memory back takes long, and says nothing about what was measured."""
    speaking(tmp_path, monkeypatch, f"write()\n{end}")
    monkeypatch.setattr(runner, "TEARDOWN_S", 0.5)
    workers = runner.Workers(Place(tmp_path))
    row = workers.run(job("a"), 6.0)
    workers.close()
    assert row["status"] == "ok"


def test_the_next_worker_is_started_while_a_job_runs_and_outlives_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends a process with the *thread* that started it, and jobs of a part are run by threads of a pool."""
    body = "until = time.time() + 20\n"
    body += (
        "while time.time() < until and not os.path.exists(request['place']['next_ready'] or '/'): time.sleep(0.01)\n"
    )
    body += "write(waited=time.time() > until, next=request['place']['next_ready'])"
    speaking(tmp_path, monkeypatch, body)
    workers = runner.Workers(Place(tmp_path))
    rows = []
    for case in "ab":
        thread = threading.Thread(target=lambda case=case: rows.append(workers.run(job(case, "offload"), 30.0)))
        thread.start()
        thread.join()
        time.sleep(0.3)
    workers.close()
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert not any(row["waited"] for row in rows)
    started = [int(Path(row["next"]).stem) for row in rows]
    assert started == [2, 3], "one for each job, and one for a job that did not come"


def test_workers_have_settings_that_times_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiling in the middle of timed steps; what the user says goes first."""
    monkeypatch.setenv("ELIXIR_COMPILE", "wait")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    speaking(tmp_path, monkeypatch, f"write(found={{name: os.environ[name] for name in {list(SETTINGS)!r}}})")
    workers = runner.Workers(Place(tmp_path))
    row = workers.run(job("a"), 30.0)
    workers.close()
    assert row["found"] == {**SETTINGS, "ELIXIR_COMPILE": "wait"}


@linux_only
@pytest.mark.slow  # loads all libraries
def test_a_job_that_hangs_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(
        f"import sys, time\nsys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\n"
        "from benchmark.proof import worker\n"
        "def hangs_here(options, place): time.sleep(60)\n"
        "worker.WORK['memory'] = hangs_here\nworker.LAST_WORDS_S = 6.0\nworker.PRELOAD = ()\n"
        "worker.main(Path(sys.argv[3]))\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(runner, "ENTRY", script)
    workers = runner.Workers(Place(tmp_path, rehearse=True))
    ready = workers._start_ahead(1)
    assert ready is not None
    assert wait_until(ready.exists, 300)
    row = workers.run(job("a", "offload"), 10.0)
    workers.close()
    assert row["status"] == "cut"
    assert "hangs_here" in (tmp_path / "log.txt").read_text(encoding="utf-8")


@linux_only
@pytest.mark.slow
def test_a_run_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    """The real workers of a rehearsal, the first in a new process and those after it forked, in the middle of jobs."""
    mark = uuid.uuid4().hex
    environment = os.environ | {"ELIXIR_TEST_MARK": mark, "OMP_NUM_THREADS": "1"}
    work = tmp_path / "work"
    command = [sys.executable, str(PROOF), "--rehearse", "--out", str(work), "--only", "memory,resident"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        # The second has a row, and that one was forked: the server of the third is done with loading.
        assert wait_until(lambda: len(read_rows(Place(work))) >= 2, 300)
        assert wait_until(lambda: len(alive(mark)) >= 3, 300), alive(mark)  # the proof, two servers of forked processes
        process.kill()
        process.wait()
        assert wait_until(lambda: not alive(mark), GONE_S), alive(mark)
