"""The global norm of gradients, wherever they are, and the factor that clips it."""

from __future__ import annotations

import contextlib
import math
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial, reduce

import torch
from torch import nn

from elixir.chunk.pages import pinned_zeros
from elixir.chunk.part_norms import norms_of
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.shards import Shards


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


class KnownNorms:
    """Norms of gradients that autograd holds, for as long as these are the tensors that they were, unwritten since."""

    def __init__(self) -> None:
        self._known: dict[nn.Parameter, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor | None, norm: torch.Tensor) -> None:
        """Keeps the norm of the gradient of `parameter`; nothing is kept of one that autograd does not hold."""
        if gradient is not None:
            self._known[parameter] = (weakref.ref(gradient), gradient._version, norm)

    def of(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The norm of the gradient that `parameter` has now; None if that one was not measured, or was written to."""
        measured, version, norm = self._known.get(parameter, (None, 0, None))
        same = measured is not None and gradient is not None and measured() is gradient and gradient._version == version
        return norm if same else None

    def clear(self) -> None:
        """Forgets all."""
        self._known.clear()


class GradientNorm:
    """The norm of the gradients of one optimizer's next step, and the limit to which it is clipped.

    Args:
        engine: of the chunks.
        shards: of the optimizer.
        max_norm: every step clips to this; 0 for no clipping.
        threads: by how many the host reads gradients at least.
    """

    def __init__(self, engine: Engine, shards: Shards, max_norm: float, threads: int) -> None:
        self._engine, self._shards, self._threads = engine, shards, threads
        self.max_norm = max_norm
        self._clip_once: float | None = None  # the least limit that was asked for since gradients were cleared
        self.was_asked_for = False
        """Whether somebody has asked for the norm, so that it is summed while gradients arrive: other bits than later.
        """
        self.last: torch.Tensor | None = None
        """See `ElixirOptimizer.grad_norm`."""
        self._on_host: torch.Tensor | None = None
        self._known = KnownNorms()
        self._position = {parameter: index for index, parameter in enumerate(engine.model.parameters())}

    @property
    def limit(self) -> float | None:
        """The limit to which the next step clips; None for no clipping.

        As in torch, repeated clipping uses the smallest limit: an infinite one cancels none.
        """
        limits = [self.max_norm] if self.max_norm else []
        return min(limits if self._clip_once is None else [*limits, self._clip_once], default=None)

    @property
    def is_wanted(self) -> bool:
        """Whether the next step needs the norm, as far as can be known during backward."""
        return self.limit is not None or self._engine.loss_scale.used or self.was_asked_for

    def ask(self, limit: float) -> None:
        """The next step clips to `limit`, too; who asks once asks again."""
        self._clip_once = limit if self._clip_once is None else min(limit, self._clip_once)
        self.was_asked_for = True

    def forget_limit(self) -> None:
        """Drops the limit that was asked for the next step."""
        self._clip_once = None

    def forget(self) -> None:
        """Gradients are about to be stepped with, which may change them."""
        self._known.clear()

    def factor(self, grad_scale: float, norm: torch.Tensor | None, *, needs_number: bool) -> Factor:
        """The factor that takes the loss scale out and clips to the limit.

        Args:
            grad_scale: the loss scale by which the gradients were multiplied.
            norm: of `sum`; None where nothing is clipped.
            needs_number: whether a shard of the host, or one that is stepped in one pass, will ask for the number.
        """
        limit = self.limit
        if norm is None or limit is None:
            return Factor(1.0 / grad_scale)

        def clipping(norm: torch.Tensor) -> torch.Tensor:
            return clip_factor(norm / grad_scale, limit)

        if needs_number and not norm.is_cuda:
            return Factor(1.0 / grad_scale * float(clipping(norm)), clips=True)
        value = 1.0 / grad_scale * clipping(norm)
        if not needs_number:
            return Factor(value, clips=True)
        if self._on_host is None or self._on_host.dtype != norm.dtype:
            self._on_host = pinned_zeros(norm.element_size(), norm.device).view(norm.dtype)
        here = self._on_host
        # On a lane, so that who needs the number waits for the norm, and not for what compute is given meanwhile. The
        # lane comes after compute that was submitted so far, which sums the norm. It has no other work by now; that of
        # the gradients' way home has much.
        copied = self._engine.lanes.refresh.submit(partial(here.copy_, norm.view(1), non_blocking=True))

        def number() -> float:
            copied.synchronize()  # the lane writes the number that is read next
            return 1.0 / grad_scale * float(clipping(here[0]))

        return Factor(value, clips=True, number=number)

    def sum(self, used: Collection[str]) -> torch.Tensor:
        """The norm of all gradients over all ranks, loss scale included, in float32; on the device where no rank has to
        read it.

        Args:
            used: the parameters that got a gradient on any rank.
        """
        found = [
            (segment.source, gradient, norm, None if shard.gradients.are_at_home else segment.source.grad)
            for shard in self._shards
            for (segment, gradient), norm in shard.gradients.with_norms(shard.gradients.of(shard.segments, used))
        ]
        known = [self._known.of(source, held) if norm is None else norm for source, _, norm, held in found]
        norms = each_norm([gradient for _, gradient, _, _ in found], self._threads, known)
        for (source, _, _, held), norm in zip(found, norms, strict=True):
            self._known.add(source, held, norm)
        summed = [(source, norm) for (source, _, _, _), norm in zip(found, norms, strict=True)]
        if norms:
            # torch sums the zeros of empty gradients, too: others are added in other groups than without them.
            zero = torch.zeros_like(norms[0])
            summed += [(it, zero) for shard in self._shards for it in shard.gradients.empty_with_gradient(used)]
        # In the order of the model, so that one rank sums the norms as PyTorch would.
        summed.sort(key=lambda pair: self._position[pair[0]])
        norm = norm_of_norms([norm for _, norm in summed])
        if self._engine.group.size == 1:
            return norm
        # Added in order of rank, so that all ranks have the same bits. Python's own sum compensates in some versions.
        square = reduce(operator.add, self._engine.exchange("norm", float(norm.cpu().double() ** 2)))
        return torch.tensor(math.sqrt(square), dtype=norm.dtype, device="cpu")


class Factor:
    """By what gradients are multiplied: a number, or what a device may still compute.

    Args:
        value: a number, or a tensor on the device.
        clips: whether a limit may have changed it.
        number: waits for the number, where `value` is a tensor and somebody needs it.
    """

    def __init__(
        self, value: float | torch.Tensor, *, clips: bool = False, number: Callable[[], float] | None = None
    ) -> None:
        self.value, self.clips = value, clips
        self._number = number

    def number(self) -> float:
        """The number; this thread waits for it."""
        if self._number is not None:
            self.value, self._number = self._number(), None
        return float(self.value)

    def is_other_than(self, number: float) -> bool:
        """Whether it is known, and other than `number`; a tensor is not looked at."""
        return not isinstance(self.value, torch.Tensor) and self.value != number
