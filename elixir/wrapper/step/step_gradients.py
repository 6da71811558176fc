"""`StepGradients`: the gradients of the next step: which parameters got one on any rank, and their loss scale."""

from __future__ import annotations

import logging
import zlib

from elixir.errors import InputError
from elixir.torch_private import DisableTorchFunctionSubclass
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.shards import Shards
from elixir.wrapper.step.user_optimizer import UserOptimizer, refuse_different_options

logger = logging.getLogger(__name__)


class StepGradients:
    """The gradients of one optimizer's next step.

    Args:
        engine: of the chunks.
        user: the optimizer.
        shards: its shards.
    """

    def __init__(self, engine: Engine, user: UserOptimizer, shards: Shards) -> None:
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
