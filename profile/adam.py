"""Measure how long a fused Adam step takes by number of elements: on the host by thread count, and on a device.

python profile/adam.py
python profile/adam.py --device cuda:0 --out adam.json
torchrun --nproc-per-node 8 profile/adam.py        # all ranks at once: each rank's rate, and that of all
"""

from __future__ import annotations

from frame import run_script

from elixir.microbench.compute import adam_jobs

if __name__ == "__main__":
    print(run_script(adam_jobs, __doc__), end="")
