"""Layers that put a checkpoint around their own forward, as those of transformers do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

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
