"""Compiled modules as units: their weights are used as one, and nothing of the interception runs inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from elixir.access.placeholders import unmarked


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was given to torch.compile, by ``module.compile()`` or as ``torch.compile(module)``."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def _attribute_of_call(module: nn.Module) -> str:
    """Name of the attribute through which a compiled module calls its code."""
    return "forward" if "_orig_mod" in module._modules else "_compiled_call_impl"


def has_cuda_graphs(module: nn.Module) -> bool:
    """Whether a compiled module was asked to record CUDA graphs; False where its backend does not say."""
    call = vars(module).get(_attribute_of_call(module))
    config = getattr(call, "get_compiler_config", lambda: None)()
    return bool(config and config.get("triton.cudagraphs"))


def compiled_units(model: nn.Module) -> dict[nn.Module, str]:
    """The outermost compiled modules that have parameters -> their names in `model`, in the order of modules.

    The model itself is no unit: all its weights at once are what streaming avoids.
    """
    units: dict[nn.Module, str] = {}
    inside: set[nn.Module] = set(model.modules()) if is_compiled(model) else set()
    for name, module in model.named_modules():
        if module not in inside and is_compiled(module) and next(module.parameters(), None) is not None:
            units[module] = name
            inside.update(module.modules())
    return units


class CompiledUnit:
    """One compiled module under a listener, until `remove`: entered, used and left around its compiled code.

    The code is compiled for ordinary parameters: guards and graphs of tracked ones would differ, and break at each
    read. So parameters are ordinary ones while the code runs, and marks of weights that are elsewhere go unnoticed.

    Args:
        module: compiled, with parameters.
        enter, leave: what a hook before and after its forward would do.
        use: announces the module's tracked parameters, each once.
    """

    def __init__(
        self,
        module: nn.Module,
        enter: Callable[[nn.Module, Any], None],
        leave: Callable[[nn.Module, Any, Any], Any],
        use: Callable[[list[nn.Parameter]], None],
    ) -> None:
        self._module = module
        self._attribute = _attribute_of_call(module)
        self._original = vars(module)[self._attribute]
        # Only the frame of `call` is left to Python: what it calls runs compiled.
        setattr(module, self._attribute, torch.compiler.disable(self._call, recursive=False))
        self._enter, self._leave, self._use = enter, leave, use
        self._tracked = [parameter for parameter in module.parameters() if hasattr(parameter, "elixir_listener")]

    def remove(self) -> None:
        """Gives the module its compiled code back."""
        setattr(self._module, self._attribute, self._original)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self._enter(self._module, args)
        output = None
        try:
            with self._ordinary():
                output = self._original(*args, **kwargs)
        finally:
            output = self._leave(self._module, args, output)
        return output

    @contextmanager
    def _ordinary(self) -> Iterator[None]:
        """Brings the weights in, and makes parameters ordinary ones meanwhile."""
        if not self._tracked:
            yield
            return
        self._use(self._tracked)
        kinds = [type(parameter) for parameter in self._tracked]
        for parameter in self._tracked:
            parameter.__class__ = nn.Parameter
        try:
            with unmarked():
                yield
        finally:
            for parameter, kind in zip(self._tracked, kinds, strict=True):
                parameter.__class__ = kind
