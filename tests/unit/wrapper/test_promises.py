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
from elixir.hardware.profile import preset
from elixir.hardware.promises import UNSTEADY_SHARE
from elixir.search.budgets import resolve_budgets
from elixir.search.request import SearchRequest
from elixir.units import GIB, MIB
from tests.common import inside
from tests.common.parity import case, hf_loss

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


def test_a_search_is_refused_where_all_free_memory_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _, _ = wrapped()
    monkeypatch.setattr("elixir.search.budgets.free_host_bytes", lambda: MIB // 2)
    with pytest.raises(InputError, match=r"512.* of host memory are free, and all of them are promised"):
        budgets()
    first.close()
