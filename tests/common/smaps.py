"""Linux says of every mapping of this process how it treats its pages."""

from __future__ import annotations

import re
from pathlib import Path

import torch


def kernel_flags(tensor: torch.Tensor) -> set[str]:
    """The kernel's flags of the mapping in which a tensor begins, such as ``dc``: not copied by fork."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            inside = int(bounds[1], 16) <= tensor.data_ptr() < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError("the tensor lies in no mapping")
