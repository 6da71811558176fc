"""The global norm of gradients, wherever they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from elixir.chunk.norms import norms_of


def total_norm(
    gradients: Sequence[torch.Tensor], threads: int, known: Sequence[torch.Tensor | None] | None = None
) -> torch.Tensor:
    """The 2-norm of all elements of all `gradients`, in float32; of none it is 0.

    It is where the gradients are, or their norms, which nobody waits for; on the CPU where they are on several devices.
    In float32 it has the bits of `torch.nn.utils.get_total_norm`.

    Args:
        gradients: flat, of any floating dtype and device.
        threads: what is read on the host is read by at least so many; nothing else computes meanwhile.
        known: the norm of each gradient that has been summed already, float32, on any device; such are not read.
    """
    norms: list[torch.Tensor | None] = [None] * len(gradients) if known is None else list(known)
    if not gradients:
        return torch.zeros(())
    unread = [index for index, norm in enumerate(norms) if norm is None]
    with _at_least(threads if any(gradients[index].device.type == "cpu" for index in unread) else 0):
        for device in dict.fromkeys(gradients[index].device for index in unread):
            places = [index for index in unread if gradients[index].device == device]
            for index, norm in zip(places, norms_of([gradients[index] for index in places]), strict=True):
                norms[index] = norm
    found = [norm for norm in norms if norm is not None]
    devices = list(dict.fromkeys(norm.device for norm in found))
    if len(devices) > 1:
        together = torch.empty(len(found), device="cpu")
        for device in devices:  # each is waited for once
            places = [index for index, norm in enumerate(found) if norm.device == device]
            together[places] = torch.stack([found[index] for index in places]).cpu()
    else:
        together = torch.stack(found)
    total: torch.Tensor = torch.linalg.vector_norm(together)
    return total


@contextlib.contextmanager
def _at_least(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if threads > before:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads > before:
            torch.set_num_threads(before)
