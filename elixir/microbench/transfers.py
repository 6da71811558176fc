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
from elixir.microbench.bench import Bench, Run, Workload, seconds_of, walking
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
_KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor, Any], object]] = {
    "all_gather": lambda whole, shard, group: _all_gather(whole, shard, group=group),
    "reduce_scatter": lambda whole, shard, group: _reduce_scatter(shard, whole, group=group),
}


def transfer_jobs(bench: Bench) -> list[Workload]:
    """Host memory and the host's link: one way, both ways at once, pinned and not, and between devices. By several
    ranks at once only the link from pinned memory, one way and both ways.

    On a machine whose device is the CPU, a link is a copy from host memory to host memory: no direction and nothing
    pinned, so that there is one series for both ways.
    """
    cuda = bench.device.type == "cuda"
    links = [*(copy_work(bench, way) for way in (_TITLES if cuda else ("host_to_device",))), both_ways_work(bench)]
    if bench.ranks.size > 1:
        return links
    jobs = [memory_work(bench.on("cpu")), *links]
    if cuda:
        jobs += [copy_work(bench, way, pinned=False) for way in _TITLES]
        if torch.cuda.device_count() > 1:
            jobs.append(_peer_work(bench))
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
        with contextlib.suppress(AttributeError, OSError):  # a system, or a kernel, without them
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
    sizes = bench.sizes(SMALLEST_BYTES, MIB // 4)

    def begin() -> Callable[[int], Run]:
        buffers = [torch.ones(sizes[-1] // 4, device=bench.device) for _ in range(3)]
        return walking(lambda a, b, c: torch.add(a, b, out=c), buffers)

    how = f"c = a + b on {bench.device}, fp32 buffers of {_span(sizes)}"
    return Workload("host memory", ("host_memory",), bench, how, sizes, begin, lambda size: 3.0 * size)


def copy_work(bench: Bench, way: str, *, pinned: bool = True) -> Workload:
    """Copies between host and device, one direction; on the CPU from host to host."""
    sizes = bench.sizes(SMALLEST_BYTES, SMALLEST_BYTES)

    def begin() -> Callable[[int], Run]:
        host, device = _buffers(bench, sizes[-1], pinned)
        return walking(_copy, (host, device) if way == "host_to_device" else (device, host))

    title, key = _TITLES[way].format(bench.device), way + ("" if pinned else ".pageable") + bench.all_ranks
    how = f"copy {title}, {_span(sizes)}, {_kind(bench, pinned)}"
    return Workload(title + ("" if pinned else ", pageable"), (key,), bench, how, sizes, begin)


def both_ways_work(bench: Bench) -> Workload:
    """Copies up and down that start together, each on its own thread and stream. One series per direction."""
    sizes = bench.sizes(SMALLEST_BOTH_BYTES, SMALLEST_BYTES, bench.effort().buffer_bytes // 2)

    def begin() -> Callable[[int], Run]:
        up, down = _buffers(bench, sizes[-1]), _buffers(bench, sizes[-1])
        return walking(_both_timed(bench.device), (*up, *reversed(down)))

    keys = tuple(f"{way}.both{bench.all_ranks}" for way in _TITLES)
    title, how = f"host and {bench.device}, both ways at once", f"copies both ways at once, {_span(sizes)} each"
    return Workload(title, keys, bench, f"{how}, {_kind(bench, True)}", sizes, begin)


def _peer_work(bench: Bench) -> Workload:
    """Copies from the device to the next CUDA device, one direction."""
    first = bench.device
    second = check_device(f"cuda:{((first.index or 0) + 1) % torch.cuda.device_count()}")
    sizes = bench.on(second).sizes(SMALLEST_BYTES, SMALLEST_BYTES)

    def copy(source: torch.Tensor, goal: torch.Tensor) -> None:
        # The copy spans two devices: an event of one says nothing about the other, so both are waited for.
        _copy(source, goal)
        torch.cuda.synchronize(first)
        torch.cuda.synchronize(second)

    def begin() -> Callable[[int], Run]:
        return walking(copy, [torch.ones(sizes[-1], dtype=torch.uint8, device=device) for device in (first, second)])

    how = f"copy {first} to {second}, {_span(sizes)}"
    by_clock = bench.on("cpu")  # see above
    return Workload("device to device", ("device_to_device",), by_clock, how, sizes, begin)


def _copy(source: torch.Tensor, goal: torch.Tensor) -> None:
    goal.copy_(source, non_blocking=True)


def _both_timed(device: torch.device) -> Callable[..., tuple[float, ...]]:
    """A run that copies the first buffer to the second and the third to the fourth, and gives the seconds of both."""

    def on_own_stream() -> None:
        if device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(device))

    pool, start = ThreadPoolExecutor(2, initializer=on_own_stream), threading.Barrier(2)

    def timed(*way: torch.Tensor) -> float:
        start.wait()
        return seconds_of(lambda: _copy(*way), device)

    return lambda up, on_device, down, on_host: tuple(pool.map(timed, (up, down), (on_device, on_host)))


def _buffers(bench: Bench, size: int, pinned: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """A host buffer and one on the device, both written to, so that their pages exist."""
    pin = pinned and bench.device.type == "cuda"
    host = torch.empty(size, dtype=torch.uint8, pin_memory=pin).fill_(1)
    return host, torch.ones(size, dtype=torch.uint8, device=bench.device)


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
    ranks = bench.ranks
    sizes = bench.sizes(SMALLEST_WHOLE_BYTES, _DTYPE.itemsize * ranks.machines)

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
    most, multiple = bench.effort().buffer_bytes, world * _DTYPE.itemsize * 512
    smallest, largest = (max(1, size // multiple) * multiple for size in (SMALLEST_WHOLE_BYTES, most))
    sizes = bench.sizes(smallest, multiple, largest)

    def prepare(size: int) -> Run:
        whole, shard = (
            torch.ones(size // parts // _DTYPE.itemsize, dtype=_DTYPE, device=bench.device) for parts in (1, world)
        )
        return lambda: _KINDS[kind](whole, shard, group)

    name = kind.replace("_", "-")
    title = f"{name}, {world} ranks" + ("" if group is None else " of each machine")
    how = f"{name} of bf16 over {_backend(bench)}, {sizes[0] / MIB:.3g} to {sizes[-1] / MIB:.4g} MiB in all"
    return Workload(title, (f"{kind}.{world}",), bench, how, sizes, lambda: prepare)


def _backend(bench: Bench) -> str:
    return "NCCL" if bench.device.type == "cuda" else "gloo"
