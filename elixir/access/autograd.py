"""Reads the state of autograd on this thread, hooks into the tensors that it saves, and differentiates by tracked
parameters."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.graph import get_gradient_edge

from elixir.access.access_listener import AccessListener
from elixir.access.placeholders import unmarked
from elixir.access.whole import held, holds_others
from elixir.errors import InputError
from elixir.torch_private import (
    DisableTorchDispatch,
    DisableTorchFunctionSubclass,
    current_autograd_node,
    current_graph_task_id,
    dispatch_mode_count,
    saved_tensors_hooks_are_enabled,
    top_saved_tensors_hooks,
)

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]


_TRANSFORMS = (
    "as torch.func.grad, vjp, jacrev and hessian do, so its use in backward cannot be seen; use loss.backward() or "
    "torch.autograd.grad instead"
)


def hooks_were_refused(error: BaseException) -> InputError | None:
    """Returns an error that says what to do, if PyTorch refused a transform because of our hooks; otherwise None."""
    if isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error):
        return InputError(
            f"a transform begins in a module that is running and would switch off saved-tensor hooks, {_TRANSFORMS}"
        )
    return None


def hooks_over(
    listener: AccessListener,
    outer: Hooks | None,
    track: Callable[[Any, AccessListener], Any],
    *,
    around_compiled: bool = False,
) -> Any:
    """Creates hooks that let the listener claim a tensor first, and pass all others to `outer`.

    Args:
        listener: claims weights.
        outer: the hooks that were active before.
        track: ``track(items, listener)`` makes weights among some tensors announce their uses.
        around_compiled: whether compiled code runs inside, whose compiler would otherwise compile these functions too.
    """
    if not saved_tensors_hooks_are_enabled():
        raise InputError(f"a weight is used where saved-tensor hooks are switched off, {_TRANSFORMS}")
    while outer is not None and listener_of(outer) is listener:
        outer = outer[0].elixir_outer  # type: ignore[attr-defined]

    keep, give = outer if outer is not None else (_Kept, _Kept.tensor_if_unchanged)
    claims = listener.pack
    # A checkpoint expects the same saved tensors when its function runs again, so all go to its hooks. A weight among
    # the arguments of the function may come back without the class that announces uses.
    keeps = outer is not None and not _are_of_checkpoint(outer)

    def pack(tensor: torch.Tensor) -> Any:
        if type(tensor) is torch.Tensor:  # has no functions of ours, and the context below takes longer than the rest
            handle = claims(tensor)
        else:
            with DisableTorchFunctionSubclass():  # questions about a parameter are no use of it
                handle = _handle(tensor, listener)
        if handle is not None:
            return handle if outer is None else _Claimed(handle)
        return _Kept(tensor) if keeps and listener.stays(tensor) else keep(tensor)

    def unpack(packed: Any) -> Any:
        if type(packed) is _Kept:
            return packed.tensor_if_unchanged()
        if outer is None or type(packed) is _Claimed:
            # On a device's thread autograd calls this from C++, without a Python frame above.
            caller = sys._getframe().f_back
            again = caller is not None and caller.f_code.co_filename == _CHECKPOINT_FILE
            if again:
                _track_arguments(caller, lambda items: track(items, listener))
            with DisableTorchFunctionSubclass():
                return _given(packed if outer is None else packed.handle, listener, again=again)
        return give(packed)

    if around_compiled:
        pack, unpack = torch.compiler.disable(pack), torch.compiler.disable(unpack)
    pack.elixir_listener = listener  # type: ignore[attr-defined]
    pack.elixir_outer = outer  # type: ignore[attr-defined]
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _track_arguments(caller: FrameType | None, track: Callable[[Any], Any]) -> None:
    """Makes the function of a checkpoint, which is about to run again, announce the weights among its arguments.

    Activation checkpointing saves them like autograd, so they come back without the class that announces uses. If a
    version of PyTorch names the function differently, the checkpoint runs unchanged.
    """
    frame = caller
    while frame is not None and frame.f_code.co_filename == _CHECKPOINT_FILE:
        # Non-reentrant checkpointing keeps the function in a frame object; its variable's name depends on the version.
        for owner in map(frame.f_locals.get, ("self", "frame", "ctx")):
            for name in ("recompute_fn", "run_function"):
                function = getattr(owner, name, None)
                if function is not None and not hasattr(function, "elixir_tracks"):
                    setattr(owner, name, _with_tracked_arguments(function, track))
        frame = frame.f_back


def _with_tracked_arguments(function: Callable[..., Any], track: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(function, updated=())
    def again(*args: Any, **kwargs: Any) -> Any:
        return function(*track(args), **kwargs)

    again.elixir_tracks = True  # type: ignore[attr-defined]
    return again


def listener_of(hooks: Hooks | None) -> Any:
    """The listener of these hooks; None for foreign hooks."""
    return None if hooks is None else getattr(hooks[0], "elixir_listener", None)


def _handle(tensor: torch.Tensor, listener: AccessListener) -> Any:
    """The listener's handle of a saved tensor; None if it does not claim it, nor any that it holds."""
    if not holds_others(tensor):
        return listener.pack(tensor)
    handles = {name: _handle(each, listener) for name, each in held(tensor)}
    return None if all(each is None for each in handles.values()) else _Held(tensor, handles)


def _given(handle: Any, listener: AccessListener, *, again: bool) -> torch.Tensor:
    """The saved tensor."""
    if type(handle) is _Held:
        return handle.joined(listener, again=again)
    return listener.again(handle) if again else listener.unpack(handle)


class _Held:
    """A saved tensor that holds others, of which the listener has claimed some."""

    __slots__ = ("_form", "_handles", "_others")

    def __init__(self, tensor: Any, handles: dict[str, Any]) -> None:
        self._handles = handles
        self._others = {name: each for name, each in held(tensor) if handles[name] is None}
        self._form = (type(tensor), tensor.__tensor_flatten__()[1], tensor.size(), tensor.stride())

    def joined(self, listener: AccessListener, *, again: bool) -> torch.Tensor:
        kind, *form = self._form
        handles = {name: handle for name, handle in self._handles.items() if handle is not None}
        found = {name: _given(handle, listener, again=again) for name, handle in handles.items()}
        tensor: torch.Tensor = kind.__tensor_unflatten__(self._others | found, *form)
        return tensor


class _Claimed:
    """A saved tensor that the listener has claimed, where others are packed by foreign hooks."""

    __slots__ = ("handle",)

    def __init__(self, handle: Any) -> None:
        self.handle = handle


class _Kept:
    """A saved tensor that the listener does not claim. Hooks switch off PyTorch's check for later writes, so this class
    repeats it."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = detached(tensor)
        self._version = tensor._version

    def tensor_if_unchanged(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a {self._tensor.dtype} tensor of shape {list(self._tensor.shape)} is at version "
                f"{self._tensor._version}, it was saved at version {self._version}"
            )
        return self._tensor


def innermost_saved_tensors_hooks() -> Hooks | None:
    """The active (pack, unpack) pair. PyTorch has no public name for it; a test notices if the private one goes."""
    hooks: Hooks | None = top_saved_tensors_hooks(True)
    return hooks


def _are_of_checkpoint(hooks: Hooks) -> bool:
    """Whether activation checkpointing has set these hooks. PyTorch wraps its functions for the compiler."""
    code = getattr(inspect.unwrap(hooks[0]), "__code__", None)
    return getattr(code, "co_filename", None) == _CHECKPOINT_FILE


def is_in_checkpoint() -> bool:
    """Whether a non-reentrant checkpoint is around what runs on this thread, with hooks of ours inside at most."""
    hooks = innermost_saved_tensors_hooks()
    while hooks is not None and not _are_of_checkpoint(hooks):
        hooks = getattr(hooks[0], "elixir_outer", None)
    return hooks is not None


def backward_is_running() -> bool:
    """Whether autograd runs a backward on this thread."""
    return bool(current_graph_task_id() != -1)


def current_node_number() -> int:
    """The sequence number of the autograd node that runs on this thread; -1 if none does."""
    node = current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor` without its graph, hidden from dispatch modes.

    A node that saves its own output would be held by it: a cycle that keeps the activation until the garbage collector
    runs.
    """
    if tensor.grad_fn is None:
        return tensor
    if type(tensor) is torch.Tensor and not dispatch_mode_count():
        return tensor.detach()
    with DisableTorchDispatch():
        return tensor.detach()


# --- differentiate ---------------------------------------------------------------------------------------------------
# Runs `torch.autograd.grad` and `backward` for tracked parameters without announcing them as uses.


def differentiate(
    func: Callable[..., Any], args: Any, kwargs: dict[str, Any], is_tracked: Callable[[Any], bool]
) -> Any:
    """Calls `func` with graph edges instead of parameters, so that no torch function sees the parameters again.

    Args:
        func: ``torch.autograd.grad`` or ``torch.autograd.backward``.
        args: its positional arguments.
        kwargs: its keyword arguments.
        is_tracked: whether an argument is a tracked parameter, a view of one, or contains any.

    Raises:
        InputError: the graph would begin at a weight, or a gradient be stored at a view of one.
    """
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    if is_tracked(next(iter(given.values()))):
        raise InputError(
            f"{func.__name__} begins at a weight, or a view of one, whose values may be elsewhere; begin at what a "
            "module's forward has computed from it"
        )
    inputs = tuple(given.get("inputs") or ())
    with DisableTorchFunctionSubclass(), unmarked():  # this asks for an edge, not for the weight's values
        if func is torch.autograd.backward and any(is_tracked(item) and not item.is_leaf for item in inputs):
            raise InputError(
                "backward(inputs=) cannot leave a gradient at a view of a weight; give the weight itself, or ask "
                "torch.autograd.grad for the gradient of the view"
            )
        given["inputs"] = tuple(get_gradient_edge(item) if is_tracked(item) else item for item in inputs)
    if not given.pop("materialize_grads", False):
        return func(**given)
    # For an edge torch does not know the shape of the zeros.
    found = func(**given | {"allow_unused": True})
    return tuple(
        torch.zeros(item.shape, dtype=item.dtype, device=item.device)
        if gradient is None and isinstance(item, torch.Tensor)
        else gradient
        for gradient, item in zip(found, inputs, strict=True)
    )
