"""Measure what a transformer computes, by dtype: matrix products by shape class, memory-bound operators, attention.

python profile/compute.py
python profile/compute.py --device cuda:0 --out compute.json
torchrun --nproc-per-node 8 profile/compute.py     # all devices at once, the slowest counts
"""

from __future__ import annotations

from frame import run_script

from elixir.microbench.compute import compute_jobs

if __name__ == "__main__":
    print(run_script(compute_jobs, __doc__), end="")
