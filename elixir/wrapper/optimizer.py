"""`ElixirOptimizer`: steps a torch optimizer where the states live, chunk by chunk.

Each chunk has an optimizer of the user's class over this rank's shard: master weights where the weights are of low
precision, the weights themselves where they are float32. Elementwise optimizers give the same numbers on a shard as on
whole tensors, so parameter groups may cut across chunks and ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from elixir.chunk.chunk import Chunk
from elixir.errors import InputError, InputTypeError
from elixir.host_threads import check_host_threads
from elixir.plan import Plan
from elixir.wrapper.backward_steps import STEP_OR_LEAVE_OUT, BackwardSteps, clips_in_backward
from elixir.wrapper.chunk_optimizer import ChunkOptimizer, Segment
from elixir.wrapper.chunk_updates import publish, update
from elixir.wrapper.fused_adam import FusedAdam, can_fuse, check_moments
from elixir.wrapper.gradient_norm import total_norm
from elixir.wrapper.host_adam import set_host_threads
from elixir.wrapper.loss_scale import LossScale
from elixir.wrapper.module import ElixirModule
from elixir.wrapper.optimizer_class import accepted_options, check_elementwise, has_stepped, shard_options

logger = logging.getLogger(__name__)


class ElixirOptimizer(torch.optim.Optimizer):
    """A torch optimizer over an `ElixirModule`.

    Schedulers and loggers see an ordinary optimizer: its ``param_groups`` are those of the optimizer given.

    Args:
        module: the wrapped model.
        optimizer: over the model's parameters, made before or after wrapping; its class and options are taken over.
        initial_scale: loss scale to begin with; used with float16 only. Several optimizers of one module share one scale:
            the last one says, also of `growth_interval`.
        max_norm: clip the global gradient norm to this; 0 or None for no clipping.
        growth_interval: steps without overflow after which the loss scale doubles.
        host_threads: of what steps on the host, on this rank; None for its part of the cores (`elixir.host_threads`).
            Other threads keep torch's number. Several optimizers of one module share them: the last one says.

    Raises:
        InputError: the optimizer is not elementwise, has parameters that are not the module's or another's, or cannot step
            as the plan says: with its moments, or in backward; or a number is out of range.
    """

    def __init__(
        self,
        module: ElixirModule,
        optimizer: torch.optim.Optimizer,
        initial_scale: float = 2.0**16,
        max_norm: float | None = None,
        growth_interval: int = 2000,
        host_threads: int | None = None,
    ) -> None:
        if not isinstance(module, ElixirModule):
            raise InputTypeError(f"module must be an ElixirModule, got {type(module).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, ElixirOptimizer):
            raise InputTypeError(f"optimizer must be a plain torch optimizer, got {type(optimizer).__name__}")
        if any(has_stepped(state) for state in optimizer.state.values()):
            raise InputError("the optimizer has stepped already, and its states would be lost; give one that has not")
        asked_threads = check_host_threads(host_threads)
        scale = LossScale(module.plan.dtype == "float16", initial_scale, growth_interval)
        self._ready = self._told = False
        self._made_by: float | None = None  # the loss scale with which `backward` has made the gradients there are
        self.module = module
        self._given = optimizer
        self._class = type(optimizer)
        self._fusible = can_fuse(optimizer)
        self.max_norm = max_norm or 0.0
        self.check_plan(module.plan)
        self.group_of = {
            parameter: index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }
        own = {slot.parameter for chunk in module.chunks for slot in chunk.slots}
        foreign = sum(parameter not in own for parameter in self.group_of)
        if foreign:
            raise InputError(f"{foreign} parameters of the optimizer are not parameters of the module")
        taken = sum(parameter in self.group_of for other in module.optimizers for parameter in other.group_of)
        if taken:
            raise InputError(
                f"{taken} parameters of the optimizer have an ElixirOptimizer already, and would be stepped twice; give each "
                "parameter to one, or close the module and wrap the model again"
            )
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        if module.plan.moments == "float32":  # others are stepped by `FusedAdam`, whatever the class
            for group in self.param_groups:
                check_elementwise(self._class, partial(self._make_over, group))
        self._clip_once = 0.0
        self.used_parameters: set[str] = set()
        self._position = {parameter: index for index, parameter in enumerate(module.module.parameters())}
        self._parts = self._make_parts()
        self.in_backward = BackwardSteps(self)
        """Steps that begin before `step` is called."""
        self.host_threads = set_host_threads(module, asked_threads)
        """Of what steps on the host."""
        module.loss_scale = scale
        module.optimizers.append(self)
        self._ready = True

    @property
    def fuses(self) -> bool:
        """Whether shards are stepped by `FusedAdam` rather than by the user's class; same rule, other rounding."""
        return self._fusible and (self.module.use_fused_kernels or self.module.plan.moments != "float32")

    @property
    def loss_scale(self) -> float:
        """What the next `backward` multiplies its loss by."""
        return self.module.loss_scale.value

    @property
    def clip_limit(self) -> float:
        """What the next `step` clips the norm of the gradients to; 0 for no clipping."""
        return self._clip_once or self.max_norm or 0.0

    def check_plan(self, plan: Plan) -> None:
        """Refuse a plan that this cannot step by; `InputError` says what to do."""
        check_moments(self._given, self._fusible, plan.moments)
        if self.max_norm and plan.steps_in_backward:
            raise clips_in_backward()
        if plan.steps_in_backward and any(other is not self for other in self.module.optimizers):
            raise InputError(
                "a plan that steps during backward is for a module with one optimizer; give that one all parameters, or plan "
                "with step_in_backward=False"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while this is built: the plan knows no other parameters.

        Raises:
            InputError: afterwards.
        """
        if getattr(self, "_ready", False):
            raise InputError("groups cannot be added to an ElixirOptimizer; give it an optimizer that has them all")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Not there yet.

        Raises:
            InputError: always, since what `torch.optim.Optimizer` would give has no states in it.
        """
        raise InputError("the states of an ElixirOptimizer cannot be saved yet; the model's state_dict() can")

    def load_state_dict(self, state_dict: Any) -> None:
        """Not there yet.

        Raises:
            InputError: always.
        """
        raise InputError("the states of an ElixirOptimizer cannot be loaded yet; the model's load_state_dict() can")

    def give_up_states(self) -> dict[str, dict[str, Any]]:
        """The states of this rank's part of each parameter; this optimizer has none until `take_states`."""
        states: dict[str, dict[str, Any]] = {}
        for part in self._parts.values():
            states |= part.give_up_states()
        self._parts = {}
        return states

    def take_states(self, states: dict[str, dict[str, Any]]) -> None:
        """Go on from `states`, under the module's plan of now; each is let go of when its chunk has taken it."""
        self._parts = self._make_parts()
        for part in self._parts.values():
            part.take_states(states)

    def make_inner(self, weights: list[nn.Parameter], segments: list[Segment]) -> torch.optim.Optimizer:
        """An optimizer of the user's class over segments, with their groups' options."""
        groups = []
        for index, options in enumerate(self.hyperparameters()):
            groups.append({**options, "params": [segment.weights for segment in segments if segment.group == index]})
        return self._make(groups)

    def make_fused(self, master: torch.Tensor, segments: list[Segment]) -> FusedAdam:
        """What steps a shard in one pass, with the groups' options."""
        decoupled = issubclass(self._class, torch.optim.AdamW)
        return FusedAdam(master, segments, self.hyperparameters(), decoupled, self.module.plan.moments)

    def _make_parts(self) -> dict[int, ChunkOptimizer]:
        return {chunk.index: ChunkOptimizer(self, chunk) for chunk in self._in_order() if chunk.plan.trainable}

    def part_of(self, chunk: Chunk) -> ChunkOptimizer:
        """What steps a chunk."""
        return self._parts[chunk.index]

    def _make_over(self, group: dict[str, Any], weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        """An optimizer of the user's class over `weights`, with a group's options."""
        return self._make([{**shard_options(group), "params": weights}])

    def _make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        defaults = {key: value for key, value in self.defaults.items() if key not in ("differentiable",)}
        made: torch.optim.Optimizer = self._class(groups, **accepted_options(self._class, shard_options(defaults)))
        return made

    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()`, with the loss scaled where the weights are float16.

        Raises:
            InputTypeError: `loss` is no tensor.
        """
        if not isinstance(loss, torch.Tensor):
            raise InputTypeError(
                f"loss must be the tensor that the model's outputs lead to, got {type(loss).__name__}; call item() after "
                "backward, and for a copy only"
            )
        scale = self.module.loss_scale
        for optimizer in self.module.optimizers:  # they share the gradients
            optimizer._made_by = scale.value
        (loss * scale.value if scale.used else loss).backward()

    def gradients_cleared(self, to_none: bool) -> None:
        """There are none any more, or zeros, which are of any scale."""
        self._made_by = None if to_none else self.loss_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; or have zeros in their place, with which `step` then steps.

        Raises:
            InputError: zeros are asked for where the module has another optimizer, whose gradients share the chunks.
        """
        self.in_backward.refuse("zero_grad()", STEP_OR_LEAVE_OUT)
        self._clip_once = 0.0
        if len(self.module.optimizers) == 1:
            self.module.zero_grad(set_to_none)
            return
        if not set_to_none:
            raise InputError("with several optimizers on one module use zero_grad(set_to_none=True)")
        self.module.forget_failed_backward()
        self.gradients_cleared(set_to_none)
        for parameter in self.group_of:
            parameter.grad = None

    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> torch.Tensor:
        """The global norm of the gradients, on the device; the next `step` clips what there is then to `max_norm`.

        Raises:
            RuntimeError: the norm is not finite, where that is asked for.
        """
        self.in_backward.refuse("clip_grad_norm_()", "leave clipping out")
        self._refuse_unreduced("clip_grad_norm_()")
        self.module.forget_failed_backward()
        self.module.gradients.settle()
        self._clip_once = max_norm
        self._agree_on_used()
        norm = self._norm() / self._gradient_scale()
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}, so they cannot be clipped")
        return norm.to(self.module.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step everywhere. With float16, a step whose gradients overflowed is left out, on all ranks alike.

        Returns:
            What `closure` returned, else None.

        Raises:
            InputError: the gradients are not those that it would step with: set by hand, of this rank alone, or with
                float16 made without `backward`.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        module = self.module
        module.refuse_step()
        self._refuse_unreduced("step()")
        self._refuse_unseen()
        module.forget_failed_backward()
        module.gradients.settle()
        self._agree_on_used(unscaled=self._unscaled())
        loss_scale, made_by = module.loss_scale, self._gradient_scale()
        factor: float | torch.Tensor = 1.0 / made_by
        limit = self.clip_limit
        if limit:
            self.in_backward.refuse("clipping", "leave it out")  # of what was asked for behind backward
        self._clip_once = 0.0
        if limit or loss_scale.used:
            norm = self._norm()
            if loss_scale.used and not math.isfinite(norm):
                loss_scale.overflowed(made_by)
                module.step_over(skipped=True)
                return result
            if limit:
                # As torch.nn.utils.clip_grad_norm_: the same epsilon, in float32, and never a factor above 1.
                clip = torch.clamp(limit / (norm / made_by + 1e-6), max=1.0)
                waits = loss_scale.used or not all(part.follows_torch for part in self._parts.values())
                factor *= float(clip) if waits else clip
        hyperparameters = self.hyperparameters()
        module.cache.invalidate()  # before weights count as changed, which inside a block they must not
        begun = self.in_backward.finish(hyperparameters)
        updates = []
        for index, part in self._parts.items():
            if index not in begun:
                part.follow_writes()
                arrived = part.gradients(self.used_parameters)  # now: when it runs, other parameters may have gradients
                update(module, part, arrived, factor, hyperparameters)
                part.mark_changed(arrived, self.used_parameters)
            updates += [ticket for ticket in [publish(module, part.chunk)] if ticket is not None]
        module.weights_changed(updates)
        module.step_over()
        # A scheduler that was built over the optimizer given reads there whether it is called after a step.
        self._given._opt_called = True  # type: ignore[attr-defined]
        loss_scale.stepped(made_by)
        return result

    def _gradient_scale(self) -> float:
        """By which the gradients there are were multiplied."""
        return self.loss_scale if self._made_by is None else self._made_by

    def _unscaled(self) -> bool:
        """Whether this rank has gradients without the loss scale by which they would be divided."""
        if self.module.holds_gradients():
            return self.module.loss_scale.used and self._made_by is None
        if not self._told:
            self._told = True
            logger.warning("step() found no gradients on this rank: call optimizer.backward(loss) before it")
        return False

    def _refuse_unreduced(self, what: str) -> None:
        if not self.module.gradients.reducing and self.module.plan.world_size > 1:
            raise InputError(f"{what} inside no_sync() would use this rank's gradients alone; call it outside")

    def _refuse_unseen(self) -> None:
        """What plain PyTorch would step with, and what would be left out here without a word."""
        with torch._C.DisableTorchFunctionSubclass():
            for chunk in self.module.chunks:
                if self.module.is_ordinary(chunk) and chunk.plan.trainable:
                    continue
                for slot in chunk.slots:
                    if slot.parameter.requires_grad and not chunk.plan.trainable:
                        raise InputError(
                            f"{slot.name} was frozen when the model was planned, and is not now; plan again"
                        )
                    if slot.parameter.grad is not None and chunk.plan.trainable:
                        raise InputError(
                            f"the gradient of {slot.name} was set by hand, but gradients are taken as backward makes "
                            "them; change them in a hook (parameter.register_hook), or change the loss"
                        )

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Of the groups, as of now."""
        return [shard_options(group) for group in self.param_groups]

    def _agree_on_used(self, *, unscaled: bool = False) -> None:
        """Names of the parameters that got a gradient on any rank, the same on all ranks.

        Raises:
            InputError: `unscaled` is true on any rank; then on all.
        """
        names = [slot.name for part in self._parts.values() for slot in part.chunk.slots]
        arrived: set[str] = set()
        for shard in self.module.gradients.shards.values():
            arrived |= shard.arrived
        if self.module._group.size > 1:
            buffers = self.module.shared_buffers
            mine = (*(name in arrived for name in names), *buffers.changed(), unscaled)
            flags = torch.tensor([float(flag) for flag in mine])
            self.module._lanes.network.submit(lambda: self.module._group.largest(flags)).synchronize()
            *found, any_unscaled = flags.tolist()
            unscaled = bool(any_unscaled)
            arrived = {name for name, flag in zip(names, found[: len(names)], strict=True) if flag}
            self.module.share_buffers(
                [name for name, flag in zip(buffers.names, found[len(names) :], strict=True) if flag]
            )
        if unscaled:
            raise InputError(
                f"step() divides float16 gradients by the loss scale, {self.loss_scale:g}, but these were made by "
                "loss.backward(); call optimizer.backward(loss), which multiplies by it"
            )
        self.used_parameters = arrived

    def _norm(self) -> torch.Tensor:
        """Norm of all gradients over all ranks, loss scale included; float32."""
        module = self.module
        module.gradients.settle()
        found = [item for part in self._parts.values() for item in part.gradients(self.used_parameters)]
        # In the order of the model, so that one rank sums the norms as PyTorch would.
        found.sort(key=lambda item: self._position[item[0].source])
        norm = total_norm([gradient for _, gradient in found], self.host_threads)
        if module._group.size == 1:
            return norm
        square = norm.cpu().double() ** 2
        module._lanes.network.submit(lambda: module._group.sum(square)).synchronize()
        return square.sqrt().float()

    def _in_order(self) -> list[Chunk]:
        """Chunks in the order in which the next forward asks for them."""
        first: dict[int, int] = {}
        for position, use in enumerate(self.module.plan.order):
            for index in use.chunks:
                first.setdefault(index, position)
        return sorted(self.module.chunks, key=lambda chunk: (first.get(chunk.index, len(first)), chunk.index))
