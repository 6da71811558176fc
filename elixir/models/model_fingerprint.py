"""One short string that says whether two models have the same parameters, so that a plan fits only its model."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from elixir.artifact import digest
from elixir.errors import InputError
from elixir.models.buffer_place import buffer_places
from elixir.models.inner_tensors import InnerTensors


def fingerprint(model: nn.Module, *, forward: bool = False) -> str:
    """16 hex digits over the model's layout; the same on meta and real, and in every process.

    Covers, in order, each parameter's first name, shape, whether it is trained and its other (tied) names, each
    persistent buffer's name and shape, and the class of each parameter that was taken apart (`InnerTensors`). Left out
    on purpose: values; dtypes, since a plan made for bf16 fits the fp32 model that the wrapper casts; buffers that are
    not saved, since they are no part of the model's state.

    Args:
        model: on meta or real.
        forward: it is only evaluated, so that no parameter counts as trained.

    Raises:
        InputError: the model has lazy parameters or buffers, whose shapes only a first forward decides.
    """
    # Identity is only a key here, never an order: dicts keep the order of `named_parameters`.
    names: dict[int, list[str]] = {}
    layout: dict[int, tuple[list[int], bool]] = {}
    kinds: list[tuple[str, str]] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, InnerTensors):
            kinds.append((prefix, module.kind.__name__))
        for own, param in module._parameters.items():
            if param is None:
                continue
            name = f"{prefix}.{own}" if prefix else own
            if is_lazy(param):
                raise _lazy(name)
            names.setdefault(id(param), []).append(name)
            layout[id(param)] = (list(param.shape), param.requires_grad and not forward)
    parameters = [(first, *layout[key], aliases) for key, (first, *aliases) in names.items()]
    persistent = [place for place in buffer_places(model, remove_duplicate=False) if place.is_persistent]
    for place in persistent:
        if is_lazy(place.buffer):
            raise _lazy(place.name)
    buffers = [(place.name, list(place.buffer.shape)) for place in persistent]
    return digest(parameters, buffers, kinds) if kinds else digest(parameters, buffers)


def _lazy(name: str) -> InputError:
    return InputError(f"{name!r} is lazy and has no shape yet; run one forward through the model first")
