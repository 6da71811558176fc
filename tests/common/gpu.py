"""Where tests run that can run on either device, which need a CUDA device, and which a real one."""

from __future__ import annotations

import pytest
import torch

from tests.pretend_cuda import DEVICE_NAME

DEVICE = "cpu"
"""``cuda`` in a run with ``--cuda``."""


def pretended() -> bool:
    """Whether the CUDA device is one that is pretended."""
    return torch.cuda.is_available() and torch.cuda.get_device_name() == DEVICE_NAME


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, or a run with --cuda")
needs_real_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or pretended(), reason="needs a CUDA device with kernels, times and memory of its own"
)
needs_pretended_gpu = pytest.mark.skipif(
    not pretended(),
    reason="looks into what the pretended device wrote down: a run with --cuda on a machine without a GPU",
)
