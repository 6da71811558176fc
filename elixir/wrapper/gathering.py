"""Full weights shown in their parameters, outside of a step: `ElixirModule.gathered`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from elixir.chunk.chunk import Chunk
from elixir.errors import InputError
from elixir.wrapper.running import RunningPlan

Wanted = nn.Module | nn.Parameter | Iterable[nn.Parameter] | None
"""The parameters of a module, one, several, or all."""


@contextlib.contextmanager
def shown(running: RunningPlan, begin: Callable[[str], None], wanted: Wanted, write: bool) -> Iterator[None]:
    """See `ElixirModule.gathered`.

    Args:
        running: whose chunks are gathered.
        begin: waits for what is still being written, once all ranks have come here.
        wanted: parameters to show.
        write: whether what is written to them becomes the weights.
    """
    uses, parameters = running.uses, _of_model(running.chunks, wanted)
    uses.refuse_inside("gathered()")
    begin("gathered()")
    opened: list[tuple[Chunk, torch.Tensor]] = []
    before = dict(uses.gathered)
    try:
        for chunk in running.chunks:
            if parameters is not None and not any(slot.parameter in parameters for slot in chunk.slots):
                continue
            if chunk.index in before:  # another `gathered` around this one holds it already
                whole = uses.gathered_memory[chunk.index]
            else:
                whole = running.whole(chunk)
                chunk.point_into(whole)
                chunk.gathered = whole
            opened.append((chunk, whole))
            uses.gathered_memory[chunk.index] = whole
            uses.gathered[chunk.index] = write or before.get(chunk.index, False)
        yield
        if write:
            running.cache.invalidate()  # a backward in here may have fetched what is old now
            for chunk, whole in opened:
                if chunk.shard is not None:
                    chunk.shard.copy_(whole[chunk.shard_start : chunk.shard_start + chunk.shard_numel])
                chunk.follow_writes()
    finally:
        uses.gathered = before
        for chunk, _ in opened:
            if chunk.index not in before:
                del uses.gathered_memory[chunk.index]
                chunk.gathered = None
                if chunk.whole is None:
                    chunk.hold_placeholders()


def _of_model(chunks: Sequence[Chunk], wanted: Wanted) -> set[nn.Parameter] | None:
    if wanted is None:
        return None
    if isinstance(wanted, nn.Module):
        wanted = wanted.parameters()
    found = [wanted] if isinstance(wanted, nn.Parameter) else list(wanted)
    own = {slot.parameter for chunk in chunks for slot in chunk.slots}
    foreign = [item for item in found if not (isinstance(item, nn.Parameter) and item in own)]
    if foreign:
        raise InputError(
            f"gathered() takes parameters of this model, or modules of it; {len(foreign)} of {len(found)} are none"
        )
    return set(found)
