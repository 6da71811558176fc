"""The optimizer phase of a trace: the states and temporaries of torch's own optimizers, by a table."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from elixir.errors import InputError, unknown_name
from elixir.tracer.device.target import OptimizerKernel, Target
from elixir.tracer.ledger import Ledger

_COUNTER_BYTES = 4
"""A number that an optimizer keeps for each weight, such as its steps, is a float32."""


class _Memory(NamedTuple):
    """The memory of an optimizer with torch's defaults, SGD's with momentum: copies of weights, unless said
    otherwise. Temporaries are those of `step()`, as observed on the CPU with torch 2.13."""

    states: int
    """States of the size of their weight."""
    counters: int
    """Numbers kept for each weight."""
    foreach: int
    """Temporaries held of all weights at once."""
    loop: int
    """Temporaries of the weight that a loop steps."""
    held: int
    """Temporaries that the loop still holds of the weight before it."""


_MEMORY = {
    "Adam": _Memory(2, 1, 1, 2, 1),
    "AdamW": _Memory(2, 1, 1, 2, 1),
    "SGD": _Memory(1, 0, 0, 0, 0),
    "RMSprop": _Memory(1, 1, 1, 1, 1),
    "Adagrad": _Memory(1, 1, 2, 1, 1),
    "NAdam": _Memory(2, 2, 1, 2, 1),
    "RAdam": _Memory(2, 1, 1, 2, 0),
    "Adamax": _Memory(2, 1, 1, 1, 0),
    "Adadelta": _Memory(2, 1, 2, 2, 1),
}
_BY_NAME = {name.lower(): name for name in _MEMORY}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class in `torch.optim` by its name in any case; `InputError` with the nearest names otherwise."""
    found = _BY_NAME.get(name.lower())
    if found is None:
        raise unknown_name("optimizer", name, _BY_NAME)
    optimizer: type[torch.optim.Optimizer] = getattr(torch.optim, found)
    return optimizer


class OptimizerPhase(NamedTuple):
    """The result of the optimizer's part of a step."""

    description: str
    """Class and kernel, such as ``AdamW (foreach)``; ``none`` for a step without one."""
    state_bytes: int
    """Exact bytes of the states on the device."""


def run_optimizer(
    name: str | None, kernel: OptimizerKernel | None, parameters: list[nn.Parameter], ledger: Ledger, target: Target
) -> OptimizerPhase:
    """Books the states and the temporaries of one `step()` of a steady run, of the weights that have gradients."""
    if name is None:
        return OptimizerPhase("none", 0)
    cls = optimizer_class(name)
    kernel = _choose_kernel(cls, kernel, target)
    memory = _MEMORY[cls.__name__]
    # Fused kernels keep their counters on the device, others on the host.
    counters = memory.counters if kernel == "fused" or target.counts_host_tensors else 0
    exact = [parameter.nbytes for parameter in parameters if parameter.grad is not None]
    sizes = list(map(target.round_bytes, exact))
    counted_bytes = target.round_bytes(_COUNTER_BYTES) * counters * len(sizes)
    ledger.add_bytes(memory.states * sum(sizes) + counted_bytes, "optimizer", "", "step")
    if kernel == "foreach":
        ledger.touch(memory.foreach * sum(sizes), "", "step")
    elif kernel == "for-loop":
        most = max(memory.held * before + memory.loop * size for before, size in pairwise([0, *sizes]))
        ledger.touch(most, "", "step")
    state_bytes = memory.states * sum(exact) + _COUNTER_BYTES * counters * len(exact)
    return OptimizerPhase(f"{cls.__name__} ({kernel})", state_bytes)


def _choose_kernel(cls: type[torch.optim.Optimizer], kernel: OptimizerKernel | None, target: Target) -> OptimizerKernel:
    """The kernel of the optimizer: the argument, or the default of `torch.optim` on the target."""
    options = inspect.signature(cls).parameters
    if kernel is None:
        return target.optimizer_kernel if target.optimizer_kernel in (*options, "for-loop") else "for-loop"
    if kernel != "for-loop" and kernel not in options:
        raise InputError(f"torch.optim.{cls.__name__} has no {kernel} kernel; leave the kernel to torch")
    return kernel
