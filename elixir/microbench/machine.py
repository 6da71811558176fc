"""Measures this machine into a `HardwareProfile`."""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Sequence

import torch

from elixir.files import PathLike
from elixir.hardware.profile import HardwareProfile
from elixir.hardware.rate_fit import PLAIN_FIELDS
from elixir.microbench.bench import Bench, Job, Progress, default_device, run_jobs
from elixir.microbench.brief import CUDA_BLOCK_OPERATORS, LAUNCH_NUMEL, call_s
from elixir.microbench.compute import DTYPES, adam_jobs, compute_jobs, compute_threads, thread_counts
from elixir.microbench.disk import disk_jobs, free_disk_bytes
from elixir.microbench.fitting import Found, Series, profile_of, system_facts
from elixir.microbench.ranks import ALONE, Ranks
from elixir.microbench.transfers import collective_jobs, pinning_rate, transfer_jobs
from elixir.units import dtype_name

logger = logging.getLogger(__name__)


def measure(
    progress: Progress | None = None,
    quick: bool = False,
    *,
    ranks: Ranks | None = None,
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
        disk_folder: also measure the disk that this folder is on, past the page cache, with a file of half a GiB
            (`quick`: 128 MiB) that is gone afterwards; several: their drives together. None: the profile knows no disk.

    Raises:
        InputError: something a profile cannot do without could not be measured, or the folder cannot be used.
        RankError: another rank is gone.
    """
    together, number = ranks or ALONE, itertools.count()
    device, first = default_device(together), together.rank == 0
    alone, at_once = Bench(device, quick), Bench(device, quick, together)
    folders = [disk_folder] if isinstance(disk_folder, (str, os.PathLike)) else list(disk_folder or ())
    single = machine_jobs(alone) if first else []
    if first and folders:
        single += disk_jobs(alone, *folders)
    shared = machine_jobs(at_once) if together.size > 1 else []

    def begins(title: str) -> None:
        if progress is not None and first:
            progress(title, next(number), len(single) + len(shared))

    results = together.share(run_jobs(single, begins)) + run_jobs(shared, begins)
    if first:
        failed = [result for result in results if result.fit is None]
        if failed:
            keys = ", ".join(result.key for result in failed)
            said = "no fit for %d of the rates, left out of the profile: %s; %s"
            logger.warning(said, len(failed), keys, failed[0].problem)
    profile: HardwareProfile = together.share(_profile(at_once, results, folders) if first else None)
    return profile


def machine_jobs(bench: Bench) -> list[Job]:
    """The jobs that one process measures by itself, or those that several ranks measure at once."""
    last = compute_jobs(bench) if bench.ranks.size == 1 else collective_jobs(bench)
    return [*transfer_jobs(bench), *adam_jobs(bench), *last]


def _profile(bench: Bench, results: Sequence[Series], disk_folders: Sequence[PathLike]) -> HardwareProfile:
    on_cpu, given, ranks = bench.device.type == "cpu", {result.key: result for result in results}, bench.ranks
    if on_cpu:
        # One copy serves both ways, and the device's step is the host's on the threads of compute.
        ways = {"device_to_host": "host_to_device", "device_to_host.all_ranks": "host_to_device.all_ranks"}
        ways |= {f"device_adam{dtype}": f"host_adam.{compute_threads()}{dtype}" for dtype in ("", ".bfloat16")}
        given |= {key: given[other] for key, other in ways.items() if other in given}
    network = given.pop("network", None)
    squares = {dtype_name(dtype): given[f"matmul.{dtype_name(dtype)}.square"] for dtype in DTYPES}
    squares = {name: result for name, result in squares.items() if result.points}
    families = given | {
        "host_adam": given[f"host_adam.{thread_counts()[-1]}"],
        "elementwise": given["host_memory" if on_cpu else "elementwise.float32"],
    }
    plain = {field: families[family] for family, field in PLAIN_FIELDS.items() if family in families}
    peer = plain.pop("device_to_device_bytes_per_s", None)
    slower = min(given["host_to_device"], given["device_to_host"], key=lambda result: result.per_s)
    lone_device = "{}" if on_cpu else "not measured, one device only; taken as the host link ({})"
    found: Found = {
        **system_facts(bench.device),
        **{field: (result.per_s, result.source) for field, result in plain.items()},
        "devices_per_host": (
            ranks.local_size if ranks.machines > 1 else 1,
            "of several machines, the ranks of each; otherwise one host is one device",
        ),
        "device_to_device_bytes_per_s": (slower.per_s, lone_device.format(slower.source)),
        "host_pin_bytes_per_s": pinning_rate(Bench(bench.device, bench.quick)),
        "flops_per_s": (
            {name: result.per_s for name, result in squares.items()},
            "; ".join(result.source for result in squares.values()),
        ),
        "matmul_efficiency": (1.0, "the rates in flops_per_s are measured, so they are reached in full"),
    }
    if peer is not None:
        found["device_to_device_bytes_per_s"] = (peer.per_s, peer.source)
    if disk_folders:
        found["disk_free_bytes"] = (free_disk_bytes(*disk_folders), "read from the operating system")
    if network is not None and network.points:
        found["network_bytes_per_s"] = (network.per_s, network.source)
        if network.fit is not None:  # a ring that sums takes so many steps between machines
            found["network_latency_s"] = (network.fit.latency_s / (2 * (ranks.machines - 1)), network.source)
    if not on_cpu:
        how = f"measured: {CUDA_BLOCK_OPERATORS} operators of {LAUNCH_NUMEL} elements, forward and backward"
        found["launch_s"] = (call_s(bench.device), how)
        found["devices_per_host"] = (torch.cuda.device_count(), "read from the driver: visible devices")
    found |= {f"fits.{key}": (result.fit, result.source) for key, result in given.items() if result.fit is not None}
    name = re.sub(r"[^a-z0-9]+", "-", found["device_name"][0].split(",")[0].lower()).strip("-")
    return profile_of(f"measured-{name}", found)
