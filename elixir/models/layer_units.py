"""The layers of a model that count as units, by one function for the tracer, the search and the runtime; and
torch.compile by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from elixir.access.compiled_units import compile_module, compiled_in_place, compiled_units, is_compiled
from elixir.access.module_call import HAVE_FAST_PATHS
from elixir.errors import InputError, InputTypeError
from elixir.step_trace import Fetch, Form, StepShape, Unit, enclosing


def layer_units(
    model: nn.Module, *, compile: bool = False, checkpointed: Collection[str] = ()
) -> dict[nn.Module, Unit]:
    """The units of a model -> what a trace says of each, in the order of modules.

    A unit is the outermost module that is compiled, checkpointed, or a repeated layer. Where these overlap, compiled
    modules rule: a layer of which only a part is compiled is no unit. A checkpoint that runs several repeated layers
    is none either; they are.

    >>> model = nn.Sequential(nn.Embedding(8, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))
    >>> [(unit.name, unit.form, unit.kind) for unit in layer_units(model, checkpointed=["1.1"]).values()]
    [('1.0', 'plain', 'Linear'), ('1.1', 'checkpointed', 'Linear')]

    Args:
        model: any module.
        compile: whether its repeated layers will be compiled.
        checkpointed: names of modules whose activations are recomputed (`StepTrace.checkpointed_modules`).
    """
    repeated = repeated_layers(model).values()
    compiled = _outermost([*compiled_units(model).values(), *(repeated if compile else ())])
    layers = _apart(repeated, compiled)
    holds_layers = {parent for name in (*compiled, *layers) for parent in _parents(name)}
    again = [name for name in checkpointed if name not in holds_layers]
    names = {*compiled, *_outermost([*layers, *_apart(again, compiled)])}
    found: dict[nn.Module, Unit] = {}
    kinds: dict[object, str] = {}
    classes = Counter[str]()
    for name, module in model.named_modules():
        if name not in names or next(module.parameters(), None) is None:
            continue
        form: Form = "compiled" if name in compiled else "checkpointed" if name in checkpointed else "plain"
        shapes = tuple((key, tuple(parameter.shape)) for key, parameter in module.named_parameters())
        if (type(module), shapes) not in kinds:
            kind = type(module).__name__
            classes[kind] += 1
            kinds[type(module), shapes] = kind if classes[kind] == 1 else f"{kind} {classes[kind]}"
        # A checkpoint of what the model itself does is no layer, and all its weights at once are no unit.
        piecewise = not name or _needs_hooks_inside(module)
        fetch: Fetch = "one" if form == "compiled" else "parameters" if piecewise else "either"
        found[module] = Unit(name, form, kinds[type(module), shapes], fetch)
    return found


def fetched_as_one(model: nn.Module, step: StepShape) -> dict[nn.Module, str]:
    """The modules of a model whose weights are fetched as one -> their names: compiled ones, and units of a plan.

    Args:
        model: as it is now, whose modules may have been compiled since it was planned.
        step: that of the plan.
    """
    compiled = compiled_units(model)
    names = {*compiled.values(), *_apart(step.fetched_whole, compiled.values())}
    return {module: name for name, module in model.named_modules() if name in names}


def repeated_layers(model: nn.Module) -> dict[nn.Module, str]:
    """The layers that a model repeats -> their names: members of one class of the outermost lists, with parameters.

    >>> model = nn.Sequential(nn.Embedding(8, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))
    >>> list(repeated_layers(model).values())
    ['1.0', '1.1', '1.2']
    """
    found: dict[nn.Module, str] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        members = {key: child for key, child in module.named_children() if _is_layer(child)}
        if len(members) > 1 and len({type(child) for child in members.values()}) == 1:
            for key, child in members.items():
                found[child] = f"{name}.{key}" if name else key
                inside.update(child.modules())
    return found


def _is_layer(module: nn.Module) -> bool:
    """Whether it has parameters, and is no list of modules, which is never called itself."""
    lists = nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict
    return next(module.parameters(), None) is not None and not isinstance(module, lists)


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
    with compiled_in_place(model, keep=keep), ExitStack() as undone:
        if arguments is not None:
            layers = repeated_layers(model)
            if not layers:
                raise InputError(
                    "compile= compiles the layers that a model repeats in an nn.ModuleList or nn.Sequential, and "
                    f"{type(model).__name__} has none; call compile() on the modules of your choice"
                )
            for layer in [each for each in layers if not is_compiled(each)]:
                undone.callback(setattr, layer, "_compiled_call_impl", None)
                compile_module(layer, **arguments)
        yield
        if keep:
            undone.pop_all()


def _needs_hooks_inside(module: nn.Module) -> bool:
    """Whether modules inside announce their weights in ways that a unit would hide: TorchScript, fast paths."""
    return any(isinstance(each, (*HAVE_FAST_PATHS, torch.jit.ScriptModule)) for each in module.modules())


def _outermost(names: Iterable[str]) -> list[str]:
    """Names that are inside none of the others."""
    names = dict.fromkeys(names)
    return [name for name in names if not any(parent in names for parent in _parents(name))]


def _apart(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Names that are none of `others`, are inside none of them and hold none of them."""
    these = set(others)
    held = {parent for other in these for parent in (other, *_parents(other))}
    return [name for name in names if name not in held and enclosing(name, these) is None]


def _parents(name: str) -> list[str]:
    """Names of the modules around one, innermost first, without the model: ``a.b`` and ``a`` for ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]
