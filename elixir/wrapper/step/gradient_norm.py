"""`StepGradients`: which gradients the next step has. `GradientNorm`: their global norm on any device, and the factor
that clips it."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, partial, reduce

import torch
from torch import nn

from elixir.chunk.gradients.chunk_gradient import norms_of
from elixir.chunk.memory import pinned_zeros
from elixir.errors import InputError
from elixir.torch_private import DisableTorchFunctionSubclass
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.shard import SteppedShards
from elixir.wrapper.step.user_optimizer import UserOptimizer, refuse_different_options

# --- step gradients --------------------------------------------------------------------------------------------------
# `StepGradients`: the gradients of the next step: which parameters got one on any rank, and their loss scale.


logger = logging.getLogger(__name__)


class StepGradients:
    """The gradients of one optimizer's next step.

    Args:
        engine: of the chunks.
        user: the optimizer.
        shards: its shards.
    """

    def __init__(self, engine: Engine, user: UserOptimizer, shards: SteppedShards) -> None:
        self._engine, self._user, self._shards = engine, user, shards
        self._scale: float | None = None  # the loss scale of the gradients; None if there are none
        self._has_warned = False
        self.are_mixed = False
        """Whether they are sums over backwards with different loss scales."""
        self.used: set[str] = set()
        """The parameters that got a gradient on any rank, once ranks have agreed."""

    @property
    def scale(self) -> float:
        """The loss scale of the gradients."""
        return self._engine.loss_scale.value if self._scale is None else self._scale

    def scaled(self, by: float) -> None:
        """Notes that the next gradients are multiplied by a loss scale, and added to existing ones."""
        if self.are_mixed or self._scale not in (None, by):
            # An overflow of another optimizer has changed the scale, which is no harm if the user has cleared all
            # gradients.
            self.are_mixed = self._are_held()
        self._scale = by

    def cleared(self) -> None:
        """Notes that gradients were dropped."""
        self._scale, self.are_mixed = None, False

    def _are_held(self) -> bool:
        """Whether this rank has gradients of the optimizer's parameters."""
        mine = [(shard.chunk, slot) for shard in self._shards for slot in shard.chunk.slots]
        with DisableTorchFunctionSubclass():
            return any(
                self._engine.gradients.holds(chunk, slot.name) or slot.parameter.grad is not None
                for chunk, slot in mine
                if slot.parameter in self._user.group_of
            )

    def stepped_groups(self) -> set[int]:
        """The groups with a gradient on any rank."""
        with DisableTorchFunctionSubclass():
            return {
                self._user.group_of[slot.parameter]
                for shard in self._shards
                for slot in shard.chunk.slots
                if slot.parameter in self._user.group_of and (slot.name in self.used or slot.parameter.grad is not None)
            }

    def refuse_unseen(self) -> None:
        """Refuses gradients that plain PyTorch would use, and that this optimizer would ignore silently."""
        with DisableTorchFunctionSubclass():
            for chunk in self._engine.chunks:
                if self._engine.is_ordinary(chunk) and chunk.plan.trainable:
                    continue
                for slot in chunk.slots:
                    if slot.parameter.requires_grad and not chunk.plan.trainable:
                        raise InputError(
                            f"{slot.name} was frozen when the model was planned, and is not now; plan again"
                        )
                    if slot.parameter.grad is not None and chunk.plan.trainable:
                        raise InputError(
                            f"the gradient of {slot.name} was set by hand, but gradients are taken as backward makes "
                            "them; change them in a hook (parameter.register_hook), or change the loss"
                        )

    def agree(self, clip_limit: float | None = None, *, stepping: bool = False) -> None:
        """Finds the parameters that got a gradient on any rank, the same on all ranks.

        Args:
            clip_limit: the limit of the norm in the step.
            stepping: whether a step comes next, for which ranks must have the same options.

        Raises:
            InputError: on all ranks, if gradients of any rank lack the loss scale, or if options differ.
            DiskError, RankError: states on a disk of this rank, or of another, are lost.
        """
        unscaled = stepping and self._are_unscaled()
        names = [slot.name for shard in self._shards for slot in shard.chunk.slots]
        used: set[str] = set()
        for gradient in self._engine.gradients.by_chunk.values():
            used |= gradient.arrived
        if self._engine.group.size > 1:
            mine = bytes([*(name in used for name in names), unscaled, self.are_mixed])
            said = self._options_to_compare(clip_limit) if stepping else {}
            digest = zlib.crc32(repr(said).encode())
            answers = self._engine.exchange("gradients used", (mine, self._engine.errors.of_disk, digest))
            self._engine.errors.agree([lost for _, lost, _ in answers])
            if len({theirs for *_, theirs in answers}) > 1:
                refuse_different_options(self._engine.exchange("options", said))
            *found, unscaled, self.are_mixed = (
                any(flags) for flags in zip(*(flags for flags, *_ in answers), strict=True)
            )
            used = {name for name, flag in zip(names, found, strict=True) if flag}
            self._engine.gradients.hold(used)
        if unscaled:
            raise InputError(
                f"step() divides float16 gradients by the loss scale, {self._engine.loss_scale.value:g}, but these "
                "were made by loss.backward(); call optimizer.backward(loss), which multiplies by it"
            )
        self.used = used

    def _options_to_compare(self, clip_limit: float | None) -> dict[str, str]:
        data_writes = sum(shard.chunk.data_writes for shard in self._shards)
        said = self._user.options_to_compare(clip_limit)
        return said | {"the number of writes through .data of weights": str(data_writes)}

    def _are_unscaled(self) -> bool:
        """Whether this rank has gradients that lack the loss scale."""
        if self._engine.holds_gradients():
            return self._engine.loss_scale.used and self._scale is None
        if not self._has_warned:
            self._has_warned = True
            logger.warning("step() found no gradients on this rank: call optimizer.backward(loss) before it")
        return False


# --- gradient norm ---------------------------------------------------------------------------------------------------


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

    def __init__(self, engine: Engine, shards: SteppedShards, max_norm: float, threads: int) -> None:
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

    def sum(self, used: Collection[str], *others: SteppedShards) -> torch.Tensor:
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
