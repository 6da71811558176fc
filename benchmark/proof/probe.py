"""Says what a machine is before an hour on it is planned: versions, memory, and how fast it pins and copies."""

from __future__ import annotations

import importlib.util
import os
import platform
import time
from typing import Any

import torch

from benchmark.proof.jobs import Row
from elixir.chunk.pinned import pinned_zeros
from elixir.hardware import free_host_bytes, total_host_bytes
from elixir.units import GIB

PIECE_BYTES = GIB
GROWN = 1.02
"""Total memory that grows by more than this while it is touched is a machine that gets its memory as it needs it."""


def probe(amount_bytes: int, device: str) -> Row:
    """Touch and pin memory, copy it to the device, give it back; prints each finding as it is made.

    Args:
        amount_bytes: how much host memory; taken in pieces of at most 1 GiB.
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
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        say(device=torch.cuda.get_device_name(), device_free_gib=free / GIB, device_total_gib=total / GIB)
    before = total_host_bytes()
    say(host_free_gib=free_host_bytes() / GIB, host_total_gib=before / GIB)
    sizes = [PIECE_BYTES] * (amount_bytes // PIECE_BYTES)
    sizes += [rest] if (rest := amount_bytes % PIECE_BYTES) else []
    began = time.perf_counter()
    pieces = [pinned_zeros(nbytes) if device == "cuda" else torch.zeros(nbytes, dtype=torch.uint8) for nbytes in sizes]
    say(touched_gib=amount_bytes / GIB, touched_and_pinned_s=time.perf_counter() - began)
    after = total_host_bytes()
    say(host_free_touched_gib=free_host_bytes() / GIB, host_total_touched_gib=after / GIB)
    if after > GROWN * before:
        print("The machine's memory grew while it was touched, so what is free says too little: give --host-memory.")
    _copied(pieces, device, say)
    began = time.perf_counter()
    pieces.clear()
    say(given_back_s=time.perf_counter() - began)
    return found


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
