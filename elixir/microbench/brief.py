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
from functools import partial

import torch
from torch.nn import functional as F

from elixir.errors import InputError
from elixir.hardware.host_share import host_share, host_view, rank_threads, use_threads
from elixir.hardware.profile import HardwareProfile, preset
from elixir.microbench.bench import Bench, Effort
from elixir.microbench.compute import adam_work
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
CALL_TURNS = 4
TURN_S = 0.05
"""How long one rate is measured before it is the next one's turn."""
STEP_RANGE = (0.85, 1.25)
"""Seconds of a step over those predicted: 0.93 to 1.17 in six runs on an idle machine
(`benchmark/results/quickstart_seconds.csv`); other work on it may take more."""


@dataclass
class _Rate:
    """One kind of work: what a run amounts to, and the sums so far."""

    run: Callable[[], object]
    amount: float
    clock: Callable[[], float] = time.perf_counter
    """Seconds since some moment."""
    done: float = 0.0
    spent_s: float = 0.0

    def turn(self, shortest_s: float) -> None:
        """Runs for `shortest_s`, at least once."""
        self.until(lambda passed_s: passed_s >= shortest_s)

    def until(self, ended: Callable[[float], bool]) -> None:
        """Runs until `ended` accepts the seconds that have passed, at least once."""
        began_s = self.clock()
        while True:
            self.run()
            self.done += self.amount
            passed_s = self.clock() - began_s
            if ended(passed_s):
                break
        self.spent_s += passed_s

    @property
    def per_s(self) -> float:
        return self.done / self.spent_s

    @property
    def run_s(self) -> float:
        """Seconds of one run."""
        return self.spent_s * self.amount / self.done


def _turn_of_lane(lane: _Rate, products: _Rate, worker: ThreadPoolExecutor, shortest_s: float) -> None:
    """Runs a lane's work on its thread, next to the products of compute, for `shortest_s`, each at least once."""
    ended = threading.Event()
    working = worker.submit(lane.until, lambda _: ended.is_set())
    try:
        products.turn(shortest_s)
    finally:
        ended.set()
        working.result()


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
        ThreadPoolExecutor(1, "elixir adam") as adam,
        ThreadPoolExecutor(1, "elixir fetch") as fetch,
        torch.random.fork_rng(devices=[]),  # dropout leaves no trace in the caller's random numbers
        torch.enable_grad(),
    ):
        adam.submit(use_threads, threads, cores).result()
        rates = _compute_rates(dtype, tokens, hidden) | _lane_rates()
        for rate in rates.values():
            rate.run()  # pays for page faults and libraries, and is not counted
        slowed = dataclasses.replace(rates["flops"])
        turns: dict[str, Callable[[float], None]] = {name: rate.turn for name, rate in rates.items()}
        turns |= {
            name: partial(_turn_of_lane, rates[name], slowed, worker)
            for name, worker in (("link", fetch), ("adam", adam))
        }
        until_s = time.perf_counter() + seconds
        for count, turn in enumerate(itertools.cycle(turns.values()), 1):
            turn(TURN_S)
            if time.perf_counter() >= until_s and count >= len(turns):
                break
    product = f"linear in {dtype_name(dtype)}, {tokens} x {hidden} x {4 * hidden}, forward and backward"
    found = _found(rates, slowed, dtype, product, threads)
    return profile_of(
        "measured-briefly",
        {
            **system_facts(torch.device("cpu")),
            **{
                field: (value, f"measured for {seconds:g} s in turns: {what}") for field, (value, what) in found.items()
            },
            "step_range": (STEP_RANGE, "assumption: as on one idle machine"),
        },
        {},
        preset("cpu"),
    )


def _compute_rates(dtype: torch.dtype, tokens: int, hidden: int) -> dict[str, _Rate]:
    random = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype).requires_grad_()

    rows, gradient = tensor(tokens, hidden), tensor(tokens, 4 * hidden).detach()
    weight_numel = 4 * hidden * hidden
    count = max(2, min(MOST_WEIGHTS, WEIGHTS_BYTES // (weight_numel * dtype.itemsize)))
    weights = [tensor(4 * hidden, hidden) for _ in range(count)]
    turns = itertools.cycle(weights)

    def multiply() -> None:
        weight = next(turns)
        F.linear(rows, weight).backward(gradient)
        rows.grad = weight.grad = None

    try:
        multiply()
    except RuntimeError as error:
        raise InputError(f"the CPU cannot multiply {dtype_name(dtype)} matrices: {error}") from None
    few = tensor(1, LAUNCH_NUMEL)
    moved_bytes = float(BLOCK_PASSES * rows.numel() * dtype.itemsize)
    return {
        "flops": _Rate(multiply, 6.0 * tokens * weight_numel),
        "operators": _Rate(lambda: _memory_bound(rows), moved_bytes),
        "launch": _Rate(lambda: _memory_bound(few), float(BLOCK_OPERATORS)),
    }


def call_s(device: torch.device) -> float:
    """Seconds that the host takes to call an operator on a CUDA device, of forward and backward."""
    with torch.random.fork_rng(devices=[device]), torch.enable_grad():
        few = torch.ones(1, LAUNCH_NUMEL, device=device, requires_grad=True)
        calls = _Rate(lambda: _memory_bound(few), float(CUDA_BLOCK_OPERATORS))
        calls.run()  # loads kernels
        for _ in range(CALL_TURNS):
            calls.turn(TURN_S)
    return 1 / calls.per_s


def _memory_bound(rows: torch.Tensor) -> None:
    """Runs forward and backward of `between_products`."""
    between_products(rows).backward(rows.detach())
    rows.grad = None


def between_products(rows: torch.Tensor) -> torch.Tensor:
    """Runs operators such as a transformer block has between its products, without weights."""
    return rows + F.dropout(F.relu(F.layer_norm(rows, rows.shape[-1:])), DROPPED)


def _lane_rates() -> dict[str, _Rate]:
    """Works of the whole measurement, each of one size; those of lanes come last."""
    cpu = Bench(torch.device("cpu"), fixed=_EFFORT)
    step = adam_work(cpu, torch.float32).begin()(ADAM_NUMEL)
    copies, sums = (work.begin()(TENSOR_BYTES) for work in (copy_work(cpu, "host_to_device"), memory_work(cpu)))
    return {
        "memory": _Rate(sums, 3.0 * TENSOR_BYTES),
        "device_adam": _Rate(step, float(ADAM_NUMEL)),
        "link": _Rate(copies, float(TENSOR_BYTES)),
        # On a thread with as many OpenMP threads as training gives to Adam.
        "adam": _Rate(step, float(ADAM_NUMEL)),
    }


def _found(rates: dict[str, _Rate], slowed: _Rate, dtype: torch.dtype, product: str, threads: int) -> Found:
    """The measured fields, with what was run for each; `slowed` are products next to lanes."""
    per_s = {name: rate.per_s for name, rate in rates.items()}
    launch_s = 1 / per_s["launch"]

    def without_calls(name: str, operators: int) -> float:
        """The rate while operators work."""
        run_s = rates[name].run_s
        return rates[name].amount / max(run_s - operators * launch_s, run_s / 2)

    name = dtype_name(dtype)
    flops = preset("cpu").flops_per_s | {name: without_calls("flops", PRODUCT_OPERATORS)}
    operators = f"add, dropout, ReLU and layer norm in {name}"
    memory, link = (per_s["memory"], "c = a + b"), (per_s["link"], "copy within host memory, next to products")
    return {
        "device_memory_bytes_per_s": memory,
        "host_memory_bytes_per_s": memory,
        "host_to_device_bytes_per_s": link,
        "device_to_host_bytes_per_s": link,
        "device_to_device_bytes_per_s": link,
        "host_adam_numel_per_s": (
            per_s["adam"],
            f"torch AdamW(fused=True) on {threads_text(threads)}, next to products",
        ),
        "device_adam_numel_per_s": (per_s["device_adam"], f"torch AdamW(fused=True), {threads_text()}"),
        "flops_per_s": (flops, f"{product}; other dtypes as in the preset cpu"),
        "sustained_memory_share": (
            without_calls("operators", BLOCK_OPERATORS) / per_s["memory"],
            f"{operators}, forward and backward, over c = a + b",
        ),
        "launch_s": (launch_s, f"{operators} of {LAUNCH_NUMEL} elements, forward and backward"),
        "contention": (
            max(0.0, 1 - slowed.per_s / per_s["flops"]),
            f"{product}, next to copies and to CPU Adam",
        ),
    }
