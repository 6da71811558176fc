"""Compares the bytes that a run counts with the memory that is there."""

from __future__ import annotations

from collections import Counter

from elixir.chunk.chunk import ChunkState
from elixir.chunk.host_buffers import SUMMANDS
from elixir.wrapper import ElixirModule
from tests.common import inside


def audit(module: ElixirModule) -> None:
    """Checks a wrapped model between two steps: counted bytes are those of the tensors, and blocks hold what they
    say."""
    chunks, gradients = inside.chunks(module), inside.gradients(module)
    for ticket in inside.updates(module):
        ticket.synchronize()  # updates, in which states are made and then counted
    found: dict[str, Counter[str]] = {"device": Counter(), "host": Counter()}
    for chunk in chunks:
        plan = chunk.plan
        if chunk.masters is not None and chunk.stored is None:
            found[plan.update_home]["optimizer_states"] += chunk.masters.nbytes
        if chunk.weights is not None:
            found["device"]["resident_weights"] += chunk.weights.nbytes
        if chunk.shard is not None:
            kind = "weight_shards" if plan.weight_home == "device" else "weights"
            found[plan.weight_home][kind] += chunk.shard.nbytes
        gradient = gradients.by_chunk.get(chunk.index)
        if gradient is not None:
            found[plan.update_home]["gradients"] += gradient.memory.tensor.nbytes
            if gradient.kept is not None:
                found[plan.update_home]["gradients"] += gradient.kept.memory.tensor.nbytes
        for stepper in inside.steppers(module):
            shard = stepper.shards[chunk.index] if plan.trainable else None  # type: ignore[attr-defined]
            if shard is not None and chunk.stored is None:
                found[plan.update_home]["optimizer_states"] += sum(
                    each.nbytes for each in shard.states.tensors.values()
                )
    found["host"]["gradients"] += sum(buffer.tensor.nbytes for buffer in inside.host_buffers(module, SUMMANDS))
    pool = inside.cache(module)._pool
    found["device"]["rcache"] = pool.count * pool.block_bytes
    blocks = gradients._blocks
    waiting = [leaving.memory for leaving in blocks._leaving]
    arriving = [own.opened.memory for own in gradients.by_chunk.values() if own.opened is not None]
    found["device"]["gradient_blocks"] = sum(each.tensor.nbytes for each in (*blocks._free, *waiting, *arriving))
    for home, kinds in found.items():
        counted = inside.bytes_by_kind(module, home)
        for kind, nbytes in kinds.items():
            assert counted.get(kind, 0) == nbytes, f"{kind} on the {home}: counted {counted.get(kind, 0)}, {nbytes}"
    cached = [chunk for chunk in chunks if chunk.state in (ChunkState.CACHED, ChunkState.FETCHING)]
    assert [chunk.index for chunk in cached] == list(inside.cache(module).held)
    assert pool.free == pool.count - len(cached)
    assert not any(chunk.pins for chunk in chunks), "something still uses a block"
