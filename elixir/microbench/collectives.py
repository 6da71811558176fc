"""Seconds of the collectives that a sharded chunk needs, by bytes of the whole chunk and world size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from elixir.errors import InputError
from elixir.microbench.bench import Bench
from elixir.microbench.fitting import Job, Series, geometric, sweep
from elixir.microbench.ranks import GROUP_TIMEOUT, Ranks
from elixir.plan.step_traffic import all_reduce_bytes
from elixir.units import MIB

SMALLEST_BYTES = MIB
"""Smallest whole chunk; anything smaller waits for the other ranks more than for the link."""
_DTYPE = torch.bfloat16
# torch 2.13 has new names for these and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


LONGEST_S = 1.0
"""Seconds of the longest sum between machines: a slow network shows its rate with little."""


def collective_jobs(bench: Bench) -> list[Job]:
    """All-gather and reduce-scatter over all ranks, and with several machines over those of each; and what the network
    between machines carries. None for a single rank.

    CUDA devices use NCCL, the CPU gloo.
    """
    ranks = bench.ranks
    if ranks.size == 1:
        return []
    kinds = ("all_gather", "reduce_scatter")
    jobs = [
        Job(
            f"{kind.replace('_', '-')}, {ranks.size} ranks",
            (f"{kind}.{ranks.size}",),
            partial(collective_series, bench, kind),
        )
        for kind in kinds
    ]
    if ranks.machines > 1:
        here, across = _groups(ranks)
        jobs += [
            Job(
                f"{kind.replace('_', '-')}, {ranks.local_size} ranks of each machine",
                (f"{kind}.{ranks.local_size}",),
                partial(collective_series, bench, kind, here),
            )
            for kind in kinds
            if ranks.local_size > 1
        ]
        jobs.append(
            Job(f"network between {ranks.machines} machines", ("network",), partial(network_series, bench, across))
        )
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


def network_series(bench: Bench, across: Any) -> Series:
    """Sums of growing buffers between machines, all ranks at once; the amount is what a machine receives.

    Args:
        bench: its ranks are on several machines, as many on each.
        across: the ranks that have this one's number on their machines.
    """
    ranks, plan = bench.ranks, bench.effort()
    sizes = geometric(SMALLEST_BYTES, plan.buffer_bytes, plan.amounts, _DTYPE.itemsize * ranks.machines)

    def prepare(size: int) -> Callable[[], object]:
        buffer = torch.zeros(size // _DTYPE.itemsize, dtype=_DTYPE, device=bench.device)
        return lambda: dist.all_reduce(buffer, group=across)

    backend = "NCCL" if bench.device.type == "cuda" else "gloo"
    cases = [(ranks.local_size * all_reduce_bytes(size, ranks.machines), partial(prepare, size)) for size in sizes]
    how = f"sums of bf16 over {backend} between {ranks.machines} machines, {ranks.local_size} at once"
    return sweep(bench, plan, "network", "bytes", how, cases, longest_s=LONGEST_S)


def collective_series(bench: Bench, kind: str, group: Any = None) -> Series:
    """``all_gather`` or ``reduce_scatter`` of growing bf16 buffers; the amount is the whole buffer, not one rank's
    part.

    Args:
        bench: says which ranks measure.
        kind: of the collective.
        group: this rank's part of them, each of which does so at once; None for all.

    Raises:
        InputError: there is only one rank.
    """
    world = bench.ranks.size if group is None else dist.get_world_size(group)
    if world == 1:
        raise InputError("a collective needs two ranks or more, found one; start with torchrun")
    plan = bench.effort()
    multiple = world * _DTYPE.itemsize * 512
    sizes = geometric(_rounded(SMALLEST_BYTES, multiple), _rounded(plan.buffer_bytes, multiple), plan.amounts, multiple)

    def prepare(size: int) -> Callable[[], object]:
        numel = size // _DTYPE.itemsize
        whole = torch.ones(numel, dtype=_DTYPE, device=bench.device)
        shard = torch.ones(numel // world, dtype=_DTYPE, device=bench.device)
        if kind == "all_gather":
            return lambda: _all_gather(whole, shard, group=group)
        return lambda: _reduce_scatter(shard, whole, group=group)

    backend = "NCCL" if bench.device.type == "cuda" else "gloo"
    how = f"{kind.replace('_', '-')} of bf16 over {backend}, {sizes[0] / MIB:.3g} to {sizes[-1] / MIB:.4g} MiB in all"
    cases = [(size, partial(prepare, size)) for size in sizes]
    return sweep(bench, plan, f"{kind}.{world}", "bytes", how, cases)


def _rounded(size: int, multiple: int) -> int:
    return max(1, size // multiple) * multiple
