"""Changes one place of the package at a time and says whether the tests of its room notice.

python tools/mutants.py --seed 1 --count 40           40 changes, drawn evenly over rooms
python tools/mutants.py --seed 1 --count 40 --cuda    lines that no test reaches on the CPU run on the emulated device
python tools/mutants.py --paths elixir/plan/plan.py   changes of files, from the top; without rows in results
python tools/mutants.py --again 40 --stage 1          40 recorded changes by the tests of `make test`; without rows

A row of benchmark/results/mutants.csv has the function and the text of a change, which outlive its line.

A change turns a comparison, exchanges `and` and `or`, `+` and `-`, or `*` and `//`, or leaves out a `not` or a call. It
is made in a copy of the repository, and in the functions of a fork of a process that has collected all tests; a line
that runs on import has a new process. The tests of the room that reach the line run there until one fails, those that
reach few lines first, those of whole outcomes second. cosmic-ray and mutmut know no rooms, and start Python and run all
tests for each place.

coverage.py (`pip install coverage`) records a file of tests once, the first and the last case of most tests, in
out/reached_lines: delete that folder after changes of the package. Other processes that a test starts are not recorded.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import gc
import os
import random
import re
import resource
import signal
import sqlite3
import sys
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
from coverage import Coverage

from benchmark.common import RESULTS
from tools.raises import ROOT, functions, in_package, repository_copy

WRAPPER = ("unit/wrapper", "unit/training", "unit/access", "unit/checkpoint", "unit/artifacts")
ROOMS = {
    "wrapper": WRAPPER, "chunk": ("unit/chunk", *WRAPPER), "tracer": ("unit/tracer", "unit/access"),
    "search": ("unit/search", "unit/artifacts"), "plan": ("unit/artifacts", "unit/search"),
    "checkpoint": ("unit/checkpoint",), "checkpoint_format": ("unit/checkpoint",),
    "cli": ("unit/cli", "unit/search"), "show": ("unit/cli", "unit/search"), "kernels": ("unit/kernels", *WRAPPER),
    "hardware": ("unit/artifacts", "unit/microbench", "unit/search"), "access": WRAPPER,
    "runtimes": ("unit/runtimes",),
    "models": ("unit/artifacts", "unit/tracer", "unit/wrapper"),
}  # fmt: skip
PAIRS = (
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn),
    (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.And, ast.Or),
)  # fmt: skip
TURNED: dict[Any, Any] = {**dict(PAIRS), **{new: old for old, new in PAIRS}}
FIRST_TESTS = 60
"""Number of tests that run before those of whole outcomes."""
WHOLE = "test_recorded_"
"""Tests of whole outcomes, which run for twice as long: they notice much, and each case reaches other lines."""
RECORDED = ROOT / "out" / "reached_lines"
RECORDED_S = 40
"""No further test of a file is recorded after so many seconds of processor time."""
LONGEST_S = 40
"""No test takes more seconds of processor time, unless a change keeps it from ending."""
STALL_S = 240
"""Nothing waits for a test that takes longer than this."""
FAILED, LATE, CRASHED = 1, 70, 71
"""How a process exits in which a test has failed, as pytest does, or that has not run all tests."""
LINES = (
    "select path, context, numbits from line_bits, context, file where context.id = context_id and file.id = file_id"
)
GIVEN = re.compile(r"^@given\(.*?^def (test_\w+)", re.DOTALL | re.MULTILINE)
"""Tests whose examples hypothesis draws: it is hypothesis that runs the lines."""
STAGES = {1: "not slow and not more", 2: "not slow"}
"""The expression after pytest's -m for the tests of ``make test``, and of CI."""
PYTEST = ("pytest", "-q", "-s", "-x", "-p", "no:cacheprovider", "-m")
NOT_NOTICED = ("no", "not reached")
COLUMNS = ("place", "change", "by", "seconds")
"""`by` is the first test that noticed a change, or why none did."""

Reached = dict[str, list[tuple[str, int]]]
"""The tests that reach a file of the package, by file, such as ``tests/unit/x/test_y.py::test_z``, with a bit for each
line. In fixtures of several tests, a file of tests reaches it."""


@dataclass(frozen=True)
class Change:
    """A change of a file at one place."""

    path: str
    function: str
    """The function around it, such as ``Lane.submit``; empty outside of all functions and classes."""
    line: int
    what: str
    source: bytes
    """The whole file with it."""

    @property
    def place(self) -> str:
        return f"{self.path}:{self.function}"


def changes_of(path: str, text: bytes) -> Iterator[Change]:
    """All changes of a file."""
    starts = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
    tree = ast.parse(text)
    names = functions(tree)
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
            lines = b"\n" * text.count(b"\n", start, end)  # what comes later stays on its line
            source = text[:start] + f"({new}".encode() + lines + b")" + text[end:]
            yield Change(path, names[node], node.lineno, f"{ast.unparse(node)} -> {new}", source)


def differing(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Functions of two versions of a file, and functions inside of those."""
    before, after = ([each for each in code.co_consts if isinstance(each, CodeType)] for code in (old, new))
    for pair in zip(before, after, strict=True) if len(before) == len(after) else ():
        if pair[0] != pair[1]:
            yield pair
            yield from differing(*pair)


def forked(run: Callable[[], Any]) -> int:
    """Runs a function that returns a status in a silent process; returns how that exits."""
    if child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # all processes that its tests have started
        return status
    try:
        os.setsid()
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        os._exit(run())
    finally:
        os._exit(CRASHED)


def run_anew(limit_s: int, *arguments: str) -> None:
    """Has this process go on as one that runs a module of Python and imports everything anew."""
    signal.alarm(4 * limit_s)
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    os.execv(sys.executable, [sys.executable, "-m", *arguments])


class Tests:
    """The plugin of pytest: tries changes after the collection, instead of a run of all tests."""

    def __init__(self, try_changes: Callable[[Tests], None], stage: str) -> None:
        self._try_changes, self._import, self._stage = try_changes, Coverage(data_file=None), stage
        self._import.start()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._import.stop()
        self._cases = defaultdict[str, list[pytest.Item]](list)
        for item in session.items:
            self._cases[item.nodeid.partition("[")[0]].append(item)
            self._cases[item.nodeid.partition("::")[0]].append(item)
        self._functions = defaultdict[tuple[str, CodeType], list[FunctionType]](list)
        gc.unfreeze()  # a list of objects leaves out those that tests/conftest.py has frozen
        for each in gc.get_objects():
            if type(each) is FunctionType:  # not by isinstance, which some objects of torch answer with a warning
                self._functions[each.__code__.co_filename, each.__code__].append(each)
        gc.freeze()
        self._try_changes(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self._failed:
            self._failed.write_text(report.nodeid)
            os._exit(FAILED)

    def _run(self, items: list[pytest.Item], limit_s: int) -> int:
        """Exits at the first test that fails, unless they are recorded."""
        for item, following in zip(items, [*items[1:], None], strict=True):
            used_s = int(time.process_time())
            if used_s >= limit_s:
                return LATE
            signal.alarm(STALL_S)
            resource.setrlimit(resource.RLIMIT_CPU, (used_s + LONGEST_S, resource.RLIM_INFINITY))
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        return 0

    def record(self, file: str, data: Path) -> None:
        """Records the first and the last case of each test of a file; of whole outcomes all of them."""

        def run() -> int:
            recorder, self._failed = Coverage(data_file=str(data)), None
            with recorder.collect():
                self._run([case for each in found for case in dict.fromkeys((each[0], *each[since:]))], RECORDED_S)
            recorder.save()
            return 0

        found = [cases for name, cases in self._cases.items() if name.startswith(f"{file}::")]
        since = 0 if WHOLE in file else -1
        forked(run)

    def notice(self, tests: list[str], limit_s: int, path: str, line: int, before: bytes) -> tuple[str, str]:
        """Whether a test fails with what a file is now, and which one; `before` is what was imported."""

        def run() -> int:
            for function, code in changes:
                function.__code__ = code
            return self._run(list(dict.fromkeys(item for test in tests for item in self._cases[test])), limit_s)

        name, self._failed = str(Path(path).absolute()), Path("failed").absolute()
        self._failed.write_text("")
        codes = (compile(text, name, "exec") for text in (before, Path(path).read_bytes()))
        changes = [(each, new) for old, new in differing(*codes) for each in self._functions[name, old]]
        anew = "--cuda" in tests or line in (self._import.get_data().lines(path) or ())
        anew |= any(each.__code__.co_freevars != new.co_freevars for each, new in changes)
        status = forked((lambda: run_anew(limit_s, *PYTEST, self._stage, *tests)) if anew else run)
        if status in (LATE, -signal.SIGKILL):
            return f"not in {limit_s} s", ""
        found = {0: "", FAILED: self._failed.read_text() or "import"}
        by = found.get(status, "no end in time" if status in (-signal.SIGXCPU, -signal.SIGALRM) else "a crash")
        return "yes" if by else "no", by


def record_cuda(file: str, data: Path) -> None:
    forked(lambda: run_anew(1000, "coverage", "run", f"--data-file={data}", "-m", *PYTEST, STAGES[2], "--cuda", file))


def reached(folders: Iterable[str], record: Callable[[str, Path], None]) -> Reached:
    """Gives the tests in these folders by the files that they reach; those that reach few lines are first."""
    tests: Reached = defaultdict(list)
    lines = Counter[str]()
    RECORDED.mkdir(parents=True, exist_ok=True)
    for path in sorted(path for folder in folders for path in (ROOT / "tests" / folder).rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        data = RECORDED / f"{name.replace('/', '.')}.{zlib.crc32(path.read_bytes()):08x}"
        if not data.exists():
            print("recording", name, flush=True)
            record(name, data)
        # There is no file if all tests of one are slow.
        for file, context, bits in sqlite3.connect(data).execute(LINES) if data.exists() else ():
            function = context.partition(f"{path.stem}.")[2].replace(".", "::")
            drawn = GIVEN.findall(path.read_text()) if context.startswith("hypothesis.") else []
            for test in (f"{name}::{each}" if each else name for each in drawn or [function]):
                tests[file].append((test, int.from_bytes(bits, "little")))
                lines[test] += tests[file][-1][1].bit_count()
    for found in tests.values():
        found.sort(key=lambda test: ("::" not in test[0], lines[test[0]]))
    return tests


def at(tests: Reached, path: str, line: int) -> list[str]:
    """The tests that reach a line; those that reach few lines are first."""
    return [test for test, bits in tests.get(path, ()) if bits >> line & 1]


def drawn(rooms: list[str], seed: int, skip: int, count: int) -> list[tuple[str, Change]]:
    """Changes and their rooms, drawn evenly over rooms; the first `skip` are left out."""
    by_room = {room: [each for file in in_package(room) for each in changes_of(*file)] for room in rooms}
    for room, changes in by_room.items():
        random.Random(f"{seed} {room}").shuffle(changes)
    numbers = [(rooms[number % len(rooms)], number // len(rooms)) for number in range(skip, count)]
    return [(room, by_room[room][number]) for room, number in numbers if number < len(by_room[room])]


def recorded(rooms: list[str], seed: int, count: int) -> list[tuple[str, Change]]:
    """Some of the changes that a test was recorded to notice, of those that can still be made."""
    with (RESULTS / "mutants.csv").open(newline="", encoding="utf-8") as file:
        known = {(row["place"], row["change"]) for row in csv.DictReader(file) if "::" in row["by"]}
    every = [(room, each) for room in rooms for file in in_package(room) for each in changes_of(*file)]
    found = [(room, each) for room, each in every if (each.place, each.what) in known]
    random.Random(seed).shuffle(found)
    return found[:count]


def first_to_notice(tests_here: Tests, change: Change, on_cpu: Reached, on_cuda: Reached, limit_s: int) -> str:
    """The first test that notices a change, or why none does."""
    tests = at(on_cpu, change.path, change.line)
    cuda = [] if tests else at(on_cuda, change.path, change.line)
    if not tests:  # what reaches a line in a case that was not recorded reaches the file in one that was
        tests = [test for test, _ in on_cpu.get(change.path, ()) if "::" in test]
    whole = [test for test, _ in on_cpu.get(change.path, ()) if WHOLE in test]
    rest = [test for test in tests if WHOLE not in test]
    parts = ((rest[:FIRST_TESTS], 1), (whole, 2), (rest[FIRST_TESTS:], 1))
    answer, before = "not reached", Path(change.path).read_bytes()
    Path(change.path).write_bytes(change.source)
    try:
        for part, times in ((["--cuda", *cuda], 4),) if cuda else parts:
            if part:
                answer, by = tests_here.notice(part, times * limit_s, change.path, change.line, before)
                if answer == "yes":
                    return by
    finally:
        Path(change.path).write_bytes(before)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30, help="changes to try")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first changes")
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), choices=ROOMS)
    parser.add_argument("--paths", nargs="+", help="changes of these files, from the top, instead of drawn ones")
    parser.add_argument("--again", type=int, metavar="COUNT", help="changes that were recorded, instead of drawn ones")
    parser.add_argument("--stage", type=int, default=2, choices=STAGES, help="1: the tests of `make test` alone")
    parser.add_argument("--limit", type=int, default=40, help="processor seconds, then it counts as not noticed")
    parser.add_argument("--cuda", action="store_true", help="run lines that no test reaches on the emulated device")
    args = parser.parse_args()
    rooms = list(dict.fromkeys(path.split("/")[1] for path in args.paths)) if args.paths else args.rooms
    if args.paths:
        files = [(room, *file) for room in rooms for file in in_package(room) if file[0] in args.paths]
        todo = [(room, each) for room, path, text in files for each in changes_of(path, text)][args.skip : args.count]
    elif args.again:
        todo = recorded(rooms, args.seed, args.again)
    else:
        todo = drawn(rooms, args.seed, args.skip, args.count)
    noticed = 0

    def try_changes(tests_here: Tests) -> None:
        nonlocal noticed
        on_cpu = {room: reached(ROOMS[room], tests_here.record) for room in rooms}
        on_cuda = reached(["gpu"], record_cuda) if args.cuda else {}
        for room, change in todo:
            begin = time.perf_counter()
            by = first_to_notice(tests_here, change, on_cpu[room], on_cuda, args.limit)
            noticed += by not in NOT_NOTICED and not by.startswith("not in")
            seconds = round(time.perf_counter() - begin, 1)
            row = {"place": change.place, "change": change.what, "by": by, "seconds": seconds}
            print(row, f"line {change.line}", flush=True)
            if not (args.paths or args.again):
                with (RESULTS / "mutants.csv").open("a", newline="", encoding="utf-8") as file:
                    csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(row)

    with repository_copy() as copy:
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        os.environ |= {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
        for name in [name for name in sys.modules if name.partition(".")[0] in ("elixir", "benchmark", "tests")]:
            del sys.modules[name]  # tests import those of the copy
        folders = sorted({f"tests/{each}" for room in rooms for each in ROOMS[room]})
        stage = STAGES[args.stage]
        pytest.main([*PYTEST[1:], stage, *folders], plugins=[Tests(try_changes, stage)])
    print(f"{noticed} of {len(todo)} noticed, seed {args.seed}, stage {args.stage}")


if __name__ == "__main__":
    main()
