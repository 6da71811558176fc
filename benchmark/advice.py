"""Whether the first advice suffices where nothing fits: ten command lines that fail, run again with it.

    python benchmark/advice.py [--only TEXT] [--no-record]

Each situation is a command line of `elixir plan` that ends without a plan. The first lever of its error that says
"enough" is added to it, flags that the situation sets already being replaced, and it runs again. Appends a row for
each to ``results/advice.csv``, with the processor seconds that saying no took; fails if any advice does not suffice.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.common import Row, append_rows, conditions, print_table
from elixir.cli import main as elixir

BIG = "--activation-checkpointing non-reentrant"
SITUATIONS = (
    f"llama-3-8b --hardware rtx4090 --batch 2 --seq 2048 --host-budget 64GiB {BIG}",
    f"llama-2-13b --hardware a100 --batch 4 --seq 2048 --host-budget 64GiB {BIG}",
    "llama-3-8b --hardware h100 --batch 8 --seq 4096 --host-budget 256GiB",
    f"opt-6.7b --hardware l4 --batch 4 --seq 1024 --host-budget 32GiB {BIG}",
    "gpt2-xl --hardware t4 --batch 8 --seq 1024 --host-budget 64GiB --dtype fp16",
    f"opt-13b --hardware rtx3090 --batch 4 --seq 1024 --host-budget 96GiB {BIG}",
    f"opt-30b --hardware h200 --batch 4 --seq 1024 --host-budget 128GiB {BIG}",
    f"mixtral-8x7b --hardware h200 --world-size 8 --batch 1 --seq 1024 --host-budget 64GiB --device-memory 60GiB {BIG}",
    "opt-1.3b --hardware l4 --batch 4 --seq 1024 --host-budget 64GiB --placement cuda",
    "bert-large --hardware t4 --batch 64 --seq 512 --host-budget 32GiB",
)


def attempt(words: list[str]) -> tuple[int, str, float]:
    """Status of one command, what it said of an error, and its processor seconds."""
    errors, started = io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            status = elixir(["plan", *words, "--brief"])
        except SystemExit as error:
            status = int(error.code or 0)
    return status, errors.getvalue(), time.process_time() - started


def advised(text: str) -> list[str]:
    """The flags of the first lever, if it is said to be enough."""
    levers = [line for line in text.splitlines() if line.startswith("  - ")]
    found = re.search(r": (--.*) \(enough", levers[0]) if levers else None
    return [] if found is None else found[1].split()


def with_flags(words: list[str], flags: list[str]) -> list[str]:
    """The command line with these flags in place of those of the same name."""
    named = {flag for flag in flags if flag.startswith("--")}
    kept: list[str] = []
    skipping = False
    for word in words:
        if word.startswith("--"):
            skipping = word in named
        if not skipping:
            kept.append(word)
    return [*kept, *flags]


def main() -> int:
    """Fails, follows the advice, and count; 1 if any did not suffice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="situations that contain this text")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    rows: list[Row] = []
    for situation in (text for text in SITUATIONS if args.only in text):
        status, text, refused_s = attempt(situation.split())
        flags = advised(text)
        suffices = status == 2 and bool(flags) and attempt(with_flags(situation.split(), flags))[0] == 0
        rows.append(
            {
                "situation": situation,
                "advice": " ".join(flags),
                "suffices": suffices,
                "refused_cpu_s": round(refused_s, 2),
                **conditions(),
            }
        )
        print(situation, "->", rows[-1]["advice"] or text.strip()[:300], suffices, file=sys.stderr, flush=True)
    columns = ("situation", "advice", "suffices", "refused_cpu_s")
    print_table("first advice", columns, [[row[name] for name in columns] for row in rows])
    if not args.no_record:
        append_rows("advice", rows)
    return int(not all(row["suffices"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
