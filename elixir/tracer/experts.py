"""Expert choices for mixture-of-experts models, whose router scores a trace does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elixir.errors import InputError, TraceError
from elixir.tracer.shadows import Shadows


class Routing(Protocol):
    """Says which entries `topk` picks where the scores are unknown."""

    assumption: str | None
    """What the trace had to suppose, once it was asked."""

    def route(self, shadows: Shadows, scores: torch.Tensor, indices: torch.Tensor) -> None:
        """Give `indices` (meta, the second result of `topk` over the last axis of `scores`) known values."""


class BalancedRouting:
    """Every expert gets the same number of tokens, apart from a share that all go to the first ones.

    Args:
        skew: share of the tokens, 0 to 1, that choose the first experts instead of their own.
    """

    def __init__(self, skew: float = 0.0) -> None:
        if not 0.0 <= skew <= 1.0:
            raise InputError(f"routing skew is a share of the tokens between 0 and 1, got {skew}")
        self._skew = skew
        self.assumption: str | None = None

    def route(self, shadows: Shadows, scores: torch.Tensor, indices: torch.Tensor) -> None:
        """Token t takes experts t*k, t*k+1, ... modulo their number."""
        experts, chosen = scores.shape[-1], indices.shape[-1]
        tokens = indices.numel() // chosen if chosen else 0
        first = torch.arange(tokens) * chosen
        first[: int(tokens * self._skew)] = 0
        values = (first[:, None] + torch.arange(chosen)[None, :]) % max(experts, 1)
        shadows.attach(indices, values.view(indices.shape))
        kind = "balanced" if self._skew == 0 else f"skewed by {self._skew:g}"
        self.assumption = f"{kind} routing of tokens over {experts} experts, {chosen} per token"


class RoutingRecorder(TorchDispatchMode):
    """While open, writes down which experts a real step chooses: ``choices`` is what `RecordedRouting` takes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.choices: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            self.choices.append(result[1].detach().cpu().clone())
        return result


class RecordedRouting:
    """The choices of a real run, in the order in which it called `topk`.

    Args:
        choices: one int64 tensor per call, of the shape that `topk` gave; see `RoutingRecorder`.
    """

    assumption: str | None = None

    def __init__(self, choices: Sequence[torch.Tensor]) -> None:
        self._choices = list(choices)
        self._next = 0

    def route(self, shadows: Shadows, scores: torch.Tensor, indices: torch.Tensor) -> None:
        """Take the next recorded choice."""
        if self._next >= len(self._choices):
            raise TraceError(f"the step calls topk more often than the {len(self._choices)} recorded choices")
        values = self._choices[self._next]
        self._next += 1
        if values.shape != indices.shape:
            raise TraceError(f"recorded choice {self._next} has shape {values.shape}, the step wants {indices.shape}")
        shadows.attach(indices, values)
