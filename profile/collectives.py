"""Measure all-gather and reduce-scatter by size, over as many ranks as torchrun starts.

torchrun --nproc-per-node 8 profile/collectives.py --out collectives.json
"""

from __future__ import annotations

from frame import run_script

from elixir.microbench.transfers import collective_jobs

if __name__ == "__main__":
    print(run_script(collective_jobs, __doc__, needs_ranks=True), end="")
