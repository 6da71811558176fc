"""FLOP/s that a large square matrix product reaches, by dtype."""

from __future__ import annotations

import time

import torch

from elixir.errors import InputError
from elixir.microbench.measurement import Measurement, check_device, effort, median_seconds, threads_text
from elixir.units import dtype_name

_SMALLEST, _LARGEST_CPU, _LARGEST_CUDA = 256, 4096, 16384
_SEED = 0
_PROBES = 3
"""Runs that one size is judged by, the fastest counting: a single one may be held up by something else."""


def matmul_rate(dtype: torch.dtype, device: torch.device | str = "cpu", *, quick: bool = False) -> Measurement:
    """FLOP/s of ``a @ b`` in `dtype`, square, as large as the time allows: some dtypes are a thousand times slower.

    TF32 is used for fp32 only where the caller's torch settings allow it, as in a training step.

    Raises:
        InputError: this device cannot multiply matrices of `dtype`.
    """
    target = check_device(device)
    plan = effort(target, quick)
    size = _SMALLEST
    largest = _LARGEST_CPU if target.type == "cpu" else _LARGEST_CUDA
    try:
        # Twice the size is eight times the work and four times the memory (three fp32 matrices at most).
        while size < largest and 16 * size**2 <= plan.buffer_bytes:
            if 8 * _fastest_seconds(size, dtype, target) > plan.matmul_s:
                break
            size *= 2
        a, b, out = _operands(size, dtype, target)
        seconds, repeats = median_seconds(lambda: torch.mm(a, b, out=out), target, plan)
    except (RuntimeError, NotImplementedError) as error:
        raise InputError(f"{target} cannot multiply {dtype_name(dtype)} matrices: {error}") from None
    how = f"{size} x {size} {dtype_name(dtype)} matrix product on {target}"
    if target.type == "cpu":
        how += f", {threads_text()}"
    return Measurement(f"matmul {dtype_name(dtype)} {target}", 2 * size**3 / seconds, "FLOP/s", repeats, how)


def _operands(size: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random numbers, since zeros draw less power and let a GPU clock higher than it does on real weights."""
    generator = torch.Generator(device=device).manual_seed(_SEED)
    a = torch.randn(size, size, device=device, generator=generator).to(dtype)
    b = torch.randn(size, size, device=device, generator=generator).to(dtype)
    return a, b, torch.empty_like(a)


def _fastest_seconds(size: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b, out = _operands(size, dtype, device)
    torch.mm(a, b, out=out)
    seconds = []
    for _ in range(_PROBES):
        _synchronize(device)
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        _synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
