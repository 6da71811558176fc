"""The optimizer phase of a trace: the states of torch's own optimizer, and its temporaries by a table."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from elixir.errors import InputError, unknown_name
from elixir.tracer.device.common.target import OptimizerKernel, Target
from elixir.tracer.ledger import Ledger


class _Temporaries(NamedTuple):
    """Copies of weights that `step()` holds, as observed on the CPU with torch 2.13."""

    foreach: int
    """Held of all weights at once."""
    loop: int
    """Held of the weight that a loop steps."""
    held: int
    """Still held by the loop of the weight before it."""


_TEMPORARIES = {
    "Adam": _Temporaries(1, 2, 1),
    "AdamW": _Temporaries(1, 2, 1),
    "SGD": _Temporaries(0, 0, 0),
    "RMSprop": _Temporaries(1, 1, 1),
    "Adagrad": _Temporaries(2, 1, 1),
    "NAdam": _Temporaries(1, 2, 1),
    "RAdam": _Temporaries(1, 2, 0),
    "Adamax": _Temporaries(1, 1, 0),
    "Adadelta": _Temporaries(2, 2, 1),
}
_BY_NAME = {name.lower(): name for name in _TEMPORARIES}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class in `torch.optim` by its name in any case; `InputError` with the nearest names otherwise."""
    found = _BY_NAME.get(name.lower())
    if found is None:
        raise unknown_name("optimizer", name, _BY_NAME)
    optimizer: type[torch.optim.Optimizer] = getattr(torch.optim, found)
    return optimizer


@dataclass(frozen=True)
class OptimizerPhase:
    """The result of the optimizer's part of a step."""

    description: str
    """Class and kernel, such as ``AdamW (foreach)``; ``none`` for a step without one."""
    state_bytes: int
    """Exact bytes of the states on the device."""


def run_optimizer(
    name: str | None, kernel: OptimizerKernel | None, parameters: list[nn.Parameter], ledger: Ledger, target: Target
) -> OptimizerPhase:
    """Books the states and the temporaries of one `step()` of a steady run.

    The states are those that torch's optimizer makes for one meta parameter of each layout.
    """
    if name is None:
        return OptimizerPhase("none", 0)
    cls = optimizer_class(name)
    kernel = _choose_kernel(cls, kernel, target)
    updated = [parameter for parameter in parameters if parameter.grad is not None]
    counts = Counter(map(_layout, updated))
    likes = {layout: _like(*layout) for layout in counts}
    optimizer = _build(cls, list(likes.values()), kernel)
    optimizer.step()
    state_bytes = held_bytes = 0
    for layout, count in counts.items():
        for state in optimizer.state[likes[layout]].values():
            # Fused kernels keep their step counters on the device; the stand-in has them on the host. A target that
            # is the host has them either way.
            if isinstance(state, torch.Tensor) and (state.is_meta or kernel == "fused" or target.counts_host_tensors):
                state_bytes += state.nbytes * count
                held_bytes += target.round_bytes(state.nbytes) * count
    ledger.add_bytes(held_bytes, "optimizer", "", "step")
    sizes = [target.round_bytes(parameter.nbytes) for parameter in updated]
    found = _TEMPORARIES[cls.__name__]
    if kernel == "foreach":
        ledger.touch(found.foreach * sum(sizes), "", "step")
    elif kernel == "for-loop":
        ledger.touch(max(found.held * before + found.loop * size for before, size in pairwise([0, *sizes])), "", "step")
    return OptimizerPhase(f"{cls.__name__} ({kernel})", state_bytes)


def _layout(parameter: nn.Parameter) -> tuple[Any, ...]:
    """All of a parameter on which its states depend."""
    return parameter.size(), parameter.stride(), parameter.dtype


def _like(size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """A parameter with a gradient."""
    made = nn.Parameter(torch.empty_strided(size, stride, dtype=dtype, device="meta"))
    made.grad = torch.empty_like(made)
    return made


def _choose_kernel(cls: type[torch.optim.Optimizer], kernel: OptimizerKernel | None, target: Target) -> OptimizerKernel:
    """The kernel of the optimizer: the argument, or the default of `torch.optim` on the target."""
    options = inspect.signature(cls).parameters
    if kernel is None:
        return target.optimizer_kernel if target.optimizer_kernel in (*options, "for-loop") else "for-loop"
    if kernel != "for-loop" and kernel not in options:
        raise InputError(f"torch.optim.{cls.__name__} has no {kernel} kernel; leave the kernel to torch")
    return kernel


def _build(
    cls: type[torch.optim.Optimizer], parameters: list[nn.Parameter], kernel: OptimizerKernel
) -> torch.optim.Optimizer:
    """The optimizer; a fused one is built as foreach, since torch refuses fused kernels on meta."""
    options: dict[str, Any] = {}
    if "foreach" in inspect.signature(cls).parameters:
        options["foreach"] = kernel != "for-loop"
    if cls is torch.optim.SGD:
        options |= {"lr": 1e-3, "momentum": 0.9}
    return cls(parameters, **options)
