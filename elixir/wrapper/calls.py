"""`Calls`: enters a context around each outermost call of one of several models, by whatever method it comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from elixir.access.autograd import backward_is_running
from elixir.access.interrupts import run_user_code
from elixir.access.module_call import ModuleCall

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Around = AbstractContextManager[tuple[Arguments, Callable[[Any], Any]]]
"""Gives the arguments as the model gets them, and a function that finishes its output."""


class Calls:
    """Enters a context when a model is called outside of another call, and leaves it with the call, until `remove`.

    `generate`, or any other method of a model, enters it for each call of the model that it contains.

    Args:
        models: those under the plan.
        begin: ``begin(model, args, kwargs)`` makes the context.
    """

    def __init__(self, models: Iterable[nn.Module], begin: Callable[[nn.Module, Any, Any], Around]) -> None:
        self._begin, self._threads = begin, set[int]()  # on which a model runs
        self._calls = [ModuleCall(model, self._run, outermost=True) for model in models]

    def remove(self) -> None:
        """Lets the models be called as before."""
        while self._calls:
            self._calls.pop().remove()

    def _run(self, model: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        if thread in self._threads or backward_is_running():
            return run_user_code(call, *args, **kwargs)
        self._threads.add(thread)
        try:
            with self._begin(model, args, kwargs) as ((args, kwargs), finished):
                output = run_user_code(call, *args, **kwargs)
            return finished(output)
        finally:
            self._threads.discard(thread)
