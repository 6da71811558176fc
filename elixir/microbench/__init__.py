"""Measures what this machine can do: memory, links, Adam, compute, collectives.

`measure` gives a whole `HardwareProfile`, `measure_briefly` the rates of a CPU in two seconds. A `Workload` is timed
for growing sizes and gives a `Series` of (amount, seconds); `fit_points` turns a series into latency and rate. The
scripts in ``profile/`` run the same works one by one. All of them leave torch's thread count and random state as they
were.
"""

from elixir.microbench.brief import measure_briefly
from elixir.microbench.machine import measure

__all__ = ["measure", "measure_briefly"]
