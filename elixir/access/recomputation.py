"""Checkpoints around the units of a model, which keep some results of their forward and make the others again; compiled
units run again whole."""

from __future__ import annotations

import copy
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from elixir.access.autograd import is_in_checkpoint
from elixir.access.compiled_units import RecomputedCall, is_compiled
from elixir.access.own_checkpoint import FUNCTION, unentered_function
from elixir.access.swapping import Swapping
from elixir.errors import InputError
from elixir.step_trace import Result, UnitActivations

logger = logging.getLogger(__name__)

_SWITCH = "gradient_checkpointing"
"""The attribute by which a module of transformers says whether it checkpoints itself."""
_COMPILED = "_compiled_call_impl"
_ABSENT = object()


class Recomputation:
    """Runs units of a model as a plan says, until `remove`, whatever checkpoint they put around themselves.

    Args:
        model: whose modules are changed in place.
        activations: of the units.
        swapping: moves what is swapped; None if nothing is.

    Raises:
        InputError: the model has no such module, or it is a TorchScript module, or compiled and should keep some
            results or move any.
    """

    def __init__(
        self, model: nn.Module, activations: Iterable[UnitActivations], swapping: Swapping | None = None
    ) -> None:
        self._swapping = swapping
        self._applied: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
        """Modules, the attributes that they had, and those that they have now."""
        self.compiled: set[str] = set()
        """Names of the units that were compiled, and run again whole."""
        wanted = {each.unit: each for each in activations}
        for name, module in model.named_modules() if wanted else ():
            if name in wanted:
                try:
                    self._apply(module, wanted.pop(name))
                except InputError:
                    self.remove()
                    raise
        if wanted:
            self.remove()
            raise InputError(f"the model has no unit {min(wanted)!r}, which the plan has; plan this model anew")

    def renew(self) -> bool:
        """Runs the units as the plan says again, if somebody has switched their own checkpoints on or off meanwhile."""
        changed = False
        for module, had, ours in self._applied:
            now = {_SWITCH: vars(module).get(_SWITCH), FUNCTION: unentered_function(module)}
            if any(now[name] != value for name, value in ours.items() if name in now):
                had.update((name, value) for name, value in now.items() if name in vars(module))
                vars(module).update(ours)
                changed = True
        return changed

    def renew_compiled(self) -> None:
        """Runs units that were compiled anew since again as the plan says. No listener may be around their calls."""
        for module, had, ours in self._applied:
            call = vars(module).get(_COMPILED)
            if _COMPILED in ours and call is not None and call is not ours[_COMPILED]:
                had[_COMPILED], ours[_COMPILED] = call, RecomputedCall(call, functools.partial(_run, module))
                vars(module).update(ours)

    def remove(self) -> None:
        """Gives the modules back what they had."""
        if self._swapping is not None:
            self._swapping.remove()
        while self._applied:
            module, had, ours = self._applied.pop()
            for name, value in had.items():
                if name == _COMPILED and vars(module).get(name) is not ours[name]:
                    continue  # somebody has compiled it anew since
                if value is _ABSENT:
                    vars(module).pop(name, None)
                else:
                    vars(module)[name] = value

    def _apply(self, module: nn.Module, each: UnitActivations) -> None:
        call = module._compiled_call_impl
        if isinstance(module, torch.jit.ScriptModule) or (is_compiled(module) and (each.keep or each.swap)):
            raise InputError(
                f"{each.unit} is compiled, so its results cannot be kept one by one; plan it without activations="
            )
        keep, swapping = each.keep, self._swapping if each.swap else None
        # Layers of transformers would checkpoint themselves in training mode alone, and without their cache.
        ours: dict[str, Any] = {_SWITCH: False} if hasattr(module, _SWITCH) else {}
        if keep is not None:
            function = _checkpoint_that_keeps(keep)
            ours[FUNCTION] = function if swapping is None else functools.partial(_moving, swapping, each.unit, function)
            if call is None:
                ours["forward"] = functools.partial(_run, module, module.forward)
            else:
                ours[_COMPILED] = RecomputedCall(call, functools.partial(_run, module))
                self.compiled.add(each.unit)
        elif swapping is not None:
            ours["forward"] = functools.partial(_moving, swapping, each.unit, module.forward)
        had = {name: vars(module).get(name, _ABSENT) for name in (_SWITCH, FUNCTION, "forward", *ours)}
        vars(module).update(ours)
        self._applied.append((module, had, ours))


def checkpoints_itself(module: nn.Module) -> bool:
    """Whether a module of transformers puts a checkpoint around its own forward."""
    return bool(getattr(module, _SWITCH, False))


@contextmanager
def recomputing(
    model: nn.Module, activations: Iterable[UnitActivations], swapping: Swapping | None = None
) -> Iterator[None]:
    """`Recomputation` of a model meanwhile."""
    applied = Recomputation(model, activations, swapping)
    try:
        yield
    finally:
        applied.remove()


def _moving(swapping: Swapping, unit: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with swapping.moving(unit):
        return function(*args, **kwargs)


def _run(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of a module, in its checkpoint unless one is around it."""
    if not torch.is_grad_enabled() or is_in_checkpoint():
        return forward(*args, **kwargs)
    args, kwargs = with_own_caches(args, kwargs)
    return vars(module)[FUNCTION](functools.partial(_forward, module, forward, **kwargs), *args)


def _forward(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = with_own_caches(args, kwargs)
    return forward(*args, **kwargs)


def with_own_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one of several runs of a layer, which adds its keys and values to a cache that only it sees."""
    if not any(map(_is_cache, (*args, *kwargs.values()))):
        return args, kwargs
    _say_that_caches_stay()
    owned = {name: _own(value) if _is_cache(value) else value for name, value in kwargs.items()}
    return tuple(_own(value) if _is_cache(value) else value for value in args), owned


def _is_cache(value: object) -> bool:
    """Whether this is a cache of keys and values, as transformers' models take it."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _own(value: Any, *, in_place: bool = False) -> Any:
    """A copy of a cache down to its tensors; those that a layer writes `in_place` are copied, too."""
    if isinstance(value, torch.Tensor):
        return value.clone() if in_place else value
    if isinstance(value, list):
        return [_own(each, in_place=in_place) for each in value]
    if isinstance(value, dict):
        return {key: _own(each, in_place=in_place) for key, each in value.items()}
    if isinstance(value, type) or not hasattr(value, "is_compileable"):
        return value
    # What transformers can compile has tensors that stay where they are.
    copied, in_place = copy.copy(value), bool(value.is_compileable)
    vars(copied).update((name, _own(each, in_place=in_place)) for name, each in vars(value).items())
    return copied


@functools.cache
def _say_that_caches_stay() -> None:
    logger.warning("layers that run again in backward add nothing to the cache of keys and values that they are given")


def _checkpoint_that_keeps(keep: tuple[Result, ...]) -> Callable[..., Any]:
    if not keep:  # no mode needs to see the operators
        return functools.partial(checkpoint, use_reentrant=False)
    kept = frozenset((result.operator, result.occurrence) for result in keep)

    def contexts() -> Any:
        first, again = create_selective_checkpoint_contexts(_Policy(kept))
        return first, _InWords(again)

    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)


class _InWords:
    """The context of a second run, which says what to do where it fails.

    Args:
        again: PyTorch's.
    """

    def __init__(self, again: Any) -> None:
        self._again = again

    def __enter__(self) -> None:
        self._again.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._again.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and "backward an extra time" in str(error):
            raise InputError(
                "a second backward, as after retain_graph=True, goes through a layer whose plan keeps results of its "
                "operators for one backward only; add the losses up, or plan without activations="
            ) from error
        if isinstance(error, RuntimeError) and "not found in storage" in str(error):
            raise InputError(
                "a layer did something else when it ran again in backward than in forward, as if it depended on state "
                "that had changed; plan without activations="
            ) from error


class _Policy:
    """Says of each operator of one call of a unit whether its results are kept."""

    def __init__(self, kept: frozenset[tuple[str, int]]) -> None:
        self._kept = kept
        self._operators = {operator for operator, _ in kept}
        self._calls = Counter[tuple[bool, str]]()

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = _name(operator)
        if name not in self._operators:
            return CheckpointPolicy.PREFER_RECOMPUTE
        # Versions of PyTorch before 2.12 ask again when the unit runs again.
        number = self._calls[context.is_recompute, name]
        self._calls[context.is_recompute, name] = number + 1
        return CheckpointPolicy.MUST_SAVE if (name, number) in self._kept else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _name(operator: Any) -> str:
    return str(operator)
