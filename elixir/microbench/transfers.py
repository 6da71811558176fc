"""Bandwidth of memories and of the links between them, by size; and of the collectives that a sharded chunk needs, by
bytes of the whole chunk and world size."""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from elixir.hardware.memory import check_device
from elixir.microbench.bench import Bench, Run, Workload, geometric, walking
from elixir.microbench.ranks import GROUP_TIMEOUT, Ranks
from elixir.plan.step_traffic import all_reduce_bytes
from elixir.units import MIB, format_bytes

SMALLEST_BYTES = 256 * 1024
"""A chunk is rarely smaller, and what is may sit in a cache."""
SMALLEST_BOTH_BYTES = 4 * MIB
"""Size of the smallest copy both ways: two threads start some ten microseconds after each other, when a smaller copy
would be half done."""
_TITLES = {"host_to_device": "host to {}", "device_to_host": "{} to host"}
PINNING_RUNS = 3
SMALLEST_WHOLE_BYTES = MIB
"""Smallest whole chunk; anything smaller waits for the other ranks more than for the link."""
_DTYPE = torch.bfloat16
# torch 2.13 has new names for these and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
LONGEST_S = 1.0
"""Seconds of the longest sum between machines: a slow network shows its rate with little."""
_KINDS = ("all_gather", "reduce_scatter")


def transfer_jobs(bench: Bench) -> list[Workload]:
    """Host memory and the host's link: one way, both ways at once, pinned and not, and between devices.

    On a machine whose device is the CPU, a link is a copy from host memory to host memory: no direction and nothing
    pinned, so that there is one series for both ways.
    """
    jobs = [memory_work(bench.on("cpu")), *link_jobs(bench)]
    if bench.device.type == "cuda":
        jobs += [copy_work(bench, way, pinned=False) for way in _TITLES]
        if torch.cuda.device_count() > 1:
            jobs.append(_peer_work(bench))
    return jobs


def link_jobs(bench: Bench) -> list[Workload]:
    """The link from pinned memory, one way and both ways at once; by all ranks at once if there are several."""
    ways = _TITLES if bench.device.type == "cuda" else ("host_to_device",)
    return [*(copy_work(bench, way) for way in ways), both_ways_work(bench)]


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


def memory_work(bench: Bench) -> Workload:
    """``c = a + b`` over fp32 buffers, bytes read and written.

    A line that the cache fetches before it is overwritten is not counted, so hardware may move up to a third more.
    """
    plan = bench.effort()
    sizes = geometric(SMALLEST_BYTES, plan.buffer_bytes, plan.amounts, MIB // 4)

    def buffers() -> list[torch.Tensor]:
        return [torch.ones(plan.buffer_bytes // 4, device=bench.device) for _ in range(3)]

    how = f"c = a + b on {bench.device}, fp32 buffers of {_span(sizes)}"
    begin = walking(lambda a, b, c: torch.add(a, b, out=c), buffers)
    return Workload("host memory", ("host_memory",), bench, how, sizes, begin, lambda size: 3.0 * size)


def copy_work(bench: Bench, way: str, *, pinned: bool = True) -> Workload:
    """Copies between host and device, one direction; on the CPU from host to host."""
    plan = bench.effort()
    sizes = geometric(SMALLEST_BYTES, plan.buffer_bytes, plan.amounts, SMALLEST_BYTES)

    def buffers() -> list[torch.Tensor]:
        both = _buffers(bench, plan.buffer_bytes, pinned)
        return both if way == "host_to_device" else both[::-1]

    title, key = _TITLES[way].format(bench.device), way + ("" if pinned else ".pageable") + _suffix(bench)
    how = f"copy {title}, {_span(sizes)}, {_kind(bench, pinned)}"
    begin = walking(lambda source, goal: goal.copy_(source, non_blocking=True), buffers)
    title += "" if pinned else ", pageable"
    return Workload(title, (key,), bench, how, sizes, begin)


def both_ways_work(bench: Bench) -> Workload:
    """Copies up and down that start together: two streams on CUDA, two threads on the CPU. One series per direction."""
    plan = bench.effort()
    half = plan.buffer_bytes // 2
    sizes = geometric(min(SMALLEST_BOTH_BYTES, half), half, plan.amounts, SMALLEST_BYTES)

    def buffers() -> list[torch.Tensor]:
        return [*_buffers(bench, half, pinned=True), *_buffers(bench, half, pinned=True)[::-1]]

    def begin() -> Callable[[int], Run]:
        timed = _timed_on_streams(bench.device) if bench.device.type == "cuda" else _timed_on_threads()
        return walking(lambda up, on_device, down, on_host: timed(((up, on_device), (down, on_host))), buffers)()

    keys = tuple(f"{way}.both{_suffix(bench)}" for way in _TITLES)
    title, how = f"host and {bench.device}, both ways at once", f"copies both ways at once, {_span(sizes)} each"
    return Workload(title, keys, bench, f"{how}, {_kind(bench, True)}", sizes, begin)


def _peer_work(bench: Bench) -> Workload:
    """Copies from the device to the next CUDA device, one direction."""
    first = bench.device
    second = check_device(f"cuda:{((first.index or 0) + 1) % torch.cuda.device_count()}")
    plan = bench.effort(second)
    sizes = geometric(SMALLEST_BYTES, plan.buffer_bytes, plan.amounts, SMALLEST_BYTES)

    def buffers() -> list[torch.Tensor]:
        return [torch.ones(plan.buffer_bytes, dtype=torch.uint8, device=device) for device in (first, second)]

    def copy(source: torch.Tensor, goal: torch.Tensor) -> None:
        # The copy spans two devices: an event of one says nothing about the other, so both are waited for.
        goal.copy_(source, non_blocking=True)
        torch.cuda.synchronize(first)
        torch.cuda.synchronize(second)

    how = f"copy {first} to {second}, {_span(sizes)}"
    by_clock = bench.on("cpu")  # see above
    begin = walking(copy, buffers)
    return Workload("device to device", ("device_to_device",), by_clock, how, sizes, begin)


def _timed_on_threads() -> Callable[[Any], tuple[float, ...]]:
    pool, start = ThreadPoolExecutor(2), threading.Barrier(2)

    def timed(way: tuple[torch.Tensor, torch.Tensor]) -> float:
        source, goal = way
        start.wait()
        began = time.perf_counter()
        goal.copy_(source)
        return time.perf_counter() - began

    return lambda ways: tuple(pool.map(timed, ways))


def _timed_on_streams(device: torch.device) -> Callable[[Any], tuple[float, ...]]:
    cuda: Any = torch.cuda  # its classes carry no annotations
    streams = [cuda.Stream(device), cuda.Stream(device)]
    events = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in streams]

    def timed(ways: Any) -> tuple[float, ...]:
        with cuda.device(device):
            for stream, (began, ended), (source, goal) in zip(streams, events, ways, strict=True):
                with cuda.stream(stream):
                    began.record()
                    goal.copy_(source, non_blocking=True)
                    ended.record()
            cuda.synchronize(device)
        return tuple(float(began.elapsed_time(ended)) / 1e3 for began, ended in events)

    return timed


def _buffers(bench: Bench, size: int, pinned: bool) -> list[torch.Tensor]:
    """A host buffer and one on the device, both written to, so that their pages exist."""
    pin = pinned and bench.device.type == "cuda"
    host = torch.empty(size, dtype=torch.uint8, pin_memory=pin).fill_(1)
    return [host, torch.ones(size, dtype=torch.uint8, device=bench.device)]


def _suffix(bench: Bench) -> str:
    return ".all_ranks" if bench.ranks.size > 1 else ""


def _kind(bench: Bench, pinned: bool) -> str:
    if bench.device.type == "cpu":
        return "host memory"
    return "pinned" if pinned else "pageable"


def _span(sizes: Sequence[int]) -> str:
    return f"{sizes[0] / MIB:g} to {sizes[-1] / MIB:g} MiB"


def collective_jobs(bench: Bench) -> list[Workload]:
    """All-gather and reduce-scatter over all ranks, and with several machines over those of each; and what the network
    between machines carries. None for a single rank.

    CUDA devices use NCCL, the CPU gloo.
    """
    ranks = bench.ranks
    if ranks.size == 1:
        return []
    jobs = [_collective_work(bench, kind, ranks.size, None) for kind in _KINDS]
    if ranks.machines > 1:
        here, across = _groups(ranks)
        if ranks.local_size > 1:
            jobs += [_collective_work(bench, kind, ranks.local_size, here) for kind in _KINDS]
        jobs.append(_network_work(bench, across))
    return jobs


def _groups(ranks: Ranks) -> tuple[Any, Any]:
    """The group of this rank's machine, and that of the ranks which have its number on their machines."""
    local, found = ranks.local_size, []
    for parts in (
        [[*range(first, first + local)] for first in range(0, ranks.size, local)],
        [[*range(number, ranks.size, local)] for number in range(local)],
    ):
        made = [(part, dist.new_group(part, timeout=GROUP_TIMEOUT)) for part in parts]  # all ranks make all groups
        found.append(next(group for part, group in made if ranks.rank in part))
    return found[0], found[1]


def _network_work(bench: Bench, across: Any) -> Workload:
    """Sums of growing buffers between machines, all ranks at once; the amount is what a machine receives."""
    ranks, plan = bench.ranks, bench.effort()
    sizes = geometric(SMALLEST_WHOLE_BYTES, plan.buffer_bytes, plan.amounts, _DTYPE.itemsize * ranks.machines)

    def prepare(size: int) -> Run:
        buffer = torch.zeros(size // _DTYPE.itemsize, dtype=_DTYPE, device=bench.device)
        return lambda: dist.all_reduce(buffer, group=across)

    title = f"network between {ranks.machines} machines"
    how = f"sums of bf16 over {_backend(bench)} between {ranks.machines} machines, {ranks.local_size} at once"

    def received(size: int) -> float:
        return ranks.local_size * all_reduce_bytes(size, ranks.machines)

    return Workload(title, ("network",), bench, how, sizes, lambda: prepare, received, LONGEST_S)


def _collective_work(bench: Bench, kind: str, world: int, group: Any) -> Workload:
    """``all_gather`` or ``reduce_scatter`` of growing bf16 buffers; the amount is the whole buffer, not one rank's
    part.

    Args:
        bench: says which ranks measure.
        kind: of the collective.
        world: ranks of the group.
        group: this rank's part of them, each of which does so at once; None for all.
    """
    plan, multiple = bench.effort(), world * _DTYPE.itemsize * 512
    smallest, largest = (max(1, size // multiple) * multiple for size in (SMALLEST_WHOLE_BYTES, plan.buffer_bytes))
    sizes = geometric(smallest, largest, plan.amounts, multiple)

    def prepare(size: int) -> Run:
        numel = size // _DTYPE.itemsize
        whole = torch.ones(numel, dtype=_DTYPE, device=bench.device)
        shard = torch.ones(numel // world, dtype=_DTYPE, device=bench.device)
        if kind == "all_gather":
            return lambda: _all_gather(whole, shard, group=group)
        return lambda: _reduce_scatter(shard, whole, group=group)

    name = kind.replace("_", "-")
    title = f"{name}, {world} ranks" + ("" if group is None else " of each machine")
    how = f"{name} of bf16 over {_backend(bench)}, {sizes[0] / MIB:.3g} to {sizes[-1] / MIB:.4g} MiB in all"
    return Workload(title, (f"{kind}.{world}",), bench, how, sizes, lambda: prepare)


def _backend(bench: Bench) -> str:
    return "NCCL" if bench.device.type == "cuda" else "gloo"
