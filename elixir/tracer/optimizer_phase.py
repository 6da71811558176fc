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

OPTIMIZER_NAMES = ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta")
_BY_NAME = {name.lower(): name for name in OPTIMIZER_NAMES}


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
    allocations count as many times as there are. A loop takes them one after the other: it is run on those that are
    `in_every_order`, next to memory of the size of all other states.
    """
    if name is None:
        return OptimizerPhase("none", 0, has_temporaries=False)
    cls = optimizer_class(name)
    kernel = _choose_kernel(cls, kernel, target)
    updated = [parameter for parameter in parameters if parameter.grad is not None]
    copies = Counter(parameter.shape for parameter in updated)
    others = Counter(map(_layout, updated))
    at_once = kernel != "for-loop" and not target.counts_host_tensors and torch.Size() not in copies
    if recorder.caches and kernel == "for-loop":
        updated = in_every_order(updated)
    elif recorder.caches and at_once and len(others) == len(copies):
        updated = list({parameter.shape: parameter for parameter in updated}.values())
        recorder.copies = copies
    others -= Counter(map(_layout, updated))  # parameters that others represent
    theirs = ledger.set_aside(bool(others and not recorder.copies), "optimizer")
    recorder.begin_optimizer()
    with recorder:
        optimizer = _build(cls, updated, kernel)
        optimizer.step()
    state_bytes = 0
    for parameter in updated:
        more = others.pop(_layout(parameter), 0)
        for state in optimizer.state[parameter].values():
            if not isinstance(state, torch.Tensor):
                continue
            record = ledger.find(state)
            if record is not None:
                record.kind = "optimizer"
            elif kernel == "fused" or target.counts_host_tensors:
                # Fused kernels keep their step counters on the device; the stand-in kept them on the host. A target
                # that is the host has them either way.
                ledger.add_bytes(state.nbytes, "optimizer", "", "step", recorder.copies.get(parameter.shape, 1))
            else:
                continue
            state_bytes += state.nbytes * (1 + more)
            for memory in theirs:
                memory.nbytes += target.round_bytes(state.nbytes) * more
    return OptimizerPhase(f"{cls.__name__} ({kernel})", state_bytes, has_temporaries=kernel != "fused")


def in_every_order(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Few of the parameters, such that each kind of them comes after the same kinds as before, and after no other.

    A loop holds what it has made for one parameter until it makes the same for the next. Repeated layers become two.
    """
    kept: list[tuple[nn.Parameter, bool]] = []  # with whether it was the first after one of the kind before
    seen = set[Any]()
    for parameter in parameters:
        kind = _layout(parameter)
        order = _layout(kept[-1][0]) if kept else None, kind
        kept.append((parameter, order not in seen))
        seen.add(order)
        last = len(kept) - 1
        while not kept[last][1]:
            last -= 1
            if _layout(kept[last][0]) == kind:
                del kept[last + 1 :]
                break
    return [parameter for parameter, _ in kept]


def _layout(parameter: nn.Parameter) -> tuple[Any, ...]:
    """All of a parameter and its gradient on which memory of its update depends."""
    assert parameter.grad is not None
    return parameter.shape, parameter.stride(), parameter.dtype, parameter.grad.stride(), parameter.grad.dtype


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
