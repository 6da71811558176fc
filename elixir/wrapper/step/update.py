"""`update`: one step of one shard, and the copy of its new weights to where the model reads them.

How a shard is updated follows from the home of its chunk, and is decided in `update`:

* states on the device: the compute stream steps them; shards that `can_share` are stepped by one kernel call;
* states on the host: the lane of CPU Adam steps them after the gradients, the previous step and the last fetch;
* states on a disk: CPU Adam steps them in a buffer of the window, between a read and a write of the disk's lane;
* updated early: `update_early` has submitted the step during backward; `update` keeps its result or steps again.

`UserOptimizer.rule_for` has chosen whether the user's class steps a shard, or Adam in one pass; `EarlyUpdates` chooses
the chunks that are updated early.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import torch

from elixir.chunk.chunk import Chunk
from elixir.chunk.host_buffers import STAGING
from elixir.chunk.lanes import Work
from elixir.chunk.memory import Memory, Ticket
from elixir.chunk.state_window import StoredStates
from elixir.errors import StepError
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.rules import Inputs, scales
from elixir.wrapper.step.shard import SteppedShard, SteppedShards
from elixir.wrapper.step.user_optimizer import UserOptimizer


def update(engine: Engine, shard: SteppedShard, inputs: Inputs) -> bool:
    """Submits the update of a shard, or keeps its early update; returns whether it kept one."""
    chunk = shard.chunk
    kept = shard.end_early(inputs)
    if kept is not None:
        if chunk.plan.weight_home == "device":
            source = chunk.states if kept.rounded is None else chunk.rounded
            _return_weights(engine, chunk, shard.copy_out(inputs.arrived, kept.rounded), source)
        if engine.options.debug.poison:
            _poison_second(engine, shard)
    elif chunk.plan.update_home != "host":
        _before_compute(shard)
        if shard.rule.turn is not None:
            # In one piece on the lane: other chunks' matrices pass through the same memory there. Compute reads the
            # result next.
            engine.lanes.network.submit(partial(shard.begin_and_turn, shard.states, inputs)).wait()
        shard.step(shard.states, inputs)
        shard.copy_out(inputs.arrived)()
    elif chunk.stored is None or inputs.arrived or not shard.skips_without_gradients:
        _on_host(engine, shard, inputs)  # otherwise states on a disk would be read and written back unchanged
    return kept is not None


def can_share(shard: SteppedShard, inputs: Inputs) -> bool:
    """Whether one kernel call may update this shard and others.

    A shared call would copy gradients that it may not multiply in place, or that have another dtype. The answer must be
    the same on all ranks, whatever gradients each has: they gather weights in the order of updates.
    """
    copies = scales(inputs.factor) and not inputs.in_place
    return shard.rule.shares_call and shard.chunk.dtype == shard.states.master.dtype and not copies


def update_together(together: Sequence[tuple[SteppedShard, Inputs]]) -> None:
    """Updates shards that `can_share` by one kernel call."""
    with contextlib.ExitStack() as given:
        calls = []
        for shard, inputs in together:
            _before_compute(shard)
            shard.begin_average(shard.states, inputs)
            call = shard.rule.prepare(shard.states, inputs.multiplied(shard.states.master.dtype), given)
            calls += [] if call is None else [call]
        for call in calls[:1]:
            call()
    for shard, inputs in together:
        shard.average(shard.states)
        shard.copy_out(inputs.arrived)()


def _before_compute(shard: SteppedShard) -> None:
    shard.gradients.memory.wait()  # compute reads the gradients that a lane brings
    shard.chunk.about_to_write()  # a checkpoint may still have to copy what this step replaces


def update_early(engine: Engine, shard: SteppedShard, inputs: Inputs) -> None:
    """Submits an update into the second set of a shard's states; it changes nothing else."""
    early, chunk = shard.begin_early(inputs), shard.chunk
    run = partial(_reporting, chunk, partial(early.run, chunk.before_write, engine.host_forms))
    # Overlaps with the rest of backward. `run` begins even after work that has failed, and leaves the old states then.
    written = (chunk.second, chunk.rounded)
    engine.lanes.host_adam.submit(run, reads=early.reads, writes=written, despite_errors=True)


def _on_host(engine: Engine, shard: SteppedShard, inputs: Inputs) -> None:
    chunk, lanes = shard.chunk, engine.lanes
    # This step may change the gradients: it waits until they have arrived and early updates have read them. If the last
    # step, which writes masters and states, has failed, this one must fail, too.
    stepped = [shard.gradients.memory, chunk.states]
    written = list(stepped)
    if chunk.plan.weight_home == "host":
        written.append(chunk.at_home)  # the block of the last fetch would otherwise get some new weights
    staged, source = None, chunk.states
    if chunk.plan.returns_rounded and inputs.arrived:
        source = engine.host_buffers.take(STAGING, chunk.shard_numel * chunk.dtype.itemsize)
        staged = source.view(chunk.shard_numel, chunk.dtype)
        written.append(source)  # its last weights may still be on their way to the device
    # The current hook: a checkpoint that begins later waits for this step and saves its result.
    step: Work = partial(_reporting, chunk, partial(shard.step, shard.states, inputs, staged), chunk.before_write)
    begin: Work = partial(_reporting, chunk, partial(shard.begin, shard.states, inputs), chunk.before_write)
    read: Ticket | None = None
    if chunk.stored is not None:
        buffer, read = engine.window.begin_step(chunk.stored)
        step, begin = (partial(chunk.stored.step, buffer, read, work) for work in (step, begin))
        written.append(buffer)  # in which the step works, once it was read
    if inputs.arrived or shard.rule.turn is not None:
        turned_bytes = engine.plan.turned_bytes(chunk.plan)
        lanes.counts.host_to_device_bytes += turned_bytes
        lanes.counts.device_to_host_bytes += turned_bytes
    if shard.rule.turn is not None:
        # Its gradients must have arrived, as for the step, which comes after what the ranks exchange.
        lanes.host_adam.submit(begin, reads=stepped, writes=written)
        lanes.network.submit(shard.rule.turn, reads=[chunk.states], writes=[chunk.states])
    done = lanes.host_adam.submit(step, reads=stepped, writes=written)
    if chunk.plan.weight_home == "device" and inputs.arrived:
        write: Work = shard.copy_out(inputs.arrived, staged)
        if read is not None:
            write = partial(StoredStates.if_read, read, write)
        sources = [source]
        if read is not None and staged is None:
            sources.append(buffer)  # weights are copied from the masters in it, which must stay until then
        returned = _return_weights(engine, chunk, write, *sources)
        done = returned if staged is None else done
    if chunk.stored is not None:
        engine.window.end_step(chunk.stored, buffer, done)


def _return_weights(engine: Engine, chunk: Chunk, write: Work, *sources: Memory) -> Ticket:
    """Copies new weights from some memory to the device by `write`, the result of `copy_out`, while the next
    chunk is stepped."""
    nbytes = chunk.shard_weights.nbytes
    engine.lanes.counts.host_to_device_bytes += nbytes
    engine.lanes.counts.refreshed_bytes += nbytes
    return engine.lanes.refresh.submit(write, reads=sources, writes=[chunk.at_home], nbytes=nbytes)


def _reporting(chunk: Chunk, work: Work, release: Callable[[], None] | None = None) -> None:
    """Runs a step on a lane. Its error is raised far from here, so it names the chunk."""
    try:
        if release is not None:
            release()  # a checkpoint may still have to write or copy what this step replaces
        work()
    except Exception as error:
        name = type(error).__name__
        cause = f"{name}: {error}" if str(error) else name
        raise StepError(
            f"rank {chunk.rank}: the optimizer step of {chunk} failed on the host with {cause}. Each of its weights is "
            "either stepped or as before; the other chunks have been stepped. state_dict() gives the weights as they "
            "are"
        ) from error


def _poison_second(engine: Engine, shard: SteppedShard) -> None:
    """Fills the old states with NaN, so that a stale read shows."""
    second, chunk = shard.second, shard.chunk
    if second is None:
        return
    memory = second.master.untyped_storage()
    tensors = [torch.empty(0, dtype=torch.uint8, device="cpu").set_(memory)]
    tensors += [tensor.view(torch.uint8) for tensor in second.tensors.values()]
    if second.weights is not None and chunk.plan.weight_home == "host":
        tensors.append(second.weights.view(torch.uint8))

    def fill() -> None:
        for tensor in tensors:
            tensor.fill_(0xFF)

    # The update still reads the old states, and a fetch the weights that lay there.
    engine.lanes.host_adam.submit(fill, writes=[chunk.second, chunk.rounded])


def publish(engine: Engine, chunk: Chunk) -> None:
    """Gathers the new weights of a resident chunk on all ranks; the next use of them waits for that."""
    whole, group = chunk.weights, engine.group
    if whole is None:
        return
    if group.size > 1:
        mine = whole[chunk.mine]
        what = f"new weights of chunk {chunk.index}"  # ranks compare this text, and so the order of their updates
        engine.lanes.counts.network_bytes += whole.nbytes - mine.nbytes
        # Overlaps with the updates of the next chunks. The other ranks would otherwise get this rank's part as it was
        # before the step.
        gather = partial(group.gather, whole, mine, what)
        engine.lanes.network.submit(gather, reads=[chunk.at_home], writes=[chunk.whole])
    if chunk.whole.writer is not None:
        chunk.hold_placeholders()  # the next use of the weights waits until they are written, whether announced or not


# --- early updates ---------------------------------------------------------------------------------------------------
# `EarlyUpdates`: chooses the chunks of one optimizer that are updated early; see `EarlyUpdate`.


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

    def __init__(self, engine: Engine, user: UserOptimizer, shards: SteppedShards) -> None:
        self._engine, self._user, self._shards = engine, user, shards
        self._begun: dict[int, SteppedShard] = {}
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
