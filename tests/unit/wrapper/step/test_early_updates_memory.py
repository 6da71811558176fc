"""Memory of new states that are made while backward runs: what is counted and predicted, and who still reads the old."""

from __future__ import annotations

from dataclasses import replace

import torch

from elixir.chunk.lanes import Emulation
from elixir.hardware.profile import preset
from elixir.search import simple_search
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import gpu, inside
from tests.common.early import attempts, chain
from tests.common.parity import Pair, take_step
from tests.unit.wrapper.step.test_early_updates import chain_plan, every_home, settled, train

SLOW_HOST = replace(preset("cpu"), host_adam_numel_per_s=1e5)
"""A host whose Adam takes longer than backward, so that the search plans early updates."""


def test_the_second_set_of_states_is_counted() -> None:
    it = chain()
    plan = chain_plan(it, "states", unified_dtype="bfloat16")
    module = ElixirModule(it.model, plan, device=gpu.DEVICE, use_fused_kernels={"cross_entropy": "plain"})
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.module.parameters(), lr=1e-3))
    arena = inside.arena(module)
    parts = arena.parts("host")
    numel = sum(chunk.numel for chunk in plan.chunks)
    assert parts["new_states"] == numel * (4 + 8 + 2)
    for _ in range(3):
        take_step(optimizer, it.loss(module, it.inp))
    assert arena.parts("host")["new_states"] == parts["new_states"]


def test_the_host_peak_that_was_predicted_is_never_passed() -> None:
    it = chain(6)
    step = {"step_fn": lambda model, inp: it.loss(model, inp).backward(), "inp": it.inp}
    plan = simple_search(it.model, 1, 6, shard_device="cpu", hardware=SLOW_HOST, early_updates=True, **step).plan
    new_states_bytes = plan.predicted.host_parts["new_states"]
    assert plan.predicted.host_peak_bytes <= plan.host_budget_bytes
    with Pair(it, plan, emulation=Emulation(delay_s=1e-3, seed=1)) as pair:
        train(pair, [None, 1e9, 1e-3, 0.05, 1e-3, 1e-3, 1e9, 1e9], steps=2)
        arena = inside.arena(pair.module)
        assert 0 < arena.parts("host")["new_states"] <= new_states_bytes
        assert arena.peak_bytes["host"] <= plan.predicted.host_peak_bytes


@every_home
def test_memory_of_old_states_is_poisoned_once_new_ones_are_kept(homes: str) -> None:
    """Poison shows if anything still reads the memory: it changes the bits that all tests here compare."""
    it = chain()
    with Pair(it, chain_plan(it, homes), max_norm=1e9) as pair:
        pair.train(1)
        stepper = inside.stepper(pair.module)
        old = {part.chunk.index: part.states.master for part in stepper.shards}  # type: ignore[attr-defined]
        pair.backward()
        begun = attempts(pair.module)
        pair.step()
        settled(pair)
        assert begun
        assert all(old[index].isnan().all() for index in begun)
        assert not any(part.states.master.isnan().any() for part in stepper.shards)  # type: ignore[attr-defined]
        pair.train(1)
