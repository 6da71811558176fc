"""Measure the bandwidth of memory and of the links between host and devices.

python profile/bandwidth.py
python profile/bandwidth.py --device cuda:0 --out bandwidth.json
"""

from __future__ import annotations

import torch

from elixir.microbench import (
    Measurement,
    device_to_device_rate,
    device_to_host_rate,
    host_to_device_rate,
    memory_rate,
)
from elixir.microbench.script import run_script


def measure(device: torch.device, quick: bool) -> list[Measurement]:
    """Host memory first; on CUDA also the device's memory, its link, and the link to every other device."""
    rates = [memory_rate("cpu", quick=quick), host_to_device_rate("cpu", quick=quick)]
    if device.type == "cuda":
        rates += [
            memory_rate(device, quick=quick),
            host_to_device_rate(device, quick=quick),
            device_to_host_rate(device, quick=quick),
        ]
        peers = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        rates += [device_to_device_rate(device, peer, quick=quick) for peer in peers if peer != device]
    return rates


if __name__ == "__main__":
    print(run_script(measure, __doc__))
