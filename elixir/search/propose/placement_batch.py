"""Many placements of one packing at once: what they need of device and host, and what they cannot beat, by NumPy.

A *variant* gives every chunk one of its `possible_homes`, as a number of `HOMES`. The bytes are those of `MemoryModel`;
the seconds are a lower bound of those of the time model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elixir.plan.chunk_plan import Home
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.packing import Ints
from elixir.search.problem.placement import HOMES, RESIDENT, Codes, Floats, Placement
from elixir.search.simulator.simulated_cost import SimulatedCost


def possible_homes(model: MemoryModel, chunk: int, *, gathered: bool) -> tuple[int, ...]:
    """Homes that a plan may give a chunk, as numbers of `HOMES`.

    With several ranks either all chunks are resident or (but for outsized ones) none: where the rCache has nothing to
    do it does not walk, reductions wait for it, and the gradients of resident chunks would need ever more blocks.

    Args:
        model: memory of the packing.
        chunk: its id.
        gathered: with several ranks, whether all are resident.
    """
    facts, several = model.work.chunks[chunk], model.setting.world_size > 1
    found: tuple[Home, ...] = (Home.RESIDENT_HOST, Home.RESIDENT)
    away = model.setting.away(facts.trainable)
    if several and not gathered and not facts.outsized:
        found = (away, Home.DEVICE_HOST, Home.DEVICE)
    elif not several and not facts.outsized:
        found = (away, *found)
    return tuple(HOMES.index(home) for home in found if facts.trainable or home.without_states)


_LOOK_BYTES = 2 << 20
"""Bytes of the curves of device memory that are made at once: programs plan in processes that train. So few also fit a
core's cache."""


@dataclass(frozen=True)
class Look:
    """An estimate of variants, an entry for each."""

    blocks: Ints
    """The rCache blocks that fit the device next to the rest, at most one per streamed chunk; -1: not even the rest."""
    host_bytes: Ints
    """Bytes that states need at least: without those on the host, if they may spill to a disk."""
    lower_bound_s: Floats
    """No step is faster."""


class Variants:
    """The placements of one packing.

    Args:
        model: memory of the packing.
        cost: the time model.
        gathered: see `possible_homes`.
    """

    def __init__(self, model: MemoryModel, cost: SimulatedCost, *, gathered: bool = False) -> None:
        self.model, self.cost = model, cost
        chunks = range(len(model.work.chunks))
        self.homes = [possible_homes(model, chunk, gathered=gathered) for chunk in chunks]

    def codes(self, placement: Placement) -> Codes | None:
        """The variant that a placement is, as one row; None where it is none."""
        possible = all(code in homes for code, homes in zip(placement.codes.tolist(), self.homes, strict=True))
        return placement.codes if possible else None

    def neighbours(self, codes: Codes) -> Codes:
        """Variants with another home for one chunk."""
        here = codes.tolist()
        changes = [(chunk, code) for chunk, homes in enumerate(self.homes) for code in homes if code != here[chunk]]
        found = np.tile(codes, (len(changes), 1))
        for row, (chunk, code) in enumerate(changes):
            found[row, chunk] = code
        return found

    def look(self, codes: Codes, device_bytes: int, chunks: Ints | None = None, *, early: bool = False) -> Look:
        """Bytes and least seconds of the variants.

        Args:
            codes: the variants.
            device_bytes: budget of the device.
            chunks: those that the columns of `codes` stand for; all by default. Of some chunks, the others being left
                out: all with these homes need no less and are no faster.
            early: the floor holds whatever chunks are updated early.
        """
        model = self.model
        some = np.arange(len(self.homes)) if chunks is None else chunks
        curve_bytes = model.telling_stretches.base.nbytes
        rows = max(_LOOK_BYTES // max(curve_bytes, 1), 1)
        pieces = [codes[first : first + rows] for first in range(0, max(len(codes), 1), rows)]
        spare = device_bytes - np.concatenate([model.device(piece, chunks).rest_bytes for piece in pieces])
        streamed = (~RESIDENT[codes]).sum(axis=1) + len(self.homes) - len(some)
        block_bytes = model.work.packing.block_bytes
        fitting = np.minimum(spare // block_bytes, streamed) if block_bytes else np.zeros_like(spare)
        blocks = np.where(spare < 0, -1, fitting)
        host = model.host(codes, chunks)
        if model.setting.spill:
            host["optimizer_states"] = np.zeros_like(spare)
        return Look(
            blocks=blocks,
            host_bytes=np.sum(list(host.values()), axis=0),
            lower_bound_s=self.cost.lower_bound_s(model.work, some, codes, np.maximum(blocks, 0), early=early),
        )
