"""`AnyStepper`, `StepObserver`, `RunningPass` and `StateReader`: the engine's views of what is built on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from elixir.chunk.chunk import Chunk
from elixir.plan.plan import Plan


class AnyStepper(Protocol):
    """The engine's view of an optimizer; see `elixir.wrapper.step.stepper.Stepper`."""

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The parameters that it steps."""

    @property
    def loops(self) -> bool:
        """Whether torch's Adam steps one weight after the other, with tensors as large as each."""

    @property
    def wants_norm(self) -> bool:
        """Whether the next step needs the norm of the gradients, as far as can be known during backward."""

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Global norm of the last step's gradients, before clipping; None if the step needed none."""

    @property
    def averages(self) -> bool:
        """Whether it keeps averages of the weights (``ema=``)."""

    def fill_averages(self, chunk: Chunk, out: torch.Tensor) -> None:
        """Copies its averages of a trained chunk's weights into `out`, flat like this rank's shard."""

    def check_plan(self, plan: Plan) -> None:
        """Raises `InputError` if this optimizer cannot step under a plan."""

    def update_early(self, chunk: Chunk) -> None:
        """Updates a chunk during backward, next to the old states; its gradients are on their way home."""

    def give_up_states(self) -> None:
        """Takes the states off the chunks; no chunk is stepped until `take_states`."""

    def take_states(self) -> None:
        """Loads the states that were given up, under the engine's current plan."""

    def drop_states(self) -> None:
        """Frees the states, after the run."""

    def gradients_scaled(self, by: float) -> None:
        """Notes that the next gradients are multiplied by a loss scale, and added to existing ones."""

    def gradients_cleared(self) -> None:
        """Notes that gradients were dropped, and that no limit holds any more."""

    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool, others: Sequence[Any] = ()) -> torch.Tensor:
        """Returns the norm of these gradients and those of `others`, whose next steps clip to `max_norm`, too."""


class StepObserver(Protocol):
    """The engine's view of who counts its steps; see `elixir.wrapper.account.step_account`."""

    def step_over(self, skipped: bool) -> None:
        """Notes that an optimizer has stepped, or has skipped its step after an overflow."""

    def explain(self, error: BaseException) -> None:
        """Adds to an error of a step what is known of its cause."""

    def spare_host_bytes(self) -> int:
        """Host memory that is free for this rank, less what its next steps take."""


class RunningPass(Protocol):
    """The engine's view of a pass of several micro-batches; see `elixir.wrapper.one_pass.micro_batch`."""

    def used(self, parameters: Iterable[nn.Parameter]) -> None:
        """Notes that weights are used, other than by a call of a layer, or that the model's forward is over."""

    def is_done(self, parameter: nn.Parameter) -> bool:
        """Whether all gradients of a parameter have come in this pass."""

    def keeps(self, parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
        """Takes a part of a gradient that is to be summed in another order; returns whether it is one."""


# --- who reads states ------------------------------------------------------------------------------------------------
# `StateReader`: reads the states of a run while training goes on, such as a checkpoint that is being written.


class StateReader(Protocol):
    """A reader of live states. It has a hook on every chunk that it still reads (`Chunk.before_write`)."""

    def let_go(self) -> None:
        """Waits until it reads no live memory, since chunks are about to be replaced."""

    def close(self) -> Exception | None:
        """Waits until everything is written; returns an unreported error."""
