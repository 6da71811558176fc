"""torch.compile by layer: which layers a model repeats, and compiling each of them in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from elixir.access.compiled_units import compile_module, compiled_in_place, is_compiled
from elixir.errors import InputError, InputTypeError


def repeated_layers(model: nn.Module) -> dict[nn.Module, str]:
    """The layers that a model repeats -> their names: members of one class of the outermost lists, with parameters.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Embedding(8, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))
    >>> list(repeated_layers(model).values())
    ['1.0', '1.1', '1.2']
    """
    found: dict[nn.Module, str] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        members = {key: child for key, child in module.named_children() if next(child.parameters(), None) is not None}
        if len(members) > 1 and len({type(child) for child in members.values()}) == 1:
            for key, child in members.items():
                found[child] = f"{name}.{key}" if name else key
                inside.update(child.modules())
    return found


def check_compile(compile: object) -> dict[str, Any] | None:
    """Arguments of torch.compile for each layer; None if nothing is to be compiled.

    Raises:
        InputTypeError: it is no bool or dict.
    """
    if compile is None or compile is False:
        return None
    if compile is True:
        return {}
    if not isinstance(compile, Mapping) or not all(isinstance(key, str) for key in compile):
        raise InputTypeError(f"compile must be True, False or a dict of torch.compile's arguments, got {compile!r}")
    return dict(compile)


@contextmanager
def layers_compiled(model: nn.Module, compile: object, *, keep: bool) -> Iterator[None]:
    """Compiles the repeated layers of a model; those that are compiled already run in place (`compiled_in_place`).

    Args:
        model: changed in place.
        compile: see `check_compile`.
        keep: whether they stay compiled if nothing raises inside.

    Raises:
        InputError: the model repeats no layer.
    """
    arguments = check_compile(compile)
    compiled: list[nn.Module] = []
    stays = False
    with compiled_in_place(model, keep=keep):
        try:
            if arguments is not None:
                layers = repeated_layers(model)
                if not layers:
                    raise InputError(
                        "compile= compiles the layers that a model repeats in an nn.ModuleList or nn.Sequential, and "
                        f"{type(model).__name__} has none; call compile() on the modules of your choice"
                    )
                compiled += [layer for layer in layers if not is_compiled(layer)]
                for layer in compiled:
                    compile_module(layer, **arguments)
            yield
            stays = keep
        finally:
            if not stays:
                for layer in compiled:
                    layer._compiled_call_impl = None
