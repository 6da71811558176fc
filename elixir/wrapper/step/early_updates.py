"""`EarlyUpdates`: which chunks of one optimizer are updated early, and how that went; see `EarlyUpdate`."""

from __future__ import annotations

from elixir.chunk.chunk import Chunk
from elixir.kernels.adam.when_compiled import begin_kernel
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.shard import Shard
from elixir.wrapper.step.shards import Shards
from elixir.wrapper.step.update import update_early
from elixir.wrapper.step.user_optimizer import UserOptimizer, copies_states

REFUSALS = 2
"""After so many steps in a row whose new states were wrong, or would have been, none are made."""
LONGEST_PAUSE_STEPS = 64


class Forecast:
    """Looks at how the last steps went.

    Whether gradients were clipped or overflowed is seen in every step, with or without new states that were made early,
    so a run that ceases to clip is noticed in the next step. Other reasons to make states again, such as options that
    change between backward and `step`, are seen only if there were such states. After those it pauses, twice as long
    each time, before it tries again.
    """

    def __init__(self) -> None:
        self._factors: list[bool] = []  # of the last steps: whether gradients were multiplied by another factor
        self._refused = 0  # steps in a row in which new states were wrong for other reasons
        self._pause = 0
        self._scale = 0.0  # of the loss, in the last step

    def expects_to_keep(self, scale: float) -> bool:
        """Whether to make new states in this step.

        Args:
            scale: of the loss. Where it has grown since the last step, gradients may overflow.
        """
        grown = 0.0 < self._scale < scale
        clips = len(self._factors) == REFUSALS and all(self._factors)
        return not (grown or clips or self._pause)

    def stepped(self, *, other_factor: bool, scale: float, started: int, kept: int) -> None:
        """A step is over.

        Args:
            other_factor: gradients were clipped, or overflowed.
            scale: of the loss, by which they were made.
            started: chunks that had new states.
            kept: those whose new states were right.
        """
        self._factors = [*self._factors, other_factor][-REFUSALS:]
        self._scale = scale
        self._pause = max(0, self._pause - 1)
        if other_factor or not started:
            return
        self._refused = 0 if kept else self._refused + 1
        if self._refused >= REFUSALS:
            self._pause = min(2 ** (self._refused - REFUSALS + 1), LONGEST_PAUSE_STEPS)


class EarlyUpdates:
    """The early updates of one optimizer, from backward until its `step`.

    Args:
        engine: of the chunks.
        user: the optimizer whose options count.
        shards: of the optimizer.
    """

    def __init__(self, engine: Engine, user: UserOptimizer, shards: Shards) -> None:
        self._engine, self._user, self._shards = engine, user, shards
        self._begun: dict[int, Shard] = {}
        self._backwards = 0  # that the last step had; 0 before the first
        self.forecast = Forecast()
        """Whether new states are likely to be kept."""
        self.started = self.kept = 0
        """Chunks that had new states in the last step, and those whose new states were right."""

    def prepare(self) -> None:
        """Makes the second sets of states now, as far as the optimizer has states, so that no step makes memory, and
        begins to compile the kernel that fills them, on which plans count."""
        given, plan = self._user.given, self._engine.plan
        copies = copies_states(given, fused_kernels=self._user.fuses, moments=plan.moments)
        for shard in self._shards:
            chunk = shard.chunk
            if chunk.plan.home.early:
                shard.make_second()
                if not copies:
                    begin_kernel(chunk.dtype, chunk.dtype if chunk.low_precision else None, plan.moments)

    def begin(self, chunk: Chunk, scale: float) -> None:
        """Makes new states of a chunk all of whose gradients are on their way home.

        Args:
            chunk: one that the plan lets be updated early.
            scale: of the loss, by which its gradients are divided.
        """
        engine, shard = self._engine, self._shards[chunk.index]
        shard.end_early(None)
        self._begun.pop(chunk.index, None)
        backwards = self._backwards or engine.plan.accumulation
        if engine.gradients.backward_count < backwards or not self.forecast.expects_to_keep(scale):
            return
        if shard.writes.exist or not shard.make_second():
            return
        names = {slot.name for slot in chunk.slots}
        inputs = shard.inputs(names, 1.0 / scale, self._user.hyperparameters(), in_place=False)
        self._begun[chunk.index] = shard
        update_early(engine, shard, inputs)

    def stepping(self) -> None:
        """The optimizer's step begins."""
        self._backwards = self._engine.gradients.backward_count
        self.started, self.kept = len(self._begun), 0
        self._engine.early_chunks, self._engine.kept_chunks = self.started, 0

    def stepped(self, *, other_factor: bool, scale: float) -> None:
        """The optimizer's step is over, or left out.

        Args:
            other_factor: gradients were clipped, or have overflowed.
            scale: of the loss, by which they were made.
        """
        self._engine.kept_chunks = self.kept
        self.forecast.stepped(other_factor=other_factor, scale=scale, started=self.started, kept=self.kept)
        self.discard()

    def discard(self) -> None:
        """Ends all early updates that were not kept."""
        for shard in self._begun.values():
            shard.end_early(None)
        self._begun.clear()
