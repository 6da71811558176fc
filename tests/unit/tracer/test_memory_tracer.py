"""`cuda_memory_profiling` keeps the original's keys and meaning, and adds to them."""

from __future__ import annotations

import torch
from torch import nn

from elixir.hardware.profile import preset
from elixir.tracer.memory_tracer import cuda_memory_profiling
from tests.common.tracing import sum_step, trace_step

ORIGINAL = {"param_occ", "buffer_occ", "grad_occ", "activation_occ"}
ADDED = {"input_occ", "peak_occ", "optimizer_occ", "step_peak_occ", "peak_module", "peak_operator", "peak_breakdown"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Linear(256, 8))


INP = {"x": torch.ones(32, 64)}


def test_keys_and_bytes() -> None:
    occ = cuda_memory_profiling(model(), INP, sum_step)
    assert set(occ) == ORIGINAL | ADDED
    numel = 64 * 256 + 256 + 512 + 256 * 8 + 8
    assert occ["param_occ"] == occ["grad_occ"] == 4 * numel
    assert occ["buffer_occ"] == 2 * 256 * 4 + 8
    assert occ["input_occ"] >= INP["x"].nbytes
    assert occ["optimizer_occ"] >= 8 * numel
    assert occ["step_peak_occ"] >= occ["peak_occ"] + occ["optimizer_occ"]
    assert sum(part["bytes"] for part in occ["peak_breakdown"]) == occ["peak_occ"]
    sizes = [part["bytes"] for part in occ["peak_breakdown"]]
    assert sizes == sorted(sizes, reverse=True)
    assert all(set(part) == {"kind", "module", "operator", "count", "bytes"} for part in occ["peak_breakdown"])


def test_activations_are_the_peak_less_what_was_there_before() -> None:
    occ = cuda_memory_profiling(model(), INP, sum_step)
    trace = trace_step(model(), INP, sum_step, dtype=torch.float, hardware=preset("h200"))
    assert occ["activation_occ"] == trace.backward_peak_bytes - trace.resting_bytes
    assert occ["peak_occ"] == trace.backward_peak_bytes
