"""Seconds of the collectives that a sharded chunk needs, by bytes of the whole chunk and world size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from elixir.errors import InputError
from elixir.microbench.bench import Bench
from elixir.microbench.fitting import Job, Series, geometric, sweep
from elixir.units import MIB

SMALLEST_BYTES = MIB
"""Smallest whole chunk; anything smaller waits for the other ranks more than for the link."""
_DTYPE = torch.bfloat16
# torch 2.13 has new names for these and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def collective_jobs(bench: Bench) -> list[Job]:
    """All-gather and reduce-scatter over all ranks; none for a single rank.

    CUDA devices use NCCL, the CPU gloo.
    """
    world = bench.ranks.size
    if world == 1:
        return []
    return [
        Job(f"{kind.replace('_', '-')}, {world} ranks", (f"{kind}.{world}",), partial(collective_series, bench, kind))
        for kind in ("all_gather", "reduce_scatter")
    ]


def collective_series(bench: Bench, kind: str) -> Series:
    """``all_gather`` or ``reduce_scatter`` of growing bf16 buffers; the amount is the whole buffer, not one rank's
    part.

    Raises:
        InputError: there is only one rank, or the kind is unknown.
    """
    world = bench.ranks.size
    if world == 1:
        raise InputError("a collective needs two ranks or more, found one; start with torchrun")
    if kind not in ("all_gather", "reduce_scatter"):
        raise InputError(f"expected 'all_gather' or 'reduce_scatter', found {kind!r}")
    plan = bench.effort()
    multiple = world * _DTYPE.itemsize * 512
    sizes = geometric(_rounded(SMALLEST_BYTES, multiple), _rounded(plan.buffer_bytes, multiple), plan.amounts, multiple)

    def prepare(size: int) -> Callable[[], object]:
        numel = size // _DTYPE.itemsize
        whole = torch.ones(numel, dtype=_DTYPE, device=bench.device)
        shard = torch.ones(numel // world, dtype=_DTYPE, device=bench.device)
        if kind == "all_gather":
            return lambda: _all_gather(whole, shard)
        return lambda: _reduce_scatter(shard, whole)

    backend = "NCCL" if bench.device.type == "cuda" else "gloo"
    how = f"{kind.replace('_', '-')} of bf16 over {backend}, {sizes[0] / MIB:.3g} to {sizes[-1] / MIB:.4g} MiB in all"
    cases = [(size, partial(prepare, size)) for size in sizes]
    return sweep(bench, plan, f"{kind}.{world}", "bytes", how, cases)


def _rounded(size: int, multiple: int) -> int:
    return max(1, size // multiple) * multiple
