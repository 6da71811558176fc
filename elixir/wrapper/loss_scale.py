"""`LossScale`: what the loss is multiplied by, so that small gradients are not lost in float16."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from elixir.errors import InputError

SMALLEST = 1.0
"""Overflows do not bring it below this: what overflows unscaled is no matter of scale."""


class LossScale:
    """Halved where gradients overflowed, doubled after enough steps without; 1 with every other dtype.

    One for all optimizers of a module, since each backward makes gradients for all of them. They may step at different
    times and the scale may change in between, so each remembers by which scale its gradients were made.

    Args:
        used: whether there is any scaling.
        initial: to begin with.
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

    def state(self) -> dict[str, float | int]:
        """Everything that `load` goes on from."""
        return {"value": self.value, "good_steps": self._good_steps, "growth_interval": self._growth_interval}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave.

        Raises:
            InputError: it is something else.
        """
        try:
            loaded = LossScale(True, float(state["value"]), int(state["growth_interval"]))
            good_steps = int(state["good_steps"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"not the state of a loss scale: {error}") from None
        self.value, self._growth_interval, self._good_steps = loaded.value, loaded._growth_interval, good_steps

    def stepped(self, made_by: float) -> None:
        """Gradients that a scale of `made_by` had made were finite; of a smaller scale they tell nothing."""
        if made_by < self.value:
            return
        self._good_steps += 1
        if self.used and self._good_steps % self._growth_interval == 0:
            self.value *= 2

    def overflowed(self, made_by: float) -> None:
        """Gradients that a scale of `made_by` had made were not finite. Said twice of one backward, it counts once."""
        self.value = min(self.value, max(made_by / 2, SMALLEST))
        self._good_steps = 0
