"""`Interception`: announces every use of a parameter to a listener, the tracer's or the runtime's.

Four things together see every use of a parameter:

* In forward and recompute, a `torch.nn.Parameter` subclass announces each torch function that gets it as an argument.
* In backward, a weight that autograd saved is announced when its node asks for it. A pair of `saved_tensors_hooks` is
  pushed at every module entry, so that it stays innermost even if activation checkpointing has pushed its own. Tensors
  that the listener does not claim go to the outer hooks. A listener that claims nothing needs no hooks.
* Code that calls operators without Python's torch functions (TorchScript, `torch.vmap`, compiled extensions) meets
  parameters that a listener has marked (`elixir.access.placeholders`): every operator that gets one is announced like a
  torch function. A trace marks none, since its dispatch mode sees every operator.
* Module entries and exits delimit scopes: the next operator may use a view that one operator created, so a parameter
  stays in use until the innermost running module returns.

A view may live longer: in a closure that is recomputed, in the context of an autograd function, or in a custom object
that a module returned. It lies in the weight's storage, by which the listener knows it, and is a `TrackedView`, which
announces its uses like a parameter; what only operators have made is marked.

Reading metadata (`shape`, `dtype`, `size()`, ...) is no use, nor is taking only the shape of a parameter (`zeros_like`,
`new_empty`). `data`, `data_ptr()` and `untyped_storage()` are uses, since they expose the values.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from elixir.access.access_listener import (
    REPLACES_MEMORY,
    AccessListener,
    Pins,
    name_of,
    operator_reads_only_metadata,
    reads_only_metadata,
    written_arguments,
)
from elixir.access.autograd import differentiate, hooks_over, innermost_saved_tensors_hooks, listener_of
from elixir.access.compiled_units import is_compiled
from elixir.access.counted_parameter import DATA, GRADIENT, plain_copy
from elixir.access.interrupts import run_user_code
from elixir.access.module_call import (
    HAVE_FAST_PATHS,
    FastPath,
    ModuleCall,
    OrdinaryWeights,
    OwnCheckpoint,
    checkpoint_function,
)
from elixir.access.placeholders import (
    is_absent,
    is_listened_to,
    listen,
    listener_to,
    remarked,
    same_memory,
    unmarked,
    watch,
)
from elixir.access.whole import Whole
from elixir.errors import InputError
from elixir.torch_private import (
    DisableTorchFunctionSubclass,
    OpOverload,
    ScriptMethod,
    functorch_level,
    script_parameters,
    torch_function_is_enabled,
    tree_leaves,
)

_TUPLE_ITERATOR = type(iter(()))
WEIGHTS_ARE_LOST = "wrapping had begun to move the model's weights when it failed: build the model again"
_HEARD_BY = "elixir_heard_by"
"""The attribute of modules by which copies of them are refused: their first, since what is copied before may raise."""


class TrackedParameter(nn.Parameter):
    """A parameter that tells its listener before a torch function reads it."""

    elixir_listener: AccessListener

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {}, types)

    def __repr__(self) -> str:  # type: ignore[override]
        """Shows values if they may be read; a debugger's list of variables must not raise."""
        try:
            return str(super().__repr__())  # type: ignore[no-untyped-call]
        except InputError:
            return f"Parameter of shape {list(self.shape)} and {self.dtype}, whose values are elsewhere"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Returns an ordinary parameter with the same values, which must be readable."""
        return plain_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain_copy(self, {}).__reduce_ex__(protocol)


class TrackedView(torch.Tensor):
    """A view of a tracked parameter that tells the listener before a torch function reads it.

    It lies in the weight's storage, whose memory comes and goes. A function's result becomes one by a change of class,
    which autograd does not notice.
    """

    elixir_listener: AccessListener | None
    """The tracer; None: who listens to the storage."""
    elixir_parameter: nn.Parameter

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {}, types)

    def __copy__(self) -> Any:
        return self[...]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies its values, as of any tensor; refused if it has a graph."""
        return self.clone().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickling the view itself would include all memory that it views.
        return self.detach().clone().__reduce_ex__(protocol)


TRACKED_PARAMETERS: set[type] = {TrackedParameter}
"""The classes of tracked parameters: one per class of a model's parameters."""


@functools.cache
def _tracked_class(kind: type) -> type:
    """Returns a class of tracked parameters with the methods and attributes of `kind`."""
    if kind is nn.Parameter:
        return TrackedParameter
    made = type(f"Tracked{kind.__name__}", (TrackedParameter, kind), {})
    TRACKED_PARAMETERS.add(made)
    return made


@dataclass(slots=True, eq=False)
class _Open:
    """A module that runs."""

    module: nn.Module
    hooks: Any = None
    """Its saved-tensor hooks; None if those of a module around it serve it."""
    end: Callable[[], None] | None = None
    """Ends what holds while a unit runs; None for other modules, and for a unit inside of itself."""


class Interception:
    """Attaches a listener to every parameter and module of a model, until `remove`.

    Args:
        model: the model. Its parameters become `TrackedParameter`s in place; they keep identity, methods and
            attributes.
        listener: learns of every use.
        parameters: the parameters to track, by default all; modules without any are left alone.
        scripts: whether to announce calls of TorchScript functions and methods, by replacing a method of PyTorch's
            classes for all threads. A trace does not need it, since its dispatch mode sees their operators.
        units: modules whose parameters are all announced when one starts, and nothing inside of it; compiled or not.
    """

    def __init__(
        self,
        model: nn.Module,
        listener: AccessListener,
        parameters: Collection[nn.Parameter] | None = None,
        *,
        scripts: bool = True,
        units: Collection[nn.Module] = (),
    ) -> None:
        self._listener = listener
        self._classes: list[tuple[nn.Parameter, type]] = []
        self._calls: list[ModuleCall | OwnCheckpoint] = []
        self._by_thread = threading.local()  # micro-batches of one pass are in forward on several threads
        self._scripts = _scripts_announce() if scripts else None
        compiled = [unit for unit in units if is_compiled(unit)]
        plain = [unit for unit in units if not is_compiled(unit)]
        inside = {module for unit in units for module in unit.modules()} - {*plain}
        self._modules = list(model.modules())
        for module in self._modules:
            for parameter in module._parameters.values():
                if parameter is None:
                    continue
                wanted = parameters is None or parameter in parameters
                if wanted and not isinstance(parameter, TrackedParameter):
                    self._classes.append((parameter, parameter.__class__))
                    parameter.__class__ = _tracked_class(parameter.__class__)
                    parameter.elixir_listener = listener  # type: ignore[attr-defined]
            if parameters is not None and next(module.parameters(), None) is None:
                continue  # it may belong to several running models, as an activation function may
            if module in inside and module not in compiled:
                continue  # it would break the graph of a compiled one, and take time in others
            self._calls.append(ModuleCall(module, self._run))
            attributes = dict(vars(module))
            vars(module).clear()
            vars(module).update({_HEARD_BY: self} | attributes)
            if module not in inside and checkpoint_function(module) is not None:
                self._calls.append(OwnCheckpoint(module, self._run))
        originals, self._units = dict(self._classes), dict[nn.Module, OrdinaryWeights]()
        self._around_compiled = bool(compiled)
        for unit in units:
            # Code is compiled for ordinary parameters: guards and graphs of others differ, and break at each read.
            kind, name = (nn.Parameter, "a compiled module") if unit in compiled else (None, "a layer")
            mine = [(each, kind or originals[each]) for each in unit.parameters() if each in originals]
            self._units[unit] = OrdinaryWeights(mine, partial(listener.used, function=name))
        fast = [each for each in self._modules if isinstance(each, HAVE_FAST_PATHS) and each not in inside]
        tracked = [each for each in fast if any(isinstance(it, TrackedParameter) for it in each.parameters())]
        self._fast = [FastPath(each, listener) for each in tracked]
        self._stop_listening = listen(listener)
        self._checkpointing = [each for each in self._modules if hasattr(each, "gradient_checkpointing")]
        self._compiled = self._present_calls()

    @property
    def _open(self) -> list[_Open]:
        """Modules that run on this thread, outermost first."""
        found: list[_Open] | None = getattr(self._by_thread, "open", None)
        if found is None:
            found = self._by_thread.open = []
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        # What is copied with its modules would listen for two models.
        raise InputError(
            "a model that runs under a plan cannot be copied or pickled; save its state_dict(), or build a second model"
        )

    @property
    def was_changed_since(self) -> bool:
        """Whether a module has been compiled, or given another function to checkpoint, since this listens."""
        return self._present_calls() != self._compiled

    def _present_calls(self) -> list[Any]:
        return [
            *(module._compiled_call_impl for module in self._modules),
            *map(checkpoint_function, self._checkpointing),
        ]

    def remove(self) -> None:
        """Restores the classes of parameters and the calls of modules."""
        if self._scripts is not None:
            self._scripts()
        for parameter, original in self._classes:
            del parameter.elixir_listener  # type: ignore[attr-defined]
            parameter.__class__ = original
        self._stop_listening()
        for path in self._fast:
            path.remove()
        for module in self._modules:
            vars(module).pop(_HEARD_BY, None)
        while self._calls:  # these hold this object, which would live until the garbage collector runs
            self._calls.pop().remove()
        self._compiled.clear()

    @property
    def is_entered(self) -> bool:
        """Whether a module of the model runs on this thread."""
        return bool(self._open)

    def _run(self, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Enters a module, calls a function, and leaves the module however the function ends."""
        opened = _Open(module)
        try:
            self._enter(opened)
            output = run_user_code(call, *args, **kwargs)
        except BaseException:
            self._leave(opened, None)
            raise
        return self._leave(opened, output)

    def _enter(self, opened: _Open) -> None:
        module, outer, running = opened.module, innermost_saved_tensors_hooks(), self._open
        # Hooks of a module around this one serve this one, too.
        if self._listener.claims_saved and listener_of(outer) is not self._listener:
            opened.hooks = hooks_over(self._listener, outer, _track, around_compiled=self._around_compiled)
            opened.hooks.__enter__()
        weights = self._units.get(module)
        # A unit that checkpoints itself is entered twice in forward: by its call, and by its checkpoint inside of that.
        begins = weights is not None and all(each.module is not module for each in running)
        running.append(opened)
        self._listener.entered(module)
        if begins and weights is not None:
            opened.end = partial(weights.end, weights.begin())
        if self._scripts is None and isinstance(module, torch.jit.ScriptModule):
            # Modules inside of it call no hooks.
            tracked: list[nn.Parameter] = [item for item in module.parameters() if type(item) in TRACKED_PARAMETERS]
            if tracked:
                self._listener.used(tracked, "TorchScript")

    def _leave(self, opened: _Open, output: Any) -> Any:
        # Autograd itself takes off the hooks that an interrupted backward has left.
        if opened.hooks is not None and (innermost_saved_tensors_hooks() or (None,))[0] is opened.hooks.pack_hook:
            opened.hooks.__exit__(None, None, None)
        running = self._open
        if not running or running[-1] is not opened:  # it could not be entered
            return output
        running.pop()
        if opened.end is not None:
            opened.end()
        return self._listener.left(opened.module, output)


def _call(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], types: Any) -> Any:
    """Handles a torch function with a tracked parameter, or a view of one, among its arguments."""
    if len(types) > 1 and any(issubclass(kind, Whole) for kind in types):
        return NotImplemented  # the other class announces all of them
    if func is torch.autograd.grad or func is torch.autograd.backward:
        # A recompute inside of it has uses to announce, so torch functions stay on.
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
        return result if name != "data" else _listener(found[0]).lends(_parameter_of(found[0]), result)


def _call_whole(kind: Any, func: Callable[..., Any], types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Handles a torch function with a tensor among its arguments that holds tracked parameters."""
    found = [] if reads_only_metadata(func) else _tracked(args, kwargs)
    if not found:
        return kind.__torch_function__(func, types, args, kwargs)
    name = name_of(func)
    if name[-1:] == "_" and _tracked(*written_arguments(name, args, kwargs)):
        raise InputError(f"{name} writes to a {kind.__name__}, which holds frozen weights; write before wrapping")

    def call(*args: Any, **kwargs: Any) -> Any:
        return kind.__torch_function__(func, types, args, kwargs)

    with unmarked():
        return _read(call, args, kwargs, name, found, [])


Whole.elixir_call = staticmethod(_call_whole)


def _noticing(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `func` for `torch.vmap` and its like, where it may get other weights than were announced for it.

    There tensors are wrapped, so the tensor that an operator gets is unknown before the call.
    """

    def noticed(*args: Any, **kwargs: Any) -> Any:
        with remarked():
            return func(*args, **kwargs)

    return noticed


def _reached(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Handles an operator that gets a marked tensor from code that calls no torch function."""
    with DisableTorchFunctionSubclass(), unmarked():
        name = operator._schema.name.partition("::")[2]
        if name == REPLACES_MEMORY and type(args[0]) in TRACKED_PARAMETERS:
            args[0].elixir_listener.replaces(args[0])  # as a later argument, a weight is only read
        if operator_reads_only_metadata(name):
            return operator(*args, **kwargs)
        found = _tracked(args, kwargs)
        if not found:
            # A view that only operators have seen, of a weight that was elsewhere.
            gone = [item for item in tree_leaves((args, kwargs)) if is_absent(item)]
            if any(isinstance(item, nn.Parameter) for item in gone):
                raise InputError(f"{name} reads a weight that is nowhere: {WEIGHTS_ARE_LOST}")
            if gone:
                raise InputError(
                    f"{name} reads a weight that is elsewhere, through a tensor made from it by code that no torch "
                    "function announces; make it in the module that uses it"
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
_call_method: Callable[..., Any] = ScriptMethod.__call__
_attached = 0  # how many calls of `_scripts_announce` are active
_attaching = threading.Lock()


def _announced_script(function: torch.jit.ScriptFunction[Any, Any], *args: Any, **kwargs: Any) -> Any:
    found = _tracked(args, kwargs) if torch_function_is_enabled() else []
    if not found:
        return _call_script(function, *args, **kwargs)
    with DisableTorchFunctionSubclass(), unmarked():
        call = partial(_call_script, function)
        seen = call if functorch_level() is None else _noticing(call)
        return _read(seen, args, kwargs, str(function.name), found, [])


def _announced_method(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Announces all weights of the module whose method is called, forward or another: modules inside call no hooks."""
    found: list[Any] = [each for each in script_parameters(method.owner) if type(each) in TRACKED_PARAMETERS]
    if not found:
        return _call_method(method, *args, **kwargs)
    listener: AccessListener = found[0].elixir_listener
    pins = listener.used(found, "TorchScript")
    try:
        return _call_method(method, *args, **kwargs)
    finally:
        listener.give_back(pins)


def _scripts_announce() -> Callable[[], None]:
    """Makes calls of TorchScript functions and methods announce uses, for all threads; returns the function that ends
    it.

    TorchScript's methods look for `__torch_function__` in their arguments, its functions do not. Marks are not enough:
    a fused kernel takes the addresses of its arguments without an operator, and in a unit marks are off.
    """
    global _attached
    with _attaching:
        _attached += 1
        torch.jit.ScriptFunction.__call__ = _announced_script  # type: ignore[method-assign, assignment]
        ScriptMethod.__call__ = _announced_method

    def back() -> None:
        global _attached
        with _attaching:
            _attached -= 1
            if not _attached:
                torch.jit.ScriptFunction.__call__ = _call_script  # type: ignore[method-assign]
                ScriptMethod.__call__ = _call_method

    return back


def _read(
    func: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    name: str,
    found: list[torch.Tensor],
    written: list[torch.Tensor],
) -> Any:
    """Announces what `func` reads and writes, and calls it."""
    listener, *others = dict.fromkeys(map(_listener, found))
    changed = list(dict.fromkeys(_parameter_of(item) for item in written)) if written else []
    if changed:
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        listener.writes(changed, name, of_weights=all(_is_weight(item) for item in tensors))
    outer, hooks = innermost_saved_tensors_hooks(), _NO_HOOKS
    if listener.claims_saved and torch.is_grad_enabled() and listener_of(outer) is not listener:
        # This runs outside of every module: in step_fn, or in a recomputed function. Or it runs inside foreign hooks,
        # which would keep the weight itself.
        hooks = hooks_over(listener, outer, _track)
    held: list[tuple[AccessListener, Pins]] = []
    try:
        for each in (listener, *others):
            mine = [item for item in found if _listener(item) is each] if others else found
            _announce(each, mine, name, held)
        with hooks:
            result = func(*args, **kwargs)
    finally:
        for each, pins in held:
            each.give_back(pins)
    if changed:
        listener.wrote(changed)
    return _track(result, listener)


_NO_HOOKS: Any = nullcontext()


def _announce(
    listener: AccessListener, found: list[torch.Tensor], name: str, held: list[tuple[AccessListener, Pins]]
) -> None:
    """Announces the parameters that are read; those of views only if the running module or node has not announced
    them. Adds to `held` what is to be given back after the read."""
    parameters: dict[int, nn.Parameter] = {}
    for item in found:
        parameter = _parameter_of(item)
        if parameter is item or not listener.holds(parameter):
            parameters[id(parameter)] = parameter
    if parameters and (pins := listener.used([*parameters.values()], name)):  # seldom: modules and nodes keep theirs
        held.append((listener, pins))
    for item in found:
        if type(item) not in TRACKED_PARAMETERS and not item.untyped_storage().nbytes():
            listener.used_through(_parameter_of(item))


def _ask(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Handles a call that reads no weight but concerns the listener."""
    owner, name = getattr(func, "__self__", None), func.__name__
    item: Any = args[0] if args else None
    if type(item) in TRACKED_PARAMETERS:
        if owner is GRADIENT:
            if name == "__get__":
                item.elixir_listener.reads_gradient(item)
            elif name == "__delete__" or args[1] is None:
                item.elixir_listener.drops_gradient(item)
        elif owner is DATA and name == "__set__":
            if same_memory(item, args[1]):
                return None  # `module.to(dtype)` does this in the forward of routers
            item.elixir_listener.replaces(item)
            func(*args, **kwargs)
            return item.elixir_listener.wrote([item])
    elif owner is DATA and name == "__set__":
        untrack([item])  # it becomes a view of other memory
    return func(*args, **kwargs)


def _track(result: Any, listener: AccessListener) -> Any:
    """Returns `result`, in which every view of a parameter has become a `TrackedView`."""
    if type(result) is torch.Tensor:
        parameter = listener.parameter_of(result)
        if parameter is not None:
            view = cast(TrackedView, result)
            # Another plan has another listener to the same storage.
            view.elixir_listener = None if is_listened_to(result) else listener
            view.elixir_parameter = parameter
            view.__class__ = TrackedView
    elif isinstance(result, (tuple, list)):
        for item in result:
            _track(item, listener)
    elif type(result) is _TUPLE_ITERATOR:  # from `for row in weight`
        return iter(_track(tuple(result), listener))
    return result


def untrack(tensors: Iterable[Any]) -> None:
    """Turns views of tracked parameters into ordinary tensors."""
    for tensor in tensors:
        if type(tensor) is TrackedView:
            tensor.__class__ = torch.Tensor  # type: ignore[assignment]


def _listener(item: Any) -> AccessListener:
    kind = type(item)
    if kind in TRACKED_PARAMETERS or (kind is TrackedView and item.elixir_listener is not None):
        return cast(AccessListener, item.elixir_listener)
    return listener_to(item)


def _parameter_of(item: Any) -> nn.Parameter:
    kind = type(item)
    found = item.elixir_parameter if kind is TrackedView else item
    return cast(nn.Parameter, _listener(item).parameter_of(item) if kind is torch.Tensor else found)


def _is_weight(item: Any) -> bool:
    """Whether it is a tracked parameter, or a view of one, which may be one that only operators have seen."""
    kind = type(item)
    if kind is torch.Tensor:
        return is_listened_to(item)
    return kind is TrackedView or kind in TRACKED_PARAMETERS


def _tracked(args: Iterable[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Finds the tracked parameters and views of them among the arguments, each once."""
    found: dict[int, torch.Tensor] = {}
    for item in (*args, *kwargs.values()) if kwargs else args:
        if _is_weight(item):
            found[id(item)] = item
        elif isinstance(item, (tuple, list, dict, Whole)):
            values = item.elixir_held if isinstance(item, Whole) else item
            inner = _tracked(item.values() if isinstance(item, dict) else values, {})
            found.update(zip(map(id, inner), inner, strict=True))
    return [*found.values()]
