"""Measure how fast a disk reads and writes by size, past the page cache.

python profile/disk.py --disk-folder /mnt/nvme
python profile/disk.py --disk-folder /mnt/nvme --quick --out disk.json
"""

from __future__ import annotations

from frame import run_script

from elixir.microbench.disk import disk_jobs

if __name__ == "__main__":
    print(run_script(disk_jobs, __doc__, needs_folder=True), end="")
