"""Updates on the host that begin while backward still runs, each as soon as its chunk's gradients are on their way
home.

What is stepped so early cannot wait for what is known after backward only: there is no clipping and no loss scale, a
backward is the only one of its step, and until `ElixirOptimizer.step` the weights are neither the old ones nor the new.
Whatever would look at them, or go back, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elixir.chunk.chunk import Chunk
from elixir.chunk.lanes import Ticket
from elixir.errors import InputError
from elixir.plan import Plan
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.chunk_optimizer import ChunkOptimizer
from elixir.wrapper.step.elementwise import same_options
from elixir.wrapper.step.segments import Arrived
from elixir.wrapper.step.updates import update
from elixir.wrapper.step.user_class import UserOptimizer


class EarlySteps:
    """Updates of one optimizer that begin in backward, until its `step` takes them over.

    Args:
        engine: of the chunks.
        user: the optimizer whose options count.
        parts: steps each chunk, by index.
    """

    def __init__(self, engine: Engine, user: UserOptimizer, parts: Mapping[int, ChunkOptimizer]) -> None:
        self._engine, self._user, self._parts = engine, user, parts
        self._begun: dict[int, Arrived] = {}
        self._hyperparameters: list[dict[str, Any]] = []

    def begin(self, chunk: Chunk, home: Ticket) -> None:
        """Step a chunk all of whose gradients have come.

        Args:
            chunk: one that the plan lets step in backward.
            home: of its gradients' arrival.
        """
        part = self._parts[chunk.index]
        if not self._begun:
            self._hyperparameters = self._user.hyperparameters()
        self._engine.phase.begin_early()
        with torch.no_grad():
            part.follow_writes()
            arrived = part.gradients(_names(chunk))
            self._begun[chunk.index] = arrived
            chunk.stepping = True
            update(self._engine, part, arrived, 1.0, self._hyperparameters, behind=[home])
            if chunk.whole is not None:
                # Weights on the device are written to from now on: autograd would notice a node that still needs them.
                part.mark_changed(arrived, _names(chunk))
                chunk.hold_placeholders()  # code that no torch function announces must not read them either

    def finish(self, hyperparameters: list[dict[str, Any]]) -> dict[int, Arrived]:
        """The updates that have begun, by chunk; they are part of the optimizer's step now.

        Raises:
            InputError: hyperparameters have been changed since backward; nothing has been finished.
        """
        if self._begun and not same_options(hyperparameters, self._hyperparameters):
            raise InputError(
                "the options of the optimizer, such as its learning rate, have been changed between backward and "
                "step(), but "
                "this plan steps during backward: change them after step() or before backward, or plan with "
                "step_in_backward=False"
            )
        begun = self.abandon()
        for index, arrived in begun.items():
            chunk = self._engine.chunks[index]
            if chunk.whole is None:  # else it was when they began to be written to
                self._parts[index].mark_changed(arrived, _names(chunk))
        return begun

    def abandon(self) -> dict[int, Arrived]:
        """Forget what has begun, as when one of the updates has failed; the others go on. Gives it."""
        begun, self._begun = self._begun, {}
        for index in begun:
            self._engine.chunks[index].stepping = False
        if begun:
            self._engine.phase.end_early()
        return begun


def check_early(plan: Plan, *, clips: bool, optimizers: int) -> None:
    """Refuse a plan that steps in backward where gradients are clipped, or several optimizers step; `InputError`."""
    if plan.steps_in_backward and clips:
        raise clips_in_backward()
    if plan.steps_in_backward and optimizers > 1:
        raise InputError(
            "a plan that steps during backward is for a module with one optimizer; give that one all parameters, or "
            "plan with step_in_backward=False"
        )


def clips_in_backward() -> InputError:
    """For an optimizer that would clip under a plan that steps during backward."""
    return InputError(
        "clipping needs the norm of all gradients, which is known after backward only, but this plan steps during "
        "backward; "
        "leave max_norm out, or plan with step_in_backward=False"
    )


def _names(chunk: Chunk) -> set[str]:
    return {slot.name for slot in chunk.slots}
