"""Measure memory and the links between host and devices by size: one way, both ways at once, pinned and not.

python profile/bandwidth.py
python profile/bandwidth.py --device cuda:0 --out bandwidth.json
torchrun --nproc-per-node 8 profile/bandwidth.py   # all ranks at once: each rank's rate, and that of all
"""

from __future__ import annotations

from frame import run_script

from elixir.microbench.transfers import transfer_jobs

if __name__ == "__main__":
    print(run_script(transfer_jobs, __doc__), end="")
