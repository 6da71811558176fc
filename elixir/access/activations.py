"""Moves the activations of units to the host and back (`Swapping`), or makes them again (`Recomputation`).

Moved ones go to host memory after forward, and come back one unit ahead of backward.

Hooks for saved tensors around a unit see what autograd, or a checkpoint, keeps of it. Weights are claimed first, by the
hooks of the interception. The same code runs in a trace and in a run; a `Mover` makes the copies.
"""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.hooks import RemovableHandle

from elixir.access.autograd import (
    Hooks,
    backward_is_running,
    innermost_saved_tensors_hooks,
    is_in_checkpoint,
    listener_of,
)
from elixir.access.compiled_units import RecomputedCall, is_compiled
from elixir.access.module_call import FUNCTION, unentered_function
from elixir.access.placeholders import storage_of
from elixir.errors import InputError
from elixir.step_trace import INPUT, SAVED, Result, StepShape, UnitActivations
from elixir.torch_private import DisableTorchFunctionSubclass, tree_leaves

SMALLEST_BYTES = 2**16
"""Smaller tensors stay: a copy of so many bytes takes about as long as to start it."""


MOST_SHARING = 4
"""A storage stays as well if a saved tensor has a smaller part of it than one of so many."""


class Sent(Protocol):
    """A tensor that moves to the host, until nothing refers to this."""

    def arrived(self) -> None:
        """Lets compute wait until it is on the host; its device memory may be freed then."""

    def fetch(self) -> None:
        """Begins to bring it back, unless it is on the device."""

    def tensor(self) -> torch.Tensor:
        """The tensor on the device; compute waits until it is there."""

    def forget(self) -> None:
        """Lets go of the device memory, until the tensor is asked for again."""


class Mover(Protocol):
    """Copies tensors to the host and back, while compute goes on."""

    def send(self, tensor: torch.Tensor) -> Sent:
        """Begins to copy a flat tensor to the host. It must not be written to before `Sent.arrived`."""


class _Moved:
    """One storage that moves, and how many saved tensors lie in it that backward has not asked for."""

    __slots__ = ("__weakref__", "_dtype", "_sent", "_source", "_storage", "_version", "waiting")

    def __init__(self, mover: Mover, tensor: torch.Tensor) -> None:
        numel = tensor.untyped_storage().nbytes() // tensor.itemsize
        self._source: torch.Tensor | None = tensor.detach().as_strided((numel,), (1,), 0)
        self._version = tensor._version
        self._storage = weakref.ref(tensor.untyped_storage())
        self._dtype = tensor.dtype
        self._sent = mover.send(self._source)
        self.waiting = 0

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether this is a tensor's storage, with the values that have been sent."""
        same = self._storage() is tensor.untyped_storage() and tensor.dtype == self._dtype
        return same and tensor._version == self._version

    def arrived(self) -> None:
        """Frees the device memory, when the host has the values."""
        if self._source is not None:
            self._sent.arrived()
            self._version = self._version if self._source._version == self._version else -1
            self._source = None

    def fetch(self) -> None:
        if self._source is None:
            self._sent.fetch()

    def taken(self) -> torch.Tensor:
        """The storage's tensor, for one of those that wait for it."""
        if self._source is not None and self._source._version != self._version:
            self._version = -1
        if self._version < 0:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation while "
                "it moved to the host; plan without activations='auto', or leave the operation out"
            )
        tensor = self._sent.tensor() if self._source is None else self._source
        self.waiting -= 1
        if self.waiting <= 0:
            self._sent.forget()
        return tensor


_Weak = weakref.ref[_Moved]


class MovedTensor:
    """A saved tensor in a storage that moves."""

    __slots__ = ("_geometry", "_moved")

    def __init__(self, moved: _Moved, tensor: torch.Tensor) -> None:
        self._moved = moved
        self._geometry = tensor.size(), tensor.stride(), tensor.storage_offset()
        moved.waiting += 1

    def tensor(self) -> torch.Tensor:
        """The tensor on the device; compute waits until it is there."""
        return self._moved.taken().as_strided(*self._geometry)

    def arrived(self) -> None:
        """Frees the device memory, when the host has the values."""
        self._moved.arrived()

    def fetch(self) -> None:
        """Begins to bring it back."""
        self._moved.fetch()


class _Call:
    """One call of a unit in forward.

    Args:
        mover: makes the copies.
        wanted: says which of the saved tensors move.
        outer: the hooks around it.
        before: storages that the unit before has sent.
    """

    def __init__(
        self, mover: Mover, wanted: Callable[[int], bool], outer: Hooks | None, before: Sequence[_Moved]
    ) -> None:
        self._mover, self._wanted, self._outer, self._before = mover, wanted, outer, before
        self._listener = listener_of(outer)
        self._count = 0
        self.moved: list[_Moved] = []
        self.known: list[_Moved] = []
        """The storages that it has moved, and those of the unit before that it saves, too."""
        self.nbytes = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        """Moves a saved tensor, if it is one of those that should."""
        with DisableTorchFunctionSubclass():
            weight = isinstance(tensor, nn.Parameter) or (
                self._listener is not None and (self._listener.stays(tensor) or self._listener.pack(tensor) is not None)
            )
        if not weight and tensor.numel():  # checkpoints of torch 2.11 save an empty tensor before the inputs
            self._count += 1
            if self._wanted(self._count - 1) and _can_move(tensor):
                return MovedTensor(self._of(tensor), tensor)
        return tensor if self._outer is None else self._outer[0](tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        """The saved tensor."""
        if type(packed) is MovedTensor:
            return packed.tensor()
        unpacked: torch.Tensor = packed if self._outer is None else self._outer[1](packed)
        return unpacked

    def _of(self, tensor: torch.Tensor) -> _Moved:
        """The storage's move, which begins now if it has not begun: a storage saved twice moves once."""
        for moved in (*self.known, *self._before):
            if moved.holds(tensor):
                if moved not in self.known:
                    self.known.append(moved)
                return moved
        moved = _Moved(self._mover, tensor)
        self.moved.append(moved)
        self.known.append(moved)
        self.nbytes += tensor.untyped_storage().nbytes()
        return moved


def _can_move(tensor: torch.Tensor) -> bool:
    """Whether a tensor has so much of a storage, and that is so large, that it is worth it."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or storage_of(tensor) == 0:
        return False
    nbytes = tensor.untyped_storage().nbytes()
    return nbytes >= SMALLEST_BYTES and MOST_SHARING * tensor.nbytes >= nbytes


class Swapping:
    """Moves activations of a model's units as a plan says, until `remove`.

    Args:
        model: whose units run.
        step: names all units, in order, and what of which is swapped.
        mover: makes the copies.

    Raises:
        InputError: a unit is unknown.
    """

    def __init__(self, model: nn.Module, step: StepShape, mover: Mover) -> None:
        self._mover = mover
        self._wanted = {each.unit: each for each in step.activations if each.swap}
        # What a graph holds, weakly, so that the host's memory is free when backward is over.
        self._latest: dict[str, list[_Weak]] = {}  # by unit, of its last call in forward, until the next unit is over
        self._before: list[_Weak] = []  # of the last unit
        self._watched: list[RemovableHandle] = []
        self.moved_bytes = Counter[str]()
        """Bytes that each unit has moved to the host so far."""
        self.paused = False
        """Whether micro-batches pass a unit together, and what calls it moves its inputs by `input_of`."""
        names = [unit.name for unit in step.units]
        self._last = names[-1] if names else ""
        for name in self._wanted:
            if name not in names:
                raise InputError(f"field 'activations': {name!r} is no unit of the step; plan anew")
            after = names.index(name) + 1
            if after < len(names):
                following = model.get_submodule(names[after])
                # Inside of its checkpoint, if it puts one around its forward.
                self._watched.append(following.register_forward_hook(partial(self._next_is_over, name)))

    def remove(self) -> None:
        """Watches no unit any more."""
        while self._watched:
            self._watched.pop().remove()
        self._latest.clear()
        self._before = []

    @contextmanager
    def moving(self, unit: str) -> Iterator[None]:
        """Moves what a unit saves, inside of it; it is put around the unit's forward, or around its checkpoint."""
        each = self._wanted.get(unit)
        if each is None or self.paused or not torch.is_grad_enabled() or backward_is_running():
            yield
            return
        everything = any(result.operator == SAVED for result in each.swap)
        inputs = frozenset(result.occurrence for result in each.swap if result.operator == INPUT)
        outer = innermost_saved_tensors_hooks()
        call = _Call(self._mover, lambda number: everything or number in inputs, outer, _alive(self._before))
        try:
            with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
                yield
        finally:
            self.moved_bytes[unit] += call.nbytes
            self._before = [weakref.ref(moved) for moved in call.known]
            # Inputs have moved while the unit ran; what else it saves leaves while the next unit runs, if there is one.
            if each.keep is not None or unit == self._last:
                for moved in call.moved:
                    moved.arrived()
            self._latest[unit] = [weakref.ref(moved) for moved in call.moved]

    def input_of(self, unit: str, number: int, tensor: torch.Tensor) -> MovedTensor | None:
        """Begins to move an input of a unit to the host; None if it stays.

        Args:
            unit: its name.
            number: of the tensor among those that the unit is called with by position, weights left out.
            tensor: what must not be written to before `MovedTensor.arrived`.
        """
        each = self._wanted.get(unit)
        if each is None or Result(INPUT, number) not in each.swap or not _can_move(tensor):
            return None
        moved = _Moved(self._mover, tensor)
        self.moved_bytes[unit] += tensor.untyped_storage().nbytes()
        return MovedTensor(moved, tensor)

    def _next_is_over(self, unit: str, module: nn.Module, args: Any, output: Any) -> None:
        """The unit after `unit` has run in forward."""
        if backward_is_running():
            return
        sent = self._latest.pop(unit, [])
        for moved in _alive(sent):
            moved.arrived()
        outputs = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        first = next(outputs, None)
        if sent and first is not None:
            # Graphs outlive their backward; what they refer to would stay on the host.
            first.register_hook(partial(_fetch, sent[::-1]))


def _alive(references: Sequence[_Weak]) -> list[_Moved]:
    return [moved for reference in references if (moved := reference()) is not None]


def _fetch(sent: Sequence[_Weak], gradient: torch.Tensor) -> None:
    """The backward of the unit after begins: what the unit needs comes back meanwhile, the last first."""
    for moved in _alive(sent):
        moved.fetch()


# --- recomputation ---------------------------------------------------------------------------------------------------
# Checkpoints around the units of a model, which keep some results of their forward and make the others again; compiled
# units run again whole.


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
