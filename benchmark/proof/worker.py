"""One job in a process of its own: reads it from standard input, writes its row to a file, ends.

Starting takes seconds, for libraries; so a worker may be started before its job is known, and then waits for it without
having touched the device.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmark.common import conditions
from benchmark.proof import capacity, links, memory, speed
from benchmark.proof.jobs import Job, NotRun, Row
from benchmark.proof.place import Place
from elixir.errors import PlanError

WORK: dict[str, Callable[[dict[str, Any], Place], Row]] = {
    "memory": memory.work,
    "speed": speed.work,
    "capacity": capacity.work,
    "measure": links.measure,
    "compare": links.compare,
}

_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "pinning")
"""Parts of messages of errors that are no `OutOfMemoryError`."""


def main() -> int:
    """Wait for a request; 0 where there comes none."""
    line = sys.stdin.readline()
    if line.strip():
        answer(line)
    return 0


def forked(line: str, log: str) -> None:
    """`answer` in a process that was forked with the libraries loaded; what it prints goes to the log."""
    with open(log, "a", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    answer(line)


def answer(line: str) -> None:
    """Do the job of a request, and leave its row where the request says."""
    request = json.loads(line)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    place = Place(Path(request["folder"]), bool(request["rehearse"]))
    row = run(Job.from_dict(request["job"]), place)
    target = Path(request["result"])
    partial = target.with_suffix(".part")
    partial.write_text(json.dumps(row), encoding="utf-8")
    os.replace(partial, target)  # the parent sees a whole row or none


def run(job: Job, place: Place) -> Row:
    """The row of a job, whatever becomes of it."""
    row: Row = {"part": job.part, "case": job.case, "contender": job.contender}
    try:
        place.prepare()
        row |= {**conditions(), **place.facts()}
        row |= {"status": "ok", **WORK[job.work](job.options, place)}
    except NotRun as reason:
        row |= {"status": "not run", "why": str(reason)}
    except PlanError as error:
        row |= {"status": "no plan fits", "why": str(error).splitlines()[0]}
    except Exception as error:
        traceback.print_exc()
        row |= {"status": "out of memory" if _is_out_of_memory(error) else "failed", "why": _line(error)}
    return row


def _is_out_of_memory(error: BaseException | None) -> bool:
    """By its type or message, or those of what it came from."""
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
