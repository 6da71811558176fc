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
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from benchmark.proof.jobs import AT_ONCE, SHARES, Job, Row
from benchmark.proof.links import ROWS_FILE, read_rows
from benchmark.proof.place import Place

ROOT = Path(__file__).resolve().parent.parent.parent
ENTRY = ROOT / "benchmark" / "gpu_proof.py"
REPORT_S = 10.0
"""Kept back for the report and its figures."""
FINAL = ("ok", "not run", "no plan fits", "out of memory")
"""States of rows that another run in the same folder would only repeat."""
NO_FALLBACK = ("ok", "not run", "no plan fits", "cut")
"""States of rows after which what needs less memory is needless, impossible by the same arithmetic, or slower still."""


class Workers:
    """Starts a process for each job."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False
        self._log: IO[str] = (place.folder / "log.txt").open("a", encoding="utf-8")

    def at_once(self, part: str) -> int:
        """How many jobs of a part may be run side by side, each on a thread of its own."""
        return AT_ONCE.get(part, 1)

    def run(self, job: Job, limit_s: float) -> Row:
        """A job's row; that of a process that was ended, or ended itself, says so.

        Args:
            job: what to do.
            limit_s: the process is ended after this long.
        """
        row: Row = {"part": job.part, "case": job.case, "contender": job.contender}
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="elixir-proof-") as folder:
            result, said = Path(folder) / "row.json", Path(folder) / "log.txt"
            request = {
                "job": job.to_dict(),
                "folder": str(self._place.folder.resolve()),
                "rehearse": self._place.rehearse,
                "result": str(result),
            }
            try:
                code = self._ask(json.dumps(request), limit_s, said)
            finally:
                text = said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""
                print(f"--- {job.id}\n{text}", file=self._log, flush=True)
            if code is None:
                row |= {"status": "cut", "why": f"ended after the {limit_s:.0f} s it was given"}
            else:
                row |= json.loads(result.read_text(encoding="utf-8")) if result.exists() else _died(code)
        return {**row, "wall_s": round(time.monotonic() - began, 2)}

    def _ask(self, line: str, limit_s: float, log: Path) -> int | None:
        """Exit code of a process that was given `line`; None if it had to be ended."""
        process = self._start(log)
        self._running.add(process)
        try:
            if self._ended:  # while this one was starting
                return None
            _say(process, line)
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)
            self._running.discard(process)

    def end_all(self) -> None:
        """End what runs or starts, from whatever thread; nothing can be run any more."""
        self._ended = True
        for process in list(self._running):
            _end(process)

    def close(self) -> None:
        """Nothing is run any more."""
        self.end_all()
        self._log.close()

    def _start(self, log: Path) -> subprocess.Popen[str]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with log.open("w", encoding="utf-8") as file:
            return subprocess.Popen(
                [sys.executable, str(ENTRY), "--worker"],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"},
                start_new_session=True,  # so that it can be ended with all that it has started
            )


class ForkedWorkers(Workers):
    """Workers of a rehearsal: but for the first, forked from a process that has loaded the libraries.

    Loading them takes longer than a toy. Beside CUDA this would not do: what a library asks the driver while it is loaded
    cannot be forked.
    """

    preload: tuple[str, ...] = (
        "benchmark.proof.worker",
        "torch.distributed.fsdp",
        "transformers.models.opt.modeling_opt",
        "transformers.models.gpt2.modeling_gpt2",
    )

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(self.preload))
        self._asked = 0

    @property
    def life(self) -> Callable[[str, str], None]:
        """What a forked process does with a request and the log's path."""
        from benchmark.proof import worker

        return worker.forked

    def at_once(self, part: str) -> int:
        """Toys are over in a moment."""
        return 1

    def _ask(self, line: str, limit_s: float, log: Path) -> int | None:
        self._asked += 1
        if self._asked == 1:
            return super()._ask(line, limit_s, log)
        process = self._context.Process(target=self.life, args=(line, str(log)))
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
        workers: has `run`, `at_once`, `end_all` and `close`; for tests.
    """
    workers = workers or (ForkedWorkers if place.rehearse else Workers)(place)
    known = {_id(row): row for row in read_rows(place)}
    settled = {name for name, row in known.items() if row["status"] in NO_FALLBACK and not again}
    answered = {name for name, row in known.items() if row["status"] in FINAL and not again}
    left_out: list[str] = []

    at_work = threading.Lock()  # rows, the sets above and what is printed
    stopping = threading.Event()  # what is ended because the run is has no row

    def run(job: Job, until_s: float, reserve_s: float = 0.0) -> Row | None:
        with at_work:
            if stopping.is_set() or job.id in answered or settled.intersection(job.unless):
                return None
            if until_s - reserve_s - clock() < max(job.expected_s, 1.0):
                left_out.append(job.id)
                return None
            print(f"{job.id} ...", flush=True)
        # What is slower than expected may take from later parts, but not from the end.
        row = workers.run(job, min(job.limit_s, deadline_s - reserve_s - clock()))
        with at_work:
            if stopping.is_set():
                return None
            _append(place.folder / ROWS_FILE, row)
            if row["status"] in NO_FALLBACK:
                settled.add(job.id)
            print(f"  {row['status']} {row.get('why', '')} ({row.get('wall_s', 0):.0f} s, {job.id})", flush=True)
            report()
        return row

    def run_all(part: str, jobs: Sequence[Job], until_s: float, reserve_s: float = 0.0) -> None:
        count = workers.at_once(part)
        if count == 1:
            for job in jobs:
                run(job, until_s, reserve_s)
            return
        with ThreadPoolExecutor(count) as pool:
            try:
                rows = list(pool.map(lambda job: run(job, until_s, reserve_s), jobs))
            except BaseException:
                stopping.set()
                workers.end_all()  # or the pool would wait for them
                raise
        for job, row in zip(jobs, rows, strict=True):
            if row is not None and row["status"] == "out of memory":
                run(job, until_s, reserve_s)  # alone it may find enough

    closing_s = sum(job.expected_s for job in closing)
    try:
        names = list(parts)
        for index, name in enumerate(names):
            left_s = max(deadline_s - closing_s - clock(), 0.0)
            part_ends = clock() + left_s * SHARES[name] / sum(SHARES[later] for later in names[index:])
            run_all(name, parts[name], part_ends)
        # What the shares left over goes to whatever still fits into it.
        missing, left_out[:] = set(left_out), []
        for name in names:
            run_all(name, [job for job in parts[name] if job.id in missing], deadline_s, closing_s)
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
