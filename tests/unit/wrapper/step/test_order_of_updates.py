"""One step: what is submitted in which order, in how many calls, and the states that a shard goes through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import StateError
from elixir.kernels import HybridAdam
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.step import stepper
from elixir.wrapper.step.fused_states import FusedStates
from elixir.wrapper.step.shard import Shard, ShardState
from elixir.wrapper.step.stepper import Stepper
from tests.common import gpu, inside
from tests.common.early import chain, needs_kernel, updating_early
from tests.common.parity import NEVER, Pair, case, make_plan, mixed, rehomed
from tests.unit.wrapper.step.test_early_updates import chain_plan, make_ordinary, steps


def fused(parameters: Any) -> torch.optim.Optimizer:
    """torch's own Adam that steps any number of tensors by one kernel."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def _hybrid(model: nn.Module) -> torch.optim.Optimizer:
    return HybridAdam(model.parameters(), lr=1e-3)


def seen_updates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Shard, Any]]:
    """The shards and inputs that `update` and `update_together` get from here on, in order."""
    seen: list[tuple[Shard, Any]] = []
    update, together = stepper.update, stepper.update_together

    def one(engine: Any, shard: Shard, inputs: Any) -> bool:
        seen.append((shard, inputs))
        return update(engine, shard, inputs)

    def several(shards: Any) -> None:
        seen.extend(shards)
        together(shards)

    monkeypatch.setattr(stepper, "update", one)
    monkeypatch.setattr(stepper, "update_together", several)
    return seen


@needs_kernel
def test_rounded_weights_of_an_early_update_are_those_of_an_ordinary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELIXIR_COMPILE", "wait")
    plan = chain_plan(chain(1), unified_dtype="bfloat16")
    (mine, theirs), kept = zip(
        *[steps(chain(1), each, [NEVER] * 3, {}, _hybrid) for each in (plan, make_ordinary(plan))], strict=True
    )
    assert any(kept[0])
    assert not any(kept[1])
    assert not [name for name, value in mine[0].items() if not torch.equal(value, theirs[0][name])]


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
        pair.train(3)
        pair.assert_same_weights()
        assert calls == [len(list(it.model.parameters()))] * 3


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
        assert {shard.state for shard in found.shards} == {ShardState.EARLY}
        pair.step()
        assert {shard.state for shard in found.shards} == {ShardState.STEADY}
        assert found.early.kept == len(list(found.shards))


def test_states_that_have_left_do_not_come_back() -> None:
    it = case("gpt2", layers=1)
    module = ElixirModule(it.model, make_plan(it, "streamed"), device=gpu.DEVICE)
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(it.model.parameters()))
    shards = list(inside.shards(optimizer))
    assert {shard.state for shard in shards} == {ShardState.STEADY}
    inside.stepper(module).give_up_states()
    for shard in shards:
        with pytest.raises(StateError, match="cannot go from 'left' to 'steady'"):
            shard.to(ShardState.STEADY)
    inside.stepper(module).take_states()


@pytest.mark.parametrize(
    ("mode", "options", "steps_parameters", "fuses"),
    [
        ("resident", {}, True, False),
        ("resident", {"use_fused_kernels": True}, True, False),
        ("resident", {"moments": "8bit"}, False, True),
        ("resident", {"unified_dtype": "bfloat16"}, False, False),
        ("streamed", {}, False, False),
        ("streamed", {"use_fused_kernels": True}, False, True),
        ("streamed", {"moments": "8bit"}, False, True),
        ("streamed", {"unified_dtype": "bfloat16"}, False, False),
    ],
)
def test_parameters_are_stepped_themselves_if_their_weights_and_states_are_resident(
    mode: str, options: dict[str, Any], steps_parameters: bool, fuses: bool
) -> None:
    it, planning = chain(2), {name: value for name, value in options.items() if name != "use_fused_kernels"}
    module = ElixirModule(
        it.model,
        make_plan(it, mode, split_number=2, **planning),
        device="cpu",
        use_fused_kernels="use_fused_kernels" in options,
    )
    first, second = (
        ElixirOptimizer(module, torch.optim.AdamW(layer.parameters(), lr=1e-3)) for layer in it.model.layers
    )
    for optimizer in (first, second):
        for shard in inside.shards(optimizer):
            assert shard.is_concerned == bool(shard.segments)
            assert all((segment.weights is segment.source) == steps_parameters for segment in shard.segments)
            assert shard.copied == ([] if steps_parameters else [segment.slot for segment in shard.segments])
            assert isinstance(shard.states, FusedStates) == fuses
            rounded = mode == "streamed" and "unified_dtype" in options
            assert shard.states.weights is (shard.chunk.shard if rounded else None)
            assert shard.accepts_tensor_factor == (mode == "resident" and not fuses)


class OfAUser(torch.optim.SGD):
    """May do anything in a step without gradients."""


@pytest.mark.parametrize(("kind", "predictable"), [(torch.optim.SGD, True), (OfAUser, False)])
def test_only_steps_of_known_classes_without_gradients_are_left_out(kind: Any, predictable: bool) -> None:
    it = chain(2)
    module = ElixirModule(it.model, make_plan(it, "streamed", split_number=2), device="cpu")
    optimizer = ElixirOptimizer(module, kind(it.model.layers[0].parameters(), lr=0.1, momentum=0.9))
    mine, other = sorted(inside.shards(optimizer), key=lambda shard: not shard.segments)
    assert (mine.skips_without_gradients, other.skips_without_gradients) == (predictable, True)
    assert (mine.has_stepped, mine.has_all_states) == (False, False)
    optimizer.backward(it.loss(module, it.inp))
    optimizer.step()
    module.settle()
    assert (mine.has_stepped, mine.has_all_states) == (True, predictable)
    assert inside.stepper(optimizer).has_states
    module.close()
    assert not inside.stepper(optimizer).has_states
