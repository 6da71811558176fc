"""`ElixirOptimizer`: steps a torch optimizer chunk by chunk, at the home of the states.

The rule of the user's class steps this rank's shard of each chunk: master weights for weights of low precision, the
weights themselves in float32. Elementwise optimizers give the same numbers on a shard as on whole tensors, so a
parameter group may span chunks and ranks. `check_given` and `families_of` judge an optimizer before it is wrapped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from elixir.access.interrupts import run_user_code
from elixir.errors import InputError, InputTypeError
from elixir.hardware.host_share import check_host_threads
from elixir.hardware.process_memory import give_back_freed
from elixir.kernels.muon import matrix_rule
from elixir.models.plannable import refuse_passes
from elixir.optimizer_states import check_decay, family_of, moments_of
from elixir.torch_private import hooks_of, not_compiled, share_hooks
from elixir.wrapper.calls import refuse_compiled_around
from elixir.wrapper.engine import engine_of
from elixir.wrapper.loss_scale import LossScale
from elixir.wrapper.module import ElixirModule, refuse_wrapped
from elixir.wrapper.one_pass.one_pass import OnePass
from elixir.wrapper.step.elementwise import options_of
from elixir.wrapper.step.stepper import Stepper
from elixir.wrapper.step.user_optimizer import check_optimizer
from elixir.wrapper.step.whole_states import load_whole_states, whole_states


class ElixirOptimizer(torch.optim.Optimizer):
    """A torch optimizer over an `ElixirModule`.

    Schedulers and loggers see an ordinary optimizer, with the ``param_groups`` of `optimizer`.

    Args:
        module: the wrapped model.
        optimizer: a torch optimizer over the model's parameters, created before or after wrapping.
        initial_scale: the first loss scale, for float16 only. Several optimizers of one module share one scale: the
            last one decides it, and `growth_interval`.
        max_norm: the limit of the global gradient norm; 0 or None for no clipping.
        growth_interval: steps without overflow after which the loss scale doubles.
        host_threads: threads of CPU Adam on this rank; None for its part of the cores (`elixir.hardware.host_share`).
            Other work keeps torch's number of threads. Several optimizers of one module share them: the last one
            decides.
        init_step: allocate the states on the device before the first step, too; those on the host always are. No number
            changes.
        ema: keep an average of the weights, of which each step keeps this share: ``ema * average + (1 - ema) *
            weights``. It begins with the weights before their first step, in float32 or wider, and lives with the
            states; `ElixirModule.gathered` shows it. The plan must count it (``optimizer_type="AdamW + EMA"``).

    Raises:
        InputError: the optimizer is not elementwise, has parameters that are not the module's or belong to another
            optimizer, or cannot step with the moments of the plan; the plan counts no average and `ema` is given, or
            the other way round; or a number is out of range.
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
        ema: float | None = None,
    ) -> None:
        if not isinstance(module, ElixirModule):
            raise InputTypeError(f"module must be an ElixirModule, got {type(module).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, ElixirOptimizer):
            raise InputTypeError(f"optimizer must be a plain torch optimizer, got {type(optimizer).__name__}")
        changing = check_optimizer(optimizer, module.plan.moments)
        asked_threads, decay = check_host_threads(host_threads), check_decay(ema)
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
            decay=decay,
        )
        engine.add_stepper(self._stepper, scale)
        if init_step:
            self._stepper.shards.make_states()
        share_hooks(optimizer, self)
        # Weak references: a caller who keeps `optimizer` must not keep the model alive by it.
        states = ShardedStates(weakref.ref(self._stepper), weakref.WeakMethod(self._drop_states))
        self.state = optimizer.state = states  # type: ignore[assignment]
        self._ready = True

    @property
    def loss_scale(self) -> float:
        """The factor by which the next `backward` multiplies its loss."""
        return self._engine.loss_scale.value

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last `step` was skipped on all ranks because float16 gradients overflowed."""
        return self._skipped

    @property
    def max_norm(self) -> float:
        """The limit of the gradient norm in every `step`; 0 for no clipping. It may be set between steps."""
        return self._stepper.norm.max_norm

    @max_norm.setter
    def max_norm(self, norm: float | None) -> None:
        self._stepper.norm.max_norm = norm or 0.0

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The global norm of the gradients in the last `step` or `clip_grad_norm_`: over all ranks, before clipping,
        without the loss scale. None if the step needed no norm: without clipping, and not in float16.
        """
        return self._stepper.grad_norm

    @property
    def ema(self) -> float | None:
        """The share of the average of the weights that each step keeps; None without an average."""
        return self._stepper.user.decay

    @property
    def host_threads(self) -> int:
        """The number of threads of CPU Adam on this rank."""
        return self._stepper.host_threads

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _copied()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises `InputError` once this is built: the plan knows no other parameters.

        Raises:
            InputError: afterwards.
        """
        if getattr(self, "_ready", False):
            raise InputError("groups cannot be added to an ElixirOptimizer; give it an optimizer that has them all")
        super().add_param_group(param_group)

    def state_dict(self, rank0_only: bool = False) -> dict[str, Any]:
        """The states in torch's layout: by number of the parameter, on the CPU, in its shape, in float32 or wider.

        It gathers one chunk at a time, and keeps all states on each rank that wants them; `elixir.save_checkpoint`
        never holds them whole. With several ranks all must call this.

        Args:
            rank0_only: other ranks get an empty dict, and need no memory for it.

        Raises:
            InputError: called in a forward or backward.
        """
        for hook in hooks_of(self, "state_dict_pre"):
            hook(self)
        engine = self._engine
        engine.refuse_inside("state_dict() of an optimizer")
        engine.settle_together("state_dict() of an optimizer")
        give_back_freed()  # of the last step
        wanted = not rank0_only or engine.group.rank == 0
        found = whole_states(engine, self._stepper, self.param_groups, wanted=wanted)
        values = (value for state in found.get("state", {}).values() for value in state.values())
        nbytes = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
        engine.arena.given_bytes["states"] = max(engine.arena.given_bytes["states"], nbytes)
        for hook in hooks_of(self, "state_dict_post") if wanted else ():
            changed = hook(self, found)
            found = found if changed is None else changed
        return found

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads a state dict in torch's layout, such as `state_dict` or the same optimizer of `torch.optim` returns.

        Parameters without a state in it have none afterwards. Options that say how a step is computed, such as
        ``fused``, stay. With several ranks all must call this with the same states.

        Raises:
            InputError: the states belong to another optimizer, other groups or another model; nothing was changed.
            InputTypeError: `state_dict` is no state dict of an optimizer.
        """
        state_dict = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict  # hooks may write to the copy
        for hook in hooks_of(self, "load_state_dict_pre"):
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._load(state_dict, "load_state_dict() of an optimizer")
        for hook in hooks_of(self, "load_state_dict_post"):
            hook(self)

    def _load(self, state_dict: Any, what: str) -> None:
        self._engine.refuse_inside(what)
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

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Calls `loss.backward()`, with the loss scaled if weights are float16.

        Args:
            loss: the loss tensor.
            kwargs: arguments of `torch.Tensor.backward`, such as ``retain_graph``.

        Raises:
            InputTypeError: `loss` is not a tensor.
            InputError: the gradients of several optimizers were clipped, and one of them has not stepped since.
        """
        if not isinstance(loss, torch.Tensor):
            raise InputTypeError(
                f"loss must be the tensor that the model's outputs lead to, got {type(loss).__name__}; call item() "
                "after backward, and for a copy only"
            )
        self._engine.phase.refuse_closed()
        refuse_compiled_around(self._engine)
        scale = self._engine.loss_scale
        scale.begins_backward()
        for stepper in self._engine.steppers:  # all optimizers share the gradients
            stepper.gradients_scaled(scale.value)
        try:
            (loss * scale.value if scale.used else loss).backward(**kwargs)
        except torch.OutOfMemoryError as error:
            if self._engine.observer is not None:
                self._engine.observer.explain(error)
            raise
        except CheckpointError as error:
            if not self._engine.plan.step.compiled:
                raise
            raise InputError(
                "a compiled layer checkpoints activations outside of its graph, where the compiler breaks it, and runs "
                "again without its weights; leave out activation checkpointing or compile= for this model"
            ) from error

    def accumulate(self, step_fn: Callable[[Any, Any], Any], batches: Iterable[Any]) -> list[Any]:
        """Calls ``step_fn(module, batch)`` for each micro-batch of an optimizer step, in passes of as many as the plan
        says.

        With ``pass_size`` 1 this is the loop that it replaces. Otherwise the micro-batches of a pass go through each
        layer together: weights are fetched, and gradients sent home, once for all of them. Losses and, with one pass
        per step, gradients have the bits of the loop, if each micro-batch has one forward and one backward; several
        passes or backwards are summed in another order. All micro-batches call the same layers in the same order, and
        what runs between and after layers reads only what layers return; nothing else that a layer reads changes before
        the pass is over. Each micro-batch has a thread, of which one
        runs at a time, and its own random numbers; for those of a loop, set a seed in `step_fn`. Their seeds follow
        from the state of PyTorch's CPU generator, which moves on only if a micro-batch has drawn: without dropout,
        batches that are drawn from it are those of the loop.

        Args:
            step_fn: runs forward and backward (`backward` of this optimizer), and may return anything, such as the
                detached loss. What it reads of other micro-batches is not there yet.
            batches: the micro-batches, in order.

        Returns:
            what the calls have returned, in order.

        Raises:
            InputError: the model cannot take several micro-batches through its layers together.
        """
        given, size = run_user_code(list, batches), self.module.plan.pass_size
        if size == 1:
            return [run_user_code(step_fn, self.module, batch) for batch in given]
        refuse_passes(self.module.module)
        self._engine.refuse_in_pass("accumulate()")
        results: list[Any] = []
        for first in range(0, len(given), size):
            self._engine.forward_comes()  # now: chunks may move, as no pass that has begun could bear
            results += OnePass(self._engine).run(partial(step_fn, self.module), given[first : first + size])
        return results

    @not_compiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients.

        Raises:
            InputError: `set_to_none` is False while the module runs under a plan.
        """
        if len(self._engine.steppers) == 1 or self._engine.phase.closed:
            self.module.zero_grad(set_to_none)
            return
        self._engine.before_zero_grad(set_to_none=set_to_none)
        self._engine.has_used_gradients(self._stepper)
        self._stepper.gradients_cleared()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self._engine.gradients.dropped()

    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Returns the global norm of the gradients, on the device; the next `step` clips to `max_norm`.

        Of several limits, the optimizer's own `max_norm` included, the smallest holds. The norm is measured before
        clipping.

        Raises:
            RuntimeError: the norm is not finite, and `error_if_nonfinite` is True.
        """
        return self._stepper.clip_grad_norm_(max_norm, error_if_nonfinite)

    @not_compiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters. With float16, all ranks skip a step whose gradients overflowed.

        Returns:
            The result of `closure`, or None.

        Raises:
            InputError: gradients were set by hand, or in float16 did not come from `backward`; or groups have other
                parameters than at the beginning.
            StepError: work on a lane has failed, in this step or before.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = run_user_code(closure)
        self._skipped = not self._stepper.step()
        if not self._skipped:
            # A scheduler over the user's optimizer reads there whether it is called after a step.
            self._user_optimizer._opt_called = True  # type: ignore[attr-defined]
        self._engine.has_used_gradients(self._stepper)
        return result


class ShardedStates(MutableMapping[Any, Any]):
    """The ``state`` of an `ElixirOptimizer` and of the user's optimizer: empty before the first step.

    Afterwards the states lie in shards, and gathered tensors would be mere copies. So `clear` drops the states, while
    reading and writing raise an error that names the way.

    Args:
        stepper: returns the stepper, which has the states, or None after its end.
        drop: returns the function that drops the states, or None.
    """

    def __init__(self, stepper: Callable[[], Stepper | None], drop: Callable[[], Callable[[], None] | None]) -> None:
        self._stepper, self._drop = stepper, drop

    def clear(self) -> None:
        """Drops all states, as before the first step. With several ranks all must call this."""
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _copied()  # with the user's optimizer

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


def _copied() -> InputError:
    """The error about copying or pickling an optimizer; both ask for ``__reduce_ex__``."""
    return InputError(
        "the optimizer of an ElixirModule cannot be copied or pickled, since its states live in the chunks of the "
        "model: save state_dict(), and load it into the optimizer of a second wrapped model"
    )


def stepper_of(optimizer: ElixirOptimizer) -> Stepper:
    """The stepper of an `ElixirOptimizer`, for tests and packages built on the runtime."""
    stepper: Stepper = vars(optimizer)["_stepper"]
    return stepper


# --- given optimizers ------------------------------------------------------------------------------------------------
# The optimizers that a caller gives with a model: whether they fit it, and of which families they are.


def check_given(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """Returns the optimizers as a list, or raises if they and the model cannot be wrapped."""
    if not isinstance(model, nn.Module) or isinstance(model, ElixirModule):
        raise InputTypeError(f"model must be a plain nn.Module, got {type(model).__name__}")
    refuse_wrapped(model)
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    if not isinstance(optimizers, Sequence) or not optimizers:
        raise InputTypeError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    own = set(model.parameters())
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise InputTypeError(f"optimizer must be a torch optimizer, got {type(each).__name__}")
        foreign = sum(parameter not in own for group in each.param_groups for parameter in group["params"])
        if foreign:
            raise InputError(
                f"{foreign} parameters of the optimizer are not the model's; make it over model.parameters() of this "
                "very model"
            )
    return list(optimizers)


class Families(NamedTuple):
    """Optimizers as a search takes them; see `elixir.search.request.SearchRequest`."""

    optimizer_type: str
    matrices: tuple[str, ...] | None
    """Names of the parameters that are stepped as whole matrices; None if there are none."""
    moments: str
    """Kind of the moments."""
    elementwise: list[torch.optim.Optimizer]
    """The optimizers that step the others."""


def families_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], moments: str | None = None) -> Families:
    """The families of optimizers: one of whole matrices, such as Muon, and one of single elements, at most.

    Args:
        model: whose parameters they step.
        optimizers: one or several.
        moments: their kind, as it was asked for (`elixir.optimizer_states.moments_of`).

    Raises:
        InputError: there are others, or several kinds of moments.
    """
    whole = [each for each in optimizers if matrix_rule(each) is not None]
    others = [each for each in optimizers if matrix_rule(each) is None]
    families = {family_of(each) for each in others}
    if len(families) > 1:
        raise InputError(
            f"one plan counts the states of one family of optimizers, and of matrices, found {sorted(families)}; use "
            "one class for all parameters, or torch.optim.Muon for matrices"
        )
    kinds = {moments_of(each, moments) for each in others or whole}
    if len(kinds) > 1:
        raise InputError(f"one plan keeps all moments alike, found {sorted(kinds)}; use one kind for all parameters")
    kind = kinds.pop()
    if not whole:
        return Families(families.pop(), None, kind, others)
    taken = {parameter for each in whole for group in each.param_groups for parameter in group["params"]}
    names = tuple(
        name for name, parameter in model.named_parameters() if parameter in taken and parameter.requires_grad
    )
    first = next(rule.family for each in whole if (rule := matrix_rule(each)) is not None)
    return Families(f"{first} + {families.pop()}" if families else first, names, kind, others)
