"""The batch to plan for, from the data that a training loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import numpy as np
import torch

from elixir.errors import InputError
from elixir.models.settings import GENERATORS, restored

LOOKED_AT = 64
"""Samples whose sizes are compared first."""
MOST_LOOKED_AT = 2048
"""Samples whose sizes are compared where the first ones differ, evenly spread over the dataset."""


def generators_untouched() -> AbstractContextManager[None]:
    """Puts the host's global random number generators back: looking at data must not change which data come."""
    return restored(*GENERATORS)


def planning_batch(loader: Any, *, batch_size: int | None = None) -> Any:
    """The batch to plan for: the largest samples of a dataset, collated; of a stream the first ones.

    No sampler is asked, and the loader is not iterated, so that training sees the same batches as without this.

    Args:
        loader: a torch DataLoader, or one that accelerate made of it.
        batch_size: of one rank; None takes the loader's.

    Raises:
        InputError: the dataset is empty.
    """
    loader = getattr(loader, "base_dataloader", loader)
    sampler = getattr(loader, "batch_sampler", None)
    size = batch_size or getattr(sampler, "batch_size", None) or loader.batch_size
    with generators_untouched():
        samples = _largest(loader.dataset, size or 1)
        if not samples:
            raise InputError("the dataset to plan for is empty; give the options inp=, a batch")
        # Without a batch size, samples of a stream are collated one by one, as the loader does it.
        return loader.collate_fn(samples if size else samples[0])


def _largest(dataset: Any, count: int) -> list[Any]:
    stream = not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))
    if stream:
        return list(islice(iter(dataset), count))
    total = len(dataset)
    sizes: dict[int, int] = {}
    for most in (min(total, LOOKED_AT), min(total, MOST_LOOKED_AT)):
        if len(set(sizes.values())) != 1:
            spread = (number * total // most for number in range(most))
            sizes |= {index: elements(dataset[index]) for index in spread if index not in sizes}
    chosen = sorted(sizes, key=lambda index: (-sizes[index], index))[:count]
    more = (index for index in range(total) if index not in sizes)
    return [dataset[index] for index in [*chosen, *islice(more, count - len(chosen))]]


def elements(sample: Any) -> int:
    """Numbers in a sample, whatever holds them."""
    if isinstance(sample, Mapping):
        return sum(map(elements, sample.values()))
    if isinstance(sample, (torch.Tensor, np.ndarray)):
        return int(np.prod(sample.shape))
    if isinstance(sample, Sequence) and not isinstance(sample, (str, bytes)):
        # A list of numbers counts by its length; nested items are counted.
        return len(sample) if sample and isinstance(sample[0], (int, float)) else sum(map(elements, sample))
    return len(sample) if isinstance(sample, (str, bytes)) else 1
