"""Values of a model that was built on meta, one parameter at a time, as its own modules would initialise them.

For each parameter the module that owns it and the modules around that one are initialised again, with memory for this
parameter alone: to all others, still on meta, nothing happens. Each parameter draws from a generator seeded by its
name, so its values depend neither on the plan nor on the number of ranks, and a rank needs to make only those of which
it keeps a part. They have the distribution of a model built on the CPU, not its bits: there one generator serves all.

What is called: ``reset_parameters()`` as torch's modules have it, and ``_init_weights(module)`` of the nearest module
that has it, as Hugging Face's models do. Other work of a constructor cannot be called again; then nothing is
guessed, and an error names what is left without a value.
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
    """Initial values of what is on meta.

    Args:
        model: not changed, but for buffers.
        seed: with a parameter's name, seeds its values.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._seed = seed
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
        parameter = self._modules[path]._parameters[own]
        if parameter is None:
            raise InputError(f"{name} is no parameter")
        values: torch.Tensor = _empty_like(parameter)
        with self._seeded(name):
            # Not every module can be initialised in part: a second try gives memory to all that its owner has.
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
        """Runs what initialises a module, the module first and those around it after; whether `wanted` has a value."""
        parts = path.split(".") if path else []
        chain = [self._modules[".".join(parts[:depth])] for depth in range(len(parts), -1, -1)]
        for resets in (False, True):  # what `_init_weights` gives a value need not be drawn twice
            with contextlib.suppress(NotImplementedError):  # from what is on meta no value can be copied
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

    @contextlib.contextmanager
    def _substituted(self, values: dict[nn.Parameter, nn.Parameter]) -> Iterator[None]:
        """Modules have `values` instead of their parameters."""
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
        """The CPU's generator starts from the seed and a name; the caller's state comes back."""
        before = torch.default_generator.get_state()
        try:
            torch.default_generator.manual_seed(zlib.crc32(name.encode(), self._seed & 0xFFFFFFFF))
            with torch.no_grad(), torch.device("cpu"):
                yield
        finally:
            torch.default_generator.set_state(before)


def _empty_like(tensor: torch.Tensor) -> Any:
    """Memory without a value, of the same kind; NaN where its dtype has one, so that it shows what was not written."""
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
