"""Steps of single chunks on the lanes, and their new weights on the way to where the model reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from elixir.chunk.chunk import Chunk
from elixir.chunk.host_buffers import STAGING, HostBuffer
from elixir.chunk.lanes import Ticket, Work, over, settled
from elixir.errors import StepError
from elixir.wrapper.build.weights import few
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.chunk_optimizer import ChunkOptimizer
from elixir.wrapper.step.segments import Arrived


def update(
    engine: Engine,
    part: ChunkOptimizer,
    arrived: Arrived,
    factor: float | torch.Tensor,
    hyperparameters: list[dict[str, Any]],
    *,
    in_place: bool = False,
) -> None:
    """Steps one chunk once its gradients have arrived: on the host while what comes next runs, on the device in the
    order of compute."""
    chunk, lanes = part.chunk, engine.lanes
    if chunk.plan.update_home != "host":
        for ticket in part.gradient_uses.to_read():
            ticket.wait()  # compute reads the gradients that it brings
        chunk.about_to_write()  # a checkpoint may still have to copy what this step replaces
        part.step(arrived, factor, hyperparameters, in_place=in_place)
        part.write_weights(arrived)
        return
    if chunk.stored is not None and not arrived and part.rests_without_gradients:
        return  # nothing to step, and so nothing to move
    # The gradients arrive, and early steps read them. The step before writes masters and states, and if it failed, so
    # must this. The fetch before reads the shard of weights: a block would get some of them new.
    before = [*part.gradient_uses.to_write(), *chunk.home_uses.to_write()]
    stage = staged = None
    if chunk.plan.returns_rounded and arrived:
        stage = engine.host_buffers.take(STAGING, chunk.shard_numel * chunk.dtype.itemsize)
        staged = stage.view(chunk.shard_numel, chunk.dtype)
        # The weights that it held last may still be on their way to the device; whether they came is not this step's.
        before += settled(stage.uses.to_write())
    # As of now: a checkpoint that begins later saves what this step makes, and waits for it.
    step: Work = partial(
        _step, part, chunk.before_write, arrived, factor, hyperparameters, staged, in_place=in_place, states=part.states
    )
    write: Work = part.writing(arrived, staged)
    from_disk: tuple[HostBuffer, Ticket] | None = None
    if chunk.stored is not None:
        alone = part.lacks_states(arrived)
        from_disk = buffer, read = engine.window.begin_step(chunk.stored, alone=alone)
        step = partial(chunk.stored.step, buffer, read, step)
        write = partial(chunk.stored.if_read, read, write)
        before.append(over(read))  # the buffer that the step works in is being filled
    stepped = lanes.host_adam.submit(step, after=before)
    part.gradient_uses.written_by(chunk.home_uses.written_by(stepped))
    returned = return_weights(engine, chunk, write, returns=bool(arrived))
    if stage is not None:
        stage.uses.written_by(returned)
    if chunk.stored is not None and from_disk is not None:
        # Weights that are not staged come from the buffer with the masters.
        filled = returned if staged is None else stepped
        engine.window.end_step(chunk.stored, from_disk[0], filled, alone=alone)


def return_weights(engine: Engine, chunk: Chunk, write: Work, *, returns: bool) -> Ticket:
    """Has the new weights of a chunk be where they live, after the step on the host that makes them; gives its
    ticket.

    Args:
        engine: of the chunk.
        chunk: whose weights they are.
        write: of `ChunkOptimizer.writing`.
        returns: whether there are new ones.
    """
    lanes = engine.lanes
    moved_bytes = chunk.shard_weights.nbytes if chunk.plan.weight_home == "device" and returns else 0
    # New weights go to the device while the next chunk is stepped. The step fills the masters or the stage that they
    # come from. Should submitting raise what the step has raised, the next step does, too.
    writes = lanes.refresh if moved_bytes else lanes.host_adam
    returned = writes.submit(write, after=chunk.home_uses.to_read(), nbytes=moved_bytes)
    engine.refreshed_bytes += moved_bytes
    return chunk.home_uses.written_by(returned)


def _step(
    part: ChunkOptimizer, release: Callable[[], None] | None, arrived: Arrived, *rest: Any, **options: Any
) -> None:
    """A step on a lane, where an error is raised far from what it is about."""
    try:
        if release is not None:
            release()  # a checkpoint may still have to write, or copy, what this step replaces
        part.step(arrived, *rest, **options)
    except Exception as error:
        raise failed_step(part.chunk, error) from error


def failed_step(chunk: Chunk, error: Exception) -> StepError:
    """For a step on the host that has raised `error`."""
    name = type(error).__name__
    cause = f"{name}: {error}" if str(error) else name
    return StepError(
        f"rank {chunk.rank}: the optimizer step of chunk {chunk.index} "
        f"({few([slot.name for slot in chunk.slots])}) failed on "
        f"the host with {cause}. Each of its weights is either stepped or as before; the other chunks have been "
        "stepped. "
        "state_dict() gives the weights as they are"
    )


def publish(engine: Engine, chunk: Chunk) -> Ticket | None:
    """Have the new weights of a resident chunk on every rank; when its next use may read them, where it must wait."""
    if chunk.whole is None:
        return None
    after = chunk.home_uses.to_read() if chunk.plan.update_home == "host" else []
    group, whole = engine.group, chunk.whole
    if group.size == 1:
        if after:
            _withhold(chunk, after[0])
        return chunk.filled
    mine = whole[chunk.shard_start : chunk.shard_start + chunk.shard_numel]
    engine.regathered_bytes += whole.nbytes - mine.nbytes
    # `after` writes this rank's part, which the other ranks would otherwise get as it was before the step.
    _withhold(chunk, engine.lanes.network.submit(lambda: group.gather(whole, mine), after=after))
    return chunk.filled


def _withhold(chunk: Chunk, written: Ticket) -> None:
    """Let nobody read a resident chunk's weights before they are `written`: the next use waits, announced or not."""
    chunk.filled = written
    chunk.hold_placeholders()
