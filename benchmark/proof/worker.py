"""One job in a separate process: reads it from standard input, writes its row to a file, ends.

Starting takes seconds, for libraries; so a worker is started before its job is known, and then waits for it without
having touched the device. It ends with its parent (`benchmark.proof.lifetime`), whatever ends that.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmark.common import conditions
from benchmark.proof import capacity, links, memory, probes, speed
from benchmark.proof.jobs import PRELOAD, Job, NotRun, Row
from benchmark.proof.place import Place
from elixir.errors import PlanError

WORK: dict[str, Callable[[dict[str, Any], Place], Row]] = {
    "memory": memory.work,
    "speed": speed.work,
    "capacity": capacity.work,
    "measure": links.measure,
    "compare": links.compare,
    "cores and link": probes.cores_and_link,
    "adam bits": probes.adam_bits,
    "storages": probes.storages,
    "tests": probes.tests,
}

LAST_WORDS_S = 5.0
"""Seconds before a job's end at which its threads' stacks go to the log, which is all that is known of one that hangs."""

_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "pinning")
"""Parts of messages of errors that are no `OutOfMemoryError`."""


def main(ready: Path) -> int:
    """Says that the libraries are loaded, waits for a request, do it; 0 where there comes none."""
    for name in PRELOAD:
        importlib.import_module(name)
    ready.touch()
    line = sys.stdin.readline()
    if line.strip():
        answer(line)
        leave()
    return 0


def forked(line: str, log: str) -> None:
    """`answer` in a process that was forked with the libraries loaded; what it prints goes to the log."""
    import multiprocessing
    from multiprocessing.connection import wait

    from benchmark.proof.lifetime import end_with_parent

    # The server that forked this process ends when the one that asked it to does, and that one's end can be read here.
    asker = multiprocessing.parent_process()
    end_with_parent(lambda: asker is None or not wait([asker.sentinel], 0))
    with open(log, "a", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    answer(line)
    leave()


def leave() -> NoReturn:
    """End at once: the row is written, and the kernel gives memory back faster than destructors do, pinned memory
    too."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def answer(line: str) -> None:
    """Do the job of a request, and leave its row where the request says."""
    request = json.loads(line)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    left_s = max(float(request["ends_s"]) - time.monotonic(), 0.1)  # loading libraries may have taken a part of it
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(left_s - LAST_WORDS_S, left_s / 2))
    row = run(Job.from_dict(request["job"]), Place.from_dict(request["place"]))
    target = Path(request["result"])
    partial = target.with_suffix(".part")
    partial.write_text(json.dumps(row), encoding="utf-8")
    os.replace(partial, target)  # the parent sees a whole row or none
    faulthandler.cancel_dump_traceback_later()


def run(job: Job, place: Place) -> Row:
    """The row of a job, whatever becomes of it."""
    row: Row = {"part": job.part, "case": job.case, "contender": job.contender}
    try:
        # Peaks are predicted for the allocator as it comes; who has to fit into a budget takes the one that wastes
        # least.
        place.prepare(expandable_segments=job.part != "memory" and job.options.get("expandable", True))
        row |= {**conditions(), **place.facts()}
        row |= {"status": "ok", **WORK[job.work](job.options, place)}
        row |= place.grown()
    except NotRun as reason:
        row |= {"status": "not run", "why": str(reason)}
    except PlanError as error:
        row |= {"status": "no plan fits", "why": str(error).splitlines()[0]}
    except Exception as error:
        traceback.print_exc()
        row |= {"status": "out of memory" if _is_out_of_memory(error) else "failed", "why": _line(error)}
    return row


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error's type or message, or those of its cause, say out of memory."""
    seen = 0
    while error is not None and seen < 10:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if any(text in str(error) for text in _OUT_OF_MEMORY):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"
