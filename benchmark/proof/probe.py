"""Says what a machine is before an hour on it is planned: versions, memory, and how fast it pins and copies.

It also builds the kernel of CPU Adam without which timed runs fail.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import time
from typing import Any

import torch

from benchmark.proof.jobs import Row
from elixir.chunk.pages import host_zeros, pinned_zeros
from elixir.hardware.memory import free_host_bytes, total_host_bytes
from elixir.kernels.adam.when_compiled import absent_kernels, begin_kernel
from elixir.units import GIB

SLICE_BYTES = GIB // 4
PINNED_BYTES = 16 * GIB
"""Bytes that are pinned of those touched; pinning all of them takes too long."""
LEFT_FREE_BYTES = GIB
"""A slice is touched once there is so much more free than it takes. Some virtual machines begin with little memory and
get more as it is used: threads that touch faster than that are killed."""
WAIT_S = 10.0
"""Seconds to wait for free memory; what has not come by then is not there."""
LONGEST_S = 75.0
"""Touching ends after this, whatever is left."""
KERNELS = ((torch.bfloat16, torch.bfloat16), (torch.float32, None))
"""Dtypes of gradients and weights with which the timed parts step on the host."""
GROWN = 1.02
"""Total memory that grows by more than this while it is touched is a machine that gets its memory as it needs it."""


def probe(amount_bytes: int, device: str) -> Row:
    """Builds the kernel; touch memory, pin some of it, copy that to the device, give it back; prints each finding as it
    is made.

    Args:
        amount_bytes: how much host memory; taken in slices.
        device: ``cuda``, or ``cpu`` for a rehearsal, which pins nothing.
    """
    found: Row = {}

    def say(**more: Any) -> None:
        found.update(more)
        for name, value in more.items():
            print(f"{name}: {f'{value:.4g}' if isinstance(value, float) else value}", flush=True)

    say(python=platform.python_version(), torch=torch.__version__, cpus=os.cpu_count())
    libraries = ("transformers", "triton", "deepspeed")
    say(installed=", ".join(name for name in libraries if importlib.util.find_spec(name)) or "none")
    began = time.perf_counter()
    for gradient, weight in KERNELS:
        begin_kernel(gradient, weight, "float32")
    absent = absent_kernels()
    say(kernels_s=time.perf_counter() - began, kernels=f"none for {'; '.join(absent)}" if absent else "built")
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        say(device=torch.cuda.get_device_name(), device_free_gib=free / GIB, device_total_gib=total / GIB)
    before = total_host_bytes()
    say(host_free_gib=free_host_bytes() / GIB, host_total_gib=before / GIB)
    began = time.perf_counter()
    pieces = _touched(amount_bytes, device)
    touched_bytes = sum(piece.nbytes for piece in pieces)
    say(touched_gib=touched_bytes / GIB, touched_s=time.perf_counter() - began)
    after = total_host_bytes()
    say(host_free_touched_gib=free_host_bytes() / GIB, host_total_touched_gib=after / GIB)
    if after > GROWN * before:
        print("The machine's memory grew while it was touched, so what is free says too little: give --host-memory.")
    if touched_bytes < amount_bytes:
        print(
            f"Only {touched_bytes / GIB:.4g} of {amount_bytes / GIB:.4g} GiB were there in time: give less than that."
        )
    if pieces:
        _copied(pieces[: max(PINNED_BYTES // SLICE_BYTES, 1)], device, say)
    began = time.perf_counter()
    pieces.clear()
    say(given_back_s=time.perf_counter() - began)
    return found


def _touched(amount_bytes: int, device: str) -> list[torch.Tensor]:
    """Memory in slices, the first of them pinned; less than was asked for if no more becomes free."""
    pieces: list[torch.Tensor] = []
    until = time.monotonic() + LONGEST_S
    touched_bytes = 0
    while touched_bytes < amount_bytes and time.monotonic() < until:
        nbytes = min(SLICE_BYTES, amount_bytes - touched_bytes)
        if not becomes_free(nbytes + LEFT_FREE_BYTES):
            break
        pins = device == "cuda" and touched_bytes < PINNED_BYTES
        pieces.append(pinned_zeros(nbytes) if pins else host_zeros(nbytes))
        touched_bytes += nbytes
    return pieces


def becomes_free(nbytes: int) -> bool:
    """Whether so much host memory is free, or becomes free in time."""
    until = time.monotonic() + WAIT_S
    while free_host_bytes() < nbytes:
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)
    return True


def _copied(pieces: list[torch.Tensor], device: str, say: Any) -> None:
    """Copies have to be submitted in far less time than they take: otherwise nothing ever overlaps."""
    target = torch.empty(max(piece.nbytes for piece in pieces), dtype=torch.uint8, device=device)
    _sync(device)
    began = time.perf_counter()
    for piece in pieces:
        target[: piece.nbytes].copy_(piece, non_blocking=True)
    submitted_s = time.perf_counter() - began
    _sync(device)
    copied_s = max(time.perf_counter() - began, 1e-9)
    say(copies_submitted_s=submitted_s, copied_s=copied_s)
    say(up_gb_per_s=sum(piece.nbytes for piece in pieces) / 1e9 / copied_s)


def _sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
