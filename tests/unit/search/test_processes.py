"""Parts of a question in forked processes: what they find, how they fail, and the same rows as in one process."""

from __future__ import annotations

import os
import signal

import pytest

from elixir.errors import InputError, PlanError, StateError
from elixir.search.whatif.processes import process_count, side_by_side
from elixir.search.whatif.settings import METHODS
from elixir.search.whatif.sweep import SweepInterrupted, fit


def _counted(part: int) -> list[tuple[int, int]]:
    return [(os.getpid(), 10 * part + number) for number in range(part)]


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_all_parts_are_worked_on(processes: int) -> None:
    found = list(side_by_side(_counted, [3, 1, 2], processes))
    assert sorted(number for _, number in found) == [10, 20, 21, 30, 31, 32]
    assert [number for _, number in found if number >= 30] == [30, 31, 32]
    pids = {pid for pid, _ in found}
    assert pids == {os.getpid()} if processes == 1 else len(pids) == 3 and os.getpid() not in pids


def test_an_error_of_a_part_is_raised() -> None:
    def work(part: int) -> list[int]:
        if part:
            raise InputError("no such model")
        return [part]

    with pytest.raises(InputError, match="no such model"):
        list(side_by_side(work, [0, 1], 2))


def test_a_process_that_is_killed_is_named() -> None:
    def work(_: int) -> list[int]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    with pytest.raises(StateError, match="ended with -9"):
        list(side_by_side(work, [0, 1], 2))


def test_there_is_a_process_for_each_core() -> None:
    assert 1 <= process_count() <= (os.cpu_count() or 1)


def test_fit_finds_the_same_side_by_side() -> None:
    methods = {name: METHODS[name] for name in ("lora", "full")}
    one, two = (fit("opt-125m", ["rtx4090"], methods=methods, processes=processes) for processes in (1, 2))
    assert one == two
    assert [row.method for row in two.rows] == ["lora", "full"]


def test_an_interrupt_ends_all_processes_and_leaves_the_rows_so_far() -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(SweepInterrupted) as stopped:
        fit("opt-125m", ["rtx4090"], methods=METHODS, processes=2, each=interrupt)
    assert len(stopped.value.found.rows) == 1


def test_what_fits_nowhere_comes_back_with_its_need() -> None:
    short = PlanError("short", needed_bytes=3, available_bytes=2, details=["of 4"])
    (found,) = side_by_side(lambda _: [short], [0], 2)
    assert str(found) == str(short)
    assert found.needed_bytes == 3
