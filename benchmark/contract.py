"""Whole runs, from load to resume, whose processes may take the memory that was predicted and no more.

    python benchmark/contract.py [--runs 300] [--first 0] [--every 1] [--limited] [--seconds 3600] [--no-record]

A run is drawn from its number: model, dtype, moments, accumulation, budgets (so homes), ranks, framework, phase. Each
rank is a process. It loads a model, plans and wraps it, trains, saves a checkpoint (without a framework while it
trains), goes through the phase (evaluation, generation, an export, a resume, other homes), and trains again. Compared
with what wrapping expected is the peak of the pages that are its own, looked at every 2 ms; pages of files, such as
libraries and a mapped checkpoint, the kernel drops. The row has the peak of both together (``VmHWM``), too.

``--limited`` puts the ranks of a run into a memory control group, where one can be made. When the model is wrapped, the
group gets 3 % less than what is expected; wrapping must refuse that, and name the room that suffices. With that room,
which is less than 2 % more than expected, the run must end well. If it does not, it is repeated with 2 % more.
A group also counts page tables and pages of files that it has written, which are in no prediction.

Ranks are forked from a process that has imported what they need (`benchmark.contract_lives`), which saves most of a
run's seconds. The device is a CPU, whose memory is the host's, so a process has both. Appends a row for each run to ``results/contract.csv``; fails where a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.common import Row, append_rows, conditions
from benchmark.contract_lives import FRAMEWORKS, PHASES, Case

ROOT = Path(__file__).resolve().parent.parent
GROUPS = Path("/sys/fs/cgroup/memory")
COUNTED_FROM_BYTES = 1 << 30
"""Smaller processes are mostly libraries; their rows are there, the bars are not for them."""
ABOVE, BELOW, MEAN = 0.02, 0.03, 0.01


def drawn(number: int) -> Case:
    """The case of a number: 0.55 to 0.85 GiB of weights and states on each rank, in few layers, with few tokens."""
    draw = random.Random(number)
    family, ranks = draw.choice(("opt-125m", "gpt2", "llama-2-7b")), draw.choice((1, 1, 1, 2))
    dtype, moments = draw.choice(("fp32", "fp32", "bf16")), draw.choice(("float32", "float32", "bfloat16"))
    hidden, vocabulary = draw.choice(((512, 8192), (768, 4096), (768, 8192), (1024, 4096)))
    framework = draw.choice(FRAMEWORKS)
    case = Case(
        number=number,
        family=family,
        layers=1,
        hidden=hidden,
        vocabulary=vocabulary,
        sequence=draw.choice((16, 32)),
        dtype=dtype,
        moments=moments,
        accumulation=draw.choice((1, 1, 2)),
        share=draw.choice((0.0, 0.3, 0.6, 1.0)),
        real=draw.random() < 0.5,
        ranks=ranks,
        phase=draw.choice(PHASES[framework]),
        framework=framework,
    )
    wanted = draw.uniform(0.55, 0.85) * (1 << 30) * ranks / case.state_bytes
    layers = round((wanted - (2 if family == "llama-2-7b" else 1) * case.embedding_numel) / case.layer_numel)
    return replace(case, layers=max(layers, 2))


# --- the processes ----------------------------------------------------------------------------------------------------


class Group:
    """A memory control group for the processes of one run; `folder` is None where none can be made."""

    def __init__(self) -> None:
        self.folder: Path | None = GROUPS / f"elixir_contract_{os.getpid()}"
        try:
            self.folder.mkdir()
            (self.folder / "memory.limit_in_bytes").read_text()
        except OSError:
            self.folder = None

    def remove(self) -> None:
        """Removes it, once its processes have ended."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


class Runs:
    """Runs cases, each rank in a process."""

    def __init__(self) -> None:
        self._parents: dict[str, subprocess.Popen[str]] = {}

    def __call__(self, case: Case, group: Path | None = None, share: float = 1.0) -> list[dict[str, Any]]:
        """The answer of each rank."""
        parent = self._parents.get(case.framework)
        if parent is None or parent.poll() is not None:
            parent = self._parents[case.framework] = _started(case.framework)
        if parent.stdin is None or parent.stdout is None:
            raise ValueError("the parent of the ranks was started without pipes")
        with tempfile.TemporaryDirectory() as folder:
            asked = {"case": asdict(case), "folder": folder, "share": share, "port": free_port()}
            asked["group"] = str(group) if group is not None else ""
            parent.stdin.write(json.dumps(asked) + "\n")
            parent.stdin.flush()
            return list(json.loads(parent.stdout.readline()))


def _started(framework: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "benchmark" / "contract_lives.py"), framework]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def free_port() -> int:
    """A port for the frameworks that open one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# --- rows -------------------------------------------------------------------------------------------------------------


def row_of(case: Case, answers: list[dict[str, Any]], before: Row) -> Row:
    """A run as a row of results: the rank that is furthest from its prediction."""
    names = ("predicted_bytes", "peak_bytes", "own_peak_bytes", "error_percent", "error_of_all_percent", "said")
    row = {**before, **asdict(case), **dict.fromkeys(names, "")}
    measured = [answer for answer in answers if "peak" in answer]
    if len(measured) < case.ranks:
        return row | {"said": next(str(each)[:300] for each in answers if "peak" not in each)}

    def error(rank: dict[str, Any]) -> float:
        return float(100 * (rank["own_peak"] - rank["expected_own"]) / rank["expected"])

    worst = max(measured, key=lambda each: abs(error(each)))
    expected, peak = worst["expected"], worst["peak"]
    figures = (expected, peak, worst["own_peak"], round(error(worst), 2), round(100 * (peak / expected - 1), 2), "")
    return row | dict(zip(names, figures, strict=True))


def limited(runs: Runs, case: Case, before: Row) -> tuple[Row, list[dict[str, Any]]]:
    """The row of a run that was given less than expected, and then what was named."""
    group = Group()
    try:
        answers = runs(case, group.folder, 1 - BELOW)
        row = row_of(case, answers, before)
        if group.folder is None:
            return row | {"with_less": "", "with_named": "", "with_more": ""}, answers
        less = ", ".join(dict.fromkeys(str(each.get("verdict", "")) for each in answers))
        if not row["said"]:
            return row | {"with_less": less, "with_named": "ran", "with_more": "ran"}, answers
        again = runs(case, group.folder, 1 + ABOVE)
        more = row_of(case, again, before)
        return more | {"with_less": less, "with_named": row["said"], "with_more": more["said"] or "ran"}, again
    finally:
        group.remove()


def missed(rows: list[Row]) -> list[str]:
    """The bars that rows miss, in words."""
    found = [f"{row['number']}: {row['said']}" for row in rows if row["said"]]
    for name, wanted in (("with_less", "refused"), ("with_named", "ran"), ("with_more", "ran")):
        found += [f"{row['number']}, {name}: {row[name]}" for row in rows if row[name] not in ("", wanted)]
    large = [row for row in rows if row["peak_bytes"] and int(row["peak_bytes"]) > COUNTED_FROM_BYTES]
    errors = [float(row["error_percent"]) for row in large]
    for row, error in zip(large, errors, strict=True):
        if not -100 * BELOW <= error <= 100 * ABOVE:
            found.append(f"{row['number']}: {error:+.2f} %")
    if errors:
        mean = statistics.fmean(map(abs, errors))
        print(f"{len(errors)} runs above 1 GiB: {min(errors):+.2f} to {max(errors):+.2f} %, mean error {mean:.2f} %")
        found += [f"mean error {mean:.2f} %"] if mean > 100 * MEAN else []
    return found


def main() -> int:
    """Draws, runs, compares; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="the step from one number to the next")
    parser.add_argument("--limited", action="store_true")
    parser.add_argument("--seconds", type=float, default=3600, help="after which no further run is begun")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    rows: list[Row] = []
    started, runs = time.monotonic(), Runs()
    for number in range(args.first, args.first + args.runs * args.every, args.every):
        if time.monotonic() - started > args.seconds:
            break
        case, before = drawn(number), conditions()
        if args.limited:
            row, answers = limited(runs, case, before)
        else:
            answers = runs(case)
            row = row_of(case, answers, before) | {"with_less": "", "with_named": "", "with_more": ""}
        rows.append(row)
        print({name: value for name, value in row.items() if name not in before}, flush=True)
        for each in answers:
            print({name: value for name, value in each.items() if name != "modules"}, flush=True)
        if not args.no_record:
            append_rows("contract", [row])
    found = missed(rows)
    print("\n".join(found))
    return int(bool(found) or not rows)


if __name__ == "__main__":
    sys.exit(main())
