"""`ModuleCall`: what a listener does before and after a module's call; and a unit's weights meanwhile.

`OwnCheckpoint` and `FastPath` are for modules whose call is not all: those that checkpoint themselves, and those that
PyTorch computes in one operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn

from elixir.access.access_listener import AccessListener
from elixir.access.compiled_units import RecomputedCall
from elixir.access.placeholders import unmarked
from elixir.torch_private import DisableTorchFunctionSubclass

CALL = "_compiled_call_impl"
"""The attribute of `nn.Module` that is called instead of the module itself, unless it is None; copies do not get it."""


class ModuleCall:
    """Runs in place of a module's call, compiled or not, until `remove`.

    Unlike hooks it lets PyTorch take fast paths, which a hook switches off, takes a fifth of their time, and ends
    whatever ends the call, an interrupt included. Hooks of the module run inside.

    Args:
        module: its own call ends in that of `nn.Module`.
        run: ``run(module, call, *args, **kwargs)`` calls ``call``, and does what comes before and after.
        outermost: stays around those that come later.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any], *, outermost: bool = False) -> None:
        self._module, self._run, self.stays_outermost = module, run, outermost
        found = module._compiled_call_impl
        self.is_compiled: bool = getattr(found, "is_compiled", found is not None)
        """Whether it calls code that torch.compile has made of the module."""
        self._place = (vars(found), "call") if isinstance(found, RecomputedCall) else (vars(module), CALL)
        around = isinstance(found, ModuleCall) and found.stays_outermost
        holder, name = (vars(found), "_call") if around else self._place
        self._call: Callable[..., Any] = holder.get(name) or module._call_impl
        # Of a compiled one only this frame is left to Python: what it calls runs compiled.
        entry: Any = torch.compiler.disable(self.__call__, recursive=False) if self.is_compiled else self
        self._entry = holder[name] = entry

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        return self._run(self._module, self._call, *args, **kwargs)

    def remove(self) -> None:
        """Lets the module be called as without this, unless it was compiled anew."""
        holder, name = self._place
        while isinstance(around := holder.get(name), ModuleCall) and around is not self:
            holder, name = vars(around), "_call"  # of one that came later, or stays outermost
        if holder.get(name) is self._entry:
            if name == CALL and self._call == self._module._call_impl:
                del holder[name]
            else:
                holder[name] = self._call
        self._run, self._entry = _call_alone, None  # a call that is running keeps nothing of a listener alive


def _call_alone(module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


class OrdinaryWeights:
    """The tracked parameters of a unit, which announce nothing while it runs: all of them are used when it begins.

    Args:
        members: the parameters, each once, and their classes meanwhile.
        use: announces them.
    """

    def __init__(
        self, members: Sequence[tuple[nn.Parameter, type]], use: Callable[[list[nn.Parameter]], object]
    ) -> None:
        self._parameters = [parameter for parameter, _ in members]
        self._classes = [(parameter, kind, type(parameter)) for parameter, kind in members]
        self._use = use

    def begin(self) -> unmarked:
        """Brings the weights in; returns the context in which marks of weights go unnoticed, which `end` leaves."""
        if self._parameters:
            self._use(self._parameters)
        for parameter, kind, _ in self._classes:
            parameter.__class__ = kind
        inside = unmarked()
        inside.__enter__()
        return inside

    def end(self, inside: unmarked) -> None:
        """Lets them announce their uses again."""
        inside.__exit__(None, None, None)
        for parameter, _, tracked in self._classes:
            parameter.__class__ = tracked


# --- own checkpoint --------------------------------------------------------------------------------------------------
# Layers that put a checkpoint around their own forward, as those of transformers do.


FUNCTION = "_gradient_checkpointing_func"
"""The attribute in which a module of transformers keeps the function that checkpoints."""


def checkpoint_function(module: nn.Module) -> Callable[..., Any] | None:
    """The function with which a module of transformers checkpoints; None for other modules."""
    return vars(module).get(FUNCTION)


def unentered_function(module: nn.Module) -> Callable[..., Any] | None:
    """The `checkpoint_function` of a module without the entry that an `OwnCheckpoint` put around it."""
    function = checkpoint_function(module)
    entry = getattr(function, "__self__", None)
    return entry.original if isinstance(entry, OwnCheckpoint) else function


class OwnCheckpoint:
    """Enters a module inside of the checkpoint that it puts around its own forward, until `remove`.

    Such a checkpoint begins inside of the module's call. Its backward runs only the forward again, not the call, whose
    saved-tensor hooks lie outside of the checkpoint's.

    Args:
        module: has a `checkpoint_function`.
        run: as of `elixir.access.module_call.ModuleCall`.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self._module, self._run = module, run
        self.original: Any = checkpoint_function(module)
        vars(module)[FUNCTION] = self._checkpoint

    def remove(self) -> None:
        """Gives the module its function back, unless it was given another one."""
        if vars(self._module).get(FUNCTION) == self._checkpoint:
            vars(self._module)[FUNCTION] = self.original

    def _checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A module may also checkpoint calls of others, whose hooks run.
        if isinstance(function, partial) and function.args and function.args[0] is self._module:
            function = partial(self._run, self._module, function)
        return self.original(function, *args, **kwargs)


@contextmanager
def without_checkpoint(module: nn.Module) -> Iterator[None]:
    """Calls what a module of transformers would checkpoint as it is, meanwhile; other modules are left alone."""
    function = checkpoint_function(module)
    if function is None:
        yield
        return
    entry = getattr(function, "__self__", None)
    owner, name = (vars(entry), "original") if isinstance(entry, OwnCheckpoint) else (vars(module), FUNCTION)
    before, owner[name] = owner[name], _as_it_is
    try:
        yield
    finally:
        owner[name] = before


def _as_it_is(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


# --- fast path -------------------------------------------------------------------------------------------------------
# `FastPath`: lets modules take PyTorch's fast paths of attention in evaluation.
#
# `nn.TransformerEncoderLayer`, `nn.TransformerEncoder` and `nn.MultiheadAttention` compute a layer in one operator,
# which rounds differently, if no gradient is wanted, no weight has a torch function and no module inside has a hook.
# Tracked weights would prevent it, yet need not announce themselves: the operator meets marked placeholders.


HAVE_FAST_PATHS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class FastPath:
    """Replaces the forward of a module that has a fast path, until `remove`.

    Args:
        module: one of `HAVE_FAST_PATHS`.
        listener: knows whether all weights of a layer fit at once.
    """

    def __init__(self, module: nn.Module, listener: AccessListener) -> None:
        self._module, self._listener = module, listener
        self._own = vars(module).get("forward")
        self._forward: Callable[..., Any] = module.forward
        self._attached = True
        update_wrapper(self, self._forward)  # code may inspect its signature
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        evaluates = self._attached and not (self._module.training or torch.is_grad_enabled())
        if not (evaluates and self._may_be_taken(args, kwargs)):
            return self._forward(*args, **kwargs)
        with DisableTorchFunctionSubclass():
            return self._forward(*args, **kwargs)

    def remove(self) -> None:
        """Restores the module's forward, unless another replacement wraps this one and still calls it."""
        self._attached = False
        if vars(self._module).get("forward") is self:
            del self._module.forward
            if self._own is not None:
                self._module.forward = self._own

    def _may_be_taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = tuple(item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor))
        if torch.overrides.has_torch_function(given):
            return False
        whole = isinstance(self._module, nn.TransformerEncoder)
        layers = self._module.layers if whole else [self._module]
        return all(self._listener.has_room_for(list(layer.parameters())) for layer in layers)  # type: ignore[union-attr]
