"""The few rates that decide a step on this machine's CPU, measured in about two seconds.

`measure` fits latency and rate by size and takes a minute. Here each rate is one number: all work done over all time
taken, in turns until the time is over, so that other programs on the same cores slow it as much as they will slow
training.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from elixir.errors import InputError
from elixir.hardware import (
    HardwareProfile,
    cpu_name,
    host_share,
    host_view,
    preset,
    rank_threads,
    total_host_bytes,
    use_threads,
)
from elixir.microbench.measurement import threads_text, today
from elixir.units import MIB, dtype_name

HIDDEN = 768
"""Width of the matrix products: of the smallest models that are trained, so that larger ones are not promised too much.
"""
WEIGHTS = 16
"""Weight matrices that are multiplied one after the other: more than caches hold, as in a step."""
TENSOR_BYTES = 8 * MIB
ADAM_NUMEL = 2**20
TURN_S = 0.02
"""How long one rate is measured before it is the next one's turn."""
STEP_RANGE = (0.9, 1.7)
"""Seconds of a step over those predicted: few rates were measured, and none while others were at work. On two machines
steps of the quickstart took 1.05 to 1.65 of the prediction."""


@dataclass
class _Rate:
    """One kind of work: what a run amounts to, and the sums so far."""

    run: Callable[[], object]
    amount: float
    done: float = 0.0
    spent_s: float = 0.0

    def turn(self, shortest_s: float) -> None:
        """Runs for `shortest_s`, at least once."""
        began_s = time.perf_counter()
        while True:
            self.run()
            self.done += self.amount
            passed_s = time.perf_counter() - began_s
            if passed_s >= shortest_s:
                break
        self.spent_s += passed_s

    @property
    def per_s(self) -> float:
        return self.done / self.spent_s


def measure_briefly(seconds: float = 2.0, *, dtype: torch.dtype = torch.float32, tokens: int = 256) -> HardwareProfile:
    """Measures this machine's CPU as device and host: enough to predict the seconds of a step on it.

    Args:
        seconds: how long the measurement takes; libraries that load in the first run come on top.
        dtype: of the matrix products. Rates of other dtypes are those of the preset ``cpu``.
        tokens: rows of the matrix products, those of the micro-batch that will be trained.

    Returns:
        A profile of plain rates without fits. Collectives, disks and host memory bandwidth under several ranks need
        `measure`.

    Raises:
        InputError: the time or the number of tokens is not positive, or the CPU cannot multiply in `dtype`.
    """
    if not seconds > 0 or tokens < 1:
        raise InputError(f"expected a positive time and one token or more, found {seconds} s and {tokens} tokens")
    share = host_share([host_view()], 0)
    threads, cores = rank_threads(share, torch.get_num_threads())
    with ThreadPoolExecutor(1, "elixir adam") as worker:
        worker.submit(use_threads, threads, cores).result()
        rates = _rates(dtype, tokens, worker)
        for rate in rates.values():
            rate.run()  # pays for page faults and libraries, and is not counted
        until_s = time.perf_counter() + seconds
        for rate in itertools.cycle(rates.values()):
            rate.turn(TURN_S)
            if time.perf_counter() >= until_s and all(rate.done for rate in rates.values()):
                break
    return _profile(dtype, {name: rate.per_s for name, rate in rates.items()}, seconds, tokens, threads)


def _rates(dtype: torch.dtype, tokens: int, worker: ThreadPoolExecutor) -> dict[str, _Rate]:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(tokens, HIDDEN, generator=random).to(dtype)
    weights = itertools.cycle([torch.randn(HIDDEN, 4 * HIDDEN, generator=random).to(dtype) for _ in range(WEIGHTS)])
    try:
        torch.mm(rows, next(weights))
    except RuntimeError as error:
        raise InputError(f"the CPU cannot multiply {dtype_name(dtype)} matrices: {error}") from None
    numel = TENSOR_BYTES // 4
    first, second, third = (torch.ones(WEIGHTS, numel) for _ in range(3))
    places = itertools.cycle(range(WEIGHTS))

    def add() -> None:
        place = next(places)
        torch.add(first[place], second[place], out=third[place])

    def copy() -> None:
        place = next(places)
        third[place].copy_(first[place])

    parameter = torch.nn.Parameter(torch.ones(ADAM_NUMEL))
    parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    return {
        "flops": _Rate(lambda: torch.mm(rows, next(weights)), 2.0 * tokens * HIDDEN * 4 * HIDDEN),
        "memory": _Rate(add, 3.0 * TENSOR_BYTES),
        "link": _Rate(copy, float(TENSOR_BYTES)),
        # On a thread with as many OpenMP threads as training gives to Adam.
        "adam": _Rate(lambda: worker.submit(optimizer.step).result(), float(ADAM_NUMEL)),
    }


def _profile(dtype: torch.dtype, per_s: dict[str, float], seconds: float, tokens: int, threads: int) -> HardwareProfile:
    base = preset("cpu")
    how = f"measured for {seconds:g} s together with the others, {threads_text()}"
    fields: dict[str, tuple[str, str]] = {
        "device_memory_bytes_per_s": ("memory", "c = a + b"),
        "host_memory_bytes_per_s": ("memory", "c = a + b"),
        "host_to_device_bytes_per_s": ("link", "copy within host memory"),
        "device_to_host_bytes_per_s": ("link", "copy within host memory"),
        "device_to_device_bytes_per_s": ("link", "copy within host memory"),
        "host_adam_numel_per_s": ("adam", f"torch AdamW(fused=True) on {threads_text(threads)}"),
        "device_adam_numel_per_s": ("adam", f"torch AdamW(fused=True) on {threads_text(threads)}"),
    }
    name, total = dtype_name(dtype), total_host_bytes()
    measured: dict[str, Any] = {field: per_s[rate] for field, (rate, _) in fields.items()}
    product = f"torch.mm in {name}, {tokens} x {HIDDEN} x {4 * HIDDEN}; other dtypes as in the preset cpu"
    return dataclasses.replace(
        base,
        name="measured-briefly",
        device_name=f"{cpu_name()}, {threads_text()}",
        device_memory_bytes=total,
        host_memory_bytes=total,
        flops_per_s={**base.flops_per_s, name: per_s["flops"]},
        sources=base.sources
        | {field: f"{how}: {what}" for field, (_, what) in fields.items()}
        | {
            "flops_per_s": f"{how}: {product}",
            "device_memory_bytes": "read from the operating system: the same memory as the host's",
            "host_memory_bytes": "read from the operating system and its control groups",
            "step_range": "steps of the quickstart on two machines took 1.05 to 1.65 of the prediction",
        },
        measured_at=today(),
        step_range=STEP_RANGE,
        **measured,
    )
