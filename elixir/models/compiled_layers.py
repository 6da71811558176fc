"""torch.compile by layer: compiles the layers that a model repeats in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from elixir.access.compiled_units import compile_module, compiled_in_place, is_compiled
from elixir.errors import InputError, InputTypeError
from elixir.models.layer_units import repeated_layers


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
