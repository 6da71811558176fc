"""One step: what is submitted in which order, in how many calls, and the states that a shard goes through."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elixir.wrapper.step import stepper
from elixir.wrapper.step.shard import SteppedShard
from elixir.wrapper.step.stepper import Stepper
from tests.common import gpu, inside
from tests.common.early import attempts, chain, updating_early
from tests.common.parity import Pair, case, make_plan, mixed, rehomed


def fused(parameters: Any) -> torch.optim.Optimizer:
    """torch's own Adam that steps any number of tensors by one kernel."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def seen_updates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[SteppedShard, Any]]:
    """The shards and inputs that `update` and `update_together` get from here on, in order."""
    seen: list[tuple[SteppedShard, Any]] = []
    update, together = stepper.update, stepper.update_together

    def one(engine: Any, shard: SteppedShard, inputs: Any) -> bool:
        seen.append((shard, inputs))
        return update(engine, shard, inputs)

    def several(shards: Any) -> None:
        seen.extend(shards)
        together(shards)

    monkeypatch.setattr(stepper, "update", one)
    monkeypatch.setattr(stepper, "update_together", several)
    return seen


def test_the_host_gets_its_updates_before_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    it = case("gpt2")
    plan = mixed(make_plan(it, "streamed"))
    with Pair(it, plan, max_norm=1e-2) as pair:
        pair.train(1)
        seen = seen_updates(monkeypatch)
        pair.train(1)
    homes = [shard.chunk.plan.update_home for shard, _ in seen]
    assert set(homes) == {"host", "device"}
    if gpu.DEVICE == "cpu":
        assert homes == sorted(homes, reverse=True)
        return
    # What needs no number comes before this thread waits for the norm.
    tensors = [isinstance(inputs.factor, torch.Tensor) for _, inputs in seen]
    assert tensors == sorted(tensors, reverse=True)
    assert tensors == [shard.accepts_tensor_factor for shard, _ in seen]


@pytest.mark.parametrize("max_norm", [None, 1e-2])
def test_one_call_steps_all_chunks_on_the_device(max_norm: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    it = case("gpt2")
    plan = make_plan(it, "resident")
    assert len(plan.chunks) > 2
    with Pair(it, plan, optimizer=lambda model: fused(model.parameters()), max_norm=max_norm) as pair:
        calls: list[int] = []
        step = torch.optim.AdamW.step

        def counted(self: torch.optim.AdamW, closure: Any = None) -> Any:
            if self is not pair.plain_optimizer:
                calls.append(sum(len(group["params"]) for group in self.param_groups))
            return step(self, closure)

        monkeypatch.setattr(torch.optim.AdamW, "step", counted)
        pair.train(1)
        weights = len(list(it.model.parameters()))
        assert calls == [1] * weights, "the first step makes states, weight by weight"
        calls.clear()
        pair.train(2)
        pair.assert_same_weights()
        assert calls == [weights] * 2


def test_shards_that_share_a_call_are_stepped_once_after_a_move() -> None:
    it = case("gpt2")
    plan = mixed(make_plan(it, "streamed"))
    with Pair(it, plan, optimizer=lambda model: fused(model.parameters()), max_norm=1e-2) as pair:
        pair.train(2)
        pair.module.rehome(rehomed(plan, "resident"))
        pair.train(2)
        pair.module.rehome(plan)
        pair.train(2)


def test_an_early_update_ends_in_step() -> None:
    it = chain()
    with Pair(it, updating_early(it, "streamed", split_number=4), max_norm=1e9) as pair:
        found = inside.stepper(pair.module)
        assert isinstance(found, Stepper)
        pair.train(2)
        pair.backward()
        assert attempts(pair.module) == [shard.chunk.index for shard in found.shards]
        pair.step()
        assert attempts(pair.module) == []
        assert pair.module.last_report.early.kept == len(list(found.shards))
