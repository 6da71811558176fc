"""Checks what Elixir promises on a CUDA device: memory, speed where all fits, speed where it does not, size, links.

    python benchmark/gpu_proof.py [--minutes 9] [--only memory,resident,offload,capacity,links] [--out DIR] [--again]
    python benchmark/gpu_proof.py --rehearse        # every path, toys on the CPU
    python benchmark/gpu_proof.py --compare --out DIR    # simulated against measured steps of a folder, without a GPU

``benchmark/gpu_quarter.sh`` runs what decides most, for a machine that is lent for a quarter of an hour; the options
``--quarter``, ``--card``, ``--carried`` and ``--prepare`` are its own.

Each case runs in a separate process, so one that runs out of memory ends no other. After each a row is appended to
``DIR/rows.jsonl`` and ``DIR/results.md`` is written anew; at the end come the plots. A case is begun only where it is
expected to end in time; a further run with the same ``--out`` goes on with those that have no row. Needs torch 2.11 or
newer and what Elixir needs; no network; DeepSpeed takes part where it can be imported.

``links`` measures the machine first, so that plans are made for it; each run ends by comparing simulated with measured
steps. benchmark/proof/README.md says what each bar is. Exits with 0 if no bar is missed, 1 if one is (or a rehearsed
case fails), 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.proof.jobs import PARTS

MINUTES = 9.0
REHEARSAL_OK = ("ok", "not run")


def parts_of(text: str) -> list[str]:
    """``memory,links`` as a list in the order in which parts run."""
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in wanted if part not in PARTS]
    if unknown or not wanted:
        raise argparse.ArgumentTypeError(f"expected some of {','.join(PARTS)}, found {text!r}")
    return [part for part in PARTS if part in wanted]


def minutes(text: str) -> float:
    """A time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected minutes above 0, found {text!r}")
    return value


def size(text: str) -> int:
    """An amount of memory above 0, bytes."""
    from elixir.errors import InputError
    from elixir.units import parse_bytes

    try:
        value = parse_bytes(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value <= 0:
        raise argparse.ArgumentTypeError(f"expected a size above 0 such as 106GiB, found {text!r}")
    return value


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=minutes, default=MINUTES, help="for everything, report included")
    parser.add_argument("--only", type=parts_of, default=list(PARTS), help="parts, with commas between them")
    parser.add_argument(
        "--quarter", type=int, choices=(1, 2), help="the jobs of one run of gpu_quarter.sh, in its order"
    )
    parser.add_argument("--card", choices=("h200", "h100"), default="h200", help="the GPU that --quarter runs on")
    parser.add_argument("--carried", type=Path, metavar="DIR", help="plans that --prepare has made")
    parser.add_argument(
        "--prepare", type=Path, metavar="DIR", help="plan all runs of Elixir in a quarter, without a GPU"
    )
    parser.add_argument("--match", metavar="PATTERN", help="only jobs whose id, part/case/contender, it finds")
    parser.add_argument("--out", type=Path, help="folder of rows, report and plots; out/gpu_proof by default")
    parser.add_argument("--again", action="store_true", help="also run what has a row in the folder already")
    parser.add_argument("--rehearse", action="store_true", help="every path, with toys on the CPU")
    parser.add_argument(
        "--host-memory", type=size, help="what jobs may plan with, such as 106GiB; free memory less 8 GiB"
    )
    parser.add_argument(
        "--compare", action="store_true", help="compare what there is in the folder, and write its report"
    )
    parser.add_argument("--worker", nargs=2, metavar=("PARENT", "READY"), help=argparse.SUPPRESS)
    return parser.parse_args(given)


def _stopped(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def why_not_here() -> str | None:
    """The reason why there can be no real run; None if there can."""
    import torch

    if torch.cuda.is_available():
        return None
    built = f"PyTorch {torch.__version__} is built without CUDA"
    if torch.version.cuda is not None:
        built = f"PyTorch {torch.__version__} is built for CUDA {torch.version.cuda}, but sees no device or driver"
    return f"no CUDA device here: {built}. There is nothing to prove without one; --rehearse runs every path on the CPU"


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    if args.worker:
        from benchmark.proof.lifetime import end_with

        end_with(int(args.worker[0]))  # before libraries are loaded, which takes seconds
        from benchmark.proof import worker

        return worker.main(Path(args.worker[1]))
    # So that being ended by `timeout`, `lifetime.py` or a scheduler leaves a report as well.
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _stopped)
    deadline_s = time.monotonic() + 60 * args.minutes
    if args.compare:
        return compare(args.out or Path("out/gpu_proof"))
    if args.prepare:
        return prepare(args)
    if not args.rehearse:
        problem = why_not_here()
        if problem is not None:
            print(problem, file=sys.stderr)
            return 2
        return prove(args, args.out or Path("out/gpu_proof"), deadline_s)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing of a rehearsal may find a GPU
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("ELIXIR_COMPILE", "0")  # compiling takes longer than all toys
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for each other on busy cores cost seconds a step
    if args.out is not None:
        return prove(args, args.out, deadline_s)
    with tempfile.TemporaryDirectory(prefix="elixir-rehearsal-") as folder:
        return prove(args, Path(folder), deadline_s)


def prepare(args: argparse.Namespace) -> int:
    """Makes the plans of a quarter of an hour beforehand, for either card; those that are up to date stay."""
    from benchmark.proof import carried, quarter

    count = carried.prepare(args.prepare, quarter.every_job(), args.host_memory)
    print(f"{count} plans are in {args.prepare}")
    return 0


def compare(folder: Path) -> int:
    """Compares what a folder has measured with what is predicted and simulated today, and writes its report: for results
    of a run that was killed, or after a change of a prediction."""
    from benchmark.common import conditions
    from benchmark.proof import links, memory, report
    from benchmark.proof.cases import closing_jobs, jobs_of
    from benchmark.proof.jobs import NotRun
    from benchmark.proof.place import Place
    from benchmark.proof.runner import append_row

    job, place = closing_jobs(rehearse=False)[0], Place(folder)
    row = {"part": job.part, "case": job.case, "contender": job.contender, **conditions()}
    row["rehearsal"] = any(row.get("rehearsal") for row in links.read_rows(place))
    try:
        row |= {"status": "ok", **links.compare({"again": True}, place)}
    except NotRun as reason:
        print(f"nothing to compare in {folder}: {reason}", file=sys.stderr)
        return 2
    append_row(folder / links.ROWS_FILE, row)
    if not row["rehearsal"]:
        for measured in links.read_rows(place):
            if measured["part"] == "memory" and measured["status"] == "ok":
                append_row(folder / links.ROWS_FILE, memory.predicted_again(measured, place))
    every = {part: jobs_of(part, rehearse=row["rehearsal"]) for part in PARTS}
    (folder / "results.md").write_text(report.markdown(links.read_rows(place), (), every), encoding="utf-8")
    print(f"mean error {row['mean_percent']:.1f} % of {len(row['cases'])} cases; see {folder / 'results.md'}")
    return 0


def prove(args: argparse.Namespace, folder: Path, deadline_s: float) -> int:
    """Runs the jobs, writes the report, says what was missed."""
    from benchmark.proof import figures, report
    from benchmark.proof.carried import hardware_file
    from benchmark.proof.cases import closing_jobs, jobs_of
    from benchmark.proof.links import read_rows
    from benchmark.proof.place import HARDWARE_FILE, Place
    from benchmark.proof.quarter import jobs_of_quarter
    from benchmark.proof.runner import REPORT_S, run_jobs

    folder.mkdir(parents=True, exist_ok=True)
    place = Place(folder, args.rehearse, args.host_memory, args.carried)
    if args.carried and hardware_file(args.carried, args.card).exists() and not (folder / HARDWARE_FILE).exists():
        shutil.copy(hardware_file(args.carried, args.card), folder / HARDWARE_FILE)
    other = [row for row in read_rows(place) if row.get("rehearsal", args.rehearse) != args.rehearse]
    if other:
        found = "a rehearsal" if args.rehearse is False else "a real run"
        print(f"{folder} has rows of {found}: choose another --out", file=sys.stderr)
        return 2
    left_out: list[str] = []
    every = {part: jobs_of(part, rehearse=args.rehearse) for part in PARTS}

    def write() -> None:
        (folder / "results.md").write_text(report.markdown(read_rows(place), left_out, every), encoding="utf-8")

    wanted = {part: every[part] for part in args.only}
    closing = closing_jobs(rehearse=args.rehearse)
    if args.quarter is not None:  # its steps are compared at home, with --compare
        wanted, closing = jobs_of_quarter(args.quarter, args.card), []
    if args.match:
        wanted = {part: [job for job in jobs if re.search(args.match, job.id)] for part, jobs in wanted.items()}
    try:
        left_out += run_jobs(
            wanted,
            closing,
            place,
            deadline_s - REPORT_S,
            again=args.again,
            report=write,
            in_order=args.quarter is not None,
        )
    finally:
        write()
    try:
        figures.draw(read_rows(place), folder)
    except ImportError as error:  # rows and report are worth more than pictures
        print(f"no plots: {error}; pip install matplotlib", file=sys.stderr)
    print((folder / "results.md").read_text(encoding="utf-8"))
    print(f"rows, report and plots are in {folder}")
    rows = read_rows(place)
    if args.rehearse:
        return int(bool(left_out) or any(row["status"] not in REHEARSAL_OK for row in rows))
    return int(any(verdict.met is False for verdict in report.verdicts(rows)))


if __name__ == "__main__":
    sys.exit(main())
