"""`LossScale`: the factor of the loss that keeps small gradients from being lost in float16."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from elixir.errors import InputError

SMALLEST = 1.0
"""Overflows do not bring the scale below this: a loss that overflows unscaled is not a matter of scale."""


class LossScale:
    """A factor that is halved when gradients overflow and doubled after enough steps without; 1 outside of float16.

    All optimizers of a module share it, since each backward makes gradients for all of them. As with one
    `torch.amp.GradScaler`, each skips its step if its own gradients overflowed, but the steps after a backward count
    once, and the scale is halved if any was skipped. They may step at different times and the scale may change in
    between, so each remembers the scale of its gradients.

    Args:
        used: whether losses are scaled at all.
        initial: the first scale.
        growth_interval: steps without overflow after which it doubles.

    Raises:
        InputError: a number is out of range.
    """

    def __init__(self, used: bool, initial: float, growth_interval: int) -> None:
        if not 0 < initial < math.inf:
            raise InputError(f"initial_scale must be finite and above 0, got {initial!r}")
        if growth_interval < 1:
            raise InputError(f"growth_interval must be 1 step or more, got {growth_interval!r}")
        self.used = used
        self.value = float(initial) if used else 1.0
        self._growth_interval = growth_interval
        self._good_steps = 0
        self._is_judged = False  # whether a step since the last backward has counted

    def state(self) -> dict[str, float | int]:
        """The values that `load` restores."""
        return {"value": self.value, "good_steps": self._good_steps, "growth_interval": self._growth_interval}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned.

        Raises:
            InputError: `state` is something else.
        """
        try:
            loaded = LossScale(True, float(state["value"]), int(state["growth_interval"]))
            good_steps = int(state["good_steps"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"not the state of a loss scale: {error}") from None
        self.value, self._growth_interval, self._good_steps = loaded.value, loaded._growth_interval, good_steps

    def begins_backward(self) -> None:
        """Notes that new gradients are made: the next step of any optimizer counts."""
        self._is_judged = False

    def stepped(self, grad_scale: float) -> None:
        """Counts a step whose gradients, of loss scale `grad_scale`, were finite, unless one since the last backward
        has counted. A smaller scale proves nothing."""
        if self._is_judged or grad_scale < self.value:
            return
        self._is_judged = True
        self._good_steps += 1
        if self.used and self._good_steps % self._growth_interval == 0:
            self.value *= 2

    def overflowed(self, grad_scale: float) -> None:
        """Halves the scale: gradients of loss scale `grad_scale` were not finite. Two calls for one backward count
        once."""
        self.value = min(self.value, max(grad_scale / 2, SMALLEST))
        self._good_steps, self._is_judged = 0, True
