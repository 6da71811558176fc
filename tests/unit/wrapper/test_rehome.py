"""Chunks move to other homes between steps, and no number changes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from elixir.errors import InputError
from elixir.optimizer_states import moments_size
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.parity import (
    MODES,
    Pair,
    assert_as_planned,
    case,
    make_plan,
    rehomed,
    take_step,
)

OPTIMIZERS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("start", MODES)
def test_same_bits_whatever_the_homes(start: str, name: str) -> None:
    it = case("gpt2")
    plan = make_plan(it, "streamed")
    with Pair(it, rehomed(plan, start), optimizer=OPTIMIZERS[name]) as pair:
        for mode in (*MODES, "streamed", "resident", "mixed"):
            pair.train(2)
            pair.module.rehome(rehomed(plan, mode))
            pair.assert_same_weights()
        pair.train(2)
        pair.assert_same_weights()
        assert_as_planned(pair.module, ())


def fused_run(homes: list[str]) -> list[dict[str, torch.Tensor]]:
    """Weights after two steps in each of `homes`, and as each move has left them."""
    it = case("gpt2")
    plan = make_plan(it, "streamed")
    module = ElixirModule(it.model, rehomed(plan, homes[0]), device="cpu", use_fused_kernels=NO_MODEL_KERNELS)
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.1))
    seen = []
    for place, mode in enumerate(homes):
        if place:
            module.rehome(rehomed(plan, mode))
            seen.append(module.state_dict())
        for _ in range(2):
            take_step(optimizer, it.loss(module, it.inp))
        seen.append(module.state_dict())
    module.close()
    return seen


NO_MODEL_KERNELS = {"rms_norm": "plain", "swiglu": "plain", "cross_entropy": "plain"}
"""Fused kernels for the step alone."""


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(mine[name], value) for name, value in theirs.items())


@pytest.mark.sampled
@pytest.mark.parametrize("homes", itertools.permutations(("streamed", "states", "resident"), 2))
def test_under_fused_steps_a_move_changes_no_bit_and_later_steps_as_long_as_no_chunk_is_ordinary(
    homes: tuple[str, str],
) -> None:
    before, moved, after = fused_run(list(homes))
    assert same(moved, before)
    _, _, stayed = fused_run([homes[0]] * 2)
    for name, value in stayed.items():
        torch.testing.assert_close(after[name], value, rtol=1e-5, atol=5e-6)  # a step is 1e-3
    if "resident" not in homes:
        assert same(after, stayed)


def test_moves_only_where_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    it = case("opt")
    plan = make_plan(it, "streamed", optimizer_type="SGD")
    with Pair(it, plan, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)) as pair:
        pair.backward()
        with pytest.raises(InputError, match="zero_grad"):
            pair.module.rehome(rehomed(plan, "resident"))
        pair.step()
        with pair.module.gathered(), pytest.raises(InputError, match="gathered"):
            pair.module.rehome(plan)
        with pytest.raises(InputError, match="repack"):
            pair.module.rehome(make_plan(case("opt"), "streamed", split_number=3))
        short = {"optimizer": "AdamW", "moments": "bfloat16", "state_size": moments_size("bfloat16")}
        with pytest.raises(InputError, match="moments in bfloat16"):
            pair.module.rehome(replace(plan, **short))  # type: ignore[arg-type]
        assert "cannot be moved" not in caplog.text, "this was asked before"
        pair.module.rehome(rehomed(plan, "resident"))
        pair.train(1)
