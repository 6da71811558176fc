"""A model under a plan gives the bits of plain PyTorch: losses of every step, weights and buffers after ten of AdamW."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.common.parity import ALL, MODES, Pair, case, make_plan
from tests.common.tiny_models import FAMILIES

CHECKPOINTS = ("none", "reentrant", "non-reentrant")
_EVERY = [(name, ck, mode) for name in ALL for ck in (CHECKPOINTS if name in FAMILIES else ("none",)) for mode in MODES]
# Each model in one mode at least, the modes and the checkpoints in turn.
_SAMPLE = [(name, CHECKPOINTS[i % 3] if name in FAMILIES else "none", MODES[i % 2]) for i, name in enumerate(ALL)]
_REST = [combination for combination in _EVERY if combination not in _SAMPLE]


def _check(name: str, checkpoint: str, mode: str, *, steps: int = 10, **options: bool) -> None:
    it = case(name, checkpoint)
    with Pair(it, make_plan(it, mode), **options) as pair:
        losses = pair.train(steps)
        pair.assert_same_weights()
        assert losses[0] != losses[-1]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("name", "checkpoint", "mode"), _SAMPLE)
def test_same_bits(name: str, checkpoint: str, mode: str) -> None:
    _check(name, checkpoint, mode, steps=5)


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize(("name", "checkpoint", "mode"), _SAMPLE)
def test_same_bits_when_nothing_unpinned_stays(name: str, checkpoint: str, mode: str) -> None:
    _check(name, checkpoint, "mixed" if mode == "streamed" else "streamed", steps=5, evict_always=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "checkpoint", "mode"), _REST)
def test_same_bits_of_every_model(name: str, checkpoint: str, mode: str) -> None:
    _check(name, checkpoint, mode)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "checkpoint", "mode"), _EVERY)
def test_same_bits_of_every_model_when_nothing_unpinned_stays(name: str, checkpoint: str, mode: str) -> None:
    _check(name, checkpoint, mode, evict_always=True)


@pytest.mark.slow
def test_experts_one_by_one_that_may_get_no_tokens() -> None:
    it = case("mixtral", experts_implementation="eager", num_local_experts=8)
    it = replace(it, inp={name: value[:1, :2] for name, value in it.inp.items()})
    with Pair(it, make_plan(it, "streamed")) as pair:
        pair.train(10)


def test_dropout_draws_the_same() -> None:
    it = case("opt", "reentrant", dropout=0.2)
    with Pair(it, make_plan(it, "streamed")) as pair:
        for seed in range(4):
            torch.manual_seed(seed)
            mine = it.loss(pair.module, pair.case.inp)
            pair.optimizer.backward(mine)
            torch.manual_seed(seed)
            plain = it.loss(pair.plain, pair.case.inp)
            plain.backward()
            assert torch.equal(mine, plain)
            pair.step()
