"""Names, states and moments of optimizers that are not known are refused, with what is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from elixir.errors import InputError
from elixir.kernels import HybridAdam
from elixir.optimizer_states import (
    StateSize,
    check_adam,
    check_kind,
    family_of,
    moments_of,
    optimizer_name,
)


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(3))]


class Greedy(torch.optim.Optimizer):
    """Keeps four states, more than any family that is known."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each] = {name: torch.zeros_like(each) for name in "abcd"}


class Failing(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("needs all weights")


def hybrids(*moments: Any) -> torch.optim.Optimizer:
    """A `HybridAdam` with one group for each kind of moments."""
    groups = [{"params": [each], "moments": kind} for each, kind in zip(weights(), moments, strict=False)]
    return HybridAdam(groups)


@pytest.mark.parametrize(
    ("raises", "says"),
    [
        (lambda: StateSize(-1), "'block_bytes' must be finite and at least 0"),
        (lambda: StateSize(4, 0), "'block_numel' must be a positive finite number"),
        (lambda: check_kind("4bit"), "unknown kind of moments '4bit'; .*8bit"),
        (lambda: check_adam("SGD", "8bit"), "found the optimizer SGD; leave moments"),
        (lambda: optimizer_name("Lamb"), "unknown optimizer type 'Lamb'"),
        (lambda: moments_of(hybrids("8bit", "bfloat16")), "have 8bit and bfloat16; give them one"),
        (lambda: moments_of(hybrids("8bit"), "bfloat16"), "make it with moments='bfloat16'"),
        (lambda: family_of(Greedy(weights())), "keeps 16 bytes of state per element, more than any family"),
        (lambda: family_of(Failing(weights())), r"Failing cannot step one weight by itself \(needs all weights\)"),
    ],
)
def test_what_is_not_known_is_refused(raises: Callable[[], Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        raises()
