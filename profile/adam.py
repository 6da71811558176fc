"""Measure how many elements per second a fused Adam step updates, on the host and on a device.

python profile/adam.py
python profile/adam.py --device cuda:0 --out adam.json
"""

from __future__ import annotations

import torch

from elixir.microbench import Measurement, adam_rate
from elixir.microbench.script import run_script


def measure(device: torch.device, quick: bool) -> list[Measurement]:
    """The host always, `device` as well where it is not the host."""
    devices = [torch.device("cpu")] + ([device] if device.type == "cuda" else [])
    return [adam_rate(target, quick=quick) for target in devices]


if __name__ == "__main__":
    print(run_script(measure, __doc__))
