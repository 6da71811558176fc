"""Runs of made-up programs do what was recorded, event by event: what moves where and when, and what waits for what.

A commit that means to change what runs do records them anew and says why:

    python -m tests.unit.wrapper.test_recorded_runs             all runs
    python -m tests.unit.wrapper.test_recorded_runs "run 3"     prints the events of one, to compare them by hand

A failing test prints what differs; ``xzcat`` shows the whole recording, one event in a line.

Other tests say what must hold in every run. Here a wait, a count or a transfer that was left out is seen although the
numbers stay right, because this machine happened to be fast.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from elixir.errors import ElixirError
from elixir.kernels.adam import step as native
from tests.common import inside
from tests.common.made_up_runs import Program, Run, known_memory, norm_of
from tests.common.rank_threads import results
from tests.common.recording import difference, in_lines, plain, read_recording, recording, write_recording

RECORDED = Path(__file__).with_suffix(".json.xz")
NAMES = (*(f"run {number}" for number in range(36)), *(f"ranks {number}" for number in (0, 2, 8, 17, 22)))
TIMEOUT_S = 200.0
"""On a busy machine a run takes a hundred times as long as on a quiet one."""


def outcome(name: str) -> list[list[dict[str, Any]]]:
    """By rank and step, the numbers, and a line for each event and each field of the report."""
    return [[in_lines(each) for each in steps] for steps in events(name)]


def events(name: str) -> list[list[dict[str, Any]]]:
    """By rank and step, all events, the report, and the numbers."""
    run = Run.of(name)
    eager = mock.patch.dict(os.environ, {native.VARIABLE: "0"})  # a kernel may be there at any time
    with tempfile.TemporaryDirectory(prefix="elixir-recorded-") as folder, recording() as seen, known_memory(), eager:

        def work(rank: int) -> list[dict[str, Any]]:
            with seen.of_rank(rank):
                return list(steps(Program(run, rank, Path(folder), seen)))

        return results(run.ranks, work, timeout_s=TIMEOUT_S) if run.ranks > 1 else [work(0)]


def steps(program: Program) -> Iterator[dict[str, Any]]:
    for actions in (*program.run.actions, None):
        error = ""
        try:
            if actions is None:
                program.found.append(norm_of(program.module.state_dict()))
                program.module.close()
            else:
                program.step(actions)
                program.module.settle()
        except ElixirError as raised:
            error = plain(f"{type(raised).__name__}: {raised}")
        for lane in inside.lanes(program.module).all() if actions is not None else ():
            lane.ask(lambda: None)  # what is recorded on it belongs to this step
        report = program.report()
        numbers, program.found = program.found, []
        yield {
            "actions": actions,
            "events": program.seen.take(program.rank)
            | ({} if actions is not None else {"forms": sorted(program.forms.items())}),
            "report": report,
            "numbers": numbers,
            "error": error,
        }
        if error:
            program.module.close()
            return


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_as_recorded(name: str) -> None:
    recorded = read_recording(RECORDED)[name]
    for rank, (found, expected) in enumerate(zip(outcome(name), recorded, strict=True)):
        for step, (here, there) in enumerate(zip(found, expected, strict=True)):
            where = f"rank {rank}, step {step}"
            changed = difference(there["lines"], here["lines"])
            assert not changed, f"{where}\n{changed}"
            assert here["numbers"] == pytest.approx(there["numbers"], rel=2e-2, nan_ok=True), where


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(events(sys.argv[1]), indent=1, default=vars))
    else:
        write_recording(RECORDED, {name: outcome(name) for name in NAMES})
