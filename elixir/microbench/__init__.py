"""Measures what this machine can do: memory, links, Adam, matrix products.

`measure` gives a whole `HardwareProfile`; the functions it is made of give one `Measurement` each and stand alone, as
the scripts in ``profile/`` use them. All of them leave torch's thread count and random state as they were.
"""

from elixir.microbench.adam import adam_rate
from elixir.microbench.compute import matmul_rate
from elixir.microbench.machine import measure
from elixir.microbench.measurement import Measurement, as_json, as_table
from elixir.microbench.transfers import (
    device_to_device_rate,
    device_to_host_rate,
    host_to_device_rate,
    memory_rate,
)

__all__ = [
    "Measurement",
    "adam_rate",
    "as_json",
    "as_table",
    "device_to_device_rate",
    "device_to_host_rate",
    "host_to_device_rate",
    "matmul_rate",
    "measure",
    "memory_rate",
]
