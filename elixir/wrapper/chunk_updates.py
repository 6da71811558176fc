"""Steps of single chunks on the lanes, and their new weights on the way to where the model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from elixir.chunk.chunk import Chunk
from elixir.chunk.lanes import Ticket
from elixir.wrapper.chunk_optimizer import Arrived, ChunkOptimizer

if TYPE_CHECKING:
    from elixir.wrapper.module import ElixirModule


def update(
    module: ElixirModule,
    part: ChunkOptimizer,
    arrived: Arrived,
    factor: float | torch.Tensor,
    hyperparameters: list[dict[str, Any]],
    behind: Sequence[Ticket] = (),
) -> None:
    """Step one chunk: on the host behind `behind` and beside what comes next, on the device at once."""
    chunk, lanes = part.chunk, module._lanes
    if chunk.plan.state_home != "host":
        part.step(arrived, factor, hyperparameters)
        part.write_weights(arrived)
        return
    # If the step before failed, so does this; and the shard may still be on its way into a block.
    before = [*behind, *(ticket for ticket in (chunk.updated, chunk.fetched) if ticket is not None)]
    stage = module.staging.take() if chunk.plan.returns_rounded and arrived else None
    staged = None if stage is None else stage.view(chunk)
    if stage is not None and stage.left is not None:
        before.append(stage.left)
    stepped = lanes.host_adam.submit(partial(part.step, arrived, factor, hyperparameters, staged), after=before)
    moved_bytes = chunk.shard_weights.nbytes if chunk.plan.weight_home == "device" and arrived else 0
    write = partial(part.write_weights, arrived, staged)
    # New weights go to the device beside the step of the next chunk.
    writes = lanes.refresh if moved_bytes else lanes.host_adam
    chunk.updated = stepped  # should submitting raise what the step has raised, the next step does, too
    chunk.updated = writes.submit(write, after=[stepped], nbytes=moved_bytes)
    if stage is not None:
        stage.left = chunk.updated
    module.account.refreshed_bytes += moved_bytes


def publish(module: ElixirModule, chunk: Chunk) -> Ticket | None:
    """Have the new weights of a resident chunk on every rank; when its next use may read them, where it must wait."""
    if chunk.whole is None:
        return None
    after = [chunk.updated] if chunk.plan.state_home == "host" and chunk.updated is not None else []
    group, whole = module._group, chunk.whole
    if group.size == 1:
        chunk.filled = after[0] if after else None
        return chunk.filled
    mine = whole[chunk.shard_start : chunk.shard_start + chunk.shard_numel]
    module.account.regathered_bytes += whole.nbytes - mine.nbytes
    chunk.filled = module._lanes.network.submit(lambda: group.gather(whole, mine), after=after)
    return chunk.filled
