"""Searches take the keywords of the first Elixir, print where they are asked to, and find the machine that is meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elixir import minimum_waste_search, optimal_search, simple_search
from elixir.errors import InputTypeError
from elixir.step_trace import StepTrace
from tests.common.searching import HARDWARE, PLENTY, SMALL
from tests.common.synthetic_trace import stack_trace

ROOM: dict[str, Any] = {"hardware": HARDWARE, "device_memory": PLENTY, "host_budget": PLENTY}


@pytest.fixture(scope="module")
def trace() -> StepTrace:
    return stack_trace(SMALL)


def test_keywords_of_the_original_searches_are_taken(trace: StepTrace) -> None:
    plans = [
        minimum_waste_search(m=trace, group_size=2, cpu_offload=True, prefetch=True, **ROOM),
        minimum_waste_search(trace, 2, placement="cpu", overlap=True, **ROOM),
    ]
    assert plans[0] == plans[1]
    assert {chunk.state_home for chunk in plans[0].chunks} == {"host"}
    assert minimum_waste_search(m=trace, group_size=2, cpu_offload=False, prefetch=False, **ROOM) == (
        minimum_waste_search(trace, 2, overlap=False, **ROOM)
    )
    assert optimal_search(m=trace, group_size=1, **ROOM) == optimal_search(trace, 1, **ROOM)
    by_hand = simple_search(m=trace, group_size=1, shard_device=torch.device("cpu"), prefetch=True, **ROOM)
    assert by_hand == simple_search(trace, 1, shard_device="cpu", overlap=True, **ROOM)


@pytest.mark.parametrize(
    ("old", "new"),
    [("m", "model"), ("group_size", "world_size"), ("prefetch", "overlap"), ("cpu_offload", "placement")],
)
def test_an_old_and_a_new_word_for_one_thing_are_refused(old: str, new: str, trace: StepTrace) -> None:
    given: dict[str, Any] = {"model": trace, "world_size": 1, **ROOM}
    with pytest.raises(InputTypeError, match=f"{old} is the first Elixir's word for {new}"):
        minimum_waste_search(**given | {new: given.get(new), old: given.get(new)})


def test_verbose_prints_the_plan_and_nothing_else_does(trace: StepTrace, capsys: pytest.CaptureFixture[str]) -> None:
    plan = optimal_search(trace, 1, **ROOM)
    assert capsys.readouterr().out == ""
    assert optimal_search(trace, 1, verbose=True, **ROOM) == plan
    assert capsys.readouterr().out == f"{plan}\n"


def test_only_rank_0_prints(
    trace: StepTrace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    simple_search(trace, 2, verbose=True, **ROOM)
    assert capsys.readouterr().out == ""
