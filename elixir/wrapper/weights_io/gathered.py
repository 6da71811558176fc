"""Full weights shown in their parameters, outside of a step: `ElixirModule.gathered`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from elixir.chunk.chunk import Chunk, Slot, take_back
from elixir.errors import InputError
from elixir.wrapper.engine import Engine

Wanted = nn.Module | nn.Parameter | Iterable[nn.Parameter] | None
"""The parameters of a module, one, several, or all."""


@contextlib.contextmanager
def shown(engine: Engine, wanted: Wanted, write: bool) -> Iterator[None]:
    """See `ElixirModule.gathered`.

    Args:
        engine: whose chunks are gathered.
        wanted: parameters to show.
        write: whether what is written to them becomes the weights, unless an exception ends it.
    """
    uses, parameters = engine.uses, _of_model(engine, wanted)
    uses.refuse_inside("gathered()")
    engine.settle_together("gathered()")
    opened: list[tuple[Chunk, torch.Tensor, list[Slot]]] = []
    before = dict(uses.gathered)
    moved = _moved_by_user(engine)
    try:
        for chunk in engine.chunks:
            asked = [slot for slot in chunk.slots if parameters is None or slot.parameter in parameters]
            if not asked:
                continue
            if write:
                chunk.about_to_write()  # before anything counts as written to, of which a checkpoint would complain
            memory = chunk.gathered
            if memory is None:  # otherwise another `gathered` around this one holds it already
                memory = engine.whole(chunk)
                if memory is chunk.whole:
                    # What is written here must not be the weights yet, and without `write` never: `data` tells nobody.
                    memory = memory.clone()
                chunk.point_into(memory)
                chunk.gathered = memory
            opened.append((chunk, memory, asked))
            writable = {slot.parameter for slot in asked} if write else set()
            uses.gathered[chunk.index] = before.get(chunk.index, frozenset()) | writable
        yield
        if write:
            engine.cache.invalidate()  # a backward in here may have fetched what is old now
            take_back(opened)
            for chunk, memory, asked in opened:
                chunk.take(memory, asked)
                for slot in asked:
                    moved.pop(slot.parameter, None)
    finally:
        uses.gathered = before
        _hide(chunk for chunk, _, _ in opened if chunk.index not in before)
        for parameter, data in moved.items():
            parameter.data = data
        if write:
            engine.renew_shared()


def _hide(chunks: Iterable[Chunk]) -> None:
    """Their parameters point to where they did before; what they pointed to can go."""
    for chunk in chunks:
        chunk.gathered = None
        if chunk.whole is None:
            chunk.hold_placeholders()
        else:
            chunk.point_into(chunk.whole)


def _moved_by_user(engine: Engine) -> dict[nn.Parameter, torch.Tensor]:
    """The memory that somebody has given to plain parameters, which get it back afterwards."""
    plain = [chunk for chunk in engine.chunks if chunk.gathered is None and engine.is_ordinary(chunk)]
    return {
        slot.parameter: slot.parameter.data
        for chunk in plain
        if chunk.whole is not None
        for slot in chunk.moved(chunk.whole)
    }


def _of_model(engine: Engine, wanted: Wanted) -> set[nn.Parameter] | None:
    if wanted is None:
        return None
    if isinstance(wanted, nn.Module):
        wanted = wanted.parameters()
    found = [wanted] if isinstance(wanted, nn.Parameter) else list(wanted)
    foreign = [item for item in found if not (isinstance(item, nn.Parameter) and item in engine.places)]
    if foreign:
        raise InputError(
            f"gathered() takes parameters of this model, or modules of it; {len(foreign)} of {len(found)} are none"
        )
    return set(found)
