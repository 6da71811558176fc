"""One process per job, within the time there is; after each a row that stays."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmark.proof.cases import impossible
from benchmark.proof.jobs import AT_ONCE, PRELOAD, SHARES, Job, Row
from benchmark.proof.links import ROWS_FILE, read_rows
from benchmark.proof.place import SETTINGS, Place

ROOT = Path(__file__).resolve().parent.parent.parent
ENTRY = ROOT / "benchmark" / "gpu_proof.py"
REPORT_S = 10.0
"""Kept back for the report and its figures."""
TEARDOWN_S = 60.0
"""How long a process may take to end after its row is written: the next one needs the memory that it gives back."""
FINAL = ("ok", "not run", "no plan fits", "out of memory", "out of host memory")
"""States of rows that another run in the same folder would only repeat."""
NO_FALLBACK = ("ok", "not run", "no plan fits", "cut")
"""States of rows after which what needs less memory is needless, impossible by the same arithmetic, or slower still."""
BY_HOST_MEMORY = ("not run", "no plan fits", "out of host memory")
"""States that may be others with other host memory to plan with."""


class _Waiting(NamedTuple):
    """A worker that has no job yet."""

    process: subprocess.Popen[str]
    log: Path
    ready: Path
    """Exists once its libraries are loaded."""


class Workers:
    """Starts a process for each job, and the next one's while a job runs: loading libraries takes seconds.

    All are started on one thread that lives as long as this object, since a process ends with the *thread* that started
    it.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._running: set[subprocess.Popen[str]] = set()
        self._waiting: deque[_Waiting] = deque()
        self._ended = False
        self._started = 0
        self._lock = threading.Lock()  # over what is running, waiting, started and ended
        self._files = tempfile.TemporaryDirectory(prefix="elixir-proof-")
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="starts workers")
        self._log: IO[str] = (place.folder / "log.txt").open("a", encoding="utf-8")

    def at_once(self, part: str) -> int:
        """How many jobs of a part may be run side by side, each on a separate thread."""
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
            request = {"job": job.to_dict(), "result": str(result), "ends_s": began + limit_s}
            try:
                code = self._ask(request, limit_s, said)
            finally:
                text = said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""
                print(f"--- {job.id}\n{text}", file=self._log, flush=True)
            # Whatever became of the process afterwards, such as being slow to give its memory back: a row is a row.
            if result.exists():
                row |= json.loads(result.read_text(encoding="utf-8"))
            elif code is None:
                row |= {"status": "cut", "why": f"ended after the {limit_s:.0f} s it was given"}
            else:
                row |= _died(code)
        return {**row, "wall_s": round(time.monotonic() - began, 2)}

    def _ask(self, request: dict[str, Any], limit_s: float, log: Path) -> int | None:
        """Exit code of a process that was given a request; None if it had to be ended."""
        own = self._take()
        try:
            following = self._start_ahead(self.at_once(request["job"]["part"]))
            place = dataclasses.replace(self._place, next_ready=following)
            with self._lock:
                if self._ended:  # while this one was starting
                    return None
            _say(own.process, json.dumps({**request, "place": place.to_dict()}))
            return _wait(own.process, Path(request["result"]), limit_s)
        finally:
            _end(own.process)
            shutil.move(own.log, log)
            with self._lock:
                self._running.discard(own.process)

    def _take(self) -> _Waiting:
        """A worker for a job: one that waits, or a new one."""
        with self._lock:
            while self._waiting:
                found = self._waiting.popleft()
                if found.process.poll() is None:
                    return found
                self._running.discard(found.process)
                _end(found.process)
        return self._starter.submit(self._start).result()

    def _start_ahead(self, count: int) -> Path | None:
        """Starts workers that wait for jobs; gives the file that says when the last of them is ready."""
        with self._lock:
            while len(self._waiting) > count:  # those of a part that ran more at once: each holds host memory
                _end(self._waiting.pop().process)
            missing = 0 if self._ended else count - len(self._waiting)
        for _ in range(missing):
            started = self._starter.submit(self._start).result()
            with self._lock:
                self._waiting.append(started)
        with self._lock:
            return self._waiting[-1].ready if self._waiting else None

    def end_all(self) -> None:
        """Ends what runs, waits or starts, from whatever thread; nothing can be run any more."""
        with self._lock:
            self._ended = True
            running = list(self._running)
        for process in running:
            _end(process)

    def close(self) -> None:
        """Nothing is run any more."""
        self.end_all()
        self._starter.shutdown()
        self.end_all()  # one that was being started
        self._files.cleanup()
        self._log.close()

    def _start(self) -> _Waiting:
        """Starts a worker; runs on the starter's thread."""
        with self._lock:
            self._started += 1
            log = Path(self._files.name) / f"{self._started}.txt"
        ready = log.with_suffix(".ready")
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                [sys.executable, str(ENTRY), "--worker", str(os.getpid()), str(ready)],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                text=True,
                env={**SETTINGS, **os.environ, **own},
                start_new_session=True,  # so that it can be ended with all that it has started
            )
        with self._lock:
            self._running.add(process)
        return _Waiting(process, log, ready)


class ForkedWorkers(Workers):
    """Workers of a rehearsal: but for the first, forked from a process that has loaded the libraries.

    Loading them takes longer than a toy. With CUDA this would not do: what a library asks the driver while it is loaded
    cannot be forked.
    """

    preload: tuple[str, ...] = ("benchmark.proof.worker", *PRELOAD)

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(self.preload))
        self._asked = 0

    @property
    def life(self) -> Callable[[str, str], None]:
        """The work of a forked process, given a request and the log's path."""
        from benchmark.proof import worker

        return worker.forked

    def at_once(self, part: str) -> int:
        """Toys are over in a moment."""
        return 1

    def _start_ahead(self, count: int) -> Path | None:
        """Forking takes no time."""
        return None

    def _ask(self, request: dict[str, Any], limit_s: float, log: Path) -> int | None:
        self._asked += 1
        if self._asked == 1:
            return super()._ask(request, limit_s, log)
        line = json.dumps({**request, "place": self._place.to_dict()})
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
    in_order: bool = False,
    clock: Callable[[], float] = time.monotonic,
    workers: Any = None,
) -> list[str]:
    """Runs what there is time for; ids of the jobs for which there was none.

    Args:
        parts: jobs by part, in the order in which parts run.
        closing: run at the end, whenever there is a second left.
        place: where.
        deadline_s: by `clock`; nothing is begun that is not expected to end before it.
        again: also jobs that have an answer in the folder already.
        report: called after each row.
        in_order: a part takes all the time that those before it have left, rather than its share.
        clock: seconds; for tests.
        workers: has `run`, `at_once`, `end_all` and `close`; for tests.
    """
    workers = workers or (ForkedWorkers if place.rehearse else Workers)(place)
    known = {} if again else {_id(row): row for row in read_rows(place) if not _outdated(row, place)}
    settled = {name for name, row in known.items() if _ends_fallbacks(row)}
    answered = {name for name, row in known.items() if row["status"] in FINAL}
    left_out: list[str] = []

    at_work = threading.Lock()  # rows, the sets above and what is printed
    stopping = threading.Event()  # what is ended because the run is has no row

    def run(job: Job, until_s: float, reserve_s: float = 0.0, in_share: bool = True) -> Row | None:
        with at_work:
            if stopping.is_set() or job.id in answered or settled.intersection(job.unless):
                return None
            why = impossible(job, place)
            if why is None and until_s - reserve_s - clock() < max(job.expected_s, 1.0):
                left_out.append(job.id)
                return None
            print(f"{job.id} ...", flush=True)
        if why is None:
            row = workers.run(job, min(job.limit_s, deadline_s - reserve_s - clock()))
        else:  # no process is needed to say so
            names = {"part": job.part, "case": job.case, "contender": job.contender, "rehearsal": place.rehearse}
            row = {**names, "status": "not run", "why": why, "host_given_bytes": place.host_bytes}
        row["in_share"] = in_share  # begun in the time of its part, not in what others have left over
        with at_work:
            if stopping.is_set():
                return None
            append_row(place.folder / ROWS_FILE, row)
            if _ends_fallbacks(row):
                settled.add(job.id)
            print(f"  {row['status']} {row.get('why', '')} ({row.get('wall_s', 0):.0f} s, {job.id})", flush=True)
            report()
        return row

    def run_all(part: str, jobs: Sequence[Job], *times: float, in_share: bool) -> None:
        """`times`: `until_s` and `reserve_s`."""
        count = workers.at_once(part)
        if count == 1:
            for job in jobs:
                run(job, *times, in_share=in_share)
            return
        with ThreadPoolExecutor(count) as pool:
            try:
                rows = list(pool.map(lambda job: run(job, *times, in_share=in_share), jobs))
            except BaseException:
                stopping.set()
                workers.end_all()  # or the pool would wait for them
                raise
        for job, row in zip(jobs, rows, strict=True):
            if row is not None and row["status"] == "out of memory":
                run(job, *times, in_share=in_share)  # alone it may find enough

    closing_s = sum(job.expected_s for job in closing)
    try:
        names = list(parts)
        for index, name in enumerate(names):
            left_s = max(deadline_s - closing_s - clock(), 0.0)
            share = 1.0 if in_order else SHARES[name] / sum(SHARES[later] for later in names[index:])
            # What takes longer than expected may take from later parts, but not from what closes the run.
            run_all(name, parts[name], clock() + left_s * share + closing_s, closing_s, in_share=True)
        # What the shares left over goes to whatever still fits into it.
        missing, left_out[:] = set(left_out), []
        for name in names:
            run_all(name, [job for job in parts[name] if job.id in missing], deadline_s, closing_s, in_share=False)
        _say_what_had_no_time(parts, left_out, place, deadline_s - closing_s - clock())
        answered.difference_update(job.id for job in closing)  # there may be more to compare than the last time
        for job in closing:
            run(job, deadline_s)
    finally:
        workers.close()
    return left_out


def _say_what_had_no_time(
    parts: dict[str, Sequence[Job]], left_out: Sequence[str], place: Place, left_s: float
) -> None:
    """A row for each part that has none, since nothing of it was begun; another run begins it all the same."""
    there = {row["part"] for row in read_rows(place)}
    missing = {job.part: job for jobs in parts.values() for job in reversed(jobs) if job.id in left_out}
    for part, job in missing.items():
        if part not in there:
            why = f"not begun: {max(left_s, 0.0):.0f} s were left, and it takes about {job.expected_s:.0f} s"
            names = {"part": part, "case": job.case, "contender": job.contender, "rehearsal": place.rehearse}
            append_row(place.folder / ROWS_FILE, {**names, "status": "not run", "why": why, "no_time": True})


def _ends_fallbacks(row: Row) -> bool:
    """Whether what would need less device memory is not tried after this row."""
    # Who offloads needs as much host memory with a smaller micro-batch; in `capacity` it is what the next one takes
    # less of.
    return row["status"] in NO_FALLBACK or (row["status"] == "out of host memory" and row["part"] != "capacity")


def _outdated(row: Row, place: Place) -> bool:
    """Whether a row says what another run may find otherwise: with more time, or with less or more host memory than there
    is now to plan with."""
    return row.get("no_time", False) or (
        row["status"] in BY_HOST_MEMORY and row.get("host_given_bytes") != place.host_bytes
    )


def _id(row: Row) -> str:
    return f"{row['part']}/{row['case']}/{row['contender']}"


def append_row(path: Path, row: Row) -> None:
    """Adds a row at once and to the disk: whatever ends this run, the row stays."""
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


def _wait(process: subprocess.Popen[str], result: Path, limit_s: float) -> int | None:
    """The exit code; None after `limit_s`, and a while longer for one that has only its memory left to give back."""
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        if not result.exists():
            return None
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=TEARDOWN_S)
    return None


def _died(code: int) -> Row:
    if code == -signal.SIGKILL:
        why = "the process was ended by SIGKILL: the host's memory ran out, most likely; see log.txt"
        return {"status": "out of host memory", "why": why}
    if code < 0:
        return {"status": "failed", "why": f"the process was ended by {signal.Signals(-code).name}; see log.txt"}
    return {"status": "failed", "why": f"the process ended with code {code} and without a row; see log.txt"}


def _end(process: subprocess.Popen[str]) -> None:
    """The process and whatever it has started. One that the driver holds is not waited for without end."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=TEARDOWN_S)
