"""Linux says of every mapping of this process how it treats its pages."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import torch

PRESENT = 63
"""The bit of a page's entry that says that it is in memory."""


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


def all_present(tensor: torch.Tensor) -> bool:
    """Whether all pages of a contiguous tensor are in memory."""
    first, last = (at // mmap.PAGESIZE for at in (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes - 1))
    with Path("/proc/self/pagemap").open("rb") as entries:
        entries.seek(8 * first)
        found = np.frombuffer(entries.read(8 * (last - first + 1)), dtype=np.uint64)
    return bool((found >> np.uint64(PRESENT)).all())
