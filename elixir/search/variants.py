"""Many placements of one packing at once: what they need of device and host, and what they cannot beat, by NumPy.

A *variant* gives every chunk the number of one of its `possible_homes`. The bytes are those of `MemoryModel.need`, to
the byte; the seconds are a floor under those of the time model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elixir.plan import STAGING_BUFFERS
from elixir.search.cost import CostModel
from elixir.search.memory import MemoryModel, Placement
from elixir.search.packing import Ints
from elixir.search.rates import Floats

Homes = tuple[bool, bool, bool]
"""Of one chunk: resident, weights on the device, states on the device."""
Codes = npt.NDArray[np.int8]
"""[variant, chunk]: index into the chunk's homes."""


def possible_homes(model: MemoryModel, chunk: int, *, gathered: bool) -> tuple[Homes, ...]:
    """What a plan may do with a chunk.

    With several ranks either all chunks are resident or (but for outsized ones) none: where the rCache has nothing to do
    it does not walk, reductions wait for it, and the gradients of resident chunks would need ever more blocks.

    Args:
        model: memory of the packing.
        chunk: its id.
        gathered: with several ranks, whether all are resident.
    """
    facts, several = model.work.chunks[chunk], model.setting.world_size > 1
    found: tuple[Homes, ...] = ((True, True, False), (True, True, True))
    if several and not gathered and not facts.outsized:
        found = ((False, False, False), (False, True, False), (False, True, True))
    elif not several and not facts.outsized:
        found = ((False, False, False), *found)
    # A frozen chunk's states are where its weights are.
    return tuple(homes for homes in found if facts.trainable or homes[1] == homes[2])


@dataclass(frozen=True)
class Look:
    """Of variants, one entry each."""

    blocks: Ints
    """As many rCache blocks as fit the device beside the rest, at most one per streamed chunk; -1: the rest does not."""
    host_bytes: Ints
    """Where states may spill to a disk, what they need at least: without those on the host."""
    floor_s: Floats
    """No step is faster."""


class Variants:
    """The placements of one packing.

    Args:
        model: memory of the packing.
        cost: the time model.
        gathered: see `possible_homes`.
    """

    def __init__(self, model: MemoryModel, cost: CostModel, *, gathered: bool = False) -> None:
        self.model, self.cost = model, cost
        chunks = range(len(model.work.chunks))
        self.homes = [possible_homes(model, chunk, gathered=gathered) for chunk in chunks]
        self._number = [{homes: code for code, homes in enumerate(found)} for found in self.homes]
        most = max(map(len, self.homes))
        padded = [[found[min(code, len(found) - 1)] for code in range(most)] for found in self.homes]
        self._flags = np.array(padded, dtype=bool)  # [chunk, code, resident / weight / state]
        self._device_bytes = np.array([[self._device(c, homes) for homes in padded[c]] for c in chunks], dtype=np.int64)
        ranks = model.setting.ranks_per_host
        self._host_bytes = np.array(
            [[ranks * self._host(c, homes) for homes in padded[c]] for c in chunks],
            dtype=np.int64,
        )
        self._adding_bytes = np.array(
            [[ranks * model.adding_bytes(c, homes[2]) for homes in padded[c]] for c in chunks], dtype=np.int64
        )
        self._staged_bytes = np.array(
            [[ranks * model.staged_bytes(c, *homes[1:]) for homes in padded[c]] for c in chunks], dtype=np.int64
        )
        self._index = np.arange(len(chunks))
        self._read_curves()

    def codes(self, placement: Placement) -> Codes | None:
        """The variant that a placement is, as one row; None where it is none."""
        flags = zip(placement.resident, placement.weight_on_device, placement.state_on_device, strict=True)
        codes = [self._number[chunk].get(homes) for chunk, homes in enumerate(flags)]
        return None if None in codes else np.array(codes, dtype=np.int8)

    def placement(self, codes: Codes) -> Placement:
        """The placement that a row stands for."""
        resident, weight, state = self._flags[self._index, codes].T.tolist()
        return Placement(tuple(resident), tuple(weight), tuple(state))

    def look(self, codes: Codes, device_bytes: int, chunks: Ints | None = None) -> Look:
        """What the variants need, and cannot beat.

        Args:
            codes: the variants.
            device_bytes: budget of the device.
            chunks: those that the columns of `codes` stand for; all by default. Of some chunks, the others being left
                out: all with these homes need no less and are no faster.
        """
        some = self._index if chunks is None else chunks
        resident, weight, state = np.moveaxis(self._flags[some, codes], -1, 0)
        rest = self._rest_bytes(codes, state, some)
        streamed = (~resident).sum(axis=1) + len(self.homes) - len(some)
        block_bytes = self.model.work.packing.block_bytes
        spare = device_bytes - rest
        fitting = np.minimum(spare // block_bytes, streamed) if block_bytes else np.zeros_like(spare)
        blocks = np.where(spare < 0, -1, fitting)
        staged = self._staged_bytes[some, codes]
        return Look(
            blocks=blocks,
            host_bytes=self._host_bytes[some, codes].sum(axis=1)
            + self._adding_bytes[some, codes].max(axis=1, initial=0)
            + staged.max(axis=1, initial=0) * np.minimum((staged > 0).sum(axis=1), STAGING_BUFFERS),
            floor_s=self.cost.floor_s(self.model.work, some, resident, weight, state, np.maximum(blocks, 0)),
        )

    def _device(self, chunk: int, homes: Homes) -> int:
        model, (resident, weight, state) = self.model, homes
        facts = model.work.chunks[chunk]
        weights = model.weight_bytes(chunk, resident=resident) if weight else 0
        return weights + (model.state_shard_bytes(chunk, master=facts.low_precision) if state else 0)

    def _host(self, chunk: int, homes: Homes) -> int:
        weights, states, gradients = self.model.host_bytes(chunk, homes[1], homes[2])
        return weights + gradients + (0 if self.model.setting.spill else states)

    def _read_curves(self) -> None:
        model, facts = self.model, self.model.work.facts
        chunks = range(len(self.homes))
        self._trainable = np.array([chunk.trainable for chunk in model.work.chunks], dtype=bool)
        curves = np.array([model.grad_curve(chunk) for chunk in chunks], dtype=np.float64) * self._trainable[:, None]
        # Gradients only get more until the step: a slot counts where nothing later in forward, or in backward, is as high.
        slots = np.concatenate(
            [
                part[_above_all_later(model.base[part])]
                for part in (
                    np.arange(facts.first_backward_slot),
                    np.arange(facts.first_backward_slot, facts.slots - 1),
                )
            ]
        )
        self._running = model.base[slots].astype(np.float64)
        self._transient = model.transient[slots].astype(np.float64)
        self._curves = curves[:, slots]
        self._at_step, self._step_curve = float(model.base[-1]), curves[:, -1]
        self._temporary = np.array([model.step_temporary_bytes(chunk) for chunk in chunks], dtype=np.float64)
        gathers = [[model.gathers_gradients(chunk, state) for state in (False, True)] for chunk in chunks]
        self._gathers: npt.NDArray[np.bool_] = np.array(gathers, dtype=bool)
        outsized = np.array([chunk.outsized for chunk in model.work.chunks])
        self._pooled = ~outsized
        self._outsized_bytes = np.where(outsized, [chunk.bytes for chunk in model.work.chunks], 0)
        filling = np.zeros((len(chunks), facts.slots), dtype=np.float32)
        for chunk in chunks:
            first, last = model.work.chunks[chunk].grad_slots or (0, -1)
            filling[chunk, first : last + 1] = not outsized[chunk]
        self._filling = np.unique(filling, axis=1)

    def _rest_bytes(self, codes: Codes, state: npt.NDArray[np.bool_], some: Ints) -> Ints:
        """Device peak without rCache blocks; floats hold these whole numbers exactly."""
        model = self.model
        everything = len(some) == len(self.homes)
        curves, filling = (self._curves, self._filling) if everything else (self._curves[some], self._filling[some])
        on_device = state.astype(np.float64)
        gathering = np.asarray((state & self._gathers[some, 1]) | (~state & self._gathers[some, 0]), dtype=bool)
        flying = gathering.any(axis=1, keepdims=True)
        if model.setting.accumulation > 1:
            flying |= (state & self._trainable[some]).any(axis=1, keepdims=True)
        in_flight = np.where(flying, self._transient, 0.0)
        running = self._running + on_device @ curves + in_flight
        step_curve, temporary = self._step_curve[some], self._temporary[some]
        step = self._at_step + on_device @ step_curve + (on_device * temporary).max(axis=1, initial=0.0)
        peak = np.maximum(running.max(axis=1, initial=0.0), step).astype(np.int64)
        # With several ranks all gradients are gathered, whatever the homes.
        rows = gathering[:1] if model.setting.world_size > 1 else gathering
        pooled = rows & self._pooled[some]
        opened = (pooled.astype(np.float32) @ filling).max(axis=1, initial=0.0).astype(np.int64)
        grad_blocks = np.minimum(opened + model.setting.overlap, pooled.sum(axis=1))
        several = model.setting.overlap or model.setting.world_size > 1
        outsized = np.where(rows, self._outsized_bytes[some], 0).max(axis=1, initial=0) * several
        constant: Ints = self._device_bytes[some, codes].sum(axis=1)
        rest: Ints = peak + constant + grad_blocks * model.work.packing.block_bytes + outsized
        return rest


def _above_all_later(heights: Ints) -> npt.NDArray[np.bool_]:
    later = np.maximum.accumulate(heights[::-1])[::-1]
    return np.asarray(heights > np.append(later[1:], -1), dtype=bool)
