"""The optimizer phase of a trace: torch's own optimizer, run on the meta parameters."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from elixir.errors import unknown_name
from elixir.tracer.targets import OptimizerKernel, Target

_BY_NAME = {
    name.lower(): name for name in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta")
}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class in `torch.optim` by its name in any case; `InputError` with the nearest names otherwise."""
    found = _BY_NAME.get(name.lower())
    if found is None:
        raise unknown_name("optimizer", name, _BY_NAME)
    optimizer: type[torch.optim.Optimizer] = getattr(torch.optim, found)
    return optimizer


def choose_kernel(name: str, kernel: OptimizerKernel | None, target: Target) -> OptimizerKernel:
    """How the optimizer runs: as told, or as `torch.optim` does by default on the target."""
    if kernel is not None:
        return kernel
    takes_foreach = "foreach" in inspect.signature(optimizer_class(name)).parameters
    default = target.optimizer_kernel()
    return default if takes_foreach or default != "foreach" else "for-loop"


def build(name: str, parameters: list[nn.Parameter], kernel: OptimizerKernel) -> torch.optim.Optimizer:
    """The optimizer; a fused one is built as foreach, since torch refuses fused kernels on meta.

    A fused kernel has the same states and no temporaries, so the caller leaves the temporaries out.
    """
    cls = optimizer_class(name)
    options: dict[str, Any] = {}
    if "foreach" in inspect.signature(cls).parameters:
        options["foreach"] = kernel != "for-loop"
    if cls is torch.optim.SGD:
        options |= {"lr": 1e-3, "momentum": 0.9}
    return cls(parameters, **options)


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors in the optimizer's state, in order."""
    return [
        value
        for parameter_state in optimizer.state.values()
        for value in parameter_state.values()
        if isinstance(value, torch.Tensor)
    ]
