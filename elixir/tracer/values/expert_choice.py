"""Expert choices for mixture-of-experts models, whose router scores a trace does not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from elixir.errors import InputError, TraceError
from elixir.torch_private import TorchDispatchMode
from elixir.tracer.values.shadows import Shadows

aten = torch.ops.aten

MAX_EXPERTS = 1 << 14
"""A choice among more is one of words, pixels or codes, and nobody spreads those evenly."""


@dataclass(frozen=True)
class ExpertChoice:
    """One operator that picks entries of floating scores along an axis."""

    scores: torch.Tensor
    indices: torch.Tensor
    """Its result that says which, int64."""
    axis: int
    """Axis of the scores."""
    keeps_axis: bool
    """Whether the indices have that axis too; otherwise they name one entry each."""
    ordered: bool = False
    """Whether all entries are listed by their score, of which the code takes as many as it wants."""

    @property
    def experts(self) -> int:
        """How many there are to choose from."""
        return int(self.scores.shape[self.axis])

    @property
    def per_token(self) -> int:
        """How many are chosen for each."""
        return int(self.indices.shape[self.axis]) if self.keeps_axis else 1


def choice_of(func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> ExpertChoice | None:
    """The choice that an operator makes by floating scores; None where it makes none.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: as well.
        results: the tensors it gave.
    """
    if func not in CHOOSES or not results or not args[0].is_floating_point() or not args[0].dim():
        return None
    names = [argument.name for argument in func._schema.arguments]
    scores, given = args[0], {**dict(zip(names, args, strict=False)), **kwargs}
    axis = given.get("dim", -1)
    if axis is None:  # the largest of all entries is no choice for each token
        return None
    axis %= scores.dim()
    indices = results[-1]  # after the chosen scores, if the operator gives these as well
    return ExpertChoice(scores, indices, axis, given.get("keepdim", func not in _PICK_ONE), func in _SORT)


_PICK_ONE = frozenset({aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim})
_SORT = frozenset({aten.sort.default, aten.sort.stable})
CHOOSES = _PICK_ONE | _SORT | {aten.topk.default, aten.multinomial.default}
"""Operators that pick entries; those of one entry leave the axis out unless they are asked to keep it."""


class Routing(Protocol):
    """Chooses the entries that a router picks if its scores are unknown."""

    def route(self, shadows: Shadows, call: object, choice: ExpertChoice) -> None:
        """Gives the indices of a choice known values, if it can.

        Args:
            shadows: which are known.
            call: the same object while one call of the innermost running module lasts.
            choice: what was chosen.
        """


class BalancedRouting:
    """Every expert gets the same number of tokens, apart from a share that all go to the first ones.

    Args:
        skew: share of the tokens, 0 to 1, that choose the first experts instead of others.
    """

    def __init__(self, skew: float = 0.0) -> None:
        if not 0.0 <= skew <= 1.0:
            raise InputError(f"routing skew is a share of the tokens between 0 and 1, got {skew}")
        self._skew = skew
        self._call: object = None
        self._taken: dict[torch.Size, int] = {}

    def route(self, shadows: Shadows, call: object, choice: ExpertChoice) -> None:
        """Token t takes experts t*k, t*k+1, ... modulo their number.

        A router that asks for one expert after the other, among the scores that are left, gets another one each time.
        """
        experts, chosen = choice.experts, choice.per_token
        if shadows.known(choice.indices) is not None or not choice.indices.numel() or experts > MAX_EXPERTS:
            return
        tokens = choice.indices.numel() // chosen
        if not choice.keeps_axis and tokens == 1:
            return  # one number: a decision, which nothing balances
        taken = 0 if choice.keeps_axis else self._taken_before(call, choice.scores.shape)
        kind = "balanced" if self._skew == 0 else f"skewed by {self._skew:g}"
        each = "" if choice.ordered else f", {chosen} per token"
        shape, axis, ordered = choice.indices.shape, choice.axis if choice.keeps_axis else None, choice.ordered

        def values() -> torch.Tensor:
            first = torch.arange(tokens) * (1 if ordered else chosen)
            first[: int(tokens * self._skew)] = 0
            found = (first[:, None] + taken + torch.arange(chosen)[None, :]) % experts
            if axis is None:
                return found.view(shape)
            return found.view(*shape[:axis], *shape[axis + 1 :], chosen).movedim(-1, axis)

        shadows.attach(choice.indices, values, f"{kind} routing of tokens over {experts} experts{each}")

    def _taken_before(self, call: object, scores: torch.Size) -> int:
        """How many single choices over such scores this call of a module has made before."""
        if call is not self._call:
            self._call, self._taken = call, {}
        taken = self._taken.get(scores, 0)
        self._taken[scores] = taken + 1
        return taken


class RoutingRecorder(TorchDispatchMode):
    """While open, writes down which experts a real step chooses: ``choices`` is what `RecordedRouting` takes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.choices: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in CHOOSES:
            results = [result] if isinstance(result, torch.Tensor) else list(result)
            choice = choice_of(func, args, kwargs or {}, results)
            if choice is not None:
                self.choices.append(choice.indices.detach().cpu().clone())
        return result


class RecordedRouting:
    """The choices of a real run, in the order in which it made them.

    Args:
        choices: one int64 tensor per operator that chooses, such as `topk`, of the shape that it gave; see
            `RoutingRecorder`.
    """

    def __init__(self, choices: Sequence[torch.Tensor]) -> None:
        self._choices = list(choices)
        self._next = 0

    def route(self, shadows: Shadows, call: object, choice: ExpertChoice) -> None:
        """Takes the next recorded choice."""
        if self._next >= len(self._choices):
            raise TraceError(f"the step chooses by scores more often than the {len(self._choices)} recorded choices")
        values = self._choices[self._next]
        self._next += 1
        if values.shape != choice.indices.shape:
            raise TraceError(
                f"recorded choice {self._next} has shape {values.shape}, the step wants {choice.indices.shape}"
            )
        shadows.attach(choice.indices, values)
