"""`update`: one step of one shard, and the way of its new weights to where the model reads them.

Where masters and states live decides how (`Chunk.plan`): on the device in the order of compute; on the host by the lane
of CPU Adam, while what comes next runs; on a disk likewise, between a read and a write of the disk's lane. Where the
plan lets new states be made early, `update_early` has submitted that during backward, and `update` keeps them if they
are right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import torch

from elixir.chunk.chunk import Chunk
from elixir.chunk.host_buffers import STAGING
from elixir.chunk.lanes import Ticket, Work, over, settled
from elixir.errors import StepError
from elixir.wrapper.build.weights import few
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.early import Inputs
from elixir.wrapper.step.shard import Shard

EARLY = "early"
"""Name of the reader in `MemoryUses`."""


def update(engine: Engine, shard: Shard, inputs: Inputs) -> bool:
    """Submits the update of a shard, or keeps the one that was made early; whether it was kept."""
    chunk = shard.chunk
    kept = shard.end_early(inputs)
    if kept is not None:
        chunk.home_uses.written_by(kept.made)
        if chunk.plan.weight_home == "device":
            _return_weights(engine, chunk, shard.writing(inputs.arrived, kept.rounded), returns=True)
        if engine.options.debug.poison:
            _poison_second(engine, shard)
    elif chunk.plan.update_home != "host":
        _before_compute(shard)
        shard.step(shard.states, inputs)
        shard.writing(inputs.arrived)()
    elif chunk.stored is None or inputs.arrived or not shard.rests_without_gradients:  # else nothing moves either
        _on_host(engine, shard, inputs)
    return kept is not None


def can_share(shard: Shard, inputs: Inputs) -> bool:
    """Whether one call of a kernel may update this shard and others, which takes no copies of gradients."""
    plain = not isinstance(inputs.factor, torch.Tensor) and inputs.factor == 1.0
    alike = bool(inputs.arrived) and inputs.arrived[0][1].dtype == shard.states.master.dtype
    return shard.states.shares_call and alike and (plain or inputs.in_place)


def update_together(together: Sequence[tuple[Shard, Inputs]]) -> None:
    """Updates shards on the device by one call of a kernel for all of them, where `can_share`."""
    with contextlib.ExitStack() as given:
        for shard, inputs in together:
            _before_compute(shard)
            inputs.multiplied(shard.states.master.dtype)
            shard.states.set_options(inputs.options)
            given.enter_context(shard.states.given(inputs.arrived))
        if together:
            together[0][0].states.call("step")
    for shard, inputs in together:
        shard.count_states()
        shard.writing(inputs.arrived)()


def _before_compute(shard: Shard) -> None:
    for ticket in shard.gradients.uses.to_read():
        ticket.wait()  # compute reads the gradients that it brings
    shard.chunk.about_to_write()  # a checkpoint may still have to copy what this step replaces


def update_early(engine: Engine, shard: Shard, inputs: Inputs) -> None:
    """Submits an update that makes new states in the second set of a shard, and changes nothing else."""
    early, chunk = shard.begin_early(inputs), shard.chunk
    run = partial(_reporting, chunk, partial(early.run, chunk.before_write, engine.host_forms))
    # Of work that has failed `run` raises what it raised, so that what was never made is not kept.
    early.made = engine.lanes.host_adam.submit(run, after=settled(early.after))
    chunk.home_uses.read_by(EARLY, early.made)
    shard.gradients.uses.read_by(EARLY, early.made)


def _on_host(engine: Engine, shard: Shard, inputs: Inputs) -> None:
    chunk, lanes = shard.chunk, engine.lanes
    # The gradients arrive, and early updates read them. The step before writes masters and states, and if it failed, so
    # must this. The fetch before reads the shard of weights: a block would get some of them new.
    after = [*shard.gradients.uses.to_write(), *chunk.home_uses.to_write()]
    staged = None
    if chunk.plan.returns_rounded and inputs.arrived:
        stage = engine.host_buffers.take(STAGING, chunk.shard_numel * chunk.dtype.itemsize)
        staged = stage.view(chunk.shard_numel, chunk.dtype)
        # The weights that it held last may still be on their way to the device; whether they came is not this step's.
        after += settled(stage.uses.to_write())
    # As of now: a checkpoint that begins later saves what this step makes, and waits for it.
    step: Work = partial(_reporting, chunk, partial(shard.step, shard.states, inputs, staged), chunk.before_write)
    write: Work = shard.writing(inputs.arrived, staged)
    if chunk.stored is not None:
        alone = chunk.stored.has_room_for_states and _makes_states(shard, inputs)
        buffer, read = engine.window.begin_step(chunk.stored, alone=alone)
        step = partial(chunk.stored.step, buffer, read, step)
        write = partial(chunk.stored.if_read, read, write)
        after.append(over(read))  # the buffer that the step works in is being filled
    stepped = lanes.host_adam.submit(step, after=after)
    chunk.home_uses.written_by(stepped)
    shard.gradients.uses.written_by(stepped)  # it may have multiplied them
    returned = _return_weights(engine, chunk, write, returns=bool(inputs.arrived))
    if staged is not None:
        stage.uses.written_by(returned)
    if chunk.stored is not None:
        # Weights that are not staged come from the buffer with the masters.
        engine.window.end_step(chunk.stored, buffer, returned if staged is None else stepped, alone=alone)


def _makes_states(shard: Shard, inputs: Inputs) -> bool:
    """Whether a class may make states in this step."""
    places = {segment.place for segment in shard.states.lacking()}
    return any(segment.place in places for segment, _ in inputs.arrived)


def _return_weights(engine: Engine, chunk: Chunk, write: Work, *, returns: bool) -> Ticket:
    """Has the new weights of a chunk be where they live, after the step on the host that makes them.

    Args:
        engine: of the chunk.
        chunk: whose weights they are.
        write: of `Shard.writing`.
        returns: whether there are new ones.
    """
    moved_bytes = chunk.shard_weights.nbytes if chunk.plan.weight_home == "device" and returns else 0
    # New weights go to the device while the next chunk is stepped. The step fills the masters or the stage that they
    # come from. Should submitting raise what the step has raised, the next step does, too.
    lane = engine.lanes.refresh if moved_bytes else engine.lanes.host_adam
    returned = lane.submit(write, after=chunk.home_uses.to_read(), nbytes=moved_bytes)
    engine.refreshed_bytes += moved_bytes
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
            f"rank {chunk.rank}: the optimizer step of chunk {chunk.index} "
            f"({few([slot.name for slot in chunk.slots])}) failed on the host with {cause}. Each of its weights "
            "is either stepped or as before; the other chunks have been stepped. state_dict() gives the weights as "
            "they are"
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
    """Has the new weights of a resident chunk on every rank; when its next use may read them, where it must wait."""
    if chunk.whole is None:
        return None
    after = chunk.home_uses.to_read() if chunk.plan.update_home == "host" else []
    group, whole = engine.group, chunk.whole
    if group.size == 1:
        if after:
            _withhold(chunk, after[0])
        return chunk.filled
    mine = whole[chunk.mine]
    engine.regathered_bytes += whole.nbytes - mine.nbytes
    # `after` writes this rank's part, which the other ranks would otherwise get as it was before the step.
    _withhold(chunk, engine.lanes.network.submit(lambda: group.gather(whole, mine), after=after))
    return chunk.filled


def _withhold(chunk: Chunk, written: Ticket) -> None:
    """Lets nobody read a resident chunk's weights before they are `written`: the next use waits, announced or not."""
    chunk.filled = written
    chunk.hold_placeholders()
