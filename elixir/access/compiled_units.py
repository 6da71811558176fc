"""Modules that were given to torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from elixir.errors import InputError


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was given to torch.compile, by ``module.compile()`` or as ``torch.compile(module)``."""
    call = module._compiled_call_impl
    return getattr(call, "is_compiled", call is not None) or _replaces(module)  # a `ModuleCall` knows it


def _replaces(module: nn.Module) -> bool:
    """Whether this is what ``torch.compile(module)`` returns: a module around the one that it was given."""
    return "_orig_mod" in module._modules


@contextmanager
def compiled_in_place(model: object, *, keep: bool = False) -> Iterator[None]:
    """Puts the modules that ``torch.compile(module)`` has replaced back, compiled as by ``module.compile()``.

    Otherwise their weights would have names with ``_orig_mod.``, by which neither plans nor checkpoints of the plain
    model fit. The model itself stays as it is.

    Args:
        model: changed in place. Anything but a module is left to others to refuse.
        keep: whether they stay in place if nothing raises inside.

    Raises:
        InputError: such a module has hooks, which would run elsewhere in place.
    """
    undo: list[Callable[[], None]] = []
    stays = False
    try:
        for name, module in list(model.named_modules()) if isinstance(model, nn.Module) else []:
            for key, child in module._modules.items():
                if child is not None and _replaces(child):
                    undo.append(_put_in_place(f"{name}.{key}" if name else key, module, key, child))
        yield
        stays = keep
    finally:
        while undo and not stays:
            undo.pop()()


def _put_in_place(name: str, parent: nn.Module, key: str, replaced: nn.Module) -> Callable[[], None]:
    """Puts one module back under its parent; returns the function that undoes it."""
    module, context = replaced._modules["_orig_mod"], vars(replaced).get("dynamo_ctx")
    hooks = (replaced._forward_hooks, replaced._forward_pre_hooks, replaced._backward_hooks)
    if module is None or context is None or any(hooks):
        raise InputError(
            f"{name} is a torch.compile(module) with hooks on it, which do not run inside of its graph; compile "
            "with module.compile(), and register them on the module"
        )
    before = module._compiled_call_impl
    if before is None:
        # Of modules of torch.nn, whose files the compiler skips, torch.compile(module) compiles a function around them.
        given = getattr(vars(replaced).get("forward"), "_torchdynamo_orig_callable", None)
        call = module._call_impl
        module._compiled_call_impl = context(call if isinstance(given, MethodType) else _around(call))
    parent._modules[key] = module

    def undo() -> None:
        module._compiled_call_impl = before
        parent._modules[key] = replaced

    return undo


def compile_module(module: nn.Module, **arguments: Any) -> None:
    """Does what ``module.compile()`` does, for modules of torch.nn as well, whose files the compiler skips."""
    if type(module).forward.__module__.startswith("torch.nn."):
        module._compiled_call_impl = torch.compile(_around(module._call_impl), **arguments)
    else:
        module.compile(**arguments)


def _around(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return run


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Lets modules compiled in place run as they are, meanwhile."""
    with compiled_in_place(model):
        calls = [(module, call) for module in model.modules() if (call := module._compiled_call_impl) is not None]
        for module, _ in calls:
            module._compiled_call_impl = None
        try:
            yield
        finally:
            for module, call in calls:
                module._compiled_call_impl = call


def inductor_settings(module: nn.Module) -> Mapping[str, Any] | None:
    """Settings with which inductor compiles a module, all of them; None if another backend does, or none."""
    found: Mapping[str, Any] | None = getattr(module._compiled_call_impl, "get_compiler_config", lambda: None)()
    return found


def has_cuda_graphs(module: nn.Module) -> bool:
    """Whether a compiled module was asked to record CUDA graphs; False where its backend does not say."""
    config = inductor_settings(module)
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


class RecomputedCall:
    """The call of a compiled module all of whose forward runs again in backward.

    Args:
        call: runs the module compiled; a `ModuleCall` takes its place, so that weights come for the second run as well.
        run: calls a function in a checkpoint.
    """

    def __init__(self, call: Callable[..., Any], run: Callable[..., Any]) -> None:
        self.call, self._run = call, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.call, *args, **kwargs)

    def get_compiler_config(self) -> Any:
        """Answers as the result of `torch.compile` does."""
        return getattr(self.call, "get_compiler_config", lambda: None)()
