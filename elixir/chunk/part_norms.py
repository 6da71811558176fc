"""Norms of single gradients: summed where a gradient is, and for what leaves for the host, before it leaves.

Clipping needs the norm of all gradients. Read from the host after backward, they would keep the device, the link and
the host's Adam waiting for as long as that takes. So each parameter's part of a chunk is summed while the rest of
backward runs, and the step has only to sum one number per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elixir.chunk.chunk import Chunk
from elixir.chunk.memory import Memory
from elixir.torch_private import foreach_norm

ROW_NUMEL = 2**14
"""Elements of low precision on the host that are summed at once; the norms of rows are added as in a tree."""
PIECE_NUMEL = 2**17
"""Elements per thread that are in float32 at a time: 512 KiB, so that they stay in a core's cache."""


def norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a norm of gradients in `dtype`: float32 or wider, as `torch.nn.utils.get_total_norm` has it."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def norms_of(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norm of each flat tensor, in float32 (of float64 in that), where it is. All are on one device.

    float32 gets the bits of `torch.nn.utils.get_total_norm`, however tensors are grouped into calls. In float16 a large
    tensor's norm would overflow though none of its elements does.
    """
    if not gradients:
        return []
    if gradients[0].device.type == "cpu":
        return [_host_norm(gradient) for gradient in gradients]
    if any(gradient.dtype == torch.float64 for gradient in gradients):
        return [torch.linalg.vector_norm(gradient, dtype=norm_dtype(gradient.dtype)) for gradient in gradients]
    return list(foreach_norm(list(gradients), 2.0, dtype=torch.float32))


def _host_norm(gradient: torch.Tensor) -> torch.Tensor:
    """Sums in pieces: torch's CPU kernel converts element by element, in one thread and into one sum: 1 GB/s of
    bfloat16, and 0.4 % off for 5e7 elements."""
    norm: torch.Tensor
    if gradient.dtype in (torch.float32, torch.float64) or gradient.numel() <= ROW_NUMEL:
        norm = torch.linalg.vector_norm(gradient, dtype=norm_dtype(gradient.dtype))
        return norm
    whole = gradient.numel() - gradient.numel() % ROW_NUMEL
    piece_numel = min(PIECE_NUMEL * torch.get_num_threads(), whole)
    wide = torch.empty(piece_numel, device="cpu")
    norms = []
    for piece in gradient[:whole].split(piece_numel):
        rows = wide[: piece.numel()].copy_(piece).view(-1, ROW_NUMEL)
        norms.append(torch.linalg.vector_norm(rows, dim=1))
    norms.append(torch.linalg.vector_norm(gradient[whole:].float()).view(1))
    norm = torch.linalg.vector_norm(torch.cat(norms))
    return norm


class PartNorms:
    """The norms of the parameters' parts of one shard of gradients, as of one moment.

    Code that changes the gradients makes a new one, or none: this one is never brought up to date.

    Args:
        chunk: whose shard it is.
        device: where the norms are kept.
    """

    def __init__(self, chunk: Chunk, device: torch.device | str) -> None:
        self._parts = [held.part for held in chunk.held.values()]
        self._index = {held.place: index for index, held in enumerate(chunk.held.values())}
        self.values = torch.zeros(len(self._parts), dtype=norm_dtype(chunk.dtype), device=device)
        """One per parameter of which the shard has a part."""
        self.memory = Memory(self.values)
        """The same, with the work that fills it, unless compute does."""

    @torch.no_grad()
    def measure(self, shard: torch.Tensor) -> None:
        """Fills in the norms of what `shard` holds."""
        if self._parts:
            torch.stack(norms_of([shard[part] for part in self._parts]), out=self.values)

    def add_and_measure(self, home: torch.Tensor, gradients: torch.Tensor) -> None:
        """Adds `gradients` to `home`, both on the host, and fills in the norms of the sums while they are cached."""
        for index, part in enumerate(self._parts):  # the gaps between them are nobody's
            self.values[index] = _host_norm(home[part].add_(gradients[part]))

    def of(self, place: int) -> torch.Tensor:
        """The norm of the part of the parameter at this place of the chunk; valid once `wait` has returned."""
        return self.values[self._index[place]]

    def wait(self) -> None:
        """Lets compute that reads norms on a device, or this thread, wait for their sums."""
        self.memory.wait()  # a lane writes `values`
