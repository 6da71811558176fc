"""Who uses which parameter when: the one interception that tracer and runtime listen to.

Three things together see every use of a parameter:

* In forward and in recompute, a `torch.nn.Parameter` subclass announces each torch function it is an argument of.
* In backward, a weight that autograd saved is announced when its node asks for it back. For that a pair of
  `saved_tensors_hooks` is pushed at every module entry, so that it is the innermost one also where a checkpoint has
  pushed its own; what the listener does not claim goes on to the hooks that were in force before.
* Module entries and exits delimit scopes: a view of a parameter made in one operator may be used in the next one, so
  what a function used stays in use until the innermost module that was running returns.

A view may be used later than that: a closure that a checkpoint runs again captured it, the context of an autograd
function keeps it, a module returned it in an object of its own. So what a function returns and the listener recognises
as a view becomes a `TrackedView`. It announces what reads it as a parameter does, and is pointed to the weight anew.

Metadata (`shape`, `dtype`, `size()`, ...) is not a use, nor is what only takes its shape from a parameter
(`zeros_like`, `new_empty`); `data`, `data_ptr()` and `untyped_storage()` are, since they lead to the values unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from elixir.differentiate import differentiate
from elixir.errors import InputError
from elixir.torch_functions import LAYOUT_METHODS, name_of, reads_only_metadata, written_arguments

_GRADIENT = torch.Tensor.grad
_DATA = torch.Tensor.data
_TUPLE_ITERATOR = type(iter(()))


class Place(Protocol):
    """Where a view lies; all but the parameter is its listener's own affair."""

    @property
    def parameter(self) -> nn.Parameter:
        """Whose memory it is."""


class AccessListener(Protocol):
    """What the tracer and the runtime each do when parameters are used."""

    def used(self, parameters: list[nn.Parameter], function: str) -> None:
        """`function` is about to read `parameters` (each once, in argument order), in forward or in recompute."""

    def writes(self, parameters: list[nn.Parameter], function: str) -> None:
        """`function` is about to write to `parameters`; comes before `used`."""

    def view(self, tensor: torch.Tensor) -> Place | None:
        """Where a result lies if its memory is a parameter's, so that it is to be tracked; else None."""

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether what runs now has announced `parameter`, so that reading a view of it is no new use."""

    def renew(self, view: TrackedView) -> None:
        """`view` is about to be read, its parameter is in use: see that it shows the values it was made of."""

    def reads_gradient(self, parameter: nn.Parameter) -> None:
        """``parameter.grad`` is about to be read."""

    def drops_gradient(self, parameter: nn.Parameter) -> None:
        """``parameter.grad`` is about to be set to None, or deleted."""

    def replaces(self, parameter: nn.Parameter) -> None:
        """``parameter.data`` is about to be set to another tensor."""

    def entered(self, module: nn.Module) -> None:
        """`module` starts to run."""

    def left(self, module: nn.Module, output: Any) -> Any:
        """`module` has returned `output`, or raised (None). Gives what it returns instead."""

    def pack(self, tensor: torch.Tensor) -> Any | None:
        """A handle that stands for `tensor` until backward if it is (a view of) a weight, else None."""

    def unpack(self, handle: Any) -> torch.Tensor:
        """The tensor behind a handle of `pack`; the autograd node now running is about to read it."""


class TrackedParameter(nn.Parameter):
    """A parameter that tells its listener before a torch function reads it."""

    _listener: AccessListener

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        """With values where they may be read; a debugger's list of variables must not raise."""
        try:
            return str(super().__repr__())  # type: ignore[no-untyped-call]
        except InputError:
            return f"Parameter of shape {list(self.shape)} and {self.dtype}, whose values are elsewhere"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """An ordinary parameter with the same values, which must be at hand."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied


class TrackedView(torch.Tensor):
    """A view of a tracked parameter that tells the listener before a torch function reads it.

    A function's result becomes one by a change of its class, of which autograd knows nothing.
    """

    _listener: AccessListener
    _place: Any
    """The listener's, a `Place`."""
    _memory: Any
    """Of what it is a view now; the listener's too."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """As of any tensor: a copy of its values, refused where it has a graph."""
        return self.clone().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled as it is, it would take along all memory that it is a view of.
        return self.detach().clone().__reduce_ex__(protocol)


_Tracked = TrackedParameter | TrackedView


class ParameterAccess:
    """Attaches a listener to every parameter and module of a model, until `remove`.

    Args:
        model: its parameters become `TrackedParameter`s in place; they keep their identity.
        listener: is told of every use.
        parameters: only these are tracked; all of them by default.
    """

    def __init__(
        self, model: nn.Module, listener: AccessListener, parameters: Collection[nn.Parameter] | None = None
    ) -> None:
        self._listener = listener
        self._classes: list[tuple[nn.Parameter, type]] = []
        self._handles: list[RemovableHandle] = []
        self._open: list[tuple[nn.Module, Any]] = []
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                wanted = parameters is None or parameter in parameters
                if wanted and not isinstance(parameter, TrackedParameter):
                    self._classes.append((parameter, parameter.__class__))
                    parameter.__class__ = TrackedParameter
                    parameter._listener = listener  # type: ignore[attr-defined]
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy of a module copies its hooks, and with them this: it would listen for two models.
        raise InputError(
            "a model that runs under a plan cannot be copied or pickled; save its state_dict(), or build a second model"
        )

    def remove(self) -> None:
        """Give parameters their class back and take all hooks off."""
        for parameter, original in self._classes:
            del parameter._listener  # type: ignore[attr-defined]
            parameter.__class__ = original
        for handle in self._handles:
            handle.remove()
        while self._open:
            hooks = self._open.pop()[1]
            if hooks is not None:
                hooks.__exit__(None, None, None)

    def _enter(self, module: nn.Module, args: Any) -> None:
        outer, hooks = innermost_saved_tensors_hooks(), None
        if _listener_of(outer) is not self._listener:  # else those of a module around this one serve
            hooks = _hooks_over(self._listener, outer)
            hooks.__enter__()
        self._open.append((module, hooks))
        self._listener.entered(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        # A module whose pre-hook raised was never entered, and one that a checkpoint stopped early has not left.
        if not any(entered is module for entered, _ in self._open):
            return output
        while True:
            entered, hooks = self._open.pop()
            if hooks is not None:
                hooks.__exit__(None, None, None)
            if entered is module:
                return self._listener.left(entered, output)
            self._listener.left(entered, None)


_Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]


def _hooks_over(listener: AccessListener, outer: _Hooks | None) -> Any:
    """Hooks that let the listener claim a tensor first and hand all others to `outer`."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        raise InputError(
            "a weight is used where saved-tensor hooks are switched off, as torch.func.grad, vjp, "
            "jacrev and hessian do, so its use in backward cannot be seen; use loss.backward() "
            "instead"
        )
    while outer is not None and _listener_of(outer) is listener:
        outer = outer[0]._elixir_outer  # type: ignore[attr-defined]

    def pack(tensor: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # what is asked of a parameter here is no use of it
            handle = listener.pack(tensor)
        if handle is not None:
            return _Claimed(handle)
        return outer[0](tensor) if outer is not None else _Kept(tensor)

    def unpack(packed: Any) -> Any:
        if type(packed) is _Claimed:
            with torch._C.DisableTorchFunctionSubclass():
                return listener.unpack(packed.handle)
        return outer[1](packed) if outer is not None else packed.tensor_if_unchanged()

    pack._elixir_listener = listener  # type: ignore[attr-defined]
    pack._elixir_outer = outer  # type: ignore[attr-defined]
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _listener_of(hooks: _Hooks | None) -> Any:
    """Whose hooks these are; None for those of others."""
    return None if hooks is None else getattr(hooks[0], "_elixir_listener", None)


class _Claimed:
    """A saved tensor that the listener keeps."""

    __slots__ = ("handle",)

    def __init__(self, handle: Any) -> None:
        self.handle = handle


class _Kept:
    """A saved tensor that nobody claims. Hooks switch off PyTorch's check for writes after saving, so it is made here."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = _detached(tensor)
        self._version = tensor._version

    def tensor_if_unchanged(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a {self._tensor.dtype} tensor of shape {list(self._tensor.shape)} is at version "
                f"{self._tensor._version}, it was saved at version {self._version}"
            )
        return self._tensor


def _call(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A torch function that has a tracked parameter, or a view of one, among its arguments."""
    if func is torch.autograd.grad or func is torch.autograd.backward:
        # What autograd runs, such as a recompute, has uses to announce: torch functions stay on.
        return differentiate(func, args, kwargs, lambda item: bool(_tracked((item,), {})))
    with torch._C.DisableTorchFunctionSubclass():
        if reads_only_metadata(func):
            return _ask(func, args, kwargs)
        found = _tracked(args, kwargs)
        if not found:
            return func(*args, **kwargs)
        listener, name = found[0]._listener, name_of(func)
        if name[-1:] == "_" or "out" in kwargs:
            written = _tracked(*written_arguments(name, args, kwargs))
            if written:
                listener.writes([_parameter_of(item) for item in written], name)
        _announce(listener, found, name)
        outer = innermost_saved_tensors_hooks()
        if torch.is_grad_enabled() and _listener_of(outer) is not listener:
            # Outside every module: in step_fn itself, or in a checkpointed function that runs again. Or inside hooks of
            # others, which would keep the weight itself.
            with _hooks_over(listener, outer):
                return _track(func(*args, **kwargs), listener)
        return _track(func(*args, **kwargs), listener)


def _announce(listener: AccessListener, found: list[_Tracked], name: str) -> None:
    """Tell of the parameters that are read; those behind views only where nothing that runs has told of them."""
    views = [item for item in found if type(item) is TrackedView]
    if not views:
        listener.used(cast(list[nn.Parameter], found), name)
        return
    parameters: list[nn.Parameter] = []
    for item in found:
        parameter = _parameter_of(item)
        known = any(parameter is other for other in parameters)
        if not known and (parameter is item or not listener.holds(parameter)):
            parameters.append(parameter)
    if parameters:
        listener.used(parameters, name)
    for view in views:
        listener.renew(view)


def _track(result: Any, listener: AccessListener) -> Any:
    """`result`, in which every view of a parameter is a `TrackedView`."""
    if type(result) is torch.Tensor:
        place = listener.view(result)
        if place is not None:
            view = cast(TrackedView, result)
            view.__class__ = TrackedView
            view._listener, view._place, view._memory = listener, place, None
    elif isinstance(result, (tuple, list)):
        for item in result:
            _track(item, listener)
    elif type(result) is _TUPLE_ITERATOR:  # of `for row in weight`
        return iter(_track(tuple(result), listener))
    return result


def untrack(tensors: Iterable[Any]) -> None:
    """Those that are views of tracked parameters become ordinary tensors, valid until the running module returns."""
    for tensor in tensors:
        if type(tensor) is TrackedView:
            tensor.__class__ = torch.Tensor  # type: ignore[assignment]


def _ask(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What reads no weight, but may have to be told or answered all the same."""
    owner, name, item = getattr(func, "__self__", None), func.__name__, args[0] if args else None
    if type(item) is TrackedParameter:
        if owner is _GRADIENT:
            if name == "__get__":
                item._listener.reads_gradient(item)
            elif name == "__delete__" or args[1] is None:
                item._listener.drops_gradient(item)
        elif owner is _DATA and name == "__set__":
            item._listener.replaces(item)
        elif name in LAYOUT_METHODS:
            return func(torch.empty(item.shape, dtype=item.dtype, device="meta"), *args[1:], **kwargs)
    elif owner is _DATA and name == "__set__":
        untrack([item])  # it is to be a view of something else
    return func(*args, **kwargs)


def innermost_saved_tensors_hooks() -> _Hooks | None:
    """The (pack, unpack) pair in force now. PyTorch has no public name for it; a test notices if this one goes."""
    hooks: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def storage_of(tensor: torch.Tensor) -> int:
    """What tells the storage that a tensor lies in from all others; 0 where it has none (sparse, or inside vmap)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return 0


def backward_is_running() -> bool:
    """Whether autograd is executing a backward pass on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def current_node_number() -> int:
    """Sequence number of the autograd node that runs on this thread; -1 where none does."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    # An output that a node saves would hold that very node: a cycle that keeps the activation until the garbage
    # collector runs. `detach` below the dispatch modes costs no dispatch and shares the storage.
    if tensor.grad_fn is None:
        return tensor
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


def _parameter_of(item: _Tracked) -> nn.Parameter:
    return cast(nn.Parameter, item._place.parameter if type(item) is TrackedView else item)


def _tracked(args: Iterable[Any], kwargs: dict[str, Any]) -> list[_Tracked]:
    """The tracked parameters and views of them among the arguments, each once."""
    found: list[_Tracked] = []
    for item in (*args, *kwargs.values()) if kwargs else args:
        kind = type(item)
        if kind is TrackedParameter or kind is TrackedView:
            if not any(item is other for other in found):
                found.append(item)
        elif isinstance(item, (tuple, list, dict)):
            for inner in _tracked(item.values() if isinstance(item, dict) else item, {}):
                if not any(inner is other for other in found):
                    found.append(inner)
    return found
