"""`shown`: shows full weights in their parameters, outside of a step; see `ElixirModule.gathered`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from elixir.chunk.chunk import Chunk, Slot, take_back
from elixir.errors import InputError
from elixir.models.quantised import flat
from elixir.wrapper.engine import Engine
from elixir.wrapper.whole_weights import whole

Wanted = nn.Module | nn.Parameter | Iterable[nn.Parameter] | None
"""The parameters of a module, one parameter, several, or None for all."""


@contextlib.contextmanager
def shown(engine: Engine, wanted: Wanted, write: bool) -> Iterator[None]:
    """See `ElixirModule.gathered`.

    Args:
        engine: the engine of the chunks.
        wanted: the parameters to show.
        write: whether writes become the weights, unless an exception ends the context.
    """
    engine.refuse_inside("gathered()")
    engine.refuse_in_pass("gathered()")
    uses, parameters = engine.uses, _of_model(engine, wanted)
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
                chunk.about_to_write()  # before versions change, at which a checkpoint would raise
            memory = chunk.shown
            if memory is None:  # otherwise another `gathered` around this one holds it
                memory = whole(engine, chunk)
                if memory is chunk.weights:
                    # Writes must not reach the weights before the end, and without `write` never; writes through `data`
                    # are not announced.
                    memory = memory.clone()
                chunk.point_into(memory)
                chunk.show_attributes(memory)
                chunk.shown = memory
            opened.append((chunk, memory, asked))
            writable = {slot.parameter for slot in asked} if write else set()
            uses.gathered[chunk.index] = before.get(chunk.index, frozenset()) | writable
        yield
        if write:
            engine.cache.invalidate()  # a forward inside of the context may have fetched old weights
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


def _hide(chunks: Iterable[Chunk]) -> None:
    """Points the parameters of chunks back to where they pointed before, and frees the shown memory."""
    for chunk in chunks:
        chunk.shown = None
        chunk.show_attributes(None)
        if chunk.weights is None:
            chunk.hold_placeholders()
        else:
            chunk.point_into(chunk.weights)


def _moved_by_user(engine: Engine) -> dict[nn.Parameter, torch.Tensor]:
    """The memory that the user has given to plain parameters, which get it back afterwards."""
    plain = [chunk for chunk in engine.chunks if chunk.shown is None and engine.is_ordinary(chunk)]
    return {
        slot.parameter: slot.parameter.data
        for chunk in plain
        if chunk.weights is not None
        for slot in chunk.moved(chunk.weights)
    }


def _of_model(engine: Engine, wanted: Wanted) -> set[nn.Parameter] | None:
    if wanted is None:
        return None
    if isinstance(wanted, nn.Module):
        wanted = wanted.parameters()
    given = [wanted] if isinstance(wanted, nn.Parameter) else list(wanted)
    found = [part for each in given for _, part in flat("", each)]
    foreign = [item for item in found if not (isinstance(item, nn.Parameter) and item in engine.places)]
    if foreign:
        raise InputError(
            f"gathered() takes parameters of this model, or modules of it; {len(foreign)} of {len(found)} are none"
        )
    return {part for part in found if isinstance(part, nn.Parameter)}
