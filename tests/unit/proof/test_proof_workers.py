"""The proof's processes: they end with the process that started them, and what they have written counts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

from benchmark.proof import runner
from benchmark.proof.jobs import Job
from benchmark.proof.place import Place

ROOT = Path(__file__).parents[3]


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
