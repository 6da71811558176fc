"""Common machines by published sources: every number is next to its source.

Data only; `elixir.hardware.profile.preset` turns an entry into a `HardwareProfile`. Three kinds of numbers are kept
apart in the text: *published* (a datasheet: memory bandwidth and FLOP/s are peaks, dense, never with sparsity),
*measured* (by someone else, named), and *assumption* (no source found; the text says on what basis). Rates are decimal
(1 GB = 1e9 bytes), memory sizes binary.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

GIB = 2**30


class Quoted(NamedTuple):
    """A value and where it comes from."""

    value: Any
    source: str


Entry = dict[str, Quoted]
"""Field of `HardwareProfile` -> value and source; ``fits.`` and a key: the rate of a fit."""

# --- measurements that several entries lean on -------------------------------------------------------------------

_GEMM_TABLE = "zzc0721/torch-performance-test-data (PyTorch matmul)"
_ORIGINAL = "the original Elixir's constants for an A100 machine"
_CAPABILITY = "NVIDIA, list of CUDA GPUs and their compute capability"

A100_ADAM_NUMEL_PER_S = 50e9
"""Adam on one A100, from the original Elixir's cost model."""
A100_80GB_BYTES_PER_S = 2.039e12
"""Published peak of the 80 GB A100's memory."""


def _device_adam(peak_bytes_per_s: float) -> Quoted:
    """Adam is bound by memory bandwidth, so one measured device tells about the others."""
    return Quoted(
        A100_ADAM_NUMEL_PER_S * peak_bytes_per_s / A100_80GB_BYTES_PER_S,
        f"derived: 50 G elements/s ({_ORIGINAL}) scaled by published memory bandwidth against 2.039 TB/s",
    )


# --- what a training step sustains --------------------------------------------------------------------------------

_PUBLISHED = "published training runs (benchmark/published.py)"
LAUNCH_S = 5e-6
"""Assumption: PyTorch's eager dispatch and a kernel launch take the host 5 to 10 us an operator."""


_ATTENTION_PART = 0.5
"""Attention's FLOP/s over those of products, masked scores not counted; all published runs together give it, above all
one with 64k tokens on an A100 (alone 0.51) and one with 32k on an H100 (alone 0.45)."""

FITTED_STEP_RANGE = (0.82, 1.28)
"""Published over predicted seconds of runs that were left out of the fit: from 0.83 to 1.27."""


def _fitted(flops_share: float, memory_share: float, source: str) -> Entry:
    """A card whose shares are fitted to whole steps, so that it is known how far others are off."""
    found = _sustained(flops_share, memory_share, source)
    return found | {"step_range": Quoted(FITTED_STEP_RANGE, f"{source}; each left out of the fit in turn")}


def _sustained(flops_share: float, memory_share: float, source: str) -> Entry:
    """Shares of the published peaks that whole steps reach, which are less than the best single products do: a warm
    device lowers its clocks, collectives take some of its units, and norms and activations leave bandwidth unused."""
    return {
        "sustained_flops_share": Quoted(flops_share, source),
        "sustained_memory_share": Quoted(memory_share, source),
        "sustained_attention_share": Quoted(flops_share * _ATTENTION_PART, f"{_ATTENTION_PART} of products; {source}"),
    }


_A100_STEPS = _fitted(0.67, 0.75, f"fitted to 12 {_PUBLISHED}, 125 M to 175 B parameters, 8 to 128 devices")
_H100_STEPS = _fitted(0.47, 0.85, f"fitted to 9 {_PUBLISHED} on the SXM card, 0.76 to 70 B parameters")
_H200_STEPS = _fitted(0.47, 0.85, f"assumption: as the H100, the same chip; fitted to 9 {_PUBLISHED}")
_LOST_IN_STEPS = 0.68
_OTHER_STEPS_MEMORY_SHARE = 0.80


def _other_steps(efficiency: float) -> Entry:
    """A device without published runs enough to fit: it loses as much as the A100 and the H100 do in the mean."""
    source = f"assumption: {_LOST_IN_STEPS} of the best products' rate, the mean of A100 and H100 in {_PUBLISHED}"
    return _sustained(efficiency * _LOST_IN_STEPS, _OTHER_STEPS_MEMORY_SHARE, source)


# --- links between host and device, and between devices ----------------------------------------------------------

_PCIE5: Entry = {
    "host_to_device_bytes_per_s": Quoted(
        55.3e9, "PCIe 5.0 x16, 63 GB/s raw; measured 55.3 GB/s by nvbandwidth 0.2 (copy engine, pinned) on an H800"
    ),
    "device_to_host_bytes_per_s": Quoted(
        55.1e9, "PCIe 5.0 x16, 63 GB/s raw; measured 55.1 GB/s by nvbandwidth 0.2 (copy engine, pinned) on an H800"
    ),
}
_PCIE4: Entry = {
    "host_to_device_bytes_per_s": Quoted(
        25.17e9, "PCIe 4.0 x16, 31.5 GB/s raw; measured 25.17 GB/s by nvbandwidth 0.5 (copy engine, pinned) on an A10"
    ),
    "device_to_host_bytes_per_s": Quoted(
        25.17e9, "assumption: as fast as host to device, which nvbandwidth shows on PCIe 5.0 within 0.4 %"
    ),
}
_PCIE3: Entry = {
    "host_to_device_bytes_per_s": Quoted(
        12e9, "PCIe 3.0 x16, 15.8 GB/s raw; measured 12 GB/s on a V100 (ZaidQureshi/bam#54)"
    ),
    "device_to_host_bytes_per_s": Quoted(
        12e9, "assumption: as fast as host to device; a P100 measured 12.9 GB/s (mpicbg-scicomp/gearshifft#82)"
    ),
}
_A100_DEVICES = 8
"""Devices of the machine that the original's constants are of."""
_A100_HOST: Entry = {
    "host_to_device_bytes_per_s": Quoted(25.0e9, f"{_ORIGINAL}: 16.3 n + 8.7 GB/s, n = 1"),
    "device_to_host_bytes_per_s": Quoted(18.1e9, f"{_ORIGINAL}: 15.8 n + 2.3 GB/s, n = 1"),
    "fits.host_to_device.all_ranks": Quoted(
        (16.3e9 * _A100_DEVICES + 8.7e9) / _A100_DEVICES, f"{_ORIGINAL}: (16.3 n + 8.7) / n GB/s each, n = 8"
    ),
    "fits.device_to_host.all_ranks": Quoted(
        (15.8e9 * _A100_DEVICES + 2.3e9) / _A100_DEVICES, f"{_ORIGINAL}: (15.8 n + 2.3) / n GB/s each, n = 8"
    ),
    "fits.host_adam.all_ranks": Quoted(
        (1.66e9 * math.log(_A100_DEVICES) + 5.15e9) / _A100_DEVICES,
        f"{_ORIGINAL}: (1.66 ln n + 5.15) / n G elements/s each, n = 8",
    ),
}

NVLINK_REACHED = 380 / 450
"""Share of NVLink's published rate per direction that a copy reached on an H100 (NVIDIA/nccl#1264)."""


def _peer(bytes_per_s: float, source: str) -> Entry:
    return {"device_to_device_bytes_per_s": Quoted(bytes_per_s, source)}


_NVLINK5 = _peer(900e9 * NVLINK_REACHED, "NVLink 5, 900 GB/s per direction; assumption: 84 % reached, as on NVLink 4")
_NVLINK4 = _peer(380e9, "NVLink 4, 450 GB/s per direction; measured 380 GB/s on an HGX H100 (NVIDIA/nccl#1264)")
_NVLINK3 = _peer(276e9, "NVLink 3, 300 GB/s per direction; nvbandwidth's documentation shows 276 GB/s")
_NVLINK2 = _peer(
    150e9 * NVLINK_REACHED, "NVLink 2, all six links 150 GB/s per direction; assumption: 84 % reached, as on NVLink 4"
)
_PEER_PCIE5 = _peer(48e9, "assumption: PCIe 5.0 loses as much between devices as PCIe 4.0 does (22 of 25 GB/s)")
_PEER_PCIE4 = _peer(22e9, "PCIe 4.0 x16; measured 22 to 26 GB/s between A6000 without NVLink (NVIDIA/nvbandwidth#50)")
_STAGED_PCIE4 = _peer(
    10e9,
    "no access to each other's memory over PCIe, so copies pass through the host; measured 19 to 21 GB/s for both "
    "directions together between A40 with that access disabled, PCIe 4.0 x16 (NVIDIA/nccl-tests#74)",
)
_STAGED_PCIE5 = _peer(
    20e9, "as on PCIe 4.0, copies pass through the host; assumption: twice the 10 GB/s of PCIe 4.0 x16 are reached"
)
_PEER_PCIE3 = _peer(12e9, "assumption: PCIe 3.0 x16 between devices as fast as from the host, 12 GB/s")

# --- hosts ---------------------------------------------------------------------------------------------------------

HOST_BANDWIDTH_REACHED = 0.8
"""Assumption: share of the published peak that a streaming loop over all cores reaches."""
ADAM_BYTES_PER_NUMEL = 28
"""Fused Adam on fp32 reads parameter, gradient and two moments, and writes all but the gradient: 7 x 4 bytes."""


def _host(peak_bytes_per_s: float, what: str, adam: Quoted, devices: int, where: str) -> Entry:
    return {
        "host_memory_bytes_per_s": Quoted(
            peak_bytes_per_s * HOST_BANDWIDTH_REACHED,
            f"{what}: {peak_bytes_per_s / 1e9:.1f} GB/s published; assumption: 80 % of it reached by all cores",
        ),
        "host_adam_numel_per_s": adam,
        "devices_per_host": Quoted(devices, where),
    }


_SERVER_ADAM = Quoted(
    5.15e9, f"{_ORIGINAL}: 1.66 ln n + 5.15 G elements/s, n = 1; assumption for every other server: no slower"
)
_SLICE_ADAM = Quoted(
    1.4e9, "assumption: a cloud slice of two cores; torch fused AdamW on two threads measured 1.2 to 1.6 G elements/s"
)


def _desktop_adam(peak_bytes_per_s: float) -> Quoted:
    return Quoted(
        peak_bytes_per_s * HOST_BANDWIDTH_REACHED / ADAM_BYTES_PER_NUMEL,
        "assumption: bound by host memory bandwidth, 28 bytes per element",
    )


def _network(cards: int, gbit_per_s: int, source: str) -> Entry:
    """Published peak of all cards of a machine that are there for traffic between devices."""
    return {
        "network_bytes_per_s": Quoted(
            cards * gbit_per_s * 1e9 / 8, f"{source}: {cards} x {gbit_per_s} Gbit/s per direction, published peak"
        )
    }


_DGX_B200 = _host(716.8e9, "DGX B200, 2 x 8 channels DDR5-5600", _SERVER_ADAM, 8, "NVIDIA DGX B200 datasheet: 8")
_DGX_B200 |= _network(8, 400, "NVIDIA DGX B200 datasheet, ConnectX-7")
_DGX_H100 = _host(614.4e9, "DGX H100/H200, 2 x 8 channels DDR5-4800", _SERVER_ADAM, 8, "NVIDIA DGX H100 datasheet: 8")
_DGX_H100 |= _network(8, 400, "NVIDIA DGX H100/H200 datasheet, ConnectX-7")
_DGX_A100 = _host(409.6e9, "DGX A100, 2 x 8 channels DDR4-3200", _SERVER_ADAM, 8, "NVIDIA DGX A100 datasheet: 8")
_DGX_A100 |= _network(8, 200, "NVIDIA DGX A100 datasheet, ConnectX-6")
_DGX_V100 = _host(153.6e9, "DGX-1, 2 x 4 channels DDR4-2400", _SERVER_ADAM, 8, "NVIDIA DGX-1 datasheet: 8")
_DGX_V100 |= _network(4, 100, "NVIDIA DGX-1 datasheet, InfiniBand EDR")
_PCIE_SERVER = _host(
    614.4e9, "server with 2 x 8 channels DDR5-4800", _SERVER_ADAM, 8, "assumption: full-size PCIe servers take 8 cards"
)
_DESKTOP_DDR5 = _host(
    83.2e9, "desktop, 2 channels DDR5-5200", _desktop_adam(83.2e9), 4, "assumption: workstations take up to 4 cards"
)
_DESKTOP_DDR4 = _host(
    51.2e9, "desktop, 2 channels DDR4-3200", _desktop_adam(51.2e9), 4, "assumption: workstations take up to 4 cards"
)


def _cloud_slice(devices: int, where: str) -> Entry:
    return _host(51.2e9, "assumption: cloud slice with the share of 2 channels DDR4-3200", _SLICE_ADAM, devices, where)


# --- devices -------------------------------------------------------------------------------------------------------


def _gpu(
    device_name: str,
    capability: tuple[int, int],
    memory: Quoted,
    bandwidth: Quoted,
    flops: Quoted,
    efficiency: Quoted,
    *groups: Entry,
) -> Entry:
    """`memory` in GiB as PyTorch reports it, `bandwidth` in bytes/s, `flops` a dict by dtype; links and host follow."""
    entry: Entry = {
        "device_kind": Quoted("cuda", ""),
        "device_name": Quoted(device_name, ""),
        "compute_capability": Quoted(capability, _CAPABILITY),
        "device_memory_bytes": Quoted(round(memory.value * GIB), memory.source),
        "device_memory_bytes_per_s": bandwidth,
        "flops_per_s": flops,
        "matmul_efficiency": efficiency,
        "host_memory_bytes": Quoted(None, "unknown: depends on how the machine was bought"),
        "device_adam_numel_per_s": _device_adam(bandwidth.value),
        "launch_s": Quoted(LAUNCH_S, "assumption: eager dispatch takes the host 5 to 10 us an operator"),
        **_other_steps(efficiency.value),
    }
    for group in groups:
        entry |= group
    return entry


def _flops(fp32: float, half: float, source: str, bf16: float | None = None) -> Quoted:
    """Dense peak in FLOP/s; `half` for fp16 and, unless `bf16` says otherwise, bf16."""
    return Quoted({"float32": fp32, "bfloat16": half if bf16 is None else bf16, "float16": half}, source)


_VM = "measured by elixir.microbench on a 2-core AMD EPYC (Zen 5) virtual machine, torch 2.13, 2 threads"
"""The slower of two runs; ordinary, not best, is what a generic host should say."""

_V100_EFFICIENCY = 97.36 / 125
_T4_EFFICIENCY = 41.91 / 65

PRESETS: dict[str, Entry] = {
    "b200": _gpu(
        "NVIDIA B200",
        (10, 0),
        Quoted(178.35, "measured: 178.35 GiB of global memory (pytorch/ao#4002); nvidia-smi shows 183359 MiB"),
        Quoted(
            7.67e12, "measured clock and bus width: 7680 bit at 3996 MHz (pytorch/ao#4002); datasheet: up to 8 TB/s"
        ),
        _flops(75e12, 2250e12, "NVIDIA HGX B200 datasheet: FP32 75, FP16/BF16 2250 TFLOPS dense"),
        Quoted(1745 / 2250, "measured 1745 of 2250 TFLOPS in bf16 (stas00/ml-engineering, MAMF table)"),
        _PCIE5,
        _NVLINK5,
        _DGX_B200,
    ),
    "h200": _gpu(
        "NVIDIA H200",
        (9, 0),
        Quoted(139.80, "datasheet: 141 GB HBM3e; PyTorch reports 139.80 GiB, nvidia-smi 143771 MiB (cuda-samples#311)"),
        Quoted(4.8e12, "NVIDIA H200 datasheet: 4.8 TB/s"),
        _flops(67e12, 989e12, "NVIDIA H200 datasheet: FP32 67, FP16/BF16 1979 TFLOPS with sparsity, so 989 dense"),
        Quoted(790.3 / 989, f"measured 790 of 989 TFLOPS in bf16 ({_GEMM_TABLE}#45)"),
        _PCIE5,
        _NVLINK4,
        _DGX_H100,
        _H200_STEPS,
    ),
    "h100": _gpu(
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        Quoted(79.11, "datasheet: 80 GB HBM3; PyTorch reports 79.11 GiB (vllm#27508), nvidia-smi 81559 MiB"),
        Quoted(3.35e12, "NVIDIA H100 SXM datasheet: 3.35 TB/s"),
        _flops(67e12, 989e12, "NVIDIA H100 SXM datasheet: FP32 67, FP16/BF16 1979 TFLOPS with sparsity, so 989 dense"),
        Quoted(794.5 / 989, "measured 794.5 of 989 TFLOPS in bf16 (stas00/ml-engineering, MAMF table)"),
        _PCIE5,
        _NVLINK4,
        _DGX_H100,
        _H100_STEPS,
    ),
    "h100-pcie": _gpu(
        "NVIDIA H100 PCIe",
        (9, 0),
        Quoted(79.11, "datasheet: 80 GB HBM2e; assumption: PyTorch reports as on the SXM card, 79.11 GiB"),
        Quoted(2.0e12, "NVIDIA H100 PCIe datasheet: 2 TB/s"),
        _flops(51e12, 756e12, "NVIDIA H100 PCIe datasheet: FP32 51, FP16/BF16 1513 TFLOPS with sparsity, so 756 dense"),
        Quoted(493 / 756, f"measured 493 of 756 TFLOPS in bf16, 8192 squared ({_GEMM_TABLE}#95)"),
        _PCIE5,
        _PEER_PCIE5,
        _PCIE_SERVER,
    ),
    "a100": _gpu(
        "NVIDIA A100-SXM4-80GB",
        (8, 0),
        Quoted(79.15, "datasheet: 80 GB HBM2e; PyTorch reports 79.15 GiB (vllm#4408), nvidia-smi 81920 MiB"),
        Quoted(A100_80GB_BYTES_PER_S, "NVIDIA A100 80GB SXM datasheet: 2039 GB/s"),
        _flops(19.5e12, 312e12, "NVIDIA A100 datasheet: FP32 19.5, FP16/BF16 312 TFLOPS dense"),
        Quoted(271.2 / 312, "measured 271.2 of 312 TFLOPS in bf16 (stas00/ml-engineering, MAMF table)"),
        _A100_HOST,
        _NVLINK3,
        _DGX_A100,
        _A100_STEPS,
    ),
    "a100-40gb": _gpu(
        "NVIDIA A100-SXM4-40GB",
        (8, 0),
        Quoted(39.38, "datasheet: 40 GB HBM2; PyTorch's out-of-memory messages say 39.38 GiB, nvidia-smi 40960 MiB"),
        Quoted(1.555e12, "NVIDIA A100 40GB SXM datasheet: 1555 GB/s"),
        _flops(19.5e12, 312e12, "NVIDIA A100 datasheet: FP32 19.5, FP16/BF16 312 TFLOPS dense"),
        Quoted(246.3 / 312, f"measured 246.3 of 312 TFLOPS in bf16 ({_GEMM_TABLE}, A100 40GB)"),
        _A100_HOST,
        _NVLINK3,
        _DGX_A100,
        _A100_STEPS,
    ),
    "v100": _gpu(
        "Tesla V100-SXM2-32GB",
        (7, 0),
        Quoted(31.74, "datasheet: 32 GB HBM2; PyTorch reports 31.74 GiB (liucongg/ChatGLM-Finetuning#73)"),
        Quoted(900e9, "NVIDIA V100 datasheet: 900 GB/s"),
        _flops(
            15.7e12,
            125e12,
            "NVIDIA V100 SXM2 datasheet: FP32 15.7, FP16 125 TFLOPS; no bf16 units: the value gives the measured "
            f"10.65 TFLOPS ({_GEMM_TABLE}#140) after the efficiency",
            bf16=10.65e12 / _V100_EFFICIENCY,
        ),
        Quoted(_V100_EFFICIENCY, f"measured 97.36 of 125 TFLOPS in fp16 on the 16 GB card ({_GEMM_TABLE}#140)"),
        _PCIE3,
        _NVLINK2,
        _DGX_V100,
    ),
    "rtx5090": _gpu(
        "NVIDIA GeForce RTX 5090",
        (12, 0),
        Quoted(31.36, "board: 32 GB GDDR7; PyTorch reports 31.36 GiB (TrajectoryCrafter#20)"),
        Quoted(1.792e12, "NVIDIA RTX Blackwell whitepaper: 1792 GB/s"),
        _flops(104.8e12, 209.5e12, "NVIDIA RTX Blackwell whitepaper: FP32 104.8, BF16 (fp32 sums) 209.5 TFLOPS dense"),
        Quoted(1.0, f"measured 224 to 240 TFLOPS in bf16, above the rated 209.5: boost clocks ({_GEMM_TABLE}#124)"),
        _PCIE5,
        _STAGED_PCIE5,
        _DESKTOP_DDR5,
    ),
    "rtx4090": _gpu(
        "NVIDIA GeForce RTX 4090",
        (8, 9),
        Quoted(23.61, "board: 24 GB GDDR6X; PyTorch reports 23.61 GiB (flux-webui#11), nvidia-smi 24564 MiB"),
        Quoted(1.008e12, "NVIDIA Ada whitepaper: 1008 GB/s"),
        _flops(82.6e12, 165.2e12, "NVIDIA Ada whitepaper: FP32 82.6, BF16 (fp32 sums) 165.2 TFLOPS dense"),
        Quoted(160.2 / 165.2, f"measured 160.2 of 165.2 TFLOPS in bf16, 8192 squared ({_GEMM_TABLE}#78)"),
        _PCIE4,
        _STAGED_PCIE4,
        _DESKTOP_DDR5,
    ),
    "rtx3090": _gpu(
        "NVIDIA GeForce RTX 3090",
        (8, 6),
        Quoted(23.68, "board: 24 GB GDDR6X; PyTorch reports 23.68 GiB (vllm#16343)"),
        Quoted(936e9, "NVIDIA GA102 whitepaper: 936 GB/s"),
        _flops(35.6e12, 71e12, "NVIDIA GA102 whitepaper: FP32 35.6, BF16 (fp32 sums) 71 TFLOPS dense"),
        Quoted(1.0, f"measured 76 TFLOPS in bf16, above the rated 71: boost clocks ({_GEMM_TABLE}, RTX 3090)"),
        _PCIE4,
        _STAGED_PCIE4,
        _DESKTOP_DDR4,
    ),
    "a6000": _gpu(
        "NVIDIA RTX A6000",
        (8, 6),
        Quoted(47.53, "board: 48 GB GDDR6; PyTorch reports 47.53 GiB (black-forest-labs/flux2#23)"),
        Quoted(768e9, "NVIDIA RTX A6000 datasheet: 768 GB/s"),
        _flops(38.7e12, 154.8e12, "NVIDIA GA102 whitepaper, RTX A6000: FP32 38.7, BF16 (fp32 sums) 154.8 TFLOPS dense"),
        Quoted(123.34 / 154.8, f"measured 123.34 of 154.8 TFLOPS in half precision ({_GEMM_TABLE}#46)"),
        _PCIE4,
        _PEER_PCIE4,
        _DESKTOP_DDR4,
    ),
    "l40s": _gpu(
        "NVIDIA L40S",
        (8, 9),
        Quoted(44.42, "datasheet: 48 GB GDDR6; PyTorch reports 44.42 GiB (Step-Video-T2V#8), nvidia-smi 46068 MiB"),
        Quoted(864e9, "NVIDIA L40S datasheet: 864 GB/s"),
        _flops(91.6e12, 362e12, "NVIDIA L40S datasheet: FP32 91.6, FP16/BF16 362 TFLOPS dense"),
        Quoted(269.2 / 362, f"measured 269 of 362 TFLOPS in bf16 ({_GEMM_TABLE}#43)"),
        _PCIE4,
        _PEER_PCIE4,
        _PCIE_SERVER,
    ),
    "l4": _gpu(
        "NVIDIA L4",
        (8, 9),
        Quoted(22.03, "datasheet: 24 GB GDDR6; PyTorch's out-of-memory messages say 22.03 GiB, nvidia-smi 23034 MiB"),
        Quoted(300e9, "NVIDIA L4 datasheet: 300 GB/s"),
        _flops(30.3e12, 121e12, "NVIDIA L4 datasheet: FP32 30.3, FP16/BF16 242 TFLOPS with sparsity, so 121 dense"),
        Quoted(59.4 / 121, f"measured 59.4 of 121 TFLOPS in bf16, 8192 squared: 72 W ({_GEMM_TABLE}#120)"),
        _PCIE4,
        _PEER_PCIE4,
        _cloud_slice(8, "Google Cloud g2-standard-96: 8"),
    ),
    "t4": _gpu(
        "Tesla T4",
        (7, 5),
        Quoted(14.56, "datasheet: 16 GB GDDR6; PyTorch's out-of-memory messages say 14.56 GiB, nvidia-smi 15360 MiB"),
        Quoted(320e9, "NVIDIA T4 datasheet: 320 GB/s"),
        _flops(
            8.1e12,
            65e12,
            "NVIDIA T4 datasheet: FP32 8.1, FP16 65 TFLOPS; no bf16 units: the value gives the measured "
            f"2.46 TFLOPS ({_GEMM_TABLE}, T4) after the efficiency",
            bf16=2.46e12 / _T4_EFFICIENCY,
        ),
        Quoted(_T4_EFFICIENCY, f"measured 41.91 of 65 TFLOPS in fp16 ({_GEMM_TABLE}, T4)"),
        _PCIE3,
        _PEER_PCIE3,
        _cloud_slice(4, "AWS g4dn.12xlarge: 4"),
    ),
    "a10g": _gpu(
        "NVIDIA A10G",
        (8, 6),
        Quoted(22.06, "board: 24 GB GDDR6; PyTorch reports 22.06 to 22.20 GiB (Dreambooth-Stable-Diffusion#18)"),
        Quoted(600e9, "Baseten, A10 against A10G: 600 GB/s"),
        _flops(35e12, 70e12, "AWS G5, A10G: FP32 35, FP16/BF16 70 TFLOPS dense"),
        Quoted(66.6 / 70, f"measured 66.6 of 70 TFLOPS in bf16, 8192 squared ({_GEMM_TABLE}#126)"),
        _PCIE4,
        _PEER_PCIE4,
        _cloud_slice(8, "AWS g5.48xlarge: 8"),
    ),
    "cpu": {
        "device_kind": Quoted("cpu", ""),
        "device_name": Quoted("generic host of two cores", ""),
        "compute_capability": Quoted(None, ""),
        "devices_per_host": Quoted(1, "one host is one device here"),
        "device_memory_bytes": Quoted(round(23.54 * GIB), f"{_VM}: 23.54 GiB; which is the host's memory too"),
        "host_memory_bytes": Quoted(round(23.54 * GIB), f"{_VM}: 23.54 GiB"),
        "device_memory_bytes_per_s": Quoted(45.9e9, f"{_VM}: c = a + b, other runs up to 78 GB/s"),
        "host_memory_bytes_per_s": Quoted(45.9e9, f"{_VM}: c = a + b, other runs up to 78 GB/s"),
        "flops_per_s": Quoted(
            {"float32": 200e9, "bfloat16": 797e9, "float16": 2.43e9},
            f"{_VM}, AVX-512 with bf16 units and without fp16 ones: torch.mm, reached",
        ),
        "matmul_efficiency": Quoted(1.0, "the rates in flops_per_s are measured, so they are reached in full"),
        "host_to_device_bytes_per_s": Quoted(22.0e9, f"{_VM}: copy within host memory"),
        "device_to_host_bytes_per_s": Quoted(22.0e9, f"{_VM}: copy within host memory"),
        "device_to_device_bytes_per_s": Quoted(22.0e9, f"{_VM}: copy within host memory"),
        "host_adam_numel_per_s": Quoted(2.40e9, f"{_VM}: torch AdamW(fused=True), other runs up to 3.7 G elements/s"),
        "device_adam_numel_per_s": Quoted(2.40e9, f"{_VM}: torch AdamW(fused=True), other runs up to 3.7 G elements/s"),
    },
}
