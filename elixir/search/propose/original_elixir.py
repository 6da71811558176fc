"""The choice of the first Elixir: no plan of ours that leaves the device may be slower.

Its rule: the chunk size and block count with the fewest moves times size, then homes for weights and states together,
chunk by chunk in order of use; either the rCache gets its share of the device first, or the shards do. Both orders are
worked out here on our memory model and our schedule, so that what it gives could be run.
"""

from __future__ import annotations

import numpy as np

from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.packing import Ints
from elixir.search.propose.candidate import Candidate, weigh
from elixir.search.propose.greedy import PlacementBuilder
from elixir.search.propose.sizes import SearchSpace

FEWEST_BLOCKS = 4
"""The first Elixir never used fewer blocks, two more with overlap."""
OVERLAP_BLOCKS = 2


def classic_candidates(space: SearchSpace, device_bytes: int, prefetch_depth: int) -> list[Candidate]:
    """The rule's one or two proposals; empty where it finds no chunk size that fits."""
    region = _largest_checkpointed_bytes(space)
    best: tuple[int, int, MemoryModel, int, int] | None = None
    survey = space.table.grid
    lower_bounds = _least_moves(survey.forward_chunks, survey.backward_chunks, survey.block_bytes, device_bytes)
    distinct = survey.distinct()
    least_scores = lower_bounds * survey.sizes
    for index in distinct[np.argsort(least_scores[distinct], kind="stable")].tolist():
        size = int(survey.sizes[index])
        if best is not None and (int(least_scores[index]), size) >= best[:2]:
            continue
        model = space.model(size)
        chunks = len(model.work.chunks)
        lower = max(FEWEST_BLOCKS, -(-region // size) + 1) + (OVERLAP_BLOCKS if space.setting.overlap else 0)
        lower = max(min(lower, chunks), model.work.schedule(frozenset(), prefetch_depth).min_blocks)
        upper = PlacementBuilder(model, 0, give_back=False).most_blocks(device_bytes)
        if upper < lower:
            continue
        score = model.work.schedule(frozenset(), prefetch_depth).simulate(upper).loads * size
        if best is None or (score, size) < best[:2]:
            best = (score, size, model, lower, upper)
    if best is None:
        return []
    _, _, model, lower, upper = best
    return [
        _with_homes(space, model, blocks, device_bytes, prefetch_depth, more_blocks=blocks == lower)
        for blocks in sorted({lower, upper})
    ]


def _with_homes(
    space: SearchSpace, model: MemoryModel, blocks: int, device_bytes: int, prefetch_depth: int, *, more_blocks: bool
) -> Candidate:
    """Gives chunks the device in order of use, next to `blocks` blocks; then more blocks if any memory is left."""
    builder = PlacementBuilder(model, blocks, give_back=False)
    chunks = range(len(model.work.chunks))
    builder.move_all(chunks, state=True, resident=space.setting.world_size == 1, budget_bytes=device_bytes)
    if more_blocks:
        blocks = max(builder.most_blocks(device_bytes), min(blocks, builder.streamed))
    return weigh(model, builder.placement(), min(blocks, builder.streamed), prefetch_depth, space.cost)


def _least_moves(forward: Ints, backward: Ints, block_bytes: Ints, device_bytes: int) -> Ints:
    """Every chunk that forward uses comes in once, and in backward all but what the blocks may have kept."""
    least: Ints = forward + np.maximum(backward - device_bytes // block_bytes, 0)
    return least


def _largest_checkpointed_bytes(space: SearchSpace) -> int:
    sums = dict.fromkeys(space.trace.checkpointed_modules, 0)
    for param, size in zip(space.trace.parameters, space.table.aligned, strict=True):
        module = param.name
        while "." in module:
            module = module.rpartition(".")[0]
            if module in sums:
                sums[module] += size
    return max(sums.values(), default=0)
