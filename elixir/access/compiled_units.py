"""Compiled modules as units: their weights are used as one, and nothing of the interception runs inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from elixir.access.placeholders import unmarked
from elixir.errors import InputError


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was given to torch.compile, by ``module.compile()`` or as ``torch.compile(module)``."""
    return module._compiled_call_impl is not None or _replaces(module)


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
        call: runs the module compiled; who listens to the module puts a call in its place that announces the weights,
            so that they come for the second run as well.
        run: calls a function in a checkpoint.
    """

    def __init__(self, call: Callable[..., Any], run: Callable[..., Any]) -> None:
        self.call, self._run = call, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.call, *args, **kwargs)

    def get_compiler_config(self) -> Any:
        """Answers as the result of `torch.compile` does."""
        return getattr(self.call, "get_compiler_config", lambda: None)()


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


class CompiledUnit:
    """One compiled module under a listener, until `remove`: entered, used and left around its compiled code.

    The code is compiled for ordinary parameters: guards and graphs of tracked ones would differ, and break at each
    read. So parameters are ordinary ones while the code runs.

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
        use: Callable[[list[nn.Parameter]], object],
    ) -> None:
        self._module = module
        outer = module._compiled_call_impl
        self._holder, self._name = (
            (vars(outer), "call") if isinstance(outer, RecomputedCall) else (vars(module), "_compiled_call_impl")
        )
        self._original: Any = self._holder[self._name]
        # Only the frame of `call` is left to Python: what it calls runs compiled.
        self._entry = self._holder[self._name] = torch.compiler.disable(self._call, recursive=False)
        self._enter, self._leave = enter, leave
        tracked = [parameter for parameter in module.parameters() if hasattr(parameter, "elixir_listener")]
        self._weights = OrdinaryWeights([(parameter, nn.Parameter) for parameter in tracked], use)

    def remove(self) -> None:
        """Gives the module its compiled code back, unless it was compiled anew."""
        if self._holder[self._name] is self._entry:
            self._holder[self._name] = self._original

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self._enter(self._module, args)
        output = None
        try:
            inside = self._weights.begin()
            try:
                output = self._original(*args, **kwargs)
            finally:
                self._weights.end(inside)
        finally:
            output = self._leave(self._module, args, output)
        return output
