"""`update`: one step of one shard, and the copy of its new weights to where the model reads them.

How a shard is updated follows from the home of its chunk, and is decided in `update`:

* states on the device: the compute stream steps them; shards that `can_share` are stepped by one kernel call;
* states on the host: the lane of CPU Adam steps them after the gradients, the previous step and the last fetch;
* states on a disk: CPU Adam steps them in a buffer of the window, between a read and a write of the disk's lane;
* updated early: `update_early` has submitted the step during backward; `update` keeps its result or steps again.

`UserOptimizer.rule_for` has chosen whether the user's class steps a shard, or Adam in one pass.
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
from elixir.wrapper.step.early_update import Inputs, scales
from elixir.wrapper.step.shard import Shard


def update(engine: Engine, shard: Shard, inputs: Inputs) -> bool:
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


def can_share(shard: Shard, inputs: Inputs) -> bool:
    """Whether one kernel call may update this shard and others.

    A shared call would copy gradients that it may not multiply in place, or that have another dtype. The answer must be
    the same on all ranks, whatever gradients each has: they gather weights in the order of updates.
    """
    copies = scales(inputs.factor) and not inputs.in_place
    return shard.rule.shares_call and shard.chunk.dtype == shard.states.master.dtype and not copies


def update_together(together: Sequence[tuple[Shard, Inputs]]) -> None:
    """Updates shards that `can_share` by one kernel call."""
    with contextlib.ExitStack() as given:
        calls = []
        for shard, inputs in together:
            _before_compute(shard)
            factor = inputs.multiply_in_place(shard.states.master.dtype)
            call = shard.rule.prepare(shard.states, inputs, factor, given)
            calls += [] if call is None else [call]
        for call in calls[:1]:
            call()
    for shard, inputs in together:
        shard.copy_out(inputs.arrived)()


def _before_compute(shard: Shard) -> None:
    shard.gradients.memory.wait()  # compute reads the gradients that a lane brings
    shard.chunk.about_to_write()  # a checkpoint may still have to copy what this step replaces


def update_early(engine: Engine, shard: Shard, inputs: Inputs) -> None:
    """Submits an update into the second set of a shard's states; it changes nothing else."""
    early, chunk = shard.begin_early(inputs), shard.chunk
    run = partial(_reporting, chunk, partial(early.run, chunk.before_write, engine.host_forms))
    # Overlaps with the rest of backward. `run` begins even after work that has failed, and leaves the old states then.
    written = (chunk.second, chunk.rounded)
    engine.lanes.host_adam.submit(run, reads=early.reads, writes=written, despite_errors=True)


def _on_host(engine: Engine, shard: Shard, inputs: Inputs) -> None:
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
    """Copies new weights from some memory to the device by `write`, which `Shard.copy_out` returned, while the next
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


def _poison_second(engine: Engine, shard: Shard) -> None:
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
