"""Bandwidth of memories and of the links between them, by size."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from elixir.errors import InputError
from elixir.microbench.bench import Bench, Effort, check_device, repeat
from elixir.microbench.fitting import Job, Series, geometric, in_turns, sweep, windows
from elixir.units import MIB, format_bytes

SMALLEST_BYTES = 256 * 1024
"""A chunk is rarely smaller, and what is may sit in a cache."""
SMALLEST_BOTH_BYTES = 4 * MIB
"""Size of the smallest copy both ways: two threads start some ten microseconds after each other, when a smaller copy
would be half done."""
_TITLES = {True: "host to {}", False: "{} to host"}
PINNING_RUNS = 3
_FAMILIES = {True: "host_to_device", False: "device_to_host"}


def transfer_jobs(bench: Bench) -> list[Job]:
    """Host memory and the host's link: one way, both ways at once, pinned and not, and between devices.

    On a machine whose device is the CPU, a link is a copy from host memory to host memory: no direction and nothing
    pinned, so that there is one series for both ways.
    """
    jobs = [Job("host memory", ("host_memory",), lambda: memory_series(bench.on("cpu"))), *link_jobs(bench)]
    if bench.device.type == "cuda":
        jobs += [_one_way_job(bench, way, f"{_FAMILIES[way]}.pageable", pinned=False) for way in (True, False)]
        if torch.cuda.device_count() > 1:
            jobs.append(Job("device to device", ("device_to_device",), partial(peer_series, bench)))
    return jobs


def pinning_rate(bench: Bench) -> tuple[float, str]:
    """Bytes a second at which host memory is touched for the first time and, where the device is CUDA, registered; and
    how.

    As the runtime does it: private pages, huge ones if the kernel has them.
    """
    nbytes, cuda = bench.on("cpu").effort().buffer_bytes, bench.device.type == "cuda"
    times = []
    for _ in range(PINNING_RUNS):
        # Private: shared memory, which Python makes otherwise, has huge pages by another setting.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
        memory = mmap.mmap(-1, nbytes, **private)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        began_s = time.perf_counter()
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        buffer.zero_()
        if cuda:
            torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), nbytes, 0)
        times.append(time.perf_counter() - began_s)
        if cuda:
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
    what = "touched and registered" if cuda else "touched"
    how = f"measured: {format_bytes(nbytes)} of host memory {what}, median of {PINNING_RUNS}"
    return nbytes / statistics.median(times), bench.on("cpu").text(how)


def link_jobs(bench: Bench) -> list[Job]:
    """The link from pinned memory, one way and both ways at once; by all ranks at once if there are several."""
    ways = (True, False) if bench.device.type == "cuda" else (True,)
    suffix = _suffix(bench)
    jobs = [_one_way_job(bench, way, _FAMILIES[way] + suffix, pinned=True) for way in ways]
    both = tuple(f"{_FAMILIES[way]}.both{suffix}" for way in (True, False))
    return [*jobs, Job(f"host and {bench.device}, both ways at once", both, partial(both_ways_series, bench))]


def _one_way_job(bench: Bench, to_device: bool, key: str, *, pinned: bool) -> Job:
    title = _TITLES[to_device].format(bench.device) + ("" if pinned else ", pageable")
    return Job(title, (key,), partial(one_way_series, bench, to_device=to_device, pinned=pinned))


def memory_series(bench: Bench) -> Series:
    """``c = a + b`` over fp32 buffers, bytes read and written.

    A line that the cache fetches before it is overwritten is not counted, so hardware may move up to a third more.
    """
    plan = bench.effort()
    a, b, c = (torch.ones(plan.buffer_bytes // 4, device=bench.device) for _ in range(3))

    def add(first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> None:
        torch.add(first, second, out=out)

    sizes = geometric(SMALLEST_BYTES, plan.buffer_bytes, plan.amounts, MIB // 4)
    cases = [(3.0 * size, partial(in_turns, add, size // 4, a, b, c)) for size in sizes]
    how = f"c = a + b on {bench.device}, fp32 buffers of {_span(sizes)}"
    return sweep(bench, plan, "host_memory", "bytes", how, cases)


def one_way_series(bench: Bench, *, to_device: bool, pinned: bool) -> Series:
    """Copies between host and device, one direction; on the CPU from host to host."""
    plan = bench.effort()
    host, other = _buffers(bench, plan.buffer_bytes, pinned)
    source, target = (host, other) if to_device else (other, host)

    def copy(origin: torch.Tensor, goal: torch.Tensor) -> None:
        goal.copy_(origin, non_blocking=True)

    sizes = _sizes(plan)
    key = _FAMILIES[to_device] + ("" if pinned else ".pageable") + _suffix(bench)
    how = f"copy {_TITLES[to_device].format(bench.device)}, {_span(sizes)}, {_kind(bench, pinned)}"
    return sweep(
        bench, plan, key, "bytes", how, [(size, partial(in_turns, copy, size, source, target)) for size in sizes]
    )


def both_ways_series(bench: Bench) -> list[Series]:
    """Copies up and down that start together: two streams on CUDA, two threads on the CPU. One series per direction."""
    plan = bench.effort()
    half = plan.buffer_bytes // 2
    (host_up, up), (host_down, down) = (_buffers(bench, half, pinned=True) for _ in range(2))
    ways = ((host_up, up), (down, host_down))
    points: tuple[list[tuple[float, float]], ...] = ([], [])
    fewest = plan.max_repeats
    sizes = geometric(min(SMALLEST_BOTH_BYTES, half), half, plan.amounts, SMALLEST_BYTES)
    timed = _timed_on_streams if bench.device.type == "cuda" else _timed_on_threads
    with ThreadPoolExecutor(2) as pool:
        for size in sizes:
            copies = [zip(windows(source, size), windows(goal, size), strict=True) for source, goal in ways]
            turns = itertools.cycle(zip(*copies, strict=True))
            once = timed(bench.device, pool, turns)
            seconds, repeats = repeat(once, plan, bench.ranks)
            for column, value in zip(points, seconds, strict=True):
                column.append((float(size), value))
            fewest = min(fewest, repeats)
    how = bench.text(f"copies both ways at once, {_span(sizes)} each, {_kind(bench, True)}")
    return [
        Series(f"{family}.both{_suffix(bench)}", "bytes", tuple(column), fewest, how, bench.ranks.size)
        for family, column in zip(("host_to_device", "device_to_host"), points, strict=True)
    ]


def peer_series(bench: Bench) -> Series:
    """Copies from the device to the next CUDA device, one direction.

    Raises:
        InputError: they are not two different CUDA devices of this machine.
    """
    first = bench.device
    is_cuda = first.type == "cuda"
    second = check_device(f"cuda:{((first.index or 0) + 1) % torch.cuda.device_count()}" if is_cuda else "cpu")
    if not is_cuda or first == second:
        raise InputError(f"expected two different CUDA devices, got {first} and {second}")
    plan = bench.effort(second)
    origin = torch.ones(plan.buffer_bytes, dtype=torch.uint8, device=first)
    target = torch.empty(plan.buffer_bytes, dtype=torch.uint8, device=second)

    def prepare(size: int) -> Callable[[], object]:
        def run() -> None:
            # The copy spans two devices: an event of one says nothing about the other, so both are waited for.
            target[:size].copy_(origin[:size], non_blocking=True)
            torch.cuda.synchronize(first)
            torch.cuda.synchronize(second)

        return run

    sizes = _sizes(plan)
    how = f"copy {first} to {second}, {_span(sizes)}"
    cases = [(size, partial(prepare, size)) for size in sizes]
    return sweep(bench.on("cpu"), plan, "device_to_device", "bytes", how, cases)  # by the clock, see above


def _timed_on_threads(device: torch.device, pool: ThreadPoolExecutor, turns: Any) -> Callable[[], tuple[float, ...]]:
    start = threading.Barrier(2)

    def timed(source: torch.Tensor, goal: torch.Tensor) -> float:
        start.wait()
        began = time.perf_counter()
        goal.copy_(source)
        return time.perf_counter() - began

    def once() -> tuple[float, ...]:
        return tuple(pool.map(lambda way: timed(*way), next(turns)))

    return once


def _timed_on_streams(device: torch.device, pool: ThreadPoolExecutor, turns: Any) -> Callable[[], tuple[float, ...]]:
    cuda: Any = torch.cuda  # its classes carry no annotations
    streams = [cuda.Stream(device), cuda.Stream(device)]
    events = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in streams]

    def once() -> tuple[float, ...]:
        with cuda.device(device):
            for stream, (began, ended), (source, goal) in zip(streams, events, next(turns), strict=True):
                with cuda.stream(stream):
                    began.record()
                    goal.copy_(source, non_blocking=True)
                    ended.record()
            cuda.synchronize(device)
        return tuple(float(began.elapsed_time(ended)) / 1e3 for began, ended in events)

    return once


def _buffers(bench: Bench, size: int, pinned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A host buffer and one on the device, both written to, so that their pages exist."""
    pin = pinned and bench.device.type == "cuda"
    host = torch.empty(size, dtype=torch.uint8, pin_memory=pin).fill_(1)
    return host, torch.ones(size, dtype=torch.uint8, device=bench.device)


def _sizes(plan: Effort) -> list[int]:
    return geometric(SMALLEST_BYTES, plan.buffer_bytes, plan.amounts, SMALLEST_BYTES)


def _suffix(bench: Bench) -> str:
    return ".all_ranks" if bench.ranks.size > 1 else ""


def _kind(bench: Bench, pinned: bool) -> str:
    if bench.device.type == "cpu":
        return "host memory"
    return "pinned" if pinned else "pageable"


def _span(sizes: list[int]) -> str:
    return f"{sizes[0] / MIB:g} to {sizes[-1] / MIB:g} MiB"
