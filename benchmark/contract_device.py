"""Whole runs on a pretended CUDA device that has the memory that was predicted and little more.

    python benchmark/contract_device.py [--runs 60] [--first 0] [--seconds 1200] [--no-record]

The runs of `benchmark/contract.py` without a framework, on one rank, each in a process with a separate device
(`tests.cuda_emulator`, needs g++). When the model is wrapped, the device gets 3 % less than the plan's peak, which
wrapping must refuse; then 2 % more, with which the run must end well. Compared are the plan's peak and the most that
the allocator had given. The pretended device has no workspaces of kernels, so the prediction is made without them, as in
``tests/gpu/test_pretended_peaks.py``. Appends a row for each run to ``results/contract_device.csv``; fails where a bar
is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.common import Row, append_rows, conditions
from benchmark.contract import ABOVE, BELOW, MEAN, drawn
from benchmark.contract_lives import PRETENDED, Case, imported, lived


def case_of(number: int) -> Case:
    """The case of a number, on one rank, without a framework."""
    found = drawn(number)
    return replace(found, framework="plain", ranks=1, layers=max(found.layers // found.ranks, 2))


def life(case: Case, folder: Path) -> Row:
    """Lives a run in this process; says its figures."""
    import torch

    from elixir.errors import InputError
    from elixir.tracer import trace
    from elixir.wrapper.account.plan_promise import PlanPromise
    from tests.cuda_emulator import install
    from tests.cuda_emulator.target import Seen

    device, original = install(), PlanPromise.refuse_exceeded
    trace.target_for = Seen  # type: ignore[attr-defined]
    found: dict[str, Any] = {"predicted_bytes": 0, "with_less": ""}

    def refuse_exceeded(promise: Any, plan: Any, *coming: Any) -> None:
        found["predicted_bytes"] = max(found["predicted_bytes"], plan.predicted.device_peak_bytes)
        if not found["with_less"]:
            device.set_capacity(int((1 - BELOW) * found["predicted_bytes"]))
            try:
                original(promise, plan, *coming)
                found["with_less"] = "accepted"
            except InputError:
                found["with_less"] = "refused"
        device.set_capacity(int((1 + ABOVE) * found["predicted_bytes"]))
        original(promise, plan, *coming)

    PlanPromise.refuse_exceeded = refuse_exceeded  # type: ignore[method-assign]
    torch.manual_seed(0)
    lived(case, 0, folder, device="cuda", hardware=PRETENDED)
    peak = torch.cuda.max_memory_allocated()
    return {**found, "peak_bytes": peak, "error_percent": round(100 * (peak / found["predicted_bytes"] - 1), 2)}


def in_a_child(case: Case) -> Row:
    """The figures of a run, or what it died of."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        child = os.fork()
        if not child:
            os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            try:
                found = life(case, Path(folder)) | {"with_more": "ran"}
            except BaseException as error:
                traceback.print_exc()
                found = {"with_more": f"{type(error).__name__}: {error}"[:300]}
            answer.write_text(json.dumps(found))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        return json.loads(answer.read_text()) if answer.exists() else {"with_more": f"status {status}"}


def main() -> int:
    """Draws, runs, compares; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1200, help="after which no further run is begun")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    imported("plain")
    started, rows = time.monotonic(), list[Row]()
    for number in range(args.first, args.first + args.runs):
        if time.monotonic() - started > args.seconds:
            break
        names = ("predicted_bytes", "peak_bytes", "error_percent", "with_less", "with_more")
        case = case_of(number)
        found = dict.fromkeys(names, "") | in_a_child(case)
        print(number, case.family, case.dtype, case.phase, found, flush=True)
        rows.append({**conditions(), **asdict(case), **found})
        if not args.no_record:
            append_rows("contract_device", rows[-1:])
    errors = [float(row["error_percent"]) for row in rows if row["error_percent"] != ""]
    missed = [row["number"] for row in rows if (row["with_less"], row["with_more"]) != ("refused", "ran")]
    mean = statistics.fmean(map(abs, errors or [100.0]))
    print(f"{len(errors)} runs, {min(errors, default=0):+.2f} to {max(errors, default=0):+.2f} %, mean {mean:.2f} %")
    print("missed:", missed)
    return int(bool(missed) or mean > 100 * MEAN or not all(-100 * BELOW <= each <= 100 * ABOVE for each in errors))


if __name__ == "__main__":
    sys.exit(main())
