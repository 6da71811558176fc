"""The few rates that decide a step on this machine's CPU, measured in about two seconds.

`measure` fits latency and rate by size and takes a minute. Here each rate is one number: all work done over all time
taken, in turns until the time is over, so that other programs on the same cores slow it as much as they will slow
training. Compute goes through autograd, since a step does. The work of lanes, copies and CPU Adam, is measured while
compute multiplies, and so is what compute loses by it: all of them share the cores.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from elixir.errors import InputError
from elixir.hardware.host_share import host_share, host_view, rank_threads, use_threads
from elixir.hardware.profile import HardwareProfile, preset
from elixir.hardware.rate_fit import PLAIN_FIELDS
from elixir.microbench.bench import HOST, Bench, Effort
from elixir.microbench.compute import adam_work, random_tensor
from elixir.microbench.fitting import Found, profile_of, system_facts, threads_text
from elixir.microbench.transfers import copy_work, memory_work
from elixir.units import MIB, dtype_name

HIDDEN = 768
"""Width of the matrix products, if none is given: of the smallest models that are trained, so that larger ones are not
promised too much."""
WEIGHTS_BYTES, MOST_WEIGHTS = 256 * MIB, 16
"""Weight matrices that are multiplied one after the other: more than caches hold, as in a step."""
TENSOR_BYTES, ADAM_NUMEL = 8 * MIB, 2**20
"""Size of a tensor that is copied or added, and elements of a parameter that is stepped."""
_EFFORT = Effort(1, 1, 0.0, 1, buffer_bytes=16 * TENSOR_BYTES, adam_numel=8 * ADAM_NUMEL, longest_s=0.0)
"""Memory that is walked through, tensor by tensor: more than caches hold."""
DROPPED = 0.1
"""Share of the activations that dropout sets to zero: what BERT, GPT-2 and OPT were trained with."""
BLOCK_OPERATORS = 10
"""Operators of `between_products`, forward and backward, views left out."""
CUDA_BLOCK_OPERATORS = 8
"""The same on CUDA, where dropout is one operator."""
BLOCK_PASSES = 24
"""How often they read or write a tensor of the activations' size."""
PRODUCT_OPERATORS = 3
LAUNCH_NUMEL = 8
"""Elements of an operator that takes no time but that of its call."""
CALLS_S = 0.2
"""How long the calls of operators on a CUDA device are measured."""
TURN_S = 0.05
"""How long one rate is measured before it is the next one's turn."""
STEP_RANGE = (0.85, 1.25)
"""Seconds of a step over those predicted: 0.93 to 1.17 in six runs on an idle machine
(`benchmark/results/quickstart_seconds.csv`); other work on it may take more."""


@dataclass
class _Rate:
    """One kind of work, and the sums so far."""

    run: Callable[[], object]
    amount: float
    """Bytes, elements, FLOPs or operators of a run."""
    what: str = ""
    """A description of the work."""
    families: tuple[str, ...] = ()
    """The keys of `PLAIN_FIELDS` whose fields it gives."""
    lane: ThreadPoolExecutor | None = None
    """The thread of the lane whose work it is."""
    runs: int = 0
    spent_s: float = 0.0

    def turn(self, products: _Rate, shortest_s: float = TURN_S) -> None:
        """Runs for `shortest_s`, at least once; the work of a lane on its thread, while `products` do so."""
        if self.lane is None:
            ends_s = time.perf_counter() + shortest_s
            return self._run_until(lambda: time.perf_counter() >= ends_s)
        ended = threading.Event()
        working = self.lane.submit(self._run_until, ended.is_set)
        try:
            products.turn(products, shortest_s)
        finally:
            ended.set()
            working.result()

    def _run_until(self, ended: Callable[[], bool]) -> None:
        began_s = time.perf_counter()
        while True:
            self.run()
            self.runs += 1
            if ended():
                break
        self.spent_s += time.perf_counter() - began_s

    @property
    def run_s(self) -> float:
        """Seconds of one run."""
        return self.spent_s / self.runs

    @property
    def per_s(self) -> float:
        return self.amount / self.run_s


def measure_briefly(
    seconds: float = 2.0, *, dtype: torch.dtype = torch.float32, tokens: int = 256, hidden: int = HIDDEN
) -> HardwareProfile:
    """Measures this machine's CPU as device and host: enough to predict the seconds of a step on it.

    Args:
        seconds: how long the measurement takes; libraries that load in the first run come on top.
        dtype: of the matrix products. Rates of other dtypes are those of the preset ``cpu``.
        tokens: rows of the matrix products, those of the micro-batch that will be trained.
        hidden: width of the model that will be trained.

    Returns:
        A profile of plain rates without fits. Collectives, disks and host memory bandwidth under several ranks need
        `measure`.

    Raises:
        InputError: the time or a size is not positive, or the CPU cannot multiply in `dtype`.
    """
    if not seconds > 0 or tokens < 1 or hidden < 1:
        raise InputError(
            f"expected a positive time, one token or more and a positive width, found {seconds} s, {tokens} tokens and "
            f"a width of {hidden}"
        )
    share = host_share([host_view()], 0)
    threads, cores = rank_threads(share, torch.get_num_threads())
    with (
        ThreadPoolExecutor(1, "elixir adam", use_threads, (threads, cores)) as adam,
        ThreadPoolExecutor(1, "elixir fetch") as fetch,
        torch.random.fork_rng(devices=[]),  # dropout leaves no trace in the caller's random numbers
        torch.enable_grad(),
    ):
        rates = _compute_rates(dtype, tokens, hidden) + _memory_rates(fetch, adam, threads)
        for rate in rates:
            rate.run()  # pays for page faults and libraries, and is not counted
        next_to_lanes = dataclasses.replace(rates[0])
        until_s = time.perf_counter() + seconds
        for count, rate in enumerate(itertools.cycle(rates), 1):
            rate.turn(next_to_lanes)
            if time.perf_counter() >= until_s and count >= len(rates):
                break
    found = {
        field: (value, f"measured for {seconds:g} s in turns: {what}")
        for field, (value, what) in _found(rates, next_to_lanes, dtype_name(dtype)).items()
    }
    found["step_range"] = (STEP_RANGE, "assumption: as on one idle machine")
    return profile_of("measured-briefly", system_facts(HOST) | found, preset("cpu"))


def _compute_rates(dtype: torch.dtype, tokens: int, hidden: int) -> list[_Rate]:
    """Products, operators between them, and their calls."""
    name, weight_numel = dtype_name(dtype), 4 * hidden * hidden
    rows = random_tensor((tokens, hidden), dtype, HOST, 0).requires_grad_()
    gradient = random_tensor((tokens, 4 * hidden), dtype, HOST, 1)
    count = max(2, min(MOST_WEIGHTS, WEIGHTS_BYTES // (weight_numel * dtype.itemsize)))
    weights = [random_tensor((4 * hidden, hidden), dtype, HOST, seed).requires_grad_() for seed in range(count)]
    turns = itertools.cycle(weights)

    def multiply() -> None:
        weight = next(turns)
        F.linear(rows, weight).backward(gradient)
        rows.grad = weight.grad = None

    try:
        multiply()
    except RuntimeError as error:
        raise InputError(f"the CPU cannot multiply {name} matrices: {error}") from None
    product = f"linear in {name}, {tokens} x {hidden} x {4 * hidden}, forward and backward"
    operators = f"add, dropout, ReLU and layer norm in {name}"
    return [
        _Rate(multiply, 6.0 * tokens * weight_numel, product),
        _Rate(lambda: _memory_bound(rows), float(BLOCK_PASSES * rows.nbytes), operators),
        _calls(HOST, BLOCK_OPERATORS, dtype),
    ]


def call_s(device: torch.device) -> float:
    """Seconds that the host takes to call an operator on a CUDA device, of forward and backward."""
    with torch.random.fork_rng(devices=[device]), torch.enable_grad():
        calls = _calls(device, CUDA_BLOCK_OPERATORS)
        calls.run()  # loads kernels
        calls.turn(calls, CALLS_S)
    return 1 / calls.per_s


def _calls(device: torch.device, operators: int, dtype: torch.dtype = torch.float32) -> _Rate:
    few = torch.ones(1, LAUNCH_NUMEL, dtype=dtype, device=device, requires_grad=True)
    return _Rate(lambda: _memory_bound(few), float(operators))


def _memory_bound(rows: torch.Tensor) -> None:
    """Runs forward and backward of `between_products`."""
    between_products(rows).backward(rows.detach())
    rows.grad = None


def between_products(rows: torch.Tensor) -> torch.Tensor:
    """Runs operators such as a transformer block has between its products, without weights."""
    return rows + F.dropout(F.relu(F.layer_norm(rows, rows.shape[-1:])), DROPPED)


def _memory_rates(fetch: ThreadPoolExecutor, adam: ThreadPoolExecutor, threads: int) -> list[_Rate]:
    """Works of the whole measurement, each of one size; those of lanes come last."""
    cpu, how = Bench(HOST, fixed=_EFFORT), "torch AdamW(fused=True)"
    step = adam_work(cpu, torch.float32).begin()(ADAM_NUMEL)
    copies, sums = (work.begin()(TENSOR_BYTES) for work in (copy_work(cpu, "host_to_device"), memory_work(cpu)))
    links, copied = ("host_to_device", "device_to_host", "device_to_device"), "copy within host memory"
    return [
        _Rate(sums, 3.0 * TENSOR_BYTES, "c = a + b", ("host_memory", "elementwise")),
        _Rate(step, float(ADAM_NUMEL), f"{how}, {threads_text()}", ("device_adam",)),
        _Rate(copies, float(TENSOR_BYTES), f"{copied}, next to products", links, fetch),
        # On a thread with as many OpenMP threads as training gives to Adam.
        _Rate(step, float(ADAM_NUMEL), f"{how} on {threads_text(threads)}, next to products", ("host_adam",), adam),
    ]


def _found(rates: list[_Rate], next_to_lanes: _Rate, dtype: str) -> Found:
    """The measured fields, with what was run for each."""
    products, operators, calls, memory, *_ = rates

    def without_calls(rate: _Rate, count: int) -> float:
        """The rate while `count` operators work."""
        return rate.amount / max(rate.run_s - count / calls.per_s, rate.run_s / 2)

    return {
        **{PLAIN_FIELDS[family]: (rate.per_s, rate.what) for rate in rates for family in rate.families},
        "flops_per_s": (
            preset("cpu").flops_per_s | {dtype: without_calls(products, PRODUCT_OPERATORS)},
            f"{products.what}; other dtypes as in the preset cpu",
        ),
        "sustained_memory_share": (
            without_calls(operators, BLOCK_OPERATORS) / memory.per_s,
            f"{operators.what}, forward and backward, over c = a + b",
        ),
        "launch_s": (1 / calls.per_s, f"{operators.what} of {LAUNCH_NUMEL} elements, forward and backward"),
        "contention": (
            max(0.0, 1 - next_to_lanes.per_s / products.per_s),
            f"{products.what}, next to copies and to CPU Adam",
        ),
    }
