"""Users' calls get the recorded answer at each moment of a training, refused or not, and leave what was recorded.

A commit that means to change an answer records them anew and says why:

    python -m tests.unit.wrapper.test_recorded_calls              all of them
    python -m tests.unit.wrapper.test_recorded_calls "calls 3"    prints the answers of one, to compare them by hand

A failing test prints what differs; ``xzcat`` shows the whole recording, one answer in a line.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.common.calls_anywhere import CallsAnywhere
from tests.common.made_up_runs import Program, Run, known_memory
from tests.common.rank_threads import results
from tests.common.recording import difference, in_lines, read_recording, recording, write_recording
from tests.unit.wrapper.test_recorded_runs import TIMEOUT_S

RECORDED = Path(__file__).with_suffix(".json.xz")
NAMES = tuple(f"calls {number}" for number in (0, 1, 3, 4, 5, 6, 8))


def outcome(name: str, *, whole: bool = False) -> list[list[dict[str, Any]]]:
    """By rank and moment, the answers, and what the next step does; in short, or as a whole."""
    run = Run.of(name)
    with tempfile.TemporaryDirectory(prefix="elixir-recorded-") as folder, recording() as seen, known_memory():

        def work(rank: int) -> list[dict[str, Any]]:
            with seen.of_rank(rank):
                found = list(moments(CallsAnywhere(Program(run, rank, Path(folder), seen))))
            return found if whole else [in_lines(each) for each in found]

        return results(run.ranks, work, timeout_s=TIMEOUT_S) if run.ranks > 1 else [work(0)]


def moments(calls: CallsAnywhere) -> Iterator[dict[str, Any]]:
    program = calls.program
    for _ in calls.moments():
        numbers = calls.train()
        program.module.settle()
        for lane in calls.lanes():
            lane.ask(lambda: None)  # what is recorded on it belongs to this moment
        yield answered(calls, numbers)
    calls.after_the_end()
    yield answered(calls, [])


def answered(calls: CallsAnywhere, numbers: list[float]) -> dict[str, Any]:
    program, answers = calls.program, calls.answers
    report = program.report() if numbers else {}
    numbers, program.found, calls.answers = numbers + program.found, [], {}
    return {
        "answers": answers,
        "events": program.seen.take(program.rank),
        "report": report,
        "numbers": numbers,
        "error": "",
    }


@pytest.mark.parametrize("name", NAMES)
def test_calls_are_answered_as_recorded(name: str) -> None:
    recorded = read_recording(RECORDED)[name]
    for rank, (found, expected) in enumerate(zip(outcome(name), recorded, strict=True)):
        for moment, (here, there) in enumerate(zip(found, expected, strict=True)):
            # Steps of weights that are loaded again and again are far apart in bfloat16, if kernels round differently.
            numbers = pytest.approx(there["numbers"], rel=0.1, abs=0.05, nan_ok=True)
            assert here["numbers"] == numbers, f"rank {rank}, moment {moment}"
            changed = difference(there["lines"], here["lines"])
            assert not changed, f"rank {rank}, moment {moment}\n{changed}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(outcome(sys.argv[1], whole=True), indent=1, default=vars))
    else:
        write_recording(RECORDED, {name: outcome(name) for name in NAMES})
