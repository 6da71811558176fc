"""`WeightSource`: where a model's weights come from: its own memory, a state dict, files, or its own initialisation.

It gives one parameter at a time, so that a model built on meta never exists as a whole on any rank.
`OwnInitialisation` gives those that no file and no memory has.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elixir.access.whole import holds_others
from elixir.checkpoint_format.index import INDEX_NAME
from elixir.checkpoint_format.slice_reader import open_checkpoint
from elixir.errors import InputError, InputTypeError, few
from elixir.models.model_tensors import buffer_places
from elixir.models.quantised import InnerTensor, by_companions, flat, is_packed, refuse_other_form
from elixir.torch_private import DisableTorchFunctionSubclass
from elixir.units import dtype_name

# --- own initialisation ----------------------------------------------------------------------------------------------
# `OwnInitialisation`: initial values of a model on meta, by its own modules, one parameter at a time.
#
# For each parameter it initialises the owning module and the modules around it again, with memory for this parameter
# only; all others stay on meta. The generator is seeded by the parameter's name. So values depend neither on the plan
# nor on the number of ranks, and a rank computes only values of which it keeps a part. They have the distribution of a
# model built on the CPU, but not its bits, since there one generator serves all.
#
# It calls ``reset_parameters()`` of torch's modules, and ``_init_weights(module)`` of the nearest module that has it,
# as in Hugging Face's models. LoRA adapters of peft, of which a half begins with zeros, are initialised by their own
# layers. Other work of a constructor cannot be repeated; an error then names the parameters without a value.


_RESETS = ("reset_parameters", "_reset_parameters")


class OwnInitialisation:
    """Computes initial values of tensors on meta.

    Args:
        model: the model; only its buffers are changed.
        seed: seeds a parameter's values, together with its name.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._seed = seed
        self._adapters = getattr(model, "peft_config", {})
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._places.setdefault(parameter, []).append((module, name))

    def parameter(self, name: str) -> torch.Tensor:
        """Initial values of a parameter, on the CPU.

        Raises:
            InputError: no module initialises it.
        """
        path, _, own = name.rpartition(".")
        parameter = self._modules[path].get_parameter(own)
        values: torch.Tensor = _empty_like(parameter)
        with self._seeded(name):
            # Not every module can be initialised in part: the second round gives memory to all parameters of the owner.
            for also in ([], list(self._modules[path]._parameters.values())):
                siblings = {other: _empty_like(other) for other in also if other is not None and other.is_meta}
                with self._substituted(siblings | {parameter: values}):
                    if self._initialise(path, values):
                        return values.detach()
        raise InputError(
            f"{name} is on meta, and {type(self._modules[path]).__name__} has no reset_parameters() and the model no "
            "_init_weights() that gives it a value; pass weights= (a state dict or safetensors), or build the model "
            "on the CPU"
        )

    def fill_buffers(self) -> None:
        """Initialises the buffers that are on meta.

        Raises:
            InputError: some have no value afterwards.
        """
        missing: list[str] = []
        for path, module in self._modules.items():
            wanted = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
            if not wanted:
                continue
            made = {name: _empty_like(module._buffers[name]) for name in wanted}
            versions = {name: buffer._version for name, buffer in made.items()}
            module._buffers.update(made)
            with self._seeded(path):
                self._initialise(path, None)
            for name in wanted:
                now = module._buffers[name]
                written = now is not made[name] or now._version != versions[name]
                if now is None or now.is_meta or not written or _unset(now):
                    missing.append(f"{path}.{name}" if path else name)
        if missing:
            raise InputError(
                f"buffers {few(missing)} are on meta, and no module "
                "gives them a value; build the model so that buffers are on the CPU, or pass weights= that have them"
            )

    def _initialise(self, path: str, wanted: torch.Tensor | None) -> bool:
        """Initialises a module, then the modules around it; returns whether `wanted` has a value."""
        parts = path.split(".") if path else []
        chain = [self._modules[".".join(parts[:depth])] for depth in range(len(parts), -1, -1)]
        if wanted is not None and any(part.startswith("lora_") for part in parts):
            self._reset_adapters(chain)
            return not _unset(wanted)
        for resets in (False, True):  # a value from `_init_weights` need not be drawn twice
            with contextlib.suppress(NotImplementedError):  # values cannot be copied from meta
                if resets:
                    for module in chain:
                        _reset(module)
                for depth, module in enumerate(chain):
                    nearest = next((around for around in chain[depth:] if _takes_a_module(around)), None)
                    if nearest is not None:
                        nearest._init_weights(module)
                if wanted is not None and not _unset(wanted):
                    return True
        return False

    def _reset_adapters(self, chain: list[nn.Module]) -> None:
        """Initialises the LoRA adapters of a layer whose values do not depend on those of the base."""
        layer: Any = next((module for module in chain if hasattr(module, "reset_lora_parameters")), None)
        for adapter, config in self._adapters.items():
            how = getattr(config, "init_lora_weights", None)
            if layer is not None and how in (True, False, "gaussian"):
                layer.reset_lora_parameters(adapter, how)

    @contextlib.contextmanager
    def _substituted(self, values: dict[nn.Parameter, nn.Parameter]) -> Iterator[None]:
        """Puts `values` into modules in place of their parameters."""
        try:
            for parameter, value in values.items():
                for module, name in self._places[parameter]:
                    module._parameters[name] = value
            yield
        finally:
            for parameter in values:
                for module, name in self._places[parameter]:
                    module._parameters[name] = parameter

    @contextlib.contextmanager
    def _seeded(self, name: str) -> Iterator[None]:
        """Seeds the CPU's generator by the seed and a name; restores the caller's state."""
        before = torch.default_generator.get_state()
        try:
            torch.default_generator.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
            with torch.no_grad(), torch.device("cpu"):
                yield
        finally:
            torch.default_generator.set_state(before)


def _empty_like(tensor: torch.Tensor) -> Any:
    """Allocates memory of the same kind, filled with NaN if its dtype has it, so that missing writes show."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if made.is_floating_point():
        made.fill_(float("nan"))
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def _unset(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())


def _reset(module: nn.Module) -> None:
    for name in _RESETS:
        method = getattr(module, name, None)
        if callable(method) and not inspect.signature(method).parameters:
            method()


def _takes_a_module(module: nn.Module) -> bool:
    method = getattr(module, "_init_weights", None)
    return callable(method) and len(inspect.signature(method).parameters) == 1


# --- weight source ---------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

_COPY = re.compile(r"\.modules_to_save\.[^.]+\.")
"""In the names of weights of whole modules that peft trains: they begin as copies of those that it leaves frozen."""
Weights = Mapping[str, torch.Tensor] | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A state dict; safetensors: a file, several, or a folder as Hugging Face writes it; or the folder of a checkpoint."""


class WeightSource:
    """Gives the values of a model's parameters and buffers.

    Args:
        model: the caller's model, on meta, with values, or partly both.
        given: values that replace the model's own; None for its own. Its modules initialise whatever is on meta and
            gets no value (`OwnInitialisation`).
        seed: the seed of that initialisation.
        strict: refuse `given` if it lacks weights of the model or has others; otherwise use what fits.

    Raises:
        InputError: with `strict`, `given` lacks weights of the model or has others; or it cannot be read.
    """

    def __init__(self, model: nn.Module, given: Weights | None = None, *, seed: int = 0, strict: bool = True) -> None:
        self._model = model
        self._names = weight_names(model)
        # A TorchScript module has no get_parameter().
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._given: Mapping[str, torch.Tensor] | None = None
        if given is not None:
            self._given, different = check_weights(model, given, strict=strict)
            if different:
                logger.warning("the weights given are not all of %s: %s", type(model).__name__, different)
        self._in_memory = isinstance(given, Mapping)
        self._own = OwnInitialisation(model, seed)

    def parameter(self, name: str) -> torch.Tensor:
        """The values of a parameter, in its shape and any dtype.

        Raises:
            InputError: the parameter is on meta and nothing gives its value; or the shape differs.
        """
        parameter = self._parameters[name]
        alias, given = self._alias(parameter), self._given or {}
        if alias is not None:
            value = _shaped(given[alias], parameter, alias)
            if is_packed(parameter) and value.dtype != parameter.dtype:
                raise InputError(
                    f"{alias} is of {value.dtype} in the weights given and packed into {parameter.dtype} in the model; "
                    "quantise the model as the weights were"
                )
            return value
        copied = _COPY.sub(".original_module.", name)
        if parameter.is_meta and copied in self._parameters and copied != name:
            return self.parameter(copied)
        return self._own.parameter(name) if parameter.is_meta else parameter.data

    def replaces(self, name: str) -> bool:
        """Whether a parameter gets new values, or is on meta."""
        parameter = self._parameters[name]
        return parameter.is_meta or self._alias(parameter) is not None

    def is_in_memory(self, name: str) -> bool:
        """Whether each rank has its own values of a parameter, in the model or a state dict: rank 0's count then."""
        parameter = self._parameters[name]
        return not parameter.is_meta if self._alias(parameter) is None else self._in_memory

    def kinds(self) -> dict[str, str]:
        """Describes each parameter and buffer, and where its value comes from: the same on all ranks."""
        found: dict[str, str] = {}
        for name, parameter in self._parameters.items():
            with DisableTorchFunctionSubclass():  # this asks for a weight's layout, not its values
                found[name] = f"{kind_of(parameter)}, strides {list(parameter.stride())}"
            if (alias := self._alias(parameter)) is not None:
                found[name] += f", given in {kind_of((self._given or {})[alias]) if self._in_memory else 'files'}"
        buffers: dict[torch.Tensor, str] = {}  # by their first names, by which ranks send them
        for place in buffer_places(self._model):
            buffers.setdefault(place.buffer, place.name)
        return found | {name: f"{kind_of(buffer)}, {buffer.layout}" for buffer, name in buffers.items()}

    def _alias(self, parameter: nn.Parameter) -> str | None:
        """The name of a parameter in the values given; None if they lack it."""
        return next((alias for alias in self._names[parameter] if alias in (self._given or {})), None)

    def fill_buffers(self) -> None:
        """Gives every buffer that is on meta or in `given` its value, on the CPU."""
        given = self._given or {}
        for place in buffer_places(self._model):
            alias = next((alias for alias in _aliases(place.name) if alias in given), None)
            if alias is not None and place.is_persistent:
                place.put(_shaped(given[alias], place.buffer, place.name).to(place.buffer.dtype, copy=True))
        self._own.fill_buffers()


def check_weights(model: nn.Module, given: Weights, *, strict: bool) -> tuple[Mapping[str, torch.Tensor], str]:
    """Opens `given` without reading values; returns it and a sentence on names that differ from the model's, or "".

    Raises:
        InputError, InputTypeError: see `WeightSource`.
    """
    values = _ordinary(given) if isinstance(given, Mapping) else _of_files(given)
    values = by_companions(values)
    names_of = weight_names(model)
    for parameter, names in names_of.items():
        alias = next((name for name in names if name in values), None)
        if alias is not None:
            refuse_other_form(names[0], parameter, alias, values)
    own = names_of.values()
    persistent = [_aliases(place.name) for place in buffer_places(model, remove_duplicate=False) if place.is_persistent]
    missing = [names[0] for names in own if not any(name in values for name in names)]
    missing += [names[0] for names in persistent if not any(name in values for name in names)]
    known = {name for names in (*own, *persistent) for name in names}
    unexpected = [name for name in values if name not in known]
    if not (missing or unexpected):
        return values, ""
    found = f"missing {few(missing)}, unexpected {few(unexpected)}"
    if strict or not known & set(values):
        raise InputError(
            f"the weights given are not those of {type(model).__name__}: {found}; rename or complete them, "
            "or give strict=False to leave those that are missing to the model's own modules"
        )
    return values, found


def _ordinary(given: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Takes the tensors of a dict apart that hold others; other mappings may read a value only when asked for it."""
    if not isinstance(given, dict) or not any(map(holds_others, given.values())):
        return given
    return dict(part for name, each in given.items() for part in flat(name, each))


def _of_files(where: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Mapping[str, torch.Tensor]:
    """Opens a checkpoint of ours if `where` is its folder, otherwise safetensors files."""
    if isinstance(where, (str, os.PathLike)) and (Path(where) / INDEX_NAME).is_file():
        return open_checkpoint(where).weights()
    return SafetensorsFiles(where)


class SafetensorsFiles(Mapping[str, torch.Tensor]):
    """Tensors in safetensors files, each read on access.

    Args:
        where: a file, several files, or a folder with ``*.safetensors``.

    Raises:
        InputError: there is no such file, one cannot be read, or two have a tensor of the same name.
    """

    def __init__(self, where: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> None:
        if not isinstance(where, (str, os.PathLike, list, tuple)):
            raise InputTypeError(f"weights must be a state dict or paths of safetensors, got {type(where).__name__}")
        self._file_of: dict[str, Path] = {}
        for path in map(Path, paths_of(where)):
            names: list[str] = _opened(path).keys()
            for name in names:
                if name in self._file_of:
                    raise InputError(f"{name} is in {self._file_of[name]} and in {path}; give only one of them")
                self._file_of[name] = path

    def __getitem__(self, name: str) -> torch.Tensor:
        # Opened at each access: pages that were read stay in memory while a file is open.
        tensor: torch.Tensor = _opened(self._file_of[name]).get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def paths_of(where: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """The safetensors that are named, or lie in a folder that is; `InputError` if there are none."""
    paths = [Path(where)] if isinstance(where, (str, os.PathLike)) else [Path(path) for path in where]
    found: list[Path] = []
    for path in paths:
        found += sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    missing = [str(path) for path in found if not path.is_file()]
    if missing or not found:
        raise InputError(f"no safetensors at {', '.join(missing or map(str, paths))}")
    return [str(path) for path in found]


def _opened(path: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise InputError("reading safetensors needs the package safetensors; install it") from None
    try:
        return safe_open(path, framework="pt", device="cpu")
    except Exception as error:  # the library's own class of error has moved between its versions
        raise InputError(f"{path} cannot be read as safetensors: {error}") from error


def weight_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Each parameter's names, the first one first.

    Those of the model without its adapters are included, and those of torchao's files: ``fc._weight_qdata``.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found = _aliases(name)
        if isinstance(parameter, InnerTensor):
            parts = [each.rsplit(".", 2) for each in found]
            found += [f"{'.'.join((*path, ''))}_{whole}_{own}" for *path, whole, own in parts]
        names.setdefault(parameter, []).extend(found)
    return names


def _aliases(name: str) -> list[str]:
    """A name, and the one that the tensor had before peft put adapters around its module."""
    before = name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")
    return list(dict.fromkeys((name, before)))


def kind_of(tensor: object) -> str:
    """Dtype and shape, and whether it is on meta."""
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}{' on meta' * tensor.is_meta}"


def _shaped(value: torch.Tensor, like: torch.Tensor, name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.shape != like.shape:
        found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(f"{name} must have shape {list(like.shape)}, the weights given have {found}")
    if value.is_meta:
        raise InputError(f"the weights given for {name} are on meta themselves, without values")
    return value.detach()
