"""Seconds of the quickstart's training step, over those predicted from two seconds of measuring.

    python benchmark/quickstart_seconds.py [--runs 5] [--no-record]

The command of docs/quickstart.md, again and again, each run in a separate process that measures anew. Its last step is
compared with its plan. Appends a row for every run to ``results/quickstart_seconds.csv``; fails if the median error is
above `MEDIAN_BAR`, or less than `COVERED` of the steps are within the printed range.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.common import Row, append_rows, conditions, print_table

ROOT = Path(__file__).resolve().parent.parent
MEDIAN_BAR, COVERED = 0.15, 0.9
_SECONDS = r"([0-9.]+) (ms|s)"


def command() -> list[str]:
    """The arguments of the training run on the page."""
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    found = re.search(r"^\$ python (example/train\.py .*)$", page, re.MULTILINE)
    if found is None:
        raise SystemExit("docs/quickstart.md shows no run of example/train.py")
    return found[1].split()


def seconds(number: str, unit: str) -> float:
    """Seconds of a printed time."""
    return float(number) * (1e-3 if unit == "ms" else 1.0)


def row() -> Row:
    """One run."""
    before = conditions()
    done = subprocess.run([sys.executable, *command()], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    planned = re.search(rf"^  step +{_SECONDS} \({_SECONDS} to {_SECONDS}\)", done.stdout, re.MULTILINE)
    taken = re.search(rf"^step +{_SECONDS} +{_SECONDS}$", done.stdout, re.MULTILINE)
    if planned is None or taken is None:
        raise SystemExit(f"no seconds in what the run printed:\n{done.stdout}")
    step_s, low_s, high_s = (seconds(*planned.groups()[at : at + 2]) for at in (0, 2, 4))
    taken_s = seconds(*taken.groups()[:2])
    return {
        **before,
        "taken_s": taken_s,
        "predicted_s": step_s,
        "ratio": round(taken_s / step_s, 3),
        "low_s": low_s,
        "high_s": high_s,
        "within": low_s <= taken_s <= high_s,
    }


def main() -> int:
    """Runs, compares, records; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    rows = []
    for _ in range(args.runs):
        rows.append(row())
        print(rows[-1], file=sys.stderr, flush=True)
    columns = ("taken_s", "predicted_s", "ratio", "low_s", "high_s", "within", "load")
    print_table("the quickstart's step", columns, [[each[name] for name in columns] for each in rows])
    error = statistics.median(abs(each["ratio"] - 1) for each in rows)
    covered = statistics.mean(each["within"] for each in rows)
    print(f"median error {error:.1%} (bar {MEDIAN_BAR:.0%}), {covered:.0%} within the range (bar {COVERED:.0%})")
    if not args.no_record:
        print(append_rows("quickstart_seconds", rows))
    return int(error > MEDIAN_BAR or covered < COVERED)


if __name__ == "__main__":
    raise SystemExit(main())
