"""Who uses which parameter when: the one interception that tracer and runtime listen to.

Four things together see every use of a parameter:

* In forward and in recompute, a `torch.nn.Parameter` subclass announces each torch function it is an argument of.
* In backward, a weight that autograd saved is announced when its node asks for it back. For that a pair of
  `saved_tensors_hooks` is pushed at every module entry, so that it is the innermost one also where a checkpoint has
  pushed its own; what the listener does not claim goes on to the hooks that were in force before. A listener that
  claims nothing does without.
* Code that calls operators without Python's torch functions (TorchScript, `torch.vmap`, compiled extensions) meets
  parameters that a listener has marked (`elixir.access.placeholders`): every operator that gets one is announced as a
  torch function is. A trace, whose dispatch mode sees every operator, marks none.
* Module entries and exits delimit scopes: a view of a parameter made in one operator may be used in the next one, so
  what a function used stays in use until the innermost module that was running returns.

A view may be used later than that: a closure that a checkpoint runs again captured it, the context of an autograd
function keeps it, a module returned it in a custom object. So what a function returns and the listener recognises
as a view becomes a `TrackedView`. It announces what reads it as a parameter does, and is pointed to the weight anew.

Metadata (`shape`, `dtype`, `size()`, ...) is not a use, nor is what only takes its shape from a parameter
(`zeros_like`, `new_empty`); `data`, `data_ptr()` and `untyped_storage()` are, since they lead to the values unseen.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from elixir.access.access_listener import AccessListener
from elixir.access.autograd import hooks_over, innermost_saved_tensors_hooks, listener_of
from elixir.access.differentiate import differentiate
from elixir.access.fast_path import HAVE_FAST_PATHS, FastPath
from elixir.access.functions import (
    REPLACES_MEMORY,
    name_of,
    operator_reads_only_metadata,
    reads_only_metadata,
    written_arguments,
)
from elixir.access.placeholders import is_absent, remarked, storage_of, unmarked, watch
from elixir.errors import InputError
from elixir.torch_private import (
    DisableTorchFunctionSubclass,
    OpOverload,
    functorch_level,
    torch_function_is_enabled,
    tree_leaves,
)

_GRADIENT = torch.Tensor.grad
_DATA = torch.Tensor.data
_TUPLE_ITERATOR = type(iter(()))


def _plain_copy(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    if id(parameter) not in memo:
        memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    copied: nn.Parameter = memo[id(parameter)]
    return copied


class TrackedParameter(nn.Parameter):
    """A parameter that tells its listener before a torch function reads it."""

    elixir_listener: AccessListener

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
        return _plain_copy(self, memo)


class CountedParameter(nn.Parameter):
    """A parameter whose ``data`` comes from a function, so that writes through it can be counted.

    It has no torch function, so it costs nothing except where ``data`` is read.
    """

    elixir_lends: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def data(self) -> torch.Tensor:
        """The values, without a graph."""
        if torch.compiler.is_compiling():
            return self.detach()
        data: torch.Tensor = _DATA.__get__(self)  # type: ignore[attr-defined]
        return data if self.elixir_lends is None else self.elixir_lends(data)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _DATA.__set__(self, value)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """An ordinary parameter with the same values."""
        return _plain_copy(self, memo)


class TrackedView(torch.Tensor):
    """A view of a tracked parameter that tells the listener before a torch function reads it.

    A function's result becomes one by a change of its class, of which autograd knows nothing.
    """

    elixir_listener: AccessListener
    elixir_place: Any
    """The listener's, a `Place`."""
    elixir_memory: Any
    """The memory that it is a view of now; also the listener's."""

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

TRACKED_PARAMETERS: set[type] = {TrackedParameter}
"""The classes of tracked parameters: one for each class that a model's parameters have."""


@functools.cache
def _tracked_class(kind: type) -> type:
    """The class of tracked parameters of `kind`, which have the methods and attributes of that class."""
    if kind is nn.Parameter:
        return TrackedParameter
    made = type(f"Tracked{kind.__name__}", (TrackedParameter, kind), {})
    TRACKED_PARAMETERS.add(made)
    return made


class Interception:
    """Attaches a listener to every parameter and module of a model, until `remove`.

    Args:
        model: its parameters become `TrackedParameter`s in place; they keep their identity, and what their own
            classes define.
        listener: is told of every use.
        parameters: only these are tracked, and modules without any are left alone; all of them by default.
        scripts: whether calls of TorchScript functions are announced, which replaces a method of PyTorch's class for
            all threads. A trace does without: its dispatch mode sees every operator that they call.
    """

    def __init__(
        self,
        model: nn.Module,
        listener: AccessListener,
        parameters: Collection[nn.Parameter] | None = None,
        *,
        scripts: bool = True,
    ) -> None:
        self._listener = listener
        self._classes: list[tuple[nn.Parameter, type]] = []
        self._handles: list[RemovableHandle] = []
        self._open: list[tuple[nn.Module, Any]] = []
        self._scripts = _script_functions_announce() if scripts else None
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is None:
                    continue
                wanted = parameters is None or parameter in parameters
                if wanted and not isinstance(parameter, TrackedParameter):
                    self._classes.append((parameter, parameter.__class__))
                    parameter.__class__ = _tracked_class(parameter.__class__)
                    parameter.elixir_listener = listener  # type: ignore[attr-defined]
            if parameters is not None and next(module.parameters(), None) is None:
                continue  # it may be part of other models that run as well, as an activation function is
            # By the class, since a TorchScript module refuses to register hooks, but calls those that it has.
            self._handles.append(nn.Module.register_forward_pre_hook(module, self._enter))
            self._handles.append(nn.Module.register_forward_hook(module, self._leave, always_call=True))
        ours = {handle.id for handle in self._handles}
        fast = [each for each in model.modules() if isinstance(each, HAVE_FAST_PATHS)]
        tracked = [each for each in fast if any(isinstance(it, TrackedParameter) for it in each.parameters())]
        self._fast = [FastPath(each, listener, ours) for each in tracked]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy of a module copies its hooks, and with them this: it would listen for two models.
        raise InputError(
            "a model that runs under a plan cannot be copied or pickled; save its state_dict(), or build a second model"
        )

    def remove(self) -> None:
        """Gives parameters their class back and takes all hooks off."""
        if self._scripts is not None:
            self._scripts()
        for parameter, original in self._classes:
            del parameter.elixir_listener  # type: ignore[attr-defined]
            parameter.__class__ = original
        for handle in self._handles:
            handle.remove()
        for path in self._fast:
            path.remove()
        while self._open:
            hooks = self._open.pop()[1]
            if hooks is not None:
                hooks.__exit__(None, None, None)

    def _enter(self, module: nn.Module, args: Any) -> None:
        outer, hooks = innermost_saved_tensors_hooks(), None
        # Those of a module around this one serve as well.
        if self._listener.claims_saved and listener_of(outer) is not self._listener:
            hooks = hooks_over(self._listener, outer, _track)
            hooks.__enter__()
        self._open.append((module, hooks))
        self._listener.entered(module)
        if isinstance(module, torch.jit.ScriptModule):
            # Nothing inside of it calls hooks, and fused kernels of TorchScript are no operators.
            tracked: list[nn.Parameter] = [item for item in module.parameters() if type(item) in TRACKED_PARAMETERS]
            if tracked:
                self._listener.used(tracked, "TorchScript")

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        # A module whose pre-hook raised was never entered, and one that a checkpoint stopped early has not left.
        innermost = bool(self._open) and self._open[-1][0] is module
        if not innermost and not any(entered is module for entered, _ in self._open):
            return output
        while True:
            entered, hooks = self._open.pop()
            if hooks is not None:
                hooks.__exit__(None, None, None)
            if entered is module:
                return self._listener.left(entered, output)
            self._listener.left(entered, None)


def _call(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A torch function that has a tracked parameter, or a view of one, among its arguments."""
    if func is torch.autograd.grad or func is torch.autograd.backward:
        # What autograd runs, such as a recompute, has uses to announce: torch functions stay on.
        return differentiate(func, args, kwargs, lambda item: bool(_tracked((item,), {})))
    with DisableTorchFunctionSubclass(), unmarked():
        if reads_only_metadata(func):
            return _ask(func, args, kwargs)
        found = _tracked(args, kwargs)
        if not found:
            return func(*args, **kwargs)
        name = name_of(func)
        may_write = name[-1:] == "_" or "out" in kwargs or "max_norm" in kwargs
        written = _tracked(*written_arguments(name, args, kwargs)) if may_write else []
        result = _read(func if functorch_level() is None else _noticing(func), args, kwargs, name, found, written)
        return result if name != "data" else found[0].elixir_listener.lends(_parameter_of(found[0]), result)


def _noticing(func: Callable[..., Any]) -> Callable[..., Any]:
    """`func` inside of `torch.vmap` and its like, where it may get other weights than those announced for it.

    There tensors are wrapped: the one that an operator gets in the end is known to nobody before.
    """

    def noticed(*args: Any, **kwargs: Any) -> Any:
        with remarked():
            return func(*args, **kwargs)

    return noticed


def _reached(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """An operator that gets something marked, called by what is no torch function."""
    with DisableTorchFunctionSubclass(), unmarked():
        name = operator._schema.name.partition("::")[2]
        if name == REPLACES_MEMORY and type(args[0]) in TRACKED_PARAMETERS:
            args[0].elixir_listener.replaces(args[0])  # a tensor that takes a weight's memory reads the weight
        if operator_reads_only_metadata(name):
            return operator(*args, **kwargs)
        found = _tracked(args, kwargs)
        if not found:
            # A view of a weight that only operators have seen so far. If it has memory, that is a block's.
            if any(is_absent(item) for item in tree_leaves((args, kwargs))):
                raise InputError(
                    f"{name} reads a weight that is elsewhere, through a tensor made from it by code that no torch "
                    "function "
                    "announces; make it in the module that uses it"
                )
            return operator(*args, **kwargs)
        schema = operator._schema.arguments
        written = [
            value
            for place, argument in enumerate(schema)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in [args[place] if place < len(args) else kwargs.get(argument.name)]
        ]
        return _read(operator, args, kwargs, name, found, _tracked(written, {}))


watch(_reached)

_call_script: Callable[..., Any] = torch.jit.ScriptFunction.__call__
_attached = 0  # how many of `_script_functions_announce` have not been taken back
_attaching = threading.Lock()


def _announced_script(function: torch.jit.ScriptFunction[Any, Any], *args: Any, **kwargs: Any) -> Any:
    found = _tracked(args, kwargs) if torch_function_is_enabled() else []
    if not found:
        return _call_script(function, *args, **kwargs)
    with DisableTorchFunctionSubclass(), unmarked():
        call = partial(_call_script, function)
        seen = call if functorch_level() is None else _noticing(call)
        return _read(seen, args, kwargs, str(function.name), found, [])


def _script_functions_announce() -> Callable[[], None]:
    """Have calls of TorchScript functions announced, until what this returns is called.

    TorchScript's methods look for `__torch_function__` in their arguments, its functions do not. Marks alone do not do,
    since a fused kernel takes the addresses of its arguments without an operator.
    """
    global _attached
    with _attaching:
        _attached += 1
        torch.jit.ScriptFunction.__call__ = _announced_script  # type: ignore[method-assign, assignment]

    def back() -> None:
        global _attached
        with _attaching:
            _attached -= 1
            if not _attached:
                torch.jit.ScriptFunction.__call__ = _call_script  # type: ignore[method-assign]

    return back


def _read(
    func: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    name: str,
    found: list[_Tracked],
    written: list[_Tracked],
) -> Any:
    """Announces what `func` reads and writes, and calls it."""
    listener = found[0].elixir_listener
    changed = list(dict.fromkeys(_parameter_of(item) for item in written)) if written else []
    if changed:
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        listener.writes(changed, name, of_weights=all(isinstance(item, _Tracked) for item in tensors))
    _announce(listener, found, name)
    outer = innermost_saved_tensors_hooks()
    if listener.claims_saved and torch.is_grad_enabled() and listener_of(outer) is not listener:
        # Outside every module: in step_fn itself, or in a checkpointed function that runs again. Or inside hooks of
        # others, which would keep the weight itself.
        with hooks_over(listener, outer, _track):
            result = func(*args, **kwargs)
    else:
        result = func(*args, **kwargs)
    if changed:
        listener.wrote(changed)
    return _track(result, listener)


def _announce(listener: AccessListener, found: list[_Tracked], name: str) -> None:
    """Tells of the parameters that are read; those of views only if nothing that runs has told of them."""
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
            view.elixir_listener, view.elixir_place, view.elixir_memory = listener, place, None
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
    """Handles a call that reads no weight, but that the listener must hear of or answer."""
    owner, name = getattr(func, "__self__", None), func.__name__
    item: Any = args[0] if args else None
    if type(item) in TRACKED_PARAMETERS:
        if owner is _GRADIENT:
            if name == "__get__":
                item.elixir_listener.reads_gradient(item)
            elif name == "__delete__" or args[1] is None:
                item.elixir_listener.drops_gradient(item)
        elif owner is _DATA and name == "__set__":
            if _same_memory(item, args[1]):
                return None  # as `module.to(dtype)` does it in the forward of routers
            item.elixir_listener.replaces(item)
            func(*args, **kwargs)
            return item.elixir_listener.wrote([item])
    elif owner is _DATA and name == "__set__":
        untrack([item])  # it is to be a view of something else
    return func(*args, **kwargs)


def _same_memory(item: torch.Tensor, other: Any) -> bool:
    """Whether `item` would be the same elements in the same order if it were given the memory of `other`."""
    return other is item or (
        isinstance(other, torch.Tensor)
        and (other.dtype, other.shape, other.stride()) == (item.dtype, item.shape, item.stride())
        and other.storage_offset() == item.storage_offset()
        and storage_of(other) == storage_of(item) != 0
    )


def _parameter_of(item: _Tracked) -> nn.Parameter:
    return cast(nn.Parameter, item.elixir_place.parameter if type(item) is TrackedView else item)


def _tracked(args: Iterable[Any], kwargs: dict[str, Any]) -> list[_Tracked]:
    """The tracked parameters and views of them among the arguments, each once."""
    found: list[_Tracked] = []
    for item in (*args, *kwargs.values()) if kwargs else args:
        kind = type(item)
        if kind is TrackedView or kind in TRACKED_PARAMETERS:
            if not any(item is other for other in found):
                found.append(item)
        elif isinstance(item, (tuple, list, dict)):
            for inner in _tracked(item.values() if isinstance(item, dict) else item, {}):
                if not any(inner is other for other in found):
                    found.append(inner)
    return found
