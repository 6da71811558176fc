"""Measures this machine into a `HardwareProfile`."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elixir.errors import RankError
from elixir.files import PathLike
from elixir.hardware.memory import cpu_name, total_host_bytes
from elixir.hardware.profile import HardwareProfile
from elixir.microbench.adam import adam_jobs, all_threads_jobs, compute_threads, thread_counts
from elixir.microbench.bench import Bench, default_device, threads_text, today
from elixir.microbench.brief import CUDA_BLOCK_OPERATORS, LAUNCH_NUMEL, call_s
from elixir.microbench.collectives import collective_jobs
from elixir.microbench.compute import DTYPES, compute_jobs
from elixir.microbench.disk import disk_jobs, free_disk_bytes
from elixir.microbench.fitting import Job, Measured
from elixir.microbench.ranks import Ranks, spawn
from elixir.microbench.transfers import link_jobs, pinning_rate, transfer_jobs
from elixir.units import dtype_name

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with a short text before each measurement, how many are done, and of how many."""

SPAWNED_WORLD = 2
_REACHED = "the rates in flops_per_s are measured, so they are reached in full"


def measure(
    progress: Progress | None = None,
    quick: bool = False,
    *,
    ranks: Ranks | None = None,
    start_ranks: bool = False,
    disk_folder: PathLike | Sequence[PathLike] | None = None,
) -> HardwareProfile:
    """Measures this machine: its first CUDA device, or its CPU as the device if it has none.

    Takes about a minute on two cores (`quick`: several seconds) and at most 1 GiB of host memory. `flops_per_s` holds
    reached rates, so `matmul_efficiency` is 1. With one device, the rate between devices cannot be measured: it is
    given as the slower direction of the host link, which is what such a copy would have to go through without a direct
    link.

    A fit that failed is logged by name and left out of `fits`; the plain field then has the rate of the largest amount.

    Args:
        progress: see `Progress`.
        quick: smaller buffers, fewer amounts and repetitions; good enough to see orders of magnitude.
        ranks: those that torchrun started (`elixir.microbench.ranks.joined`): rank 0 measures first, then all of
            them measure links, Adam and collectives at once. All get the same profile.
        start_ranks: without `ranks`, on a machine without CUDA, start two processes for that. They import the caller's
            main module, which must be safe to import.
        disk_folder: also measure the disk that this folder is on, past the page cache, with a file of half a GiB
            (`quick`: 128 MiB) that is gone afterwards; several: their drives together. None: the profile knows no disk.

    Raises:
        InputError: something a profile cannot do without could not be measured, or the folder cannot be used.
        RankError: another rank is gone.
    """
    together = ranks or Ranks()
    device = default_device(together)
    start_ranks = start_ranks and together.size == 1 and device.type == "cpu"
    first = together.rank == 0
    single = single_jobs(Bench(device, quick)) if first else []
    folders = [disk_folder] if isinstance(disk_folder, (str, os.PathLike)) else list(disk_folder or ())
    if first and folders:
        single += disk_jobs(Bench(device, quick), *folders)
    shared = rank_jobs(Bench(device, quick, together))
    count = len(single) + len(shared) + start_ranks
    tell = progress if first else None
    results = together.share(run_jobs(single, tell, (0, count)))
    results += run_jobs(shared, tell, (len(single), count))
    if start_ranks:
        if tell is not None:
            tell(f"{SPAWNED_WORLD} ranks at once", count - 1, count)
        try:
            results += spawn(SPAWNED_WORLD, measured_by_ranks, device, quick)
        except RankError as error:
            logger.warning("collectives not measured: %s", error)
    if first:
        failed = [result for result in results if result.fit is None]
        if failed:
            keys = ", ".join(result.key for result in failed)
            said = "no fit for %d of the rates, left out of the profile: %s; %s"
            logger.warning(said, len(failed), keys, failed[0].problem)
    profile: HardwareProfile = together.share(
        _profile(Bench(device, quick, together), results, folders) if first else None
    )
    return profile


def single_jobs(bench: Bench) -> list[Job]:
    """The jobs that one process measures by itself."""
    return [*transfer_jobs(bench), *adam_jobs(bench), *compute_jobs(bench)]


def rank_jobs(bench: Bench) -> list[Job]:
    """The jobs that several ranks measure at once; none for one rank."""
    if bench.ranks.size == 1:
        return []
    return [*link_jobs(bench), *all_threads_jobs(bench), *collective_jobs(bench)]


def run_jobs(
    jobs: Sequence[Job], progress: Progress | None = None, counted: tuple[int, int] | None = None
) -> list[Measured]:
    """The results of `jobs`, run in order; `counted` is how many are done before them, and how many there are in
    all."""
    done, count = (0, len(jobs)) if counted is None else counted
    results: list[Measured] = []
    for index, job in enumerate(jobs):
        if progress is not None:
            progress(job.title, done + index, count)
        results += job.measured()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what one measurement used is free for the next
    return results


def measured_by_ranks(ranks: Ranks, device: torch.device, quick: bool) -> list[Measured]:
    """The results of `rank_jobs`; the whole work of a process that was started for it."""
    return run_jobs(rank_jobs(Bench(device, quick, ranks)))


def _profile(bench: Bench, results: Sequence[Measured], disk_folders: Sequence[PathLike]) -> HardwareProfile:
    device, found = bench.device, {result.key: result for result in results}
    if device.type == "cpu":
        # One copy serves both ways, and the device's step is the host's on the threads of compute.
        found["device_to_host"] = found["host_to_device"]
        found |= {f"device_adam{key}": found[f"host_adam.{compute_threads()}{key}"] for key in ("", ".bfloat16")}
        if "host_to_device.all_ranks" in found:
            found["device_to_host.all_ranks"] = found["host_to_device.all_ranks"]
    squares = {dtype_name(dtype): found[f"matmul.{dtype_name(dtype)}.square"] for dtype in DTYPES}
    squares = {name: result for name, result in squares.items() if result.series is not None}
    rates = {
        "device_memory_bytes_per_s": found["host_memory" if device.type == "cpu" else "elementwise.float32"],
        "host_memory_bytes_per_s": found["host_memory"],
        "host_to_device_bytes_per_s": found["host_to_device"],
        "device_to_host_bytes_per_s": found["device_to_host"],
        "host_adam_numel_per_s": found[f"host_adam.{thread_counts()[-1]}"],
        "device_adam_numel_per_s": found["device_adam"],
    }
    if disk_folders:
        rates |= {f"{way}_bytes_per_s": found[way] for way in ("disk_read", "disk_write")}
    values: dict[str, Any] = {name: result.per_s for name, result in rates.items()}
    sources = {name: result.source for name, result in rates.items()}
    values["device_to_device_bytes_per_s"], sources["device_to_device_bytes_per_s"] = _peer_rate(device, found)
    pin_per_s, sources["host_pin_bytes_per_s"] = pinning_rate(Bench(device, bench.quick))
    values["host_pin_bytes_per_s"] = pin_per_s
    if disk_folders:
        values["disk_free_bytes"] = free_disk_bytes(*disk_folders)
        sources["disk_free_bytes"] = "read from the operating system"
    network = found.pop("network", None)
    if network is not None and network.series is not None:
        values["network_bytes_per_s"], sources["network_bytes_per_s"] = network.per_s, network.source
        if network.fit is not None:  # a ring that sums takes so many steps between machines
            values["network_latency_s"] = network.fit.latency_s / (2 * (bench.ranks.machines - 1))
            sources["network_latency_s"] = network.source
    fits = {key: result.fit for key, result in found.items() if result.fit is not None}
    if device.type == "cuda":
        values["launch_s"] = call_s(device)
        sources["launch_s"] = (
            f"measured: {CUDA_BLOCK_OPERATORS} operators of {LAUNCH_NUMEL} elements, forward and backward"
        )
    facts, fact_sources = _facts(device, bench.ranks)
    return HardwareProfile(
        flops_per_s={name: result.per_s for name, result in squares.items()},
        matmul_efficiency=1.0,
        host_memory_bytes=total_host_bytes(),
        sources=sources
        | fact_sources
        | {
            "flops_per_s": "; ".join(result.source for result in squares.values()),
            "matmul_efficiency": _REACHED,
            "host_memory_bytes": "read from the operating system and its control groups",
            "fits": "measured: latency and rate with the least squared relative error; each has a separate line",
        }
        | {f"fits.{key}": found[key].source for key in fits},
        measured_at=today(),
        fits=fits,
        **facts,
        **values,
    )


def _facts(device: torch.device, ranks: Ranks) -> tuple[dict[str, Any], dict[str, str]]:
    """Fields that are read rather than measured, and their sources."""
    if device.type == "cpu":
        name = f"{cpu_name()}, {threads_text()}"
        return (
            {
                "name": f"measured-{_slug(name)}",
                "device_kind": "cpu",
                "device_name": name,
                "compute_capability": None,
                "devices_per_host": ranks.local_size if ranks.machines > 1 else 1,
                "device_memory_bytes": total_host_bytes(),
            },
            {
                "devices_per_host": "of several machines, the ranks of each; otherwise one host is one device",
                "device_memory_bytes": "read from the operating system: the same memory as the host's",
            },
        )
    properties = torch.cuda.get_device_properties(device)
    return (
        {
            "name": f"measured-{_slug(properties.name)}",
            "device_kind": "cuda",
            "device_name": properties.name,
            "compute_capability": (properties.major, properties.minor),
            "devices_per_host": torch.cuda.device_count(),
            "device_memory_bytes": torch.cuda.mem_get_info(device)[1],
        },
        {
            "compute_capability": "read from the driver",
            "devices_per_host": "read from the driver: visible devices",
            "device_memory_bytes": "read from the driver: total, not free",
        },
    )


def _peer_rate(device: torch.device, found: dict[str, Measured]) -> tuple[float, str]:
    if "device_to_device" in found:
        return found["device_to_device"].per_s, found["device_to_device"].source
    slower = min((found["host_to_device"], found["device_to_host"]), key=lambda result: result.per_s)
    if device.type == "cpu":
        return slower.per_s, slower.source
    return slower.per_s, f"not measured, one device only; taken as the host link ({slower.source})"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.split(",")[0].lower()).strip("-")
