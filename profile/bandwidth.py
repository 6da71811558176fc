"""Measure memory and the links between host and devices by size: one way, both ways at once, pinned and not.

python profile/bandwidth.py
python profile/bandwidth.py --device cuda:0 --out bandwidth.json
torchrun --nproc-per-node 8 profile/bandwidth.py   # all ranks at once: each rank's rate, and that of all
"""

from __future__ import annotations

from frame import run_script

from elixir.microbench.bench import Bench, Workload
from elixir.microbench.transfers import link_jobs, transfer_jobs


def jobs(bench: Bench) -> list[Workload]:
    """Everything for one rank; the links that ranks share for several."""
    return transfer_jobs(bench) if bench.ranks.size == 1 else link_jobs(bench)


if __name__ == "__main__":
    print(run_script(jobs, __doc__), end="")
