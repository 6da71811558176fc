"""Measure the FLOP/s that large matrix products reach, by dtype.

python profile/compute.py
python profile/compute.py --device cuda:0 --out compute.json
"""

from __future__ import annotations

import torch

from elixir.microbench import Measurement, matmul_rate
from elixir.microbench.script import run_script

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def measure(device: torch.device, quick: bool) -> list[Measurement]:
    """One rate per dtype."""
    return [matmul_rate(dtype, device, quick=quick) for dtype in DTYPES]


if __name__ == "__main__":
    print(run_script(measure, __doc__))
