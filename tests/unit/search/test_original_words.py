"""Searches take the keywords of the first Elixir, print where they are asked to, and find the machine that is meant."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elixir import minimum_waste_search, optimal_search, simple_search
from elixir.errors import InputTypeError
from elixir.hardware.profile import preset
from elixir.search.searches import DEFAULT_HARDWARE, profile_for
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


def test_the_machine_is_the_one_that_is_named_or_the_traces_or_found(
    trace: StepTrace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    assert profile_for(HARDWARE, trace) is HARDWARE
    assert profile_for("t4", trace) == preset("t4")
    assert profile_for(None, replace(trace, device="t4")) == preset("t4")
    assert caplog.records == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for ranks, level in ((None, logging.WARNING), (0, logging.WARNING), (1, logging.DEBUG)):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda r=ranks: r is not None)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda r=ranks: r)
        assert profile_for(None, replace(trace, device="no such")) == preset(DEFAULT_HARDWARE)
        assert [(each.levelno, "no hardware given" in each.message) for each in caplog.records] == [(level, True)]
        caplog.clear()
    with pytest.raises(InputTypeError, match="got int"):
        profile_for(3)  # type: ignore[arg-type]


def test_a_gpu_without_a_preset_has_its_own_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: preset("t4").device_name)
    assert profile_for(None) == preset("t4")
    assert caplog.records == []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 2))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**33))
    found = profile_for(None)
    assert (found.device_name, found.compute_capability, found.device_memory_bytes) == ("some GPU", (7, 2), 2**33)
    assert (found.devices_per_host, found.name) == (3, f"rates-of-{DEFAULT_HARDWARE}")
    assert "no preset for 'some GPU'" in caplog.text
