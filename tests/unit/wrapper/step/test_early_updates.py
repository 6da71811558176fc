"""New states that are made while backward runs: kept or made again, no bit of what is trained changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import gpu, inside
from tests.common.debug import debugged
from tests.common.early import (
    HOMES,
    attempts,
    chain,
    updating_early,
)
from tests.common.parity import Case, Pair, assert_as_planned, case
from tests.common.tiny_models import FAMILIES

_QUICK = {("gpt2", "mixed"), ("mixtral", "streamed")}
_EVERY = [
    pytest.param(family, homes, marks=() if (family, homes) in _QUICK else pytest.mark.slow)
    for family in FAMILIES
    for homes in HOMES
]
every_home = pytest.mark.parametrize("homes", HOMES)


def chain_plan(it: Case, homes: str = "streamed", **options: Any) -> Any:
    return updating_early(it, homes, split_number=len(it.model.layers), **options)  # type: ignore[arg-type]


def settled(pair: Pair) -> None:  # all new states are made, before the step
    for ticket in inside.updates(pair.module):
        ticket.synchronize()


def train(pair: Pair, norms: list[float | None], steps: int = 1) -> None:
    for norm in norms:
        for _ in range(steps):
            pair.max_norm = norm
            pair.optimizer.max_norm = norm
            pair.train(1)


@pytest.mark.parametrize(("family", "homes"), _EVERY)
def test_same_bits_as_plain_pytorch(family: str, homes: str) -> None:
    it = case(family, "non-reentrant")
    with Pair(it, updating_early(it, homes)) as pair:
        train(pair, [None, 1e9])
        for norm, kept in ((1e9, True), (1e-3, False), (1e9, True), (None, True)):
            pair.max_norm = pair.optimizer.max_norm = norm
            pair.backward()
            assert attempts(pair.module)
            pair.step()
            made = inside.early_counts(pair.module)
            assert made[0]
            assert made[1] == (made[0] if kept else 0)
            assert not attempts(pair.module)
        pair.assert_same_weights()
        assert_as_planned(pair.module, ())


# --- what happens between backward and step -----------------------------------------------------------------------------


def _fails(pair: Pair) -> None:
    with contextlib.suppress(ZeroDivisionError):
        pair.module.module.layers[0].register_forward_pre_hook(_raise_once())
        pair.module(**pair.case.inp)


def _raise_once() -> Callable[..., None]:
    left = [1]

    def hook(*_: Any) -> None:
        if left:
            left.pop()
            raise ZeroDivisionError

    return hook


def _writes(pair: Pair) -> None:
    with torch.no_grad(), pair.module.gathered(write=True):
        for mine, plain in zip(pair.module.module.parameters(), pair.plain.parameters(), strict=True):
            mine.mul_(0.5)
            plain.mul_(0.5)


@every_home
def test_no_step_after_backward(homes: str) -> None:
    it = chain()
    with Pair(it, chain_plan(it, homes), max_norm=1e9) as pair:
        pair.train(1)
        for _ in range(2):
            pair.backward()
            assert attempts(pair.module)
            pair.optimizer.zero_grad()
            pair.plain_optimizer.zero_grad()
        pair.train(1)
        pair.backward()
        state = pair.plain.state_dict()
        released = pair.module.release()
        found = released.state_dict()  # on the host, whatever the device
        assert not [name for name, value in found.items() if not torch.equal(value.cpu(), state[name].cpu())]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)


def steps(it: Case, plan: Any, norms: list[float], running: dict[str, Any], make: Any = _adamw) -> Any:
    """Weights and states after some steps, and how many chunks' new states were kept."""
    options = debugged({k: v for k, v in running.items() if k != "initial_scale"}, poison=True)
    module = ElixirModule(it.model, plan, device=gpu.DEVICE, **options)
    optimizer = ElixirOptimizer(
        module,
        make(module.module),
        initial_scale=running.get("initial_scale", 2**10),
    )
    kept = []
    for norm in norms:
        optimizer.max_norm = norm
        optimizer.backward(it.loss(module, it.inp))
        optimizer.step()
        kept.append(module.last_report.early.kept)
        optimizer.zero_grad()
    state = module.state_dict(), optimizer.state_dict()["state"]
    module.close()
    return state, kept


_OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bfloat16": ({"unified_dtype": "bfloat16"}, {}),
    "fused": ({}, {"use_fused_kernels": {"cross_entropy": "plain"}}),
    "fused bfloat16": ({"unified_dtype": "bfloat16"}, {"use_fused_kernels": {"cross_entropy": "plain"}}),
    "8bit": ({"moments": "8bit"}, {}),
    "bfloat16 moments": ({"moments": "bfloat16", "unified_dtype": "bfloat16"}, {}),
    "float16": ({"unified_dtype": "float16"}, {}),
    "float16 that overflows": ({"unified_dtype": "float16"}, {"initial_scale": 2.0**40}),
}
