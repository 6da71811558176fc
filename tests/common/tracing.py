"""Common parts of the tracer's tests: machines, predictions, real runs, recorded expert choices."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

from elixir.hardware.profile import preset
from elixir.step_trace import StepTrace
from elixir.tracer.device import cpu_target
from elixir.tracer.meta import TracedModel, on_meta
from elixir.tracer.trace import trace_step
from elixir.tracer.values.expert_choice import RecordedRouting, RoutingRecorder

CPU = preset("cpu")
H200 = preset("h200")

Step = Callable[[nn.Module, dict[Any, Any]], Any]


class Seen:
    """A list to which a step can append in a trace, which would put a list back to what it held before."""

    def __init__(self) -> None:
        self._queue = queue.SimpleQueue[Any]()  # nothing that a trace looks into

    def append(self, item: Any) -> None:
        """Adds one item."""
        self._queue.put(item)

    def __iter__(self) -> Iterator[Any]:
        """Takes the items out."""
        while not self._queue.empty():
            yield self._queue.get()


@contextlib.contextmanager
def kernels_not_run() -> Iterator[None]:
    """Leaves out what kernels of the CPU allocate, which differs between processors, and what is known of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_target, "MAX_RUN_FLOPS", 0.0)
        patch.setattr(cpu_target, "KERNELS_HERE", {})
        yield


def on_meta_now(model: nn.Module) -> TracedModel:
    """Returns all that a trace knows of a model that is on meta."""
    with on_meta(model, None) as traced:
        return traced


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


def real_routing(model: nn.Module, inp: dict[Any, Any], step_fn: Step) -> RecordedRouting:
    """The expert choices of a real step, dropout being off."""
    with RoutingRecorder() as log:
        step_fn(model, inp)
    model.zero_grad(set_to_none=True)
    return RecordedRouting(log.choices)
