"""Changes one place of the package at a time and says whether the tests of its room notice.

python benchmark/mutants.py --seed 1 --count 40           40 changes, drawn evenly over rooms
python benchmark/mutants.py --seed 1 --count 40 --cuda    lines that no test reaches on the CPU run on the emulated device

A change turns a comparison, exchanges `and` and `or`, `+` and `-`, or `*` and `//`, or leaves out a `not` or a call. It
is made in a copy of the repository. The tests of the room that reach the line run until one fails, in turns from each
file, those of whole outcomes second, in a fork of a process that has imported torch and transformers. cosmic-ray and
mutmut know no rooms, and start Python and run all tests for each place.
"""

from __future__ import annotations

import argparse
import ast
import random
import time
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from benchmark.common import append_rows, conditions
from benchmark.reached_lines import at, forked, in_package, reached, repository_copy

WRAPPER = ("unit/wrapper", "unit/training", "unit/access", "unit/checkpoint", "unit/artifacts")
ROOMS = {
    "wrapper": WRAPPER, "chunk": ("unit/chunk", *WRAPPER), "tracer": ("unit/tracer", "unit/access"),
    "search": ("unit/search", "unit/artifacts"), "plan": ("unit/artifacts", "unit/search"),
    "checkpoint": ("unit/checkpoint",), "checkpoint_format": ("unit/checkpoint",),
}  # fmt: skip
PAIRS = (
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn),
    (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.And, ast.Or),
)  # fmt: skip
TURNED: dict[Any, Any] = {**dict(PAIRS), **{new: old for old, new in PAIRS}}
LIMIT_S = 40
"""A change that the tests have not noticed after so many seconds of processor time counts as not noticed."""
FIRST_TESTS = 10
"""Number of tests that run before the files of all others are imported."""
WHOLE = "test_recorded_"
"""Tests of whole outcomes, which run next, for twice as long: they notice much, and each case reaches other lines."""


def places(path: str, text: bytes) -> Iterator[tuple[str, int, str, bytes]]:
    """All changes of a file: its name, a line, what changes, the whole file with that."""
    starts = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
    tree = ast.parse(text)
    texts = {inner for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        match node:
            case ast.Compare(ops=[old]) | ast.BoolOp(op=old) | ast.BinOp(op=old) if type(old) in TURNED:
                turned = TURNED[type(old)]()
                new = ast.unparse(type(node)(**vars(node) | {"op": turned, "ops": [turned]}))
            case ast.UnaryOp(op=ast.Not()):
                new = ast.unparse(node.operand)
            case ast.Expr(value=ast.Call()):
                new = "None"
            case _:
                continue
        if node not in texts:  # Python 3.11 does not know where the parts of an f-string are
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            source = text[:start] + f"({new})".encode() + text[end:]
            yield path, node.lineno, f"{ast.unparse(node)} -> {new}", source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30, help="changes to try")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first changes")
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), choices=ROOMS)
    parser.add_argument("--cuda", action="store_true", help="run lines that no test reaches on the emulated device")
    args = parser.parse_args()
    with repository_copy() as copy:
        on_cpu = {room: reached(ROOMS[room], copy) for room in args.rooms}
        on_cuda = reached(["gpu"], copy, "--cuda") if args.cuda else {}
        drawn = {room: [each for file in in_package(room) for each in places(*file)] for room in args.rooms}
        for room, changes in drawn.items():
            random.Random(f"{args.seed} {room}").shuffle(changes)
        for number in range(args.skip, args.count):
            room = args.rooms[number % len(args.rooms)]
            path, line, change, source = drawn[room][number // len(args.rooms)]
            tests, options = at(on_cpu[room], path, line), []
            if not tests and args.cuda:
                tests, options = at(on_cuda, path, line), ["--cuda"]
            if not tests:  # what reaches a line in a case that was not recorded reaches the file in one that was
                tests, options = [test for test, _ in on_cpu[room].get(path, ()) if "::" in test], []
            found, by, begin = "not reached", "", time.perf_counter()
            before = (copy / path).read_bytes()
            (copy / path).write_bytes(source)
            whole = [] if options else [test for test, _ in on_cpu[room].get(path, ()) if WHOLE in test]
            rest = [test for test in tests if WHOLE not in test]
            for part, limit_s in ((rest[:FIRST_TESTS], LIMIT_S), (whole, 2 * LIMIT_S), (rest[FIRST_TESTS:], LIMIT_S)):
                if part and found != "yes":
                    found, by = forked([*options, *part], None, copy, limit_s)
            (copy / path).write_bytes(before)
            row = {"seed": args.seed, "room": room, "place": f"{path}:{line}", "change": change, "noticed": found}
            row |= {"by": by, "same": "", "cuda": bool(tests and options), "tests": len(tests)}
            row |= {"seconds": round(time.perf_counter() - begin, 1)} | conditions()
            print(row, flush=True)
            append_rows("mutants", [row])


if __name__ == "__main__":
    main()
