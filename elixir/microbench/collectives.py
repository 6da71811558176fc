"""Seconds of the collectives that a sharded chunk needs, by bytes of the whole chunk and world size."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from elixir.microbench.bench import Bench, Run, Workload, geometric
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
_KINDS = ("all_gather", "reduce_scatter")


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
    sizes = geometric(SMALLEST_BYTES, plan.buffer_bytes, plan.amounts, _DTYPE.itemsize * ranks.machines)

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
    smallest, largest = (max(1, size // multiple) * multiple for size in (SMALLEST_BYTES, plan.buffer_bytes))
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
