"""Settings shared by all tests."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

# Examples are drawn the same way on every run, and no example fails for being slow on a busy machine.
settings.register_profile(
    "elixir", deadline=None, derandomize=True, print_blob=False, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("elixir")

# Tests share the machine with each other; more threads than cores make them slower, not faster.
torch.set_num_threads(min(2, os.cpu_count() or 1))
