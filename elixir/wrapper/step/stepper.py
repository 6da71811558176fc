"""`Stepper`: one optimizer of an engine. A step checks the gradients, sums their norm and updates every shard."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from elixir.chunk.chunk import Chunk
from elixir.errors import InputError
from elixir.hardware.host_share import core_list, rank_threads, use_threads
from elixir.hardware.process_memory import HEAP
from elixir.plan.plan import Plan
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.gradient_norm import Factor, GradientNorm, StepGradients
from elixir.wrapper.step.rules import Inputs
from elixir.wrapper.step.shard import SteppedShard, SteppedShards
from elixir.wrapper.step.update import EarlyUpdates, can_share, publish, update, update_together
from elixir.wrapper.step.user_optimizer import UserOptimizer

logger = logging.getLogger(__name__)


class Stepper:
    """Steps the chunks of one engine by the rule of one optimizer; an `elixir.wrapper.engine.AnyStepper`.

    Args:
        engine: the engine of the chunks.
        given: the user's optimizer.
        groups: returns its parameter groups.
        max_norm: the limit of the gradient norm; 0 for no clipping.
        host_threads: see `ElixirOptimizer`.
        changing: the result of `check_optimizer`.
        decay: see `UserOptimizer`.
    """

    def __init__(
        self,
        engine: Engine,
        given: torch.optim.Optimizer,
        groups: Callable[[], list[dict[str, Any]]],
        *,
        max_norm: float,
        host_threads: int | None,
        changing: frozenset[str],
        decay: float | None = None,
    ) -> None:
        self._engine = engine
        self.user = UserOptimizer(given, groups, engine, changing, decay)
        self.check_plan(engine.plan)
        self.shards = SteppedShards(engine, self.user)
        self.gradients = StepGradients(engine, self.user, self.shards)
        self.early = EarlyUpdates(engine, self.user, self.shards)
        self.host_threads = _set_host_threads(engine, host_threads)
        """Threads of CPU Adam."""
        self.norm = GradientNorm(engine, self.shards, max_norm, self.host_threads)
        try:
            with (
                engine.group.together("make its optimizer states"),
                engine.window.file.without_loss("no optimizer was made, and weights are as they were"),
            ):
                self.shards.make()
                self._prepare_early()
        except BaseException:
            self.shards.forget()
            raise
        self.shards.warn_if_slow()

    @property
    def parameters(self) -> set[torch.nn.Parameter]:
        """The parameters that this steps."""
        return set(self.user.group_of)

    @property
    def has_states(self) -> bool:
        """Whether this rank has states of a step."""
        return not self._engine.phase.closed and any(shard.has_stepped for shard in self.shards)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """See `ElixirOptimizer.grad_norm`."""
        return self.norm.last

    @property
    def loops(self) -> bool:
        """Whether torch's Adam steps one weight after the other, with tensors as large as each."""
        return self.user.loops

    @property
    def wants_norm(self) -> bool:
        """Whether the next step needs the norm of the gradients, as far as can be known during backward."""
        return self.norm.is_wanted

    @property
    def averages(self) -> bool:
        """See `AnyStepper`."""
        return self.user.decay is not None

    def fill_averages(self, chunk: Chunk, out: torch.Tensor) -> None:
        """See `AnyStepper`."""
        self.shards[chunk.index].fill_averages(out)

    def follow_writes(self) -> None:
        """Copies writes to resident weights since the last step to the masters, as the next step would."""
        for shard in self.shards:
            shard.writes.copy_to_masters()

    def check_plan(self, plan: Plan) -> None:
        """Raises `InputError` if this optimizer cannot step under a plan."""
        if plan.step.forward:
            raise InputError("the plan is for forward alone (optimizer_type=None); plan anew to train the model")
        self.user.check_plan(plan)

    def give_up_states(self) -> None:
        """Takes all states off the chunks; no chunk is stepped until `take_states`."""
        self.early.discard()
        self.shards.leave()

    def drop_states(self) -> None:
        """See `AnyStepper`."""
        self.shards.forget()

    def take_states(self) -> None:
        """Loads the states that were given up, under the engine's current plan."""
        self.shards.arrive()
        self._prepare_early()

    def _prepare_early(self) -> None:
        if self._engine.plan.has_early_updates:
            # The threads that fill the states allocate them. This thread waits: if memory is too small, wrapping must
            # raise.
            self._engine.lanes.host_adam.submit(self.early.prepare).synchronize()

    def update_early(self, chunk: Chunk) -> None:
        """Updates a chunk during backward, next to the old states; its gradients are on their way home."""
        if len(self._engine.steppers) == 1:  # a chunk has one second set, not one per optimizer
            with torch.no_grad():
                self.early.begin(chunk, self.gradients.scale)

    def gradients_scaled(self, by: float) -> None:
        """Notes that the next gradients are multiplied by a loss scale, and added to existing ones."""
        self.norm.refuse_stale()
        self.gradients.scaled(by)

    def gradients_cleared(self) -> None:
        """See `AnyStepper`."""
        self.gradients.cleared()
        self.norm.forget_limit()

    def clip_grad_norm_(
        self, max_norm: float, error_if_nonfinite: bool, others: Sequence[Stepper] = ()
    ) -> torch.Tensor:
        """See `ElixirOptimizer.clip_grad_norm_`.

        Args:
            max_norm: the limit.
            error_if_nonfinite: whether to refuse such a norm.
            others: further optimizers, whose gradients count and are clipped, too.
        """
        engine = self._engine
        engine.refuse_in_pass("clip_grad_norm_()")
        engine.forget_failed_backward()
        engine.errors.refuse_failed()
        engine.gradients.send_late()
        for each in (self, *others):
            each.norm.ask(float(max_norm))  # ranks compare its text, which for a tensor would name the device
            each.gradients.agree()
        used = set[str]().union(*(each.gradients.used for each in (self, *others)))
        norm = self.norm.sum(used, *(each.shards for each in others))
        for each in (self, *others) if others else ():
            each.norm.of_all = norm
        norm = norm / self.gradients.scale
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}, so they cannot be clipped")
        self.norm.last = norm.to(engine.device)
        return self.norm.last

    # --- a step ----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Steps all shards; returns False if the step was skipped after an overflow.

        Raises:
            InputError, StepError: see `ElixirOptimizer.step`.
        """
        engine = self._engine
        engine.refuse_step()
        self.user.refuse_other_parameters()
        self.gradients.refuse_unseen()
        self.early.stepping()
        engine.gradients.send_late()  # each update waits for its own gradients; this thread goes on
        if self.norm.is_shared and self.norm.max_norm and self.norm.of_all is None:
            first, *others = engine.steppers
            first.clip_grad_norm_(self.norm.max_norm, False, others)
        self.gradients.agree(self.norm.limit, stepping=True)
        grad_scale = self.gradients.scale
        factor = self._factor(grad_scale)
        self.norm.forget_limit()
        if factor is not None:
            options = self.user.hyperparameters()
            changes = self.user.step_changes(self.gradients.stepped_groups)
            engine.cache.invalidate()  # first, since no block may hold a weight whose version has changed
            self.user.apply_changes(changes)
            engine.take_back((shard.chunk, shard.copied) for shard in self.shards)
            self._update(factor, options, in_place=factor.clips and grad_scale == 1.0)
            engine.loss_scale.stepped(grad_scale)
        other = factor is None or factor.is_other_than(1.0 / grad_scale)
        self.early.stepped(other_factor=other, scale=grad_scale)
        if engine.observer is not None:
            engine.observer.step_over(skipped=factor is None)
        return factor is not None

    def _factor(self, grad_scale: float) -> Factor | None:
        """The factor of the gradients, or None if this step is skipped.

        Args:
            grad_scale: the loss scale by which the gradients were multiplied.
        """
        loss_scale, self.norm.last = self._engine.loss_scale, None
        if self.gradients.are_mixed:
            logger.info("a step is left out, since the loss scale has changed while its gradients were added up")
            return None
        if self.norm.limit is None and not loss_scale.used:
            return Factor(1.0 / grad_scale)
        norm = self.norm.sum(self.gradients.used) if self.norm.of_all is None else self.norm.of_all
        self.norm.forget()
        self.norm.last = norm if grad_scale == 1.0 else norm / grad_scale
        if loss_scale.used:
            norm = norm.cpu()  # whether this is a step at all depends on it
            if not math.isfinite(norm):
                loss_scale.overflowed(grad_scale)
                return None
        needs_number = loss_scale.used or not all(shard.accepts_tensor_factor for shard in self.shards)
        return self.norm.factor(grad_scale, norm, needs_number=needs_number)

    def _update(self, factor: Factor, options: list[dict[str, Any]], *, in_place: bool) -> None:
        """Updates all shards.

        The order: shards on the device whose ranks exchange matrices, since they would otherwise wait for the exchanges
        of the host; then all shards on the host, so that CPU Adam runs while this thread submits the rest; then the
        rest. If the norm is still on the device, this thread first submits the shards that accept the factor as a
        tensor, then waits for the number.
        """
        engine, order = self._engine, ((True, "device"), (True, "host"), (False, "host"), (False, "device"))
        shards = sorted(self.shards, key=lambda it: order.index((it.rule.turn is not None, it.chunk.plan.update_home)))
        if isinstance(factor.value, torch.Tensor):
            first = [shard for shard in shards if shard.accepts_tensor_factor]
            shards = [shard for shard in shards if not shard.accepts_tensor_factor]
            self._update_each(first, factor.value, options, in_place=in_place)
        if shards:
            self._update_each(shards, factor.number(), options, in_place=in_place)
        engine.window.flush()
        engine.weights_changed()

    def _update_each(
        self,
        shards: Iterable[SteppedShard],
        factor: float | torch.Tensor,
        options: list[dict[str, Any]],
        *,
        in_place: bool,
    ) -> None:
        """Updates shards in order, those that share one call at the end."""
        together: list[tuple[SteppedShard, Inputs]] = []
        for shard in shards:
            shard.writes.copy_to_masters()
            if not shard.is_concerned:
                continue
            inputs = shard.inputs(self.gradients.used, factor, options, in_place=in_place)
            if can_share(shard, inputs):
                together.append((shard, inputs))
                continue
            self._engine.lanes.counts.kept_chunks += update(self._engine, shard, inputs)
            self._updated(shard, inputs)
            HEAP.trim_if_over()
        update_together(together)
        for shard, inputs in together:
            self._updated(shard, inputs)

    def _updated(self, shard: SteppedShard, inputs: Inputs) -> None:
        if inputs.in_place:
            shard.gradients.forget_norms()
        self._engine.lanes.counts.network_bytes += shard.rule.exchanged_bytes
        shard.writes.record_step(inputs.arrived, self.gradients.used)
        publish(self._engine, shard.chunk)


def _all_cores() -> list[int] | None:
    """The cores that this thread may use, and so the process except for its lanes."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _set_host_threads(engine: Engine, asked: int | None) -> int:
    """Makes CPU Adam run on `asked` threads, or by default on this rank's part of the cores; returns their number.

    All optimizers of an engine share the lane: the last one decides.

    Raises:
        InputError: ``ELIXIR_BIND`` makes no sense.
    """
    share = engine.host_share
    compute_threads = torch.get_num_threads() if engine.device.type == "cpu" else 0
    threads, cores = rank_threads(share, compute_threads, asked, enough=engine.plan.host_threads)
    # An earlier optimizer may have bound the lane.
    engine.lanes.host_adam.submit(partial(use_threads, threads, cores or _all_cores()))
    if any(chunk.plan.trainable and chunk.plan.update_home == "host" for chunk in engine.chunks):
        where = f"bound to cores {core_list(cores)}" if cores is not None else "not bound"
        logger.info("threads of the host's Adam: %d, %s", threads, where)
        if threads > share.all_cores:
            logger.warning(
                "host_threads=%d is more than the %d cores that this process may use; its threads will wait for each "
                "other: give fewer, or None",
                threads,
                share.all_cores,
            )
    return threads
