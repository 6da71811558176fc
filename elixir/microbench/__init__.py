"""Measures what this machine can do: memory, links, Adam, compute, collectives.

`measure` gives a whole `HardwareProfile`, `measure_briefly` the rates of a CPU in two seconds. `measure` runs jobs,
which give `Series` of (amount, seconds); `fit_points` turns a series into latency and rate. The scripts in ``profile/``
run the same jobs alone. All of them leave torch's thread count and random state as they were.
"""

from elixir.microbench.adam import adam_jobs, adam_series, all_threads_jobs
from elixir.microbench.brief import measure_briefly
from elixir.microbench.collectives import collective_jobs, collective_series
from elixir.microbench.compute import attention_series, compute_jobs, matmul_series
from elixir.microbench.disk import disk_jobs, with_disk
from elixir.microbench.fitting import Job, Measured, Series, fit_points, fitted
from elixir.microbench.machine import measure
from elixir.microbench.measurement import Bench
from elixir.microbench.plots import plot_fits, plot_profile
from elixir.microbench.ranks import Ranks, joined
from elixir.microbench.report import as_json, as_table
from elixir.microbench.transfers import link_jobs, transfer_jobs

__all__ = [
    "Bench",
    "Job",
    "Measured",
    "Ranks",
    "Series",
    "adam_jobs",
    "adam_series",
    "all_threads_jobs",
    "as_json",
    "as_table",
    "attention_series",
    "collective_jobs",
    "collective_series",
    "compute_jobs",
    "disk_jobs",
    "fit_points",
    "fitted",
    "joined",
    "link_jobs",
    "matmul_series",
    "measure",
    "measure_briefly",
    "plot_fits",
    "plot_profile",
    "transfer_jobs",
    "with_disk",
]
