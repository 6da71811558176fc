"""One process per job, within the time there is; after each a row that stays."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from benchmark.proof.jobs import SHARES, Job, Row
from benchmark.proof.links import ROWS_FILE, read_rows
from benchmark.proof.place import Place

ROOT = Path(__file__).resolve().parent.parent.parent
ENTRY = ROOT / "benchmark" / "gpu_proof.py"
REPORT_S = 10.0
"""Kept back for the report and its figures."""
_PRELOAD = [
    "benchmark.proof.worker",
    "torch.distributed.fsdp",
    "transformers.models.opt.modeling_opt",
    "transformers.models.gpt2.modeling_gpt2",
]
FINAL = ("ok", "not run", "no plan fits", "out of memory")
"""States of rows that another run in the same folder would only repeat."""


class Workers:
    """Starts a process for each job; one ahead of need where that disturbs nothing that is timed."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._spare: subprocess.Popen[str] | None = None
        self._log: IO[str] = (place.folder / "log.txt").open("a", encoding="utf-8")

    def run(self, job: Job, limit_s: float, *, ahead: bool) -> Row:
        """A job's row; that of a process that was ended, or ended itself, says so.

        Args:
            job: what to do.
            limit_s: the process is ended after this long.
            ahead: start the next process meanwhile, which takes a core for some seconds.
        """
        row: Row = {"part": job.part, "case": job.case, "contender": job.contender}
        print(f"--- {job.id}", file=self._log, flush=True)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="elixir-proof-") as folder:
            result = Path(folder) / "row.json"
            request = {
                "job": job.to_dict(),
                "folder": str(self._place.folder.resolve()),
                "rehearse": self._place.rehearse,
                "result": str(result),
            }
            code = self._ask(json.dumps(request), limit_s, ahead)
            if code is None:
                row |= {"status": "cut", "why": f"ended after the {limit_s:.0f} s it was given"}
            else:
                row |= json.loads(result.read_text(encoding="utf-8")) if result.exists() else _died(code)
        return {**row, "wall_s": round(time.monotonic() - began, 2)}

    def _ask(self, line: str, limit_s: float, ahead: bool) -> int | None:
        """Exit code of a process that was given `line`; None if it had to be ended."""
        process, self._spare = self._spare or self._start(), None
        if ahead:
            self._spare = self._start()
        try:
            _say(process, line)
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)

    def close(self) -> None:
        """End what waits."""
        if self._spare is not None:
            _end(self._spare)
        self._log.close()

    def _start(self) -> subprocess.Popen[str]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.Popen(
            [sys.executable, str(ENTRY), "--worker"],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"},
            start_new_session=True,  # so that it can be ended with all that it has started
        )


class ForkedWorkers(Workers):
    """Workers of a rehearsal: but for the first, forked from a process that has loaded the libraries.

    Loading them takes longer than a toy. Beside CUDA this would not do: what a library asks the driver while it is loaded
    cannot be forked.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._asked = 0

    def _ask(self, line: str, limit_s: float, ahead: bool) -> int | None:
        from benchmark.proof import worker

        self._asked += 1
        if self._asked == 1:
            return super()._ask(line, limit_s, False)
        process = self._context.Process(target=worker.forked, args=(line, self._log.name))
        process.start()
        try:
            process.join(limit_s)
            return process.exitcode
        finally:
            process.kill()
            process.join()
            process.close()


def run_jobs(
    parts: dict[str, Sequence[Job]],
    closing: Sequence[Job],
    place: Place,
    deadline_s: float,
    *,
    again: bool,
    report: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
    workers: Any = None,
) -> list[str]:
    """Run what there is time for; ids of the jobs for which there was none.

    Args:
        parts: jobs by part, in the order in which parts run.
        closing: run at the end, whenever there is a second left.
        place: where.
        deadline_s: by `clock`; nothing is begun that is not expected to end before it.
        again: also jobs that have an answer in the folder already.
        report: called after each row.
        clock: seconds; for tests.
        workers: has `run` and `close`; for tests.
    """
    workers = workers or (ForkedWorkers if place.rehearse else Workers)(place)
    known = {_id(row): row for row in read_rows(place)}
    succeeded = {name for name, row in known.items() if row["status"] == "ok" and not again}
    answered = {name for name, row in known.items() if row["status"] in FINAL and not again}
    left_out: list[str] = []

    def run(job: Job, until_s: float, reserve_s: float = 0.0) -> None:
        if job.id in answered or succeeded.intersection(job.unless):
            return
        left_s = until_s - reserve_s - clock()
        if left_s < max(job.expected_s, 1.0):
            left_out.append(job.id)
            return
        print(f"{job.id} ...", flush=True)
        # What is slower than expected may take from later parts, but not from the end.
        limit_s = min(job.limit_s, deadline_s - reserve_s - clock())
        row = workers.run(job, limit_s, ahead=job.part == "memory")
        _append(place.folder / ROWS_FILE, row)
        if row["status"] == "ok":
            succeeded.add(job.id)
        print(f"  {row['status']} {row.get('why', '')} ({row.get('wall_s', 0):.0f} s)", flush=True)
        report()

    closing_s = sum(job.expected_s for job in closing)
    try:
        names = list(parts)
        for index, name in enumerate(names):
            left_s = max(deadline_s - closing_s - clock(), 0.0)
            part_ends = clock() + left_s * SHARES[name] / sum(SHARES[later] for later in names[index:])
            for job in parts[name]:
                run(job, part_ends)
        # What the shares left over goes to whatever still fits into it.
        for job in [job for name in names for job in parts[name] if job.id in left_out]:
            left_out.remove(job.id)
            run(job, deadline_s, closing_s)
        answered.difference_update(job.id for job in closing)  # there may be more to compare than the last time
        for job in closing:
            run(job, deadline_s)
    finally:
        workers.close()
    return left_out


def _id(row: Row) -> str:
    return f"{row['part']}/{row['case']}/{row['contender']}"


def _append(path: Path, row: Row) -> None:
    """At once and to the disk: whatever ends this run, the row stays."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _say(process: subprocess.Popen[str], line: str) -> None:
    if process.stdin is None:
        raise RuntimeError("a worker has no standard input")
    with contextlib.suppress(BrokenPipeError):  # it ended on its own, which its exit code tells
        process.stdin.write(line + "\n")
        process.stdin.close()


def _died(code: int) -> Row:
    if code < 0:
        name = signal.Signals(-code).name
        hint = ": the host's memory ran out, most likely" if -code == signal.SIGKILL else ""
        return {"status": "failed", "why": f"the process was ended by {name}{hint}; see log.txt"}
    return {"status": "failed", "why": f"the process ended with code {code} and without a row; see log.txt"}


def _end(process: subprocess.Popen[str]) -> None:
    """The process and whatever it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    process.wait()
