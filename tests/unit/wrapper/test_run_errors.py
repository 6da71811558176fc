"""Each call reports the errors of before that it must, and no others, as often and with as many ranks as it must."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elixir.errors import DiskError, ElixirError, FileError, InputError, RankError, StepError
from elixir.wrapper.run_errors import Call, ErrorKind, RunErrors, changed_in_part

ERRORS: dict[ErrorKind, ElixirError] = {
    ErrorKind.CHANGE: changed_in_part("a load has ended"),
    ErrorKind.LANE: StepError("a step failed"),
    ErrorKind.DISK: RankError("another rank's disk"),
}

REPORTED: dict[Call, set[ErrorKind]] = {
    Call.USE: {ErrorKind.CHANGE},
    Call.RUN: {ErrorKind.LANE, ErrorKind.DISK},
    Call.GRADIENTS: {ErrorKind.LANE},
    Call.STEP: {ErrorKind.DISK},
    Call.ONE_STEP: {ErrorKind.LANE, ErrorKind.DISK},
}


def reported(errors: RunErrors, call: Call) -> Exception | None:
    try:
        errors.report(call)
    except Exception as error:
        return error
    return None


def with_disk(lost: DiskError | None, rank_count: int) -> RunErrors:
    window: Any = SimpleNamespace(lost=lost)
    return RunErrors(cast(Any, window), rank_count)


LOST = DiskError(FileError(5, "broken", "/disk", "read"), "chunk 0")


@pytest.mark.parametrize("call", Call)
@pytest.mark.parametrize("kind", ErrorKind)
def test_a_call_reports_its_kinds_and_ends_only_the_error_of_a_lane(call: Call, kind: ErrorKind) -> None:
    errors = with_disk(None, rank_count=2)
    errors.record(kind, ERRORS[kind])
    expected = ERRORS[kind] if kind in REPORTED[call] else None
    assert reported(errors, call) is expected
    ended = expected is not None and kind is ErrorKind.LANE and call is not Call.ONE_STEP
    assert reported(errors, call) is (None if ended else expected)
    assert errors.end(kind) == ([] if ended else [ERRORS[kind]])
    assert reported(errors, call) is None


def test_a_disk_stops_one_rank_at_once_and_several_once_they_have_agreed() -> None:
    assert reported(with_disk(LOST, rank_count=1), Call.STEP) is LOST
    here, there = with_disk(LOST, rank_count=2), with_disk(None, rank_count=2)
    assert reported(here, Call.STEP) is None
    assert reported(here, Call.ONE_STEP) is LOST  # a checkpoint reports it to the other ranks
    reports = [here.of_disk, there.of_disk]
    assert reports == [str(LOST), None]
    with pytest.raises(DiskError):
        here.agree(reports)
    with pytest.raises(RankError, match="chunk 0"):
        there.agree(reports)
    assert isinstance(reported(there, Call.RUN), RankError)


def test_the_first_error_of_a_lane_is_kept_and_the_newest_of_a_change() -> None:
    errors = with_disk(None, rank_count=1)
    for kind in (ErrorKind.LANE, ErrorKind.CHANGE):
        errors.record(kind, ERRORS[kind])
        errors.record(kind, InputError("a second one"))
    assert reported(errors, Call.RUN) is ERRORS[ErrorKind.LANE]
    assert str(reported(errors, Call.USE)) == "a second one"
