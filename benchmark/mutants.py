"""Changes one place of the package at a time and says whether the tests of its room notice.

python benchmark/mutants.py --seed 1 --count 40           which tests reach a line is recorded first, in out/mutants
python benchmark/mutants.py --seed 1 --count 40 --cuda    lines that the emulated device alone reaches
python benchmark/mutants.py --raises                      errors of the package that no test reaches

A change turns a comparison, exchanges `and` and `or`, `+` and `-`, or `*` and `//`, or leaves out a `not` or a call.
Places are drawn evenly over rooms. A mutant runs in a copy of the repository, under the tests of its room that reach
the line, until one fails. Needs coverage.py. cosmic-ray and mutmut know no rooms and run all tests for each place.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmark.common import append_rows, conditions

ROOT = Path(__file__).resolve().parent.parent
REACHED = ROOT / "out" / "mutants"
WRAPPER = ("tests/unit/wrapper/", "tests/unit/training/", "tests/unit/access/")
ROOMS = {
    "wrapper": WRAPPER,
    "chunk": ("tests/unit/chunk/", *WRAPPER),
    **dict.fromkeys(("checkpoint", "checkpoint_format"), ("tests/unit/checkpoint/",)),
    "tracer": ("tests/unit/tracer/", "tests/unit/access/"),
    "search": ("tests/unit/search/", "tests/unit/artifacts/"),
}
TURNED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip
LIMIT_S = 300
"""Tests that take longer than this with a change have noticed it: something waits for ever."""

Tests = dict[str, dict[int, set[str]]]
"""The tests that reach a line, by file and line, such as ``tests/unit/x/test_y.py::test_z``."""


class Place(NamedTuple):
    """One change; `source` is the whole file with it."""

    path: str
    line: int
    change: str
    source: bytes


def places(path: Path) -> Iterator[Place]:
    """All changes of a file."""
    text = path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def start(node: ast.expr) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def end(node: ast.expr) -> int:
        return starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                first, last, new = end(left), start(right), TURNED[type(operator)]
            case ast.BoolOp(op=operator, values=[left, right, *_]) | ast.BinOp(left=left, op=operator, right=right):
                first, last, new = end(left), start(right), TURNED.get(type(operator))
            case ast.UnaryOp(op=ast.Not()):
                first, last, new = start(node), start(node) + len("not"), ""
            case ast.Expr(value=ast.Call() as call):
                first, last, new = start(call), end(call), "pass"
            case _:
                continue
        if new is None:  # a division, say
            continue
        old = text[first:last].decode()
        operator = old.strip("() \n\t")
        if new not in ("", "pass"):  # brackets and line ends around an operator stay
            new = old.replace(operator, new, 1)
        if "#" not in operator or new == "pass":
            change = " ".join(f"{operator if new != 'pass' else old} -> {new.strip('() ')}".split())[:120]
            yield Place(str(path.relative_to(ROOT)), node.lineno, change, text[:first] + new.encode() + text[last:])


def pytest_run(*arguments: str, cuda: bool, prefix: tuple[str, ...] = (), **options: Any) -> Any:
    """Runs quick tests in another process."""
    settings = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *(("--cuda",) if cuda else ()))
    command = [sys.executable, *prefix, *settings, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def reached(rooms: list[str], *, cuda: bool) -> Tests:
    """Runs the tests of these rooms under coverage.py once, a process for each file, unless that is done already."""
    from coverage import CoverageData

    REACHED.mkdir(parents=True, exist_ok=True)
    settings = REACHED / "coveragerc"
    settings.write_text("[run]\ndynamic_context = test_function\nsource = elixir\n", encoding="utf-8")
    folders = ["tests/gpu"] if cuda else sorted({folder for room in rooms for folder in ROOMS[room]})
    tests: Tests = defaultdict(lambda: defaultdict(set))
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        data = REACHED / name.replace("/", ".")
        if not data.exists():
            coverage = ("-m", "coverage", "run", f"--rcfile={settings}", f"--data-file={data}")
            done = pytest_run(name, cuda=cuda, prefix=coverage, cwd=ROOT)
            print(name, *done.stdout.strip().splitlines()[-1:], flush=True)
        found = CoverageData(str(data))
        found.read()
        for file in found.measured_files():
            for line, contexts in found.contexts_by_lineno(file).items():
                functions = {
                    context.partition(f"{path.stem}.")[2].replace(".", "::") for context in contexts if context
                }
                tests[str(Path(file).relative_to(ROOT))][line] |= {f"{name}::{each}" for each in functions if each}
    return tests


def notice(place: Place, tests: set[str], copy: Path, *, cuda: bool) -> tuple[str, str]:
    """Whether the tests notice, and which one."""
    if not tests:
        return "not reached", ""
    before = (copy / place.path).read_bytes()
    (copy / place.path).write_bytes(place.source)
    try:
        done = pytest_run(
            "-x", *sorted(tests), cuda=cuda, cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return "yes", "no end in time"
    finally:
        (copy / place.path).write_bytes(before)
    failed = [line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return ("no", "") if done.returncode == 0 else ("yes", (failed or [done.stdout.strip()[-80:]])[0])


def unreached_raises(tests: Tests, rooms: list[str]) -> Iterator[str]:
    for path in sorted(path for room in rooms for path in (ROOT / "elixir" / room).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Raise) and node.exc and not tests.get(name, {}).get(node.lineno):
                yield f"{name}:{node.lineno}: {ast.unparse(node)[:100]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30, help="changes to try")
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), choices=ROOMS)
    parser.add_argument("--raises", action="store_true", help="list errors that no test reaches, and stop")
    parser.add_argument("--cuda", action="store_true", help="lines that the emulated device alone reaches")
    args = parser.parse_args()
    on_cpu = reached(args.rooms, cuda=False)
    if args.raises:
        print(*unreached_raises(on_cpu, args.rooms), sep="\n")
        return
    on_cuda = reached(args.rooms, cuda=True) if args.cuda else {}
    drawn: dict[str, list[tuple[Place, set[str]]]] = defaultdict(list)
    for room in args.rooms:
        for place in (each for path in sorted((ROOT / "elixir" / room).rglob("*.py")) for each in places(path)):
            tests = {test for test in on_cpu.get(place.path, {}).get(place.line, ()) if test.startswith(ROOMS[room])}
            of_cuda = on_cuda.get(place.path, {}).get(place.line, set())
            if not args.cuda or (of_cuda and not tests):
                drawn[room].append((place, of_cuda if args.cuda else tests))
        random.Random(args.seed).shuffle(drawn[room])
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(".git", ".venv*", "out", "*_cache")
        copy = Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=ignored))
        for number in range(args.count):
            room = args.rooms[number % len(args.rooms)]
            place, tests = drawn[room][number // len(args.rooms)]
            begin = time.perf_counter()
            found, by = notice(place, tests, copy, cuda=args.cuda)
            row = {"seed": args.seed, "room": room, "place": f"{place.path}:{place.line}", "change": place.change}
            row |= {"noticed": found, "by": by, "tests": len(tests), "seconds": round(time.perf_counter() - begin, 1)}
            print(row, flush=True)
            append_rows("mutants", [row | conditions()])


if __name__ == "__main__":
    main()
