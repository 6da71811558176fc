"""`update`: one step of one shard, and the copy of its new weights to where the model reads them.

How a shard is updated follows from the home of its chunk, and is decided in `update`:

* states on the device: by compute, in its order; shards that `can_share` one call of a kernel are updated together;
* states on the host: by the lane of CPU Adam, after the gradients, the step before and the last fetch;
* states on a disk: likewise, in a buffer of the window, between a read and a write of the disk's lane;
* updated early: `update_early` has submitted it during backward, and `update` keeps the new states if they are right.

What makes the states and steps them, a class or Adam in one pass, is chosen when the shard is made
(`UserOptimizer.states_over`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import torch

from elixir.chunk.chunk import Chunk
from elixir.chunk.host_buffers import STAGING
from elixir.chunk.lanes import Ticket, Work, over, settled
from elixir.chunk.state_window import StoredStates
from elixir.errors import StepError
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.early_update import Inputs
from elixir.wrapper.step.shard import Shard

EARLY = "early"
"""Name of the reader in `MemoryUses`."""


def update(engine: Engine, shard: Shard, inputs: Inputs) -> bool:
    """Submits the update of a shard, or keeps the one that was made early; whether it was kept."""
    chunk = shard.chunk
    kept = shard.end_early(inputs)
    if kept is not None:
        chunk.home_uses.written_by(kept.ticket)
        if chunk.plan.weight_home == "device":
            _return_weights(engine, chunk, shard.copy_out(inputs.arrived, kept.rounded))
        if engine.options.debug.poison:
            _poison_second(engine, shard)
    elif chunk.plan.update_home != "host":
        _before_compute(shard)
        shard.step(shard.states, inputs)
        shard.copy_out(inputs.arrived)()
    elif chunk.stored is None or inputs.arrived or not shard.skips_without_gradients:
        _on_host(engine, shard, inputs)  # otherwise states on a disk would be read, and written back as they are
    return kept is not None


def can_share(shard: Shard, inputs: Inputs) -> bool:
    """Whether one call of a kernel may update this shard and others.

    It would copy all gradients that it may not multiply in place, or that have another dtype. All ranks must answer
    alike, whatever gradients each has: they gather weights in the order of updates.
    """
    plain = not isinstance(inputs.factor, torch.Tensor) and inputs.factor == 1.0
    return shard.states.shares_call and shard.chunk.dtype == shard.states.master.dtype and (plain or inputs.in_place)


def update_together(together: Sequence[tuple[Shard, Inputs]]) -> None:
    """Updates shards on the device by one call of a kernel for all of them, where `can_share`."""
    with contextlib.ExitStack() as given:
        for shard, inputs in together:
            _before_compute(shard)
            inputs.multiply_in_place(shard.states.master.dtype)
            shard.states.set_options(inputs.options)
            given.enter_context(shard.states.with_gradients(inputs.arrived))
        if together:
            together[0][0].states.call("step")
    for shard, inputs in together:
        shard.count_states()
        shard.copy_out(inputs.arrived)()


def _before_compute(shard: Shard) -> None:
    for ticket in shard.gradients.uses.to_read():
        ticket.wait()  # compute reads the gradients that it brings
    shard.chunk.about_to_write()  # a checkpoint may still have to copy what this step replaces


def update_early(engine: Engine, shard: Shard, inputs: Inputs) -> None:
    """Submits an update that makes new states in the second set of a shard, and changes nothing else."""
    early, chunk = shard.begin_early(inputs), shard.chunk
    run = partial(_reporting, chunk, partial(early.run, chunk.before_write, engine.host_forms))
    # `settled` lets `run` begin after work that has failed; `run` then raises that error, and nothing is kept.
    early.ticket = engine.lanes.host_adam.submit(run, after=settled(early.after))
    chunk.home_uses.read_by(EARLY, early.ticket)
    shard.gradients.uses.read_by(EARLY, early.ticket)


def _on_host(engine: Engine, shard: Shard, inputs: Inputs) -> None:
    chunk, lanes = shard.chunk, engine.lanes
    # The gradients arrive, and early updates read them. The last step writes masters and states; if it has failed, this
    # one must fail, too. The last fetch reads the shard of weights: a block would get some of them new.
    after = [*shard.gradients.uses.to_write(), *chunk.home_uses.to_write()]
    staged = None
    if chunk.plan.returns_rounded and inputs.arrived:
        stage = engine.host_buffers.take(STAGING, chunk.shard_numel * chunk.dtype.itemsize)
        staged = stage.view(chunk.shard_numel, chunk.dtype)
        # The weights that it held last may still be on their way to the device. Whether they came is no concern here.
        after += settled(stage.uses.to_write())
    # The hook of now: a checkpoint that begins later saves what this step makes, and waits for it.
    step: Work = partial(_reporting, chunk, partial(shard.step, shard.states, inputs, staged), chunk.before_write)
    read: Ticket | None = None
    if chunk.stored is not None:
        alone = chunk.stored.has_room_for_states and _makes_states(shard, inputs)
        buffer, read = engine.window.begin_step(chunk.stored, alone=alone)
        step = partial(chunk.stored.step, buffer, read, step)
        after.append(over(read))  # the buffer that the step works in is being filled
    stepped = lanes.host_adam.submit(step, after=after)
    chunk.home_uses.written_by(stepped)
    shard.gradients.uses.written_by(stepped)  # it may have multiplied them
    returned = stepped
    if chunk.plan.weight_home == "device" and inputs.arrived:
        write: Work = shard.copy_out(inputs.arrived, staged)
        returned = _return_weights(engine, chunk, write if read is None else partial(StoredStates.if_read, read, write))
    if staged is not None:
        stage.uses.written_by(returned)
    if chunk.stored is not None:
        # Weights that are not staged come from the buffer with the masters.
        engine.window.end_step(chunk.stored, buffer, returned if staged is None else stepped, alone=alone)


def _makes_states(shard: Shard, inputs: Inputs) -> bool:
    """Whether a class may make states in this step."""
    places = {segment.place for segment in shard.states.without_states()}
    return any(segment.place in places for segment, _ in inputs.arrived)


def _return_weights(engine: Engine, chunk: Chunk, write: Work) -> Ticket:
    """Copies new weights to the device by `write`, of `Shard.copy_out`, while the next chunk is stepped."""
    nbytes = chunk.shard_weights.nbytes
    # The step fills the masters or the stage that the weights come from.
    returned = engine.lanes.refresh.submit(write, after=chunk.home_uses.to_read(), nbytes=nbytes)
    engine.refreshed_bytes += nbytes
    return chunk.home_uses.written_by(returned)


def _reporting(chunk: Chunk, work: Work, release: Callable[[], None] | None = None) -> None:
    """A step on a lane, where an error is raised far from what it is about."""
    try:
        if release is not None:
            release()  # a checkpoint may still have to write, or copy, what this step replaces
        work()
    except Exception as error:
        name = type(error).__name__
        cause = f"{name}: {error}" if str(error) else name
        raise StepError(
            f"rank {chunk.rank}: the optimizer step of {chunk} failed on the host with {cause}. Each of its weights is "
            "either stepped or as before; the other chunks have been stepped. state_dict() gives the weights as they "
            "are"
        ) from error


def _poison_second(engine: Engine, shard: Shard) -> None:
    """Has what still looks at the memory of the old states see NaN."""
    second, chunk = shard.second, shard.chunk
    if second is None:
        return
    memory = second.master.untyped_storage()
    tensors = [torch.empty(0, dtype=torch.uint8, device="cpu").set_(memory)]
    tensors += [tensor.view(torch.uint8) for _, tensor, _ in second.memory()]
    if second.weights is not None and chunk.plan.weight_home == "host":
        tensors.append(second.weights.view(torch.uint8))

    def fill() -> None:
        for tensor in tensors:
            tensor.fill_(0xFF)

    # The new states are made of the old ones, and a fetch may still read the weights that lay there.
    filled = engine.lanes.host_adam.submit(fill, after=chunk.home_uses.to_write())
    chunk.home_uses.read_by(EARLY, filled)


def publish(engine: Engine, chunk: Chunk) -> Ticket | None:
    """Gathers the new weights of a resident chunk on all ranks; the work after which they may be read, if any."""
    if chunk.whole is None:
        return None
    after = chunk.home_uses.to_read() if chunk.plan.update_home == "host" else []
    group, whole = engine.group, chunk.whole
    if group.size == 1:
        if after:
            _withhold(chunk, after[0])
        return chunk.filled
    mine = whole[chunk.mine]
    what = f"new weights of chunk {chunk.index}"  # ranks compare it, and so the order of their updates
    engine.regathered_bytes += whole.nbytes - mine.nbytes
    # `after` writes this rank's part, which the other ranks would otherwise get as it was before the step.
    _withhold(chunk, engine.lanes.network.submit(lambda: group.gather(whole, mine, what), after=after))
    return chunk.filled


def _withhold(chunk: Chunk, written: Ticket) -> None:
    """Lets nobody read a resident chunk's weights before they are `written`: the next use waits, announced or not."""
    chunk.filled = written
    chunk.hold_placeholders()
