"""States of any form move between homes as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.common import inside
from tests.common.on_disk import on_disk
from tests.common.parity import Case, Pair, case, make_plan, rehomed


class Kept(torch.optim.Optimizer):
    """A rule that looks at a state which `make` makes in the first step."""

    def __init__(self, parameters: Any, make: Callable[[torch.Tensor], Any], lr: float = 1e-2) -> None:
        self._make = make
        super().__init__(parameters, {"lr": lr, "make": make})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["mean"], state["kept"] = torch.zeros_like(weight), group["make"](weight)
                scale = state["kept"][0] if isinstance(state["kept"], tuple) else state["kept"]
                state["mean"].mul_(0.9).add_(weight.grad)
                weight.addcmul_(state["mean"], torch.ones_like(weight) * scale, value=-group["lr"])


def a_pair(weight: torch.Tensor) -> Any:
    return (0.5, 2.0)


class Later(Kept):
    """Makes another state in its second step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, a_count)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        again = [weight for group in self.param_groups for weight in group["params"] if self.state[weight]]
        super().step()
        for weight in again:
            self.state[weight].setdefault("later", torch.ones_like(weight))


def in_one_place(weight: torch.Tensor) -> Any:
    return torch.full((), 0.5, device=weight.device).expand(weight.shape)


def in_16_bits(weight: torch.Tensor) -> Any:
    return torch.full_like(weight, 0.5, dtype=torch.bfloat16)


def a_count(weight: torch.Tensor) -> Any:
    return torch.ones((), dtype=torch.int64)


MAKE: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {
    "made ahead": (lambda parameters: torch.optim.Adagrad(parameters, initial_accumulator_value=0.5), 0),
    "a pair": (lambda parameters: Kept(parameters, a_pair), 2),
    "in one place": (lambda parameters: Kept(parameters, in_one_place), 2),
    "in 16 bits": (lambda parameters: Kept(parameters, in_16_bits), 2),
    "a count": (lambda parameters: Kept(parameters, a_count), 2),
}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(("start", "to"), [("streamed", "resident"), ("resident", "mixed")])
def test_states_move_as_they_are(name: str, start: str, to: str) -> None:
    make, steps = MAKE[name]
    it = case("opt")
    plan = make_plan(it, "streamed")
    with Pair(it, rehomed(plan, start), optimizer=lambda model: make(model.parameters())) as pair:
        pair.train(steps)
        pair.module.rehome(rehomed(plan, to))
        pair.train(2)


def test_states_in_16_bits_have_one_place_on_a_disk(tmp_path: Path) -> None:
    it = case("opt", layers=1)
    plan = make_plan(it, "streamed")
    make, steps = MAKE["in 16 bits"]
    with Pair(it, plan, optimizer=lambda model: make(model.parameters()), disk_folder=tmp_path) as pair:
        pair.train(steps)
        pair.module.rehome(on_disk(plan))
        for chunk in inside.chunks(pair.module):
            assert chunk.stored is None or "kept float32" not in chunk.stored._regions
        pair.train(2)


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.Rprop])
def test_states_that_are_dropped_are_made_anew(make: Any) -> None:
    it = case("opt", layers=1)
    with Pair(it, make_plan(it, "streamed"), optimizer=lambda model: make(model.parameters(), lr=1e-3)) as pair:
        pair.train(2)
        pair.optimizer.state.clear()
        pair.plain_optimizer.state.clear()
        pair.train(2)


def test_shards_that_share_a_call_let_go_of_states_one_by_one() -> None:
    it: Case = case("opt")
    plan = rehomed(make_plan(it, "streamed"), "resident")
    with Pair(it, plan, optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True)) as pair:
        pair.train(1)
        states = [shard.states for shard in inside.shards(pair.optimizer)]
        states[0].forget()
        assert list(states[1].to_save())
        assert len(states[1].by_weights) == sum(len(other.segments) for other in states[1:])
        pair.module.close()


@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_states_whose_home_stays_are_not_allocated_a_second_time(moments: str) -> None:
    it = case("opt")
    plan = rehomed(make_plan(it, "streamed", moments=moments), "streamed")
    *others, last = plan.chunks
    other = replace(plan, chunks=(*others, replace(last, resident=True, weight_home="device", state_home="device")))

    def memory() -> dict[tuple[str, str], int]:
        stay = [shard for shard in inside.shards(pair.optimizer) if shard.chunk.index < len(others)]
        return {(it.name, it.kind): it.tensor.data_ptr() for shard in stay for it in shard.states.to_save()}

    with Pair(it, plan) as pair:
        pair.exact = moments == "float32"
        pair.train(2)
        before = memory()
        pair.module.rehome(other)
        assert memory() == before != {}
        pair.train(2)
        if pair.exact:
            pair.assert_same_weights()


@pytest.mark.parametrize("homes", ["resident", "streamed"])
def test_states_that_a_class_makes_after_its_first_step_are_counted(homes: str) -> None:
    it = case("opt", layers=1)
    plan = make_plan(it, "streamed")
    with Pair(it, rehomed(plan, homes), optimizer=lambda model: Later(model.parameters())) as pair:
        for _ in range(3):
            pair.train(1)  # ends with an audit of what is counted
        pair.module.rehome(rehomed(plan, "mixed"))
        pair.train(1)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "8bit"])
def test_states_that_stay_on_a_disk_stay_what_they_are(moments: str, tmp_path: Path) -> None:
    """The chunk is another one, since its weights move; the extent is the same."""
    plan = on_disk(make_plan(case("opt", layers=1), "streamed", moments=moments))
    chunks = [replace(chunk, weight_home="device") if chunk.state_home == "disk" else chunk for chunk in plan.chunks]
    with Pair(case("opt", layers=1), plan, disk_folder=tmp_path) as pair:
        pair.exact = False
        pair.train(2)
        before = pair.optimizer.state_dict()["state"]
        pair.module.rehome(replace(plan, chunks=tuple(chunks)))
        after = pair.optimizer.state_dict()["state"]
        assert before
        for number, state in before.items():
            assert all(torch.equal(value, after[number][kind]) for kind, value in state.items()), number
        assert any(state["exp_avg"].any() for state in after.values())
