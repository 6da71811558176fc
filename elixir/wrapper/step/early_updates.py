"""`EarlyUpdates`: chooses the chunks of one optimizer that are updated early; see `EarlyUpdate`."""

from __future__ import annotations

from elixir.chunk.chunk import Chunk
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.shard import Shard
from elixir.wrapper.step.shards import Shards
from elixir.wrapper.step.update import update_early
from elixir.wrapper.step.user_optimizer import UserOptimizer

REFUSALS = 2
"""After this many discarded steps in a row, early updates pause."""
LONGEST_PAUSE_STEPS = 64


class Forecast:
    """Predicts from the last steps whether early updates will be kept.

    Every step shows whether gradients were clipped or overflowed, with or without early updates, so a run that ceases
    to clip is noticed in the next step. Other reasons to discard, such as options that change between backward and
    `step`, show only if there were early updates. After those it pauses, twice as long each time.
    """

    def __init__(self) -> None:
        self._factors: list[bool] = []  # by step, newest last: whether gradients were clipped or overflowed
        self._refused = 0  # steps in a row whose new states were discarded for other reasons
        self._pause = 0
        self._scale = 0.0  # the loss scale of the last step

    def expects_to_keep(self, scale: float) -> bool:
        """Whether to update early in this step.

        Args:
            scale: the loss scale. If it has grown since the last step, gradients may overflow.
        """
        grown = 0.0 < self._scale < scale
        clips = len(self._factors) == REFUSALS and all(self._factors)
        return not (grown or clips or self._pause)

    def stepped(self, *, other_factor: bool, scale: float, started: int, kept: int) -> None:
        """Records a step.

        Args:
            other_factor: whether gradients were clipped or overflowed.
            scale: the loss scale of its gradients.
            started: the number of chunks that were updated early.
            kept: the number of them whose new states were kept.
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
        engine: the engine of the chunks.
        user: the optimizer.
        shards: its shards.
    """

    def __init__(self, engine: Engine, user: UserOptimizer, shards: Shards) -> None:
        self._engine, self._user, self._shards = engine, user, shards
        self._begun: dict[int, Shard] = {}
        self._backwards = 0  # backwards of the last step; 0 before the first
        self.forecast = Forecast()
        """The prediction whether new states will be kept."""

    def prepare(self) -> None:
        """Allocates the second sets of states now, as far as the optimizer has states, so that no step allocates."""
        for shard in self._shards:
            if shard.chunk.plan.home.early:
                shard.make_second()

    def begin(self, chunk: Chunk, scale: float) -> None:
        """Updates a chunk early if the update is likely to be kept. All its gradients are on their way home.

        Args:
            chunk: a chunk that the plan updates early.
            scale: the loss scale, by which its gradients are divided.
        """
        engine, shard = self._engine, self._shards[chunk.index]
        shard.end_early(None)
        self._begun.pop(chunk.index, None)
        backwards = self._backwards or engine.plan.passes
        if engine.gradients.backward_count < backwards or not self.forecast.expects_to_keep(scale):
            return
        if engine.gradients.is_partial(chunk) or shard.writes.exist or not shard.make_second():
            return
        names = {slot.name for slot in chunk.slots}
        inputs = shard.inputs(names, 1.0 / scale, self._user.hyperparameters(), in_place=False)
        self._begun[chunk.index] = shard
        update_early(engine, shard, inputs)

    def stepping(self) -> None:
        """Notes that the optimizer's step begins."""
        self._backwards = self._engine.gradients.backward_count
        counts = self._engine.lanes.counts
        counts.early_chunks, counts.kept_chunks = len(self._begun), 0

    def stepped(self, *, other_factor: bool, scale: float) -> None:
        """Records a step that is over or was skipped.

        Args:
            other_factor: whether gradients were clipped or have overflowed.
            scale: the loss scale of its gradients.
        """
        started, kept = self._engine.lanes.counts.early_chunks, self._engine.lanes.counts.kept_chunks
        self.forecast.stepped(other_factor=other_factor, scale=scale, started=started, kept=kept)
        self.discard()

    def discard(self) -> None:
        """Discards all early updates that were not kept."""
        for shard in self._begun.values():
            shard.end_early(None)
        self._begun.clear()
