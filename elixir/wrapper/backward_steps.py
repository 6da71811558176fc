"""Updates on the host that begin while backward still runs, each as soon as its chunk's gradients are on their way home.

What is stepped so early cannot wait for what is known after backward only: there is no clipping and no loss scale, a
backward is the only one of its step, and until `ElixirOptimizer.step` the weights are neither the old ones nor the new.
Whatever would look at them, or go back, is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten

from elixir.chunk.chunk import Chunk
from elixir.chunk.lanes import Ticket
from elixir.errors import InputError
from elixir.wrapper.chunk_updates import update

if TYPE_CHECKING:
    from elixir.wrapper.chunk_optimizer import Arrived
    from elixir.wrapper.optimizer import ElixirOptimizer

STEP_OR_ACCUMULATE = (
    "call step() first (where batches are accumulated, run all backwards but the last inside no_sync())"
)
"""Instead of going on to the next batch."""
STEP_OR_LEAVE_OUT = "call step() first (a step that shall be left out must be left out before its backward)"
"""Instead of giving up a step."""


class BackwardSteps:
    """Of one optimizer.

    Args:
        optimizer: whose parts are stepped.
    """

    def __init__(self, optimizer: ElixirOptimizer) -> None:
        self._optimizer = optimizer
        self._begun: dict[int, Arrived] = {}
        self._hyperparameters: list[dict[str, Any]] = []

    def begin(self, chunk: Chunk, home: Ticket) -> None:
        """Step a chunk all of whose gradients have come.

        Args:
            chunk: one that the plan lets step in backward.
            home: of its gradients' arrival.
        """
        optimizer = self._optimizer
        if optimizer.clip_limit or optimizer.module.uses.gathered:
            return  # the norm must be known, or weights must stay until gathered() is left: `step` does it
        part = optimizer.part_of(chunk)
        if not self._begun:
            self._hyperparameters = optimizer.hyperparameters()
        with torch.no_grad():
            part.follow_writes()
            arrived = part.gradients(_names(chunk))
            self._begun[chunk.index] = arrived
            chunk.stepping = True
            update(optimizer.module, part, arrived, 1.0, self._hyperparameters, behind=[home])
            if chunk.whole is not None:
                # Weights on the device are written to from now on: autograd would notice a node that still needs them.
                part.mark_changed(arrived, _names(chunk))

    def finish(self, hyperparameters: list[dict[str, Any]]) -> dict[int, Arrived]:
        """What has begun, by chunk; it is part of the optimizer's step now.

        Raises:
            InputError: hyperparameters have been changed since backward; nothing has been finished.
        """
        if self._begun and not _same(hyperparameters, self._hyperparameters):
            raise InputError(
                "the options of the optimizer, such as its learning rate, have been changed between backward and step(), but "
                "this plan steps during backward: change them after step() or before backward, or plan with "
                "step_in_backward=False"
            )
        begun, self._begun = self._begun, {}
        for index, arrived in begun.items():
            chunk = self._optimizer.module.chunks[index]
            chunk.stepping = False
            if chunk.whole is None:  # else it was when they began to be written to
                self._optimizer.part_of(chunk).mark_changed(arrived, _names(chunk))
        return begun

    def refuse(self, what: str, instead: str = "call step() first") -> None:
        """Raise `InputError` between backward and `ElixirOptimizer.step`.

        Args:
            what: is not possible there.
            instead: what to do under the same plan.
        """
        if self._begun:
            raise InputError(
                f"{what} between backward and step() would meet weights that are stepped in part, since this plan steps "
                f"during backward: {instead}, or plan with step_in_backward=False"
            )


def clips_in_backward() -> InputError:
    """For an optimizer that would clip under a plan that steps during backward."""
    return InputError(
        "clipping needs the norm of all gradients, which is known after backward only, but this plan steps during backward; "
        "leave max_norm out, or plan with step_in_backward=False"
    )


def _names(chunk: Chunk) -> set[str]:
    return {slot.name for slot in chunk.slots}


def _same(one: Any, other: Any) -> bool:
    values, form = tree_flatten(one)
    others, other_form = tree_flatten(other)
    return form == other_form and all(map(_equal, values, others))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)
