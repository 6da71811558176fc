"""`GradientNorm`: the global norm of gradients on any device, and the factor that clips it."""

from __future__ import annotations

import contextlib
import math
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, partial, reduce

import torch
from torch import nn

from elixir.chunk.pages import pinned_zeros
from elixir.chunk.part_norms import norms_of
from elixir.errors import InputError
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.shards import Shards


def each_norm(
    gradients: Sequence[torch.Tensor], threads: int, known: Sequence[torch.Tensor | None] | None = None
) -> list[torch.Tensor]:
    """The 2-norm of each gradient, in float32, on the device of the gradient or of its known norm.

    Args:
        gradients: flat tensors of any floating dtype and device.
        threads: at least this many threads read gradients on the host; nothing else computes meanwhile.
        known: norms that were summed before, float32, on any device; these gradients are not read.
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
    """The 2-norm of tensors with these `norms`, in their dtype; 0 for none.

    The result is on the device of the norms, and no thread waits for it; if they are on several devices it is on the
    CPU. In float32 it has the bits of `torch.nn.utils.get_total_norm`.
    """
    if not norms:
        return torch.zeros((), device="cpu")
    devices = list(dict.fromkeys(norm.device for norm in norms))
    if len(devices) > 1:
        together = torch.empty(
            len(norms), dtype=max((n.dtype for n in norms), key=lambda dtype: dtype.itemsize), device="cpu"
        )
        for device in devices:  # one wait per device: the CPU reads its norms next
            places = [index for index, norm in enumerate(norms) if norm.device == device]
            together[places] = torch.stack([norms[index] for index in places]).cpu()
    else:
        together = torch.stack(list(norms))
    total: torch.Tensor = torch.linalg.vector_norm(together)
    return total


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """The number by which gradients with this `norm` are multiplied to clip it to `limit`.

    It follows torch.nn.utils.clip_grad_norm_: the same epsilon, in float32, and never a factor above 1.
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
    """Caches norms of gradients that autograd holds, until a gradient is replaced or written to."""

    def __init__(self) -> None:
        self._known: dict[nn.Parameter, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor | None, norm: torch.Tensor) -> None:
        """Caches the norm of the gradient of `parameter`; ignores a gradient that autograd does not hold."""
        if gradient is not None:
            self._known[parameter] = (weakref.ref(gradient), gradient._version, norm)

    def of(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The cached norm of the current gradient of `parameter`; None if it is unknown or out of date."""
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
        max_norm: the limit in every step; 0 for no clipping.
        threads: the least number of threads that read gradients on the host.
    """

    def __init__(self, engine: Engine, shards: Shards, max_norm: float, threads: int) -> None:
        self._engine, self._shards, self._threads = engine, shards, threads
        self.max_norm = max_norm
        self._clip_once: float | None = None  # the least limit given since gradients were cleared
        self.was_asked_for = False
        """Whether `clip_grad_norm_` was ever called, so that norms are summed while gradients arrive; a later sum
        rounds differently.
        """
        self.is_shared = False
        """Whether `max_norm` limits the norm of all optimizers of the module."""
        self.of_all: torch.Tensor | None = None
        """The norm of the gradients of all optimizers, if the next step clips that."""
        self.last: torch.Tensor | None = None
        """See `ElixirOptimizer.grad_norm`."""
        self._known = KnownNorms()
        self._position = {parameter: index for index, parameter in enumerate(engine.model.parameters())}

    @cached_property
    def _on_host(self) -> torch.Tensor:
        """Pinned memory for a norm of any dtype."""
        return pinned_zeros(torch.float64.itemsize, self._engine.device)

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
        """Makes the next step clip to `limit`, too. Later backwards sum norms while gradients arrive."""
        self._clip_once = limit if self._clip_once is None else min(limit, self._clip_once)
        self.was_asked_for = True

    def refuse_stale(self) -> None:
        """Refuses gradients that come after the norm of several optimizers was taken."""
        if self.of_all is not None:
            raise InputError(
                "max_norm= or clip_grad_norm_() took the norm of several optimizers, and more gradients would come "
                "before all of them have stepped; step all of them after such a backward"
            )

    def forget_limit(self) -> None:
        """Drops the limit that `ask` has set for the next step."""
        self._clip_once = self.of_all = None

    def forget(self) -> None:
        """Drops cached norms, since a step may change the gradients."""
        self._known.clear()

    def factor(self, grad_scale: float, norm: torch.Tensor | None, *, needs_number: bool) -> Factor:
        """The factor that takes the loss scale out and clips to the limit.

        Args:
            grad_scale: the loss scale by which the gradients were multiplied.
            norm: the result of `sum`; None if nothing is clipped.
            needs_number: whether some shard needs a Python number, since it does not accept a tensor.
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
        here = self._on_host.view(norm.dtype)[:1]
        # A lane copies the number, so that readers wait for the norm only and not for compute that is submitted
        # meanwhile. The lane waits for the compute submitted so far, which sums the norm. `refresh` is idle now, while
        # `offload` may still be moving gradients.
        copied = self._engine.lanes.refresh.submit(partial(here.copy_, norm.view(1), non_blocking=True))

        def number() -> float:
            copied.synchronize()  # the lane writes the number that this thread reads next
            return 1.0 / grad_scale * float(clipping(here[0]))

        return Factor(value, clips=True, number=number)

    def sum(self, used: Collection[str], *others: Shards) -> torch.Tensor:
        """The norm of all gradients over all ranks, loss scale included, in float32. On one rank it stays on the
        device.

        Args:
            used: the parameters that got a gradient on any rank.
            others: the shards of other optimizers, whose gradients count, too.
        """
        shards = [shard for each in (self._shards, *others) for shard in each]
        found = [
            (segment.source, gradient, norm, None if shard.gradients.are_at_home else segment.source.grad)
            for shard in shards
            for (segment, gradient), norm in shard.gradients.with_norms(shard.gradients.of(shard.segments, used))
        ]
        known = [self._known.of(source, held) if norm is None else norm for source, _, norm, held in found]
        norms = each_norm([gradient for _, gradient, _, _ in found], self._threads, known)
        for (source, _, _, held), norm in zip(found, norms, strict=True):
            self._known.add(source, held, norm)
        summed = [(source, norm) for (source, _, _, _), norm in zip(found, norms, strict=True)]
        if norms:
            # torch sums the zeros of empty gradients, too; without them it would add the others in different groups.
            zero = torch.zeros_like(norms[0])
            summed += [(it, zero) for shard in shards for it in shard.gradients.empty_with_gradient(used)]
        # In the order of the model, so that one rank sums the norms as PyTorch does.
        summed.sort(key=lambda pair: self._position[pair[0]])
        norm = norm_of_norms([norm for _, norm in summed])
        if self._engine.group.size == 1:
            return norm
        # Added in order of rank, so that all ranks get the same bits. Python's `sum` compensates in some versions.
        squares = self._engine.exchange("norm", float(norm.cpu().double() ** 2))
        square = reduce(operator.add, squares[: self._engine.group.shards])  # each replica has them all
        return torch.tensor(math.sqrt(square), dtype=norm.dtype, device="cpu")


class Factor:
    """The factor of all gradients: a number, or a tensor that the device may still be computing.

    Args:
        value: a number, or a tensor on the device.
        clips: whether a limit may have changed it.
        number: waits for the number, if `value` is a tensor and some shard needs a number.
    """

    def __init__(
        self, value: float | torch.Tensor, *, clips: bool = False, number: Callable[[], float] | None = None
    ) -> None:
        self.value, self.clips = value, clips
        self._number = number

    def number(self) -> float:
        """The factor as a number; this thread waits for it."""
        if self._number is not None:
            self.value, self._number = self._number(), None
        return float(self.value)

    def is_other_than(self, number: float) -> bool:
        """Whether it is a known number that differs from `number`; a tensor is not read."""
        return not isinstance(self.value, torch.Tensor) and self.value != number
