"""`ModuleCall`: what a listener does before and after a module's call; and a unit's weights meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from elixir.access.compiled_units import RecomputedCall
from elixir.access.placeholders import unmarked

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
