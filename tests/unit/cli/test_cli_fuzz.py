"""Malformed command lines, drawn with a seed: each ends with status 2 and one sentence, or was not malformed after all."""

from __future__ import annotations

import io
import json
import random
import signal
import string
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from elixir.cli import main
from elixir.cli.options import COMMANDS, FLAGS

SEED = 20
SAMPLE, ALL = (2, 19), (0, 3000)
"""First draw and how many; those of the sample end before they plan or try anything."""
LIMIT_S = 600
"""Time limit of one command; one that takes longer hangs."""

NASTY = (
    "", " ", "-1", "0", "1", "-0", "1e400", "nan", "inf", "-inf", "1_000", "½", "٣", "0x10", "1.5", "1e3", "999999999TiB", "1KiB",
    "-5GiB", "GiB", "12 parsecs", "1000000000", "99999999999999999999", "9" * 5000, ",", "1,,2", "1,1", "1,nan", "none", "None",
    "null", "true", "[]", "{}", "--", "-", "--help=1", "a\nb", "a\tb", "\u202e", "\x00"[:0] + "�", "😀", "'; rm -rf", "%s", "{0}",
    "..", "/", "/dev/null", "/proc/self/mem", "/nowhere/at/all.json", "os:getcwd", "os:nothing", "nothing:at_all", ":", "a:b:c",
    "sys:exit", "elixir", "json:loads", "builtins:print", "torch:zeros", "opt-125m", "opt-126m", "h200", "h2000", "cpu",
    "non-reentrant:0", "non-reentrant:-3", "reentrant:x", "float8", "bf16", "adamw", "lion", "fp64",
)  # fmt: skip
TINY = ["opt-125m", "--batch", "1", "--seq", "8"]


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raises `TimeoutError` in the main thread after so many seconds."""

    def late(*_: object) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(argv: list[str]) -> tuple[int, str]:
    """Exit status and what was said on standard error."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with within(LIMIT_S), redirect_stdout(out), redirect_stderr(err):
            status = main(argv)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else -1
    return status, err.getvalue()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A whole trace, plan and profile, and a folder for what is made of them."""
    folder = tmp_path_factory.mktemp("fuzz")
    made = {name: folder / f"{name}.json" for name in ("trace", "plan", "hardware")}
    for argv in (
        ["profile", *TINY, "--device", "cpu", "--out", str(made["trace"])],
        ["plan", str(made["trace"]), "--hardware", "cpu", "--device-memory", "8GiB", "--host-budget", "8GiB", "--brief",
         "--assume", "nominal", "--out", str(made["plan"])],
        ["hardware", "--show", "cpu", "--out", str(made["hardware"])],
    ):  # fmt: skip
        status, said = run(argv)
        assert status == 0, said
    return made


def damaged(draw: random.Random, text: str) -> str:
    """An artifact with one thing wrong."""
    data = json.loads(text)
    way = draw.randrange(4)
    if way == 0:
        return text[: draw.randrange(len(text))]
    if way == 1:
        place = draw.randrange(len(text))
        return text[:place] + draw.choice(string.printable + "é\x00") + text[place + 1 :]
    holder, key = data, draw.choice(sorted(data))
    while draw.random() < 0.7 and isinstance(holder[key], (dict, list)) and holder[key]:
        holder = holder[key]
        key = draw.choice(sorted(holder) if isinstance(holder, dict) else range(len(holder)))  # type: ignore[type-var]
    if way == 2:
        holder[key] = draw.choice([None, -1, 0, 1e308, "x", [], {}, True, 2**80, [[]], float("nan")])
    else:
        del holder[key]
    return json.dumps(data)


def drawn(draw: random.Random, files: dict[str, Path]) -> list[str]:
    """One command line with something wrong, perhaps."""
    command = draw.choice(sorted(COMMANDS))
    words = " ".join(COMMANDS[command][1].values()).replace("|", " ").split()
    positional = [word for word in words if not word.startswith("--")]
    flags = [word for word in words if word.startswith("--")]
    argv = [command]
    for name in positional:
        whole = {
            "plan": files["plan"],
            "trace": files["trace"],
            "file": files["plan"],
            "a": files["plan"],
            "b": files["plan"],
        }
        source = draw.choice(sorted(files.values()))
        kind = draw.random()
        if kind < 0.35:
            path = files["plan"].parent / f"damaged-{draw.randrange(8)}.json"
            path.write_text(damaged(draw, source.read_text()), encoding="utf-8", errors="surrogateescape")
            argv.append(str(path))
        elif kind < 0.5:
            argv.append(draw.choice(NASTY))
        elif kind < 0.6:
            argv.append(str(source))
        else:
            argv.append(str(whole.get(name, "opt-125m")))
    if "--seq" in flags:
        argv += ["--seq", "8"]
    for flag in draw.sample(flags, min(len(flags), draw.choice([0, 1, 1, 2, 3]))):
        if flag == "--measure":
            continue  # would measure this machine
        argv.append(flag)
        takes = "action" not in (FLAGS.get(f"{flag}@{command}") or FLAGS[flag])
        if takes != (draw.random() < 0.05):
            argv.append(draw.choice(NASTY))
    if draw.random() < 0.05:
        argv.insert(draw.randrange(len(argv) + 1), draw.choice(["--no-such-flag", "--bach", "-x", "", "profil"]))
    return argv


def complaint(argv: list[str]) -> str:
    """Problems with how a command ended; empty if there are none."""
    try:
        status, said = run(argv)
    except TimeoutError as error:
        return str(error)
    except BaseException as error:
        return f"raised {type(error).__name__}: {error}"
    lines = [line for line in said.splitlines() if line.strip()]
    if status == 0:
        return "" if "Traceback" not in said else "status 0 with a traceback"
    if status != 2:
        return f"status {status}: {said[-300:]}"
    if not lines or "Traceback" in said or "internal" in said.lower():
        return f"status 2 without a sentence: {said[-300:]}"
    longest = max(map(len, lines))
    return "" if longest < 2000 else f"status 2 with a line of {longest} characters"


@pytest.mark.parametrize(
    ("first", "count"), [SAMPLE, pytest.param(*ALL, marks=pytest.mark.slow)], ids=["sample", "all"]
)
def test_a_malformed_command_line_ends_with_a_sentence(
    files: dict[str, Path], first: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some draws name an output
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = []
    for number in range(first, first + count):
        argv = drawn(random.Random(SEED * 100_000 + number), files)
        problem = complaint(argv)
        if problem:
            found.append(f"{number}: elixir {' '.join(map(repr, argv))[:400]}\n    {problem}")
    assert not found, "\n".join([f"{len(found)} of {count}", *found[:40]])
