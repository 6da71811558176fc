"""The optimizer phase of a trace: torch's own optimizer, run on the meta parameters."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elixir.errors import InputError, unknown_name
from elixir.tracer.device.common.target import OptimizerKernel, Target
from elixir.tracer.ledger import Ledger
from elixir.tracer.recorder import Recorder

_BY_NAME = {
    name.lower(): name
    for name in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta")
}


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
    has_temporaries: bool
    """False for a fused kernel: what the stand-in allocated apart from states does not exist."""


def run_optimizer(
    name: str | None,
    kernel: OptimizerKernel | None,
    parameters: list[nn.Parameter],
    recorder: Recorder,
    ledger: Ledger,
    target: Target,
) -> OptimizerPhase:
    """One `step()` of torch's optimizer on the meta gradients, booked by `recorder`.

    A foreach or fused optimizer treats all parameters at once, so one of each shape represents the others: its
    allocations count as many times as there are. A loop takes them one after the other, and is run on all of them.
    """
    if name is None:
        return OptimizerPhase("none", 0, has_temporaries=False)
    cls = optimizer_class(name)
    kernel = _choose_kernel(cls, kernel, target)
    updated = [parameter for parameter in parameters if parameter.grad is not None]
    copies = Counter(parameter.shape for parameter in updated)
    layouts = {(parameter.shape, parameter.stride(), parameter.dtype) for parameter in updated}
    at_once = kernel != "for-loop" and not target.counts_host_tensors and torch.Size() not in copies
    if recorder.caches and at_once and len(layouts) == len(copies):
        updated = list({parameter.shape: parameter for parameter in updated}.values())
        recorder.copies = copies
    recorder.new_kind = "workspace"
    with recorder:
        optimizer = _build(cls, updated, kernel)
        optimizer.step()
    state_bytes = 0
    for parameter in updated:
        for state in optimizer.state[parameter].values():
            if not isinstance(state, torch.Tensor):
                continue
            count = recorder.copies.get(parameter.shape, 1)
            record = ledger.find(state)
            if record is not None:
                record.kind = "optimizer"
                state_bytes += state.nbytes * count
            elif kernel == "fused" or target.counts_host_tensors:
                # Fused kernels keep their step counters on the device; the stand-in kept them on the host. A target
                # that is the host has them either way.
                state_bytes += state.nbytes * count
                ledger.add_bytes(state.nbytes, "optimizer", "", "step", count)
    return OptimizerPhase(f"{cls.__name__} ({kernel})", state_bytes, has_temporaries=kernel != "fused")


def _choose_kernel(cls: type[torch.optim.Optimizer], kernel: OptimizerKernel | None, target: Target) -> OptimizerKernel:
    """The kernel of the optimizer: the argument, or the default of `torch.optim` on the target."""
    options = inspect.signature(cls).parameters
    if kernel is None:
        return target.optimizer_kernel() if target.optimizer_kernel() in (*options, "for-loop") else "for-loop"
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
