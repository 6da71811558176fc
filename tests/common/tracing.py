"""What tests of the tracer share: machines, predictions, real runs, recorded expert choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from elixir.hardware import preset
from elixir.tracer import RecordedRouting, StepTrace, trace_step

CPU = preset("cpu")
H200 = preset("h200")

Step = Callable[[nn.Module, dict[Any, Any]], Any]


def cpu_trace(model: nn.Module, inp: dict[Any, Any], step_fn: Step, **options: Any) -> StepTrace:
    """A trace for target `cpu`, without an optimizer unless told."""
    return trace_step(model, inp, step_fn, **({"hardware": CPU, "optimizer": None} | options))


def predicted_bytes(model: nn.Module, inp: dict[Any, Any], step_fn: Step, **options: Any) -> int:
    """Peak of the step on the CPU above what was there before it."""
    trace = cpu_trace(model, inp, step_fn, **options)
    return trace.backward_peak_bytes - trace.resting_bytes


def sum_step(model: nn.Module, inp: dict[Any, Any]) -> None:
    """Forward on `x`, sum, backward."""
    model(inp["x"]).sum().backward()


class _TopkLog(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.choices: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            self.choices.append(result[1].clone())
        return result


def real_routing(model: nn.Module, inp: dict[Any, Any], step_fn: Step) -> RecordedRouting:
    """The expert choices of a real step, dropout being off."""
    with _TopkLog() as log:
        step_fn(model, inp)
    model.zero_grad(set_to_none=True)
    return RecordedRouting(log.choices)
