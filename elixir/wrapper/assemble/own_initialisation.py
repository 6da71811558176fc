"""`OwnInitialisation`: initial values of a model on meta, by its own modules, one parameter at a time.

For each parameter it initialises the owning module and the modules around it again, with memory for this parameter
only; all others stay on meta. The generator is seeded by the parameter's name. So values depend neither on the plan nor
on the number of ranks, and a rank computes only values of which it keeps a part. They have the distribution of a model
built on the CPU, but not its bits, since there one generator serves all.

It calls ``reset_parameters()`` of torch's modules, and ``_init_weights(module)`` of the nearest module that has it, as
in Hugging Face's models. LoRA adapters of peft, of which a half begins with zeros, are initialised by their own layers.
Other work of a constructor cannot be repeated; an error then names the parameters without a value.
"""

from __future__ import annotations

import contextlib
import inspect
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from elixir.errors import InputError, few

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
