"""Two plans in one process: the second knows of the memory that the first was promised and has not taken yet."""

from __future__ import annotations

import copy
import gc
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import elixir
from elixir.errors import InputError
from elixir.hardware import promises
from elixir.hardware.process_memory import HEAP, HEAP_LEFT_BYTES
from elixir.hardware.profile import preset
from elixir.hardware.promises import UNSTEADY_SHARE
from elixir.search import optimal_search
from elixir.search.budgets import resolve_budgets
from elixir.search.request import SearchRequest
from elixir.units import GIB, MIB
from elixir.wrapper.account.plan_promise import state_dict_bytes
from tests.common import inside
from tests.common.parity import case, hf_loss
from tests.common.peaks import status_bytes

HERE = replace(preset("cpu"), host_memory_bytes=None)
FREE = 16 * GIB


@pytest.fixture(autouse=True)
def known_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # models of other tests
    inside.forget(monkeypatch, "promises")
    for place in ("elixir.search.budgets", "elixir.wrapper.account.plan_promise"):
        monkeypatch.setattr(f"{place}.free_host_bytes", lambda: FREE)


def wrapped(**memory: Any) -> tuple[Any, Any, Any]:
    it = case("gpt2")
    optimizer = torch.optim.AdamW(it.model.parameters(), lr=1e-3)
    memory = {"device_memory": "1600KiB", "host_budget": "1GiB", **memory}
    return *elixir.wrap(
        it.model, optimizer, inp=it.inp, hardware="cpu", replan=False, assume="nominal", **memory
    ), it.inp


def budgets() -> int:
    found = resolve_budgets(HERE, SearchRequest(world_size=1, host_reserve=0))
    return found.device_bytes + found.host_bytes


def test_a_second_plan_leaves_out_what_the_first_may_still_take() -> None:
    assert budgets() == FREE
    model, optimizer, inp = wrapped()
    predicted, arena = model.plan.predicted, inside.arena(model)
    peaks = predicted.device_peak_bytes + predicted.host_peak_bytes
    buffers = sum(each.nbytes for each in model.module.buffers())

    def expected() -> int:
        return FREE - peaks + arena.live_bytes("device") + arena.live_bytes("host") + buffers

    before = budgets()
    assert before == expected() < FREE
    hf_loss(model, inp).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.settle()
    assert before < budgets() == expected() < FREE  # moments and gradients are taken by now
    model.close()
    assert budgets() == FREE


def test_a_promise_lasts_until_its_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = wrapped()
    engine, plans = inside.engine(model), []
    drop = engine.drop_memory

    def dropped() -> None:
        drop()
        plans.append(promises.outstanding("cpu").plans)

    monkeypatch.setattr(engine, "drop_memory", dropped)
    model.close()
    assert plans == [1]
    assert not promises.outstanding("cpu").plans


def test_sizes_that_are_given_are_obeyed_and_a_model_that_is_gone_was_promised_nothing() -> None:
    model, optimizer, _ = wrapped()
    given = resolve_budgets(HERE, SearchRequest(world_size=1, device_memory="1GiB", host_budget="2GiB"))
    assert (given.device_bytes, given.host_bytes) == (GIB, 2 * GIB)
    assert budgets() < FREE
    del model, optimizer
    gc.collect()
    assert budgets() == FREE


def test_a_plan_that_exceeds_what_is_free_and_not_promised_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _, _ = wrapped()
    needed = first.plan.predicted.device_peak_bytes + first.plan.predicted.host_peak_bytes
    free = {"bytes": needed}
    monkeypatch.setattr("elixir.wrapper.account.plan_promise.free_host_bytes", lambda: free["bytes"])
    it = case("gpt2")
    kept = copy.deepcopy(it.model.state_dict())
    plan = first.plan
    with pytest.raises(InputError, match=r"takes .* of host memory, but only .* not promised .*\(1\).*together\(\)"):
        elixir.ElixirModule(it.model, plan, device="cpu")
    state = it.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in kept.items())
    first.close()
    with pytest.raises(
        InputError, match=r"takes (.*) MiB more of host memory, but only .*: (.*) MiB more suffice"
    ) as said:
        elixir.ElixirModule(it.model, plan, device="cpu")  # alone: the libraries take more than the plan here
    found = re.search(r"takes (.*) MiB more .*: (.*) MiB more suffice", str(said.value))
    assert found is not None
    assert (1 + UNSTEADY_SHARE) * float(found[1]) - float(found[2]) == pytest.approx(needed / MIB, abs=0.03)
    free["bytes"] += int(float(found[2]) * MIB) + 1  # the size that it names suffices
    elixir.ElixirModule(it.model, plan, device="cpu").close()
    with pytest.raises(InputError, match="more suffice"):
        elixir.ElixirModule(it.model, plan, device="cpu", reserve="2MiB")


def test_other_homes_are_refused_where_they_take_more_than_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, inp = wrapped(reserve="1GiB", device_memory="16MiB")  # which the program has not taken yet
    before = model.plan
    other = optimal_search(
        case("gpt2").model, 1, inp=inp, hardware="cpu", chunks_of=before, optimizer_type=before.optimizer,
        device_memory="1800KiB", host_budget="1GiB",
    ).plan  # fmt: skip
    free = {"bytes": MIB}
    monkeypatch.setattr("elixir.wrapper.account.plan_promise.free_host_bytes", lambda: free["bytes"])

    def predicted() -> int | None:
        hf_loss(model, inp).backward()
        optimizer.step()
        optimizer.zero_grad()
        found: int | None = model.last_report.predicted.get("process_peak")
        return found

    expected = predicted()
    with pytest.raises(InputError, match="more suffice"):
        model.rehome(other)
    assert model.plan is before
    assert predicted() == expected  # a plan that never ran is no part of it
    free["bytes"] = FREE
    model.rehome(other)
    assert [chunk.home for chunk in model.plan.chunks] != [chunk.home for chunk in before.chunks]
    predicted()


def test_full_state_dicts_count_as_far_as_they_exceed_what_a_step_has() -> None:
    it = case("gpt2")
    expected = state_dict_bytes(it.model, [torch.optim.AdamW(it.model.parameters())])
    model, optimizer, inp = wrapped(between_steps="1GiB")

    def step() -> dict[str, int]:
        hf_loss(model, inp).backward()
        optimizer.step()
        optimizer.zero_grad()
        return model.last_report.process_parts

    peak_bytes = model.plan.predicted.device_peak_bytes
    parts = step()
    # Activations are gone while it is there, and so are the gaps that they have left.
    assert GIB - peak_bytes <= parts["state_dicts"] + parts["heap"] - HEAP_LEFT_BYTES < GIB
    states = optimizer.state_dict(rank0_only=True)["state"].values()
    given = [
        *model.state_dict(rank0_only=True).values(),
        *(each[name] for each in states for name in each if name != "step"),
    ]
    assert sum({each.data_ptr(): each.nbytes for each in given}.values()) == expected


def test_a_report_tells_the_process_from_what_it_was_predicted(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, inp = wrapped(reserve="3MiB")

    def reported() -> Any:
        hf_loss(model, inp).backward()
        optimizer.step()
        optimizer.zero_grad()
        return model.last_report

    report = reported()
    if "process_peak" not in report.observed:
        pytest.skip("this operating system does not tell")
    assert report.process_parts["reserve"] == 3 * MIB
    assert report.process_parts["host"] == report.predicted["host_peak"]
    assert sum(report.process_parts.values()) <= report.predicted["process_peak"]
    assert "process_peak" not in report.surprises()
    missing = int(1.1 * report.predicted["process_peak"]) - status_bytes("VmRSS")
    grown = torch.ones(missing, dtype=torch.uint8)  # such as a data set that comes later
    assert "process_peak" in reported().surprises()
    assert "process_peak" in caplog.text
    assert "reserve=" in caplog.text
    del grown
    expected = HEAP.expected_bytes
    other, _, _ = wrapped()
    assert HEAP.expected_bytes >= expected > 0  # of both
    assert "process_peak" not in reported().observed  # whose memory is it?
    other.close()


def test_a_search_is_refused_where_all_free_memory_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _, _ = wrapped()
    monkeypatch.setattr("elixir.search.budgets.free_host_bytes", lambda: MIB // 2)
    with pytest.raises(InputError, match=r"512.* of host memory are free, and all of them are promised"):
        budgets()
    first.close()


@pytest.mark.slow
def test_state_dicts_that_are_given_are_needed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elixir.wrapper.account.plan_promise.free_host_bytes", lambda: 3 * GIB)
    wrapped(between_steps="2GiB", host_budget="2GiB")
    monkeypatch.setattr("elixir.wrapper.account.plan_promise.free_host_bytes", lambda: 2 * GIB)
    with pytest.raises(InputError, match="more suffice"):
        wrapped(between_steps="2GiB", host_budget="2GiB")
