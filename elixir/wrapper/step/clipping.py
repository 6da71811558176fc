"""Clipping: the global norm of gradients, wherever they are, and the factor that follows from it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from elixir.chunk.norms import norms_of


def each_norm(
    gradients: Sequence[torch.Tensor], threads: int, known: Sequence[torch.Tensor | None] | None = None
) -> list[torch.Tensor]:
    """The 2-norm of each of the `gradients`, in float32: where it is, or where its norm is known to be.

    Args:
        gradients: flat, of any floating dtype and device.
        threads: what is read on the host is read by at least so many; nothing else computes meanwhile.
        known: the norm of each gradient that has been summed already, float32, on any device; such are not read.
    """
    norms: list[torch.Tensor | None] = [None] * len(gradients) if known is None else list(known)
    unread = [index for index, norm in enumerate(norms) if norm is None]
    with _at_least(threads if any(gradients[index].device.type == "cpu" for index in unread) else 0):
        for device in dict.fromkeys(gradients[index].device for index in unread):
            places = [index for index in unread if gradients[index].device == device]
            for index, norm in zip(places, norms_of([gradients[index] for index in places]), strict=True):
                norms[index] = norm
    return [norm for norm in norms if norm is not None]


def total_norm(gradients: Sequence[torch.Tensor], threads: int) -> torch.Tensor:
    """The 2-norm of all elements of all `gradients`; see `each_norm` and `norm_of_norms`."""
    return norm_of_norms(each_norm(gradients, threads))


def norm_of_norms(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of tensors with these `norms`, in their dtype; of none it is 0.

    It is where the norms are, which nobody waits for; on the CPU where they are on several devices. In float32 it has
    the bits of `torch.nn.utils.get_total_norm`.
    """
    if not norms:
        return torch.zeros((), device="cpu")
    devices = list(dict.fromkeys(norm.device for norm in norms))
    if len(devices) > 1:
        together = torch.empty(
            len(norms), dtype=max((n.dtype for n in norms), key=lambda dtype: dtype.itemsize), device="cpu"
        )
        for device in devices:  # each is waited for once
            places = [index for index, norm in enumerate(norms) if norm.device == device]
            together[places] = torch.stack([norms[index] for index in places]).cpu()
    else:
        together = torch.stack(list(norms))
    total: torch.Tensor = torch.linalg.vector_norm(together)
    return total


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """The number by which gradients with this `norm` are multiplied to clip it to `limit`.

    As torch.nn.utils.clip_grad_norm_: the same epsilon, in float32, and never a factor above 1.
    """
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


class KnownNorms:
    """Norms of gradients that autograd holds, for as long as these are the tensors that they were, unwritten since."""

    def __init__(self) -> None:
        self._known: dict[nn.Parameter, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor | None, norm: torch.Tensor) -> None:
        """Keep the norm of the gradient of `parameter`; nothing is kept of one that autograd does not hold."""
        if gradient is not None:
            self._known[parameter] = (weakref.ref(gradient), gradient._version, norm)

    def of(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The norm of the gradient that `parameter` has now; None if that one was not measured, or was written to."""
        measured, version, norm = self._known.get(parameter, (None, 0, None))
        same = measured is not None and gradient is not None and measured() is gradient and gradient._version == version
        return norm if same else None

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()


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
