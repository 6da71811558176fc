"""Allocations of a real step on the CPU, to compare with a trace's prediction."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class ObservedMemory:
    """Allocations of one call, as torch.profiler recorded them."""

    peak_bytes: int
    """Highest running sum of allocations less frees, from 0 at the start."""
    end_bytes: int
    """The running sum at the end."""
    peak_operators: tuple[str, ...]
    """Names of the operators that were running at the peak, outermost first."""


def observe(call: Callable[[], Any]) -> ObservedMemory:
    """Runs `call` under torch.profiler and follows the CPU allocator's events.

    A first run of the same code should have gone before, so that lazily allocated buffers of libraries do not count.
    """
    gc.collect()  # garbage of earlier steps would be freed in the middle of this one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events: list[tuple[int, int, tuple[str, ...]]] = []
    stack: list[tuple[Any, tuple[str, ...]]] = [
        (event, ()) for event in reversed(profiler.profiler.kineto_results.experimental_event_tree())
    ]
    while stack:
        event, path = stack.pop()
        if event.tag == _EventType.Allocation:
            if event.extra_fields.device.type == "cpu":
                events.append((event.start_time_ns, event.extra_fields.alloc_size, path))
            continue
        inside = (*path, event.name)
        stack.extend((child, inside) for child in reversed(event.children))
    events.sort(key=lambda item: item[0])
    live = peak = 0
    operators: tuple[str, ...] = ()
    for _, size, path in events:
        live += size
        if live > peak:
            peak, operators = live, path
    return ObservedMemory(peak_bytes=peak, end_bytes=live, peak_operators=operators)


def observe_step(
    model: torch.nn.Module, inp: dict[Any, Any], step_fn: Callable[[torch.nn.Module, dict[Any, Any]], Any]
) -> ObservedMemory:
    """Forward and backward of a real model on the CPU, its gradients being freed before and after."""
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        observed = observe(lambda: step_fn(model, inp))
    model.zero_grad(set_to_none=True)
    return observed
