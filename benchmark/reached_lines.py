"""Says which quick test reaches each error of the package, in any process, and lists the errors that none reaches.

python benchmark/reached_lines.py                             all quick tests; benchmark/results/raises.csv has the tests
python benchmark/reached_lines.py tests/unit/cli -k plan      arguments of pytest

For `benchmark/mutants.py` coverage.py (`pip install coverage`) records a file of tests once, the first and the last
case of each test, in out/reached_lines: delete that folder after changes of the package. Ranks and other processes that
a test starts are not recorded there.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import Pipe, get_context
from pathlib import Path
from typing import Any

import hypothesis  # noqa: F401  slow to import, as the others, and so imported before the forks
import pytest
import torch._dynamo  # noqa: F401
import transformers.modeling_utils  # noqa: F401
from coverage import Coverage

from benchmark.common import RESULTS
from elixir.errors import shortened

ROOT = Path(__file__).resolve().parent.parent
REACHED = ROOT / "out" / "reached_lines"
RECORDED_S = 10
"""No further test of a file is recorded after so many seconds of processor time."""
STALL_S = 240
"""Nothing waits for a test that takes longer than this."""
LONGEST_S = 12
"""No test takes more seconds of processor time, unless a change keeps it from ending."""
WRITE_RAISED = """
def _raised(place):
    import os
    with open({path!r}, "a") as file:
        file.write(f"{{place}}\\t{{os.environ.get('PYTEST_CURRENT_TEST', '')}}\\n")
import builtins
builtins.__raised__ = _raised
"""
LINES = (
    "select path, context, numbits from line_bits, context, file where context.id = context_id and file.id = file_id"
)

Reached = dict[str, list[tuple[str, int]]]
"""The tests that reach a file of the package, by file, such as ``tests/unit/x/test_y.py::test_z``, with a bit for each
line. On import, or in fixtures of several tests, a file of tests reaches it."""


def run_tests(say: Callable[[Any], None], tests: list[str], data: Path | None, copy: Path, limit_s: int) -> None:
    """Runs in a fork until a test fails; says its name, and after each other test the processor seconds so far."""

    class Plugin:
        def pytest_runtest_logreport(self, report: Any) -> None:
            say((report.nodeid or "import") if report.failed and not data else time.process_time())

        pytest_collectreport = pytest_runtest_logreport

        def pytest_runtest_teardown(self, item: pytest.Item) -> None:
            item.session.shouldstop = bool(data) and time.process_time() > RECORDED_S

        @pytest.hookimpl(trylast=True)  # after `-m` has left out slow cases
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            names = [item.nodeid.partition("[")[0] for item in items]
            if data:
                # The first and the last case of each.
                items[:] = [
                    item
                    for index, (name, item) in enumerate(zip(names, items, strict=True))
                    if name not in names[:index] or name not in names[index + 1 :]
                ]
                return
            # By name here: pytest runs nothing if one test of a list is gone since it was recorded.
            place = {test: number for number, test in enumerate(tests)}
            places = [place.get(name, place.get(name.partition("::")[0])) for name in names]
            found = [(number, index) for index, number in enumerate(places) if number is not None]
            items[:] = [items[index] for _, index in sorted(found)]

    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("elixir", "benchmark", "tests")]:
        del sys.modules[name]  # tests import those of the copy
    settings = ("-q", "-p", "no:cacheprovider", "-m", "not slow", *dict.fromkeys(t.partition("::")[0] for t in tests))
    if data:
        recorder = Coverage(data_file=str(data))
        with recorder.collect():
            pytest.main(list(settings), plugins=[Plugin()])
        recorder.save()
    else:
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 5))  # beyond the second it would be killed silently
        pytest.main(["-x", *settings], plugins=[Plugin()])
    say("")


def forked(tests: list[str], data: Path | None, copy: Path, limit_s: int = 0) -> tuple[str, str]:
    """Whether one of the tests fails, and which one; or records them in `data`."""
    here, there = Pipe(duplex=False)
    process = get_context("fork").Process(target=run_tests, args=(there.send, tests, data, copy, limit_s))
    process.start()
    there.close()
    by: Any = 0.0
    with contextlib.suppress(EOFError, ProcessLookupError):
        while isinstance(by, float):
            by = here.recv() if here.poll(None if data else STALL_S) else "no end in time"
        os.killpg(process.pid, signal.SIGKILL)  # with all processes that its tests have started
    process.join()
    if isinstance(by, float):
        if process.exitcode == -signal.SIGXCPU and limit_s - by < LONGEST_S:
            return f"not in {limit_s} s", ""
        by = "no end in time" if process.exitcode == -signal.SIGXCPU else "a crash"
    return "yes" if by else "no", by


def reached(folders: Iterable[str], copy: Path, *options: str) -> Reached:
    """Gives the tests in these folders by the files that they reach; those that reach few lines are first."""
    tests: Reached = defaultdict(list)
    lines = Counter[str]()
    REACHED.mkdir(parents=True, exist_ok=True)
    for path in sorted(path for folder in folders for path in (ROOT / "tests" / folder).rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        data = REACHED / f"{name.replace('/', '.')}.{zlib.crc32(path.read_bytes()):08x}"
        if not data.exists():
            print("recording", name, flush=True)
            forked([*options, name], data, copy)
        for file, context, bits in sqlite3.connect(data).execute(LINES):
            function = context.partition(f"{path.stem}.")[2].replace(".", "::")
            test = f"{name}::{function}" if function else name
            tests[file].append((test, int.from_bytes(bits, "little")))
            lines[test] += tests[file][-1][1].bit_count()
    for found in tests.values():
        found.sort(key=lambda test: ("::" not in test[0], lines[test[0]]))
    return tests


def at(tests: Reached, path: str, line: int) -> list[str]:
    """The tests that reach a line: the first of each file, the second of each, and so on."""
    turns, found = Counter[str](), list[tuple[int, str]]()
    for test, bits in tests.get(path, ()):
        if bits >> line & 1:
            turns[file := test.partition("::")[0]] += 1
            found.append((turns[file], test))
    return [test for _, test in sorted(found, key=lambda each: each[0])]


def in_package(folder: str = "") -> Iterator[tuple[str, bytes]]:
    """All files of a room, with their text."""
    for path in sorted((ROOT / "elixir" / folder).rglob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_bytes()


@contextlib.contextmanager
def repository_copy() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(".git", ".venv*", "out", "*_cache")
        yield Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=ignored))


def mark_errors(copy: Path) -> dict[str, str]:
    """Has each ``raise`` in a copy of the repository write down its place and the running test first; gives all."""
    errors = {}
    for path, text in in_package():
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Raise):
                place, line = f"{path}:{node.lineno}", lines[node.lineno - 1]
                errors[place] = ast.unparse(node)
                mark = f'__raised__("{place}"); '.encode()
                lines[node.lineno - 1] = line[: node.col_offset] + mark + line[node.col_offset :]
        if path == "elixir/__init__.py":
            after = lines.index(b"from __future__ import annotations\n") + 1
            lines.insert(after, WRITE_RAISED.format(path=str(copy / "raised")).encode())
        (copy / path).write_bytes(b"".join(lines))
    return errors


def main() -> None:
    with repository_copy() as copy:
        errors = mark_errors(copy)
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadfile", "-m", "not slow"]
        for arguments in [sys.argv[1:]] if sys.argv[1:] else [["tests"], ["--cuda", "tests/gpu"]]:
            subprocess.run([*command, *arguments], cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, check=False)
        found = [line.split("\t") for line in (copy / "raised").read_text().splitlines()]
    rows = [("place", "error", "test")]
    for place, error in errors.items():
        test = max((test.rpartition(" ")[0] for at, test in found if at == place), default="")
        rows.append((place, shortened(error, 80), test))
        if not test:
            print(f"{place}: {error}")
    if not sys.argv[1:]:
        with (RESULTS / "raises.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
