"""`Calls`: enters a context around each outermost call of one of several models, by whatever method it comes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from types import FrameType
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

from elixir.access.autograd import backward_is_running
from elixir.access.interrupts import runs

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Around = AbstractContextManager[tuple[Arguments, Callable[[Any], Any]]]
"""Gives the arguments as the model gets them, and a function that finishes its output."""


class _Begun(NamedTuple):
    """An outermost call that has begun."""

    context: Around
    finished: Callable[[Any], Any]
    handled: BaseException | None
    """The exception that the caller was handling."""


class _Open(NamedTuple):
    """A call of a model."""

    frame: FrameType
    """Calls the model's hooks and its forward."""
    begun: _Begun | None
    """None inside of another call, and in backward."""


class Calls:
    """Enters a context when a model is called outside of another call, and leaves it when the call returns or raises.

    `generate`, or any other method of a model, enters it for each call of the model that it contains.

    Args:
        models: those under the plan.
        begin: ``begin(model, args, kwargs)`` makes the context.
    """

    def __init__(self, models: Iterable[nn.Module], begin: Callable[[nn.Module, Any, Any], Around]) -> None:
        self._models, self._begin = list(models), begin
        self._open: dict[int, list[_Open]] = {}  # by thread
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Hooks the models: before all hooks that are there by now, and after them."""
        self.remove()
        for model in self._models:
            self._handles.append(model.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
            self._handles.append(model.register_forward_hook(self._leave, with_kwargs=True, always_call=True))

    def remove(self) -> None:
        """Takes the hooks off."""
        self.leave_ended()
        while self._handles:
            self._handles.pop().remove()

    def leave_ended(self) -> None:
        """Leaves the context of a call that was interrupted on this thread: PyTorch calls no hook then."""
        outermost = next(iter(self._open.get(threading.get_ident(), ())), None)
        if outermost is not None and not runs(outermost.frame):
            del self._open[threading.get_ident()]
            if outermost.begun is not None:
                with suppress(KeyboardInterrupt):
                    outermost.begun.context.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)

    def _enter(self, model: nn.Module, args: Any, kwargs: Any) -> Arguments | None:
        self.leave_ended()
        open_here = self._open.setdefault(threading.get_ident(), [])
        if open_here or backward_is_running():
            open_here.append(_Open(sys._getframe(1), None))
            return None
        begun = self._begin(model, args, kwargs)
        arguments, finished = begun.__enter__()
        open_here.append(_Open(sys._getframe(1), _Begun(begun, finished, sys.exc_info()[1])))
        return arguments

    def _leave(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        thread = threading.get_ident()
        open_here = self._open.get(thread, [])
        found = open_here.pop().begun if open_here else None  # none is open if the call could not begin
        if not open_here:
            self._open.pop(thread, None)
        if found is None:
            return None
        # torch calls this after an error too, which is then being handled; a later hook may have raised it.
        error = sys.exc_info()
        if error[1] is found.handled:
            error = (None, None, None)
        found.context.__exit__(*error)
        return None if error[0] is not None else found.finished(output)
