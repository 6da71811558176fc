"""`ElixirOptimizer`: steps a torch optimizer where the states live, chunk by chunk.

The rule of the user's class steps this rank's shard of each chunk: master weights where the weights are of low
precision, the weights themselves where they are float32. Elementwise optimizers give the same numbers on a shard as on
whole tensors, so parameter groups may cut across chunks and ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from itertools import islice
from typing import Any, NoReturn

import torch

from elixir.errors import InputError, InputTypeError
from elixir.hardware.host_share import check_host_threads
from elixir.torch_private import hooks_of, not_compiled, share_hooks
from elixir.wrapper.engine import engine_of
from elixir.wrapper.loss_scale import LossScale
from elixir.wrapper.module import ElixirModule
from elixir.wrapper.step.elementwise import MODES, options_of
from elixir.wrapper.step.stepper import Stepper
from elixir.wrapper.step.user_optimizer import check_optimizer
from elixir.wrapper.step.whole_states import load_whole_states, whole_states


class ElixirOptimizer(torch.optim.Optimizer):
    """A torch optimizer over an `ElixirModule`.

    Schedulers and loggers see an ordinary optimizer: its ``param_groups`` are those of the optimizer given.

    Args:
        module: the wrapped model.
        optimizer: over the model's parameters, made before or after wrapping; its class and options are taken over.
        initial_scale: loss scale to begin with; used with float16 only. Several optimizers of one module share one
            scale: the last one says, also of `growth_interval`.
        max_norm: clip the global gradient norm to this; 0 or None for no clipping.
        growth_interval: steps without overflow after which the loss scale doubles.
        host_threads: of what steps on the host, on this rank; None for its part of the cores
            (`elixir.hardware.host_share`). Other threads keep torch's number. Several optimizers of one module share
            them: the last one says.
        init_step: have the moments of Adam, AdamW or `HybridAdam` before the first step, so that it finds all memory
            taken: moments are zero, counts 0, and no weight changes. Without effect for other classes, and on every
            number. Plans keep their states on the host ready in any case.

    Raises:
        InputError: the optimizer is not elementwise, has parameters that are not the module's or another's, or cannot
            step with the moments of the plan; or a number is out of range.
    """

    def __init__(
        self,
        module: ElixirModule,
        optimizer: torch.optim.Optimizer,
        initial_scale: float = 2.0**16,
        max_norm: float | None = None,
        growth_interval: int = 2000,
        host_threads: int | None = None,
        init_step: bool = False,
    ) -> None:
        if not isinstance(module, ElixirModule):
            raise InputTypeError(f"module must be an ElixirModule, got {type(module).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, ElixirOptimizer):
            raise InputTypeError(f"optimizer must be a plain torch optimizer, got {type(optimizer).__name__}")
        changing = check_optimizer(optimizer, module.plan.moments)
        asked_threads = check_host_threads(host_threads)
        scale = LossScale(module.plan.dtype == "float16", initial_scale, growth_interval)
        self._ready = False
        self._skipped = False
        self.module = module
        self._engine = engine = engine_of(module)
        self._user_optimizer = optimizer
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self._stepper = Stepper(
            engine,
            optimizer,
            lambda: self.param_groups,
            max_norm=max_norm or 0.0,
            host_threads=asked_threads,
            changing=changing,
        )
        engine.loss_scale = scale
        engine.steppers.append(self._stepper)
        if init_step:
            self._stepper.shards.make_states()
        share_hooks(optimizer, self)
        # Who keeps the optimizer given must not keep the model by it.
        states = ShardedStates(weakref.ref(self._stepper), weakref.WeakMethod(self._drop_states))
        self.state = optimizer.state = states  # type: ignore[assignment]
        self._ready = True

    def __getattr__(self, name: str) -> Any:
        """``train`` and ``eval`` of a class that rewrites weights for training and evaluation, as schedule-free's do.

        With several ranks all must call them.
        """
        given = vars(self).get("_user_optimizer")
        if name in MODES and callable(getattr(given, name, None)):
            return torch.no_grad()(partial(self._stepper.rewrite, name))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def loss_scale(self) -> float:
        """The scale by which the next `backward` multiplies its loss."""
        return self._engine.loss_scale.value

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last `step` was left out because float16 gradients overflowed, on all ranks alike."""
        return self._skipped

    @property
    def max_norm(self) -> float:
        """Every `step` clips the norm of the gradients to it; 0 for no clipping. May be set between steps."""
        return self._stepper.norm.max_norm

    @max_norm.setter
    def max_norm(self, norm: float | None) -> None:
        self._stepper.norm.max_norm = norm or 0.0

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Global norm of the gradients of the last `step`, or of `clip_grad_norm_` if that came later: before clipping,
        loss scale taken out, over all ranks. None if the step needed no norm: without clipping, and not in float16.
        """
        return self._stepper.grad_norm

    @property
    def host_threads(self) -> int:
        """How many threads of this rank step on the host."""
        return self._stepper.host_threads

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while this is built: the plan knows no other parameters.

        Raises:
            InputError: afterwards.
        """
        if getattr(self, "_ready", False):
            raise InputError("groups cannot be added to an ElixirOptimizer; give it an optimizer that has them all")
        super().add_param_group(param_group)

    def state_dict(self, rank0_only: bool = False) -> dict[str, Any]:
        """The states in torch's own layout: by number, on the CPU, moments in float32 or wider and in the parameter's
        shape.

        One chunk is gathered at a time, but all of it ends on every rank that wants it; `elixir.save_checkpoint` holds
        nothing whole. With several ranks all must call this.

        Args:
            rank0_only: the other ranks get an empty dict, and need no memory for it.

        Raises:
            InputError: in a forward or backward.
        """
        for hook in hooks_of(self, "state_dict_pre"):
            hook(self)
        engine = self._engine
        engine.uses.refuse_inside("state_dict() of an optimizer")
        engine.settle_together("state_dict() of an optimizer")
        wanted = not rank0_only or engine.group.rank == 0
        found = whole_states(engine, self._stepper, self.param_groups, wanted=wanted)
        for hook in hooks_of(self, "state_dict_post") if wanted else ():
            changed = hook(self, found)
            found = found if changed is None else changed
        return found

    def load_state_dict(self, state_dict: Any) -> None:
        """Goes on from a state dict of torch's own layout, such as `state_dict` or the same optimizer of `torch.optim`
        gives.

        Parameters without a state in it have none afterwards. Options that say how a step is computed, such as
        ``fused``, stay as they are. With several ranks all must call this with the same states.

        Raises:
            InputError: it is of another optimizer, other groups or another model; nothing was changed.
            InputTypeError: it is no state dict of an optimizer.
        """
        state_dict = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict  # hooks may write to it
        for hook in hooks_of(self, "load_state_dict_pre"):
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._load(state_dict, "load_state_dict() of an optimizer")
        for hook in hooks_of(self, "load_state_dict_post"):
            hook(self)

    def _load(self, state_dict: Any, what: str) -> None:
        self._engine.uses.refuse_inside(what)
        self._engine.settle_together(what)
        with torch.no_grad():
            load_whole_states(self._engine, self._stepper, self.param_groups, state_dict)

    def _drop_states(self) -> None:
        sizes = [len(group["params"]) for group in self.param_groups]
        numbers = iter(range(sum(sizes)))
        groups = [
            {**options_of(group), "params": list(islice(numbers, size))}
            for group, size in zip(self.param_groups, sizes, strict=True)
        ]
        self._load({"state": {}, "param_groups": groups}, "state.clear() of an optimizer")

    def _has_used_gradients(self) -> None:
        self._engine.unstepped = [each for each in self._engine.unstepped if each is not self._stepper]

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """`loss.backward()`, with the loss scaled where the weights are float16.

        Args:
            loss: as the model's outputs give it.
            kwargs: of `torch.Tensor.backward`, such as ``retain_graph``.

        Raises:
            InputTypeError: `loss` is no tensor.
        """
        if not isinstance(loss, torch.Tensor):
            raise InputTypeError(
                f"loss must be the tensor that the model's outputs lead to, got {type(loss).__name__}; call item() "
                "after "
                "backward, and for a copy only"
            )
        scale = self._engine.loss_scale
        for stepper in self._engine.steppers:  # they share the gradients
            stepper.gradients_scaled(scale.value)
        (loss * scale.value if scale.used else loss).backward(**kwargs)

    @not_compiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients; or have zeros in their place, with which `step` then steps.

        Raises:
            InputError: zeros are asked for where the module has another optimizer, whose gradients share the chunks.
        """
        self._has_used_gradients()
        if len(self._engine.steppers) == 1:
            self.module.zero_grad(set_to_none)
            return
        if not set_to_none:
            raise InputError("with several optimizers on one module use zero_grad(set_to_none=True)")
        self._engine.forget_failed_backward()
        self._stepper.gradients_cleared(None)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> torch.Tensor:
        """The global norm of the gradients, on the device; the next `step` clips what there is then to `max_norm`.

        Asked several times, or where the optimizer has a `max_norm` anyway, it clips to the least. The norm is that
        before any clipping.

        Raises:
            RuntimeError: the norm is not finite, where that is asked for.
        """
        return self._stepper.clip_grad_norm_(max_norm, error_if_nonfinite)

    @not_compiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step everywhere. With float16, a step whose gradients overflowed is left out, on all ranks alike.

        Returns:
            What `closure` returned, else None.

        Raises:
            InputError: the gradients are not those that it would step with: set by hand, of this rank alone, or with
                float16 made without `backward`; or groups have other parameters than when this was made.
            StepError: an update on the host has failed, in this step or the one before.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._skipped = not self._stepper.step()
        if not self._skipped:
            # A scheduler that was built over the optimizer given reads there whether it is called after a step.
            self._user_optimizer._opt_called = True  # type: ignore[attr-defined]
        self._has_used_gradients()
        return result


class ShardedStates(MutableMapping[Any, Any]):
    """``state`` of an `ElixirOptimizer` and of the optimizer that it was given: empty before the first step.

    Afterwards the states lie in shards, and tensors that were gathered here would not be theirs. `clear` drops them;
    reading and writing raise, and name the way.

    Args:
        stepper: has the states, while it lives.
        drop: drops them.
    """

    def __init__(self, stepper: Callable[[], Stepper | None], drop: Callable[[], Callable[[], None] | None]) -> None:
        self._stepper, self._drop = stepper, drop

    def clear(self) -> None:
        """Has all weights begin without states, as before the first step. With several ranks all must call this."""
        drop = self._drop()
        if drop is not None:
            drop()

    def _refuse(self) -> NoReturn:
        raise InputError(
            "the states of the optimizer lie in shards, so that state neither shows nor takes them: call "
            "state_dict() of the ElixirOptimizer, change what it gives, and give that to its load_state_dict(); "
            "state.clear() drops all states"
        )

    def _refuse_made(self) -> None:
        stepper = self._stepper()
        if stepper is not None and stepper.has_states:
            self._refuse()

    def __len__(self) -> int:
        self._refuse_made()
        return 0

    def __iter__(self) -> Iterator[Any]:
        self._refuse_made()
        return iter(())

    def __contains__(self, key: object) -> bool:
        self._refuse_made()
        return False

    def __getitem__(self, key: Any) -> Any:
        self._refuse()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse()

    def __delitem__(self, key: Any) -> None:
        self._refuse()


def stepper_of(optimizer: ElixirOptimizer) -> Stepper:
    """The engine's side of an `ElixirOptimizer`, for tests and packages built on the runtime."""
    stepper: Stepper = vars(optimizer)["_stepper"]
    return stepper
