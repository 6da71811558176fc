"""Shapes of one packing: a plan as a few counts, and the bytes of thousands of them at once.

Some placements keep the states of equally many chunks on the device. The one that keeps those of the first chunks in
order of use has the least floor: the host steps what forward asks for last, whose gradients arrive first. With several
batches a step the gradients of all of them leave for the host, and backward waits less where the chunks whose states
are there are spread over the order. The weights
that the device has room for next to the states are those that a plan loads most often per byte, in order of use or
spread over it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from elixir.plan.chunk_plan import Home
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.placement import RESIDENT, Bools, Codes, Ints, Placement
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.request import HomeChoice
from elixir.search.simulator.floors import MOST_AHEAD
from elixir.search.simulator.work_times import WorkTimes
from elixir.units import LARGEST_BYTES

GRID = 17
"""Numbers of chunks with states away that are looked at together."""
PLACEMENTS = 7_000
"""Placements of one packing that are all looked at."""
IN_ORDER, SPREAD = range(2)
"""The order in which weights get the room that states leave: as forward asks for them, or spread evenly."""


class Rows(NamedTuple):
    """Placements, with as many blocks as fit."""

    codes: Codes
    blocks: Ints
    fits: Bools
    """Whether device and host have the memory, early updates and states on the disk left out."""
    host_bytes: Ints
    """Need of the host of one machine."""


@dataclass(frozen=True)
class Shape:
    """A plan as numbers."""

    family: Family
    away: int
    """Trained chunks whose states the device has not."""
    blocks: int
    """The rCache has so many at least."""
    depth: int
    """Chunks fetched ahead."""
    order: int = IN_ORDER
    share: float = 1.0
    """The part of the room for weights that they get; if none, blocks do. Where all weights fit, less than all of the
    room leaves some on the host: these come by fetches, which wait for no other chunk's new weights to return."""
    speed: float = 0.0
    """The speed of the host by which chunks are chosen to be updated early; 0: none is."""
    rule: int = 0
    """The choice, if host memory has no second set for all: spread over the order, those that forward asks for
    first, or those whose gradients arrive first."""


def levels_of(model: MemoryModel, chunk: int, *, gathered: bool) -> tuple[Home, Home, Home]:
    """The homes that a plan may give a chunk: with nothing on the device, with weights there, and with states as well.

    With several ranks either all chunks are resident or (but for outsized ones) none: where the rCache has nothing to
    do it does not walk, reductions wait for it, and the gradients of resident chunks would need ever more blocks.

    Args:
        model: memory of the packing.
        chunk: its id.
        gathered: with several ranks, whether all are resident.
    """
    facts, several = model.work.chunks[chunk], model.setting.world_size > 1
    stays = gathered or facts.outsized
    whole, hosted = Home.DEVICE, Home.DEVICE_HOST
    if stays or not several:
        whole, hosted = Home.RESIDENT, Home.RESIDENT_HOST
    away = model.setting.away(facts.trainable)
    if facts.trainable:
        return hosted if stays else away, hosted, whole
    return whole if stays else away, whole, whole


class Family:
    """Shapes of one packing.

    Args:
        model: its bytes.
        times: its orders of use.
        budgets: memory that shapes may take.
        gathered: several ranks: all chunks are gathered for the whole step; otherwise none, but for outsized ones.
        evenly: states are away of chunks spread over the order of use; otherwise of those that forward asks for last.
        homes: if they are given, each chunk has one: its level with all on the device, or with nothing.
    """

    def __init__(
        self,
        model: MemoryModel,
        times: WorkTimes,
        budgets: Budgets,
        *,
        gathered: bool,
        evenly: bool = False,
        homes: HomeChoice = "auto",
    ) -> None:
        self.model, self.budgets, self.gathered, self.evenly = model, budgets, gathered, evenly
        self.work, self.several = model.work, model.setting.world_size > 1
        self.count = len(self.work.chunks)
        self.block_bytes = self.work.packing.block_bytes
        self._before_s = times.before_first_use_s
        self._rows: dict[tuple[bytes, int, int, float], Rows] = {}
        levels = [levels_of(model, c, gathered=gathered) for c in range(self.count)]
        if homes != "auto":
            levels = [(three[2 if homes == "cuda" else 0],) * 3 for three in levels]
        self.levels: Codes = np.array([[home.number for home in three] for three in levels], dtype=np.int8)
        """[chunk, 3]: numbers of the homes with nothing on the device, with weights, with weights and states."""
        chunks = self.work.chunks if homes == "auto" else ()
        unused = [c for c, facts in enumerate(chunks) if facts.trainable and not facts.grad_bytes]
        # The gather of a resident chunk that the host steps holds up the network's lane, in which all gathers of
        # forward come after it. So those are the first whose states the device keeps.
        used = times.update_order if homes == "auto" else ()
        outsized = [c for c in used if self.several and not gathered and chunks[c].outsized]
        others = [c for c in used if c not in outsized]
        if evenly:
            others = [others[place] for place in np.argsort(_reversed_bits(np.arange(len(others)))).tolist()]
        self.steps: Ints = np.array([*outsized, *others, *unused], dtype=np.int64)
        """Trained chunks; the device gives up their states from the last on."""
        self.most_away = len(self.steps)
        self._rest: Ints = np.full(self.most_away + 1, -1, dtype=np.int64)
        ids = np.arange(self.count)
        self.weight_bytes: Ints = (
            model.device_weights[ids, self.levels[:, 1]] - model.device_weights[ids, self.levels[:, 0]]
        )
        """Device bytes of weights at their second level, by chunk."""
        # A first chunk whose states alone are too much, as an embedding's, would keep those of all others away, too.
        if len(used) and self.least_away == self.most_away:
            self.steps, self._rest[:] = np.roll(self.steps, -1), -1
            del self.least_away

    @cached_property
    def fewest(self) -> tuple[int, ...]:
        """The fewest blocks by depth, with all chunks streamed that may be."""
        depths = range(MOST_AHEAD + 1) if self.model.setting.overlap else range(1)
        stays = frozenset(np.flatnonzero(RESIDENT[self.levels[:, 0]]).tolist())
        return tuple(self.work.schedule(stays, depth).min_blocks for depth in depths)

    def depth(self, blocks: int) -> int:
        """The most chunks that so many blocks can fetch ahead."""
        return max((depth for depth, fewest in enumerate(self.fewest) if fewest <= blocks), default=0)

    @cached_property
    def _orders(self) -> tuple[Ints, Ints]:
        """Chunks in the order in which their weights get the device: most loads a byte first."""
        uses = np.bincount([c for _, chunks, _ in self.work.entries for c in chunks], minlength=self.count)
        worth = -np.round(uses * self.model.shard_bytes / np.maximum(self.weight_bytes, 1), 2)
        place = np.argsort(np.lexsort((np.arange(self.count), self._before_s)), kind="stable")
        return np.lexsort((place, worth)), np.lexsort((_reversed_bits(place), worth))

    def _base(self, away: Ints) -> tuple[Codes, Bools]:
        """Homes with the states of so many chunks, and all other weights, away; and which of `steps` the device has."""
        codes = np.tile(self.levels[:, 0], (len(away), 1))
        held: Bools = np.arange(self.most_away) < self.most_away - away[:, None]
        codes[:, self.steps] = np.where(held, self.levels[self.steps, 2], self.levels[self.steps, 0])
        return codes, held

    def _rest_bytes(self, away: Ints) -> Ints:
        """Device bytes by `away`, without blocks, and with all other weights away."""
        missing = np.unique(away[self._rest[away] < 0])
        if len(missing):
            self._rest[missing] = self.model.device(self._base(missing)[0]).rest_bytes
        return self._rest[away]

    @cached_property
    def least_away(self) -> int:
        """The fewest chunks whose states the device cannot hold; above `most_away` if nothing fits.

        It is looked for between a few numbers: a state more that is away hardly ever takes more of the device.
        """
        away = spread(0, self.most_away)
        while True:
            fits = np.flatnonzero(self._room(away, self.fewest[0])[1])
            if not len(fits) and len(away) <= self.most_away:
                away = np.arange(self.most_away + 1)
                continue
            if not len(fits):
                return self.most_away + 1
            first = int(away[fits[0]])
            before = int(away[fits[0] - 1]) if fits[0] else first - 1
            if first - before == 1:
                return first
            away = spread(before, first)

    @property
    def placement(self) -> Placement:
        """Nothing on the device that may be elsewhere; all homes, if they are given."""
        return Placement.numbered(self.levels[:, 0].tolist())

    @cached_property
    def emptiest(self) -> tuple[Placement, int]:
        """The homes and the blocks that need least of the device, whatever the host has."""
        away = np.arange(self.most_away + 1)
        weights = self._room(away, 0)[-1].sum(axis=1)
        rest = self._rest_bytes(away)
        streamed = rest + self.fewest[0] * self.block_bytes
        whole = np.where(RESIDENT[self.levels[:, 1]].all(), rest + weights, LARGEST_BYTES)
        at = int(np.minimum(streamed, whole).argmin())
        codes, here = self._base(away[at : at + 1])[0][0], streamed[at] <= whole[at]
        if not here:
            codes = np.where(codes == self.levels[:, 2], codes, self.levels[:, 1])
        return Placement.numbered(codes.tolist()), self.fewest[0] * bool(here)

    @property
    def every(self) -> Codes:
        """All placements; none if they are too many to be looked at."""
        options = [list(dict.fromkeys(three)) for three in self.levels.tolist()]
        if math.prod(map(len, options)) > PLACEMENTS:
            return np.zeros((0, self.count), dtype=np.int8)
        codes: Codes = np.zeros((1, 0), dtype=np.int8)
        for some in options:
            tiled = np.tile(np.array(some, dtype=np.int8), len(codes))
            codes = np.column_stack((np.repeat(codes, len(some), axis=0), tiled))
        return codes

    def most_on_device(self, depth: int = 0) -> tuple[Placement, int] | None:
        """The homes that leave least to the host, next to the fewest blocks; None if no shape fits the device."""
        blocks = self.fewest[min(depth, len(self.fewest) - 1)]
        away = np.arange(self.most_away + 1)
        fits = np.flatnonzero(self._room(away, blocks)[1])
        if not len(fits):
            return None
        rows = self.rows(away[fits[:1]], blocks)
        return Placement.numbered(rows.codes[0].tolist()), min(blocks, int(rows.blocks[0]))

    @property
    def most_blocks(self) -> int:
        """Blocks that fit with all states and weights away."""
        spare = int(self.budgets.device_bytes - self._rest_bytes(np.array([self.most_away]))[0])
        return min(spare // self.block_bytes, self.count) if self.block_bytes else 0

    def _room(self, away: Ints, blocks: int) -> tuple[Ints, Bools, Bools, Codes, Ints]:
        """Spare bytes without blocks, whether so many blocks fit, whether all weights do instead, homes with all other
        weights away, and bytes of each weight that is not there yet."""
        spare, (codes, held) = self.budgets.device_bytes - self._rest_bytes(away), self._base(away)
        needs = np.tile(self.weight_bytes, (len(away), 1))
        needs[:, self.steps] = np.where(held, 0, self.weight_bytes[self.steps])
        everything = (needs.sum(axis=1) <= spare) & bool(RESIDENT[self.levels[:, 1]].all())
        return spare, (spare >= blocks * self.block_bytes) | everything, everything, codes, needs

    def rows(self, away: Ints, blocks: int, order: int = IN_ORDER, share: float = 1.0) -> Rows:
        """The placements with so many states away and at least so many blocks."""
        key = away.tobytes(), blocks, order, share
        if key in self._rows:
            return self._rows[key]
        spare, fits, everything, codes, needs = self._room(away, blocks)
        chosen = self._orders[order]
        room = np.where(everything & (share == 1), spare, share * (spare - blocks * self.block_bytes))
        takes: Bools = np.zeros(needs.shape, dtype=bool)
        takes[:, chosen] = np.cumsum(needs[:, chosen], axis=1) <= room[:, None]
        codes = np.where(takes & (needs > 0), self.levels[:, 1], codes)
        streamed = (~RESIDENT[codes]).sum(axis=1)
        left = spare - (takes * needs).sum(axis=1)
        most = left // self.block_bytes if self.block_bytes else np.zeros_like(left)
        if 0 < share < 1:
            most = np.minimum(most, blocks)
        host = self.host_bytes(codes)
        found = np.where(streamed > 0, np.minimum(most, streamed), 0)
        made = self._rows[key] = Rows(codes, found, fits & (host <= self.budgets.host_bytes), host)
        return made

    def host_bytes(self, codes: Codes) -> Ints:
        """Host bytes of one machine; without states if what the host cannot hold goes to the disk."""
        found = self.model.host_bytes(codes)
        if self.model.setting.spill:
            states = self.model.host_states[np.arange(self.count), codes].sum(axis=1)
            found = found - states * self.model.setting.ranks_per_host
        return found

    def room_for(self, codes: Codes) -> tuple[Ints, Bools]:
        """Blocks that fit next to placements of this packing, no more than they stream; and whether these fit at
        all."""
        spare = self.budgets.device_bytes - self.model.device(codes).rest_bytes
        streamed = (~RESIDENT[codes]).sum(axis=1)
        blocks = np.minimum(spare // self.block_bytes, streamed) if self.block_bytes else np.zeros_like(spare)
        return np.maximum(blocks, 0), (spare >= 0) & (self.host_bytes(codes) <= self.budgets.host_bytes)

    def placed(self, shape: Shape) -> tuple[Placement, int] | None:
        """Homes of a shape but for early updates, and its blocks; None if it does not fit."""
        if not self.least_away <= shape.away <= self.most_away:
            return None
        rows = self.rows(np.array([shape.away]), shape.blocks, shape.order, shape.share)
        return (Placement.numbered(rows.codes[0].tolist()), int(rows.blocks[0])) if rows.fits[0] else None


def families(space: SearchSpace, budgets: Budgets, sizes: Iterable[int], homes: HomeChoice = "auto") -> list[Family]:
    """The families of all packings of these capacities, those that pack alike once."""
    models = dict.fromkeys(map(space.model, sizes))
    gathered = [False] if space.setting.world_size == 1 or homes == "cpu" else [False, True]
    evenly = [False] if space.setting.accumulation == 1 or homes != "auto" else [False, True]
    return [
        Family(model, space.cost.times(model), budgets, gathered=way, evenly=order, homes=homes)
        for model, way, order in product(models, gathered, evenly)
    ]


def spread(low: int, high: int, count: int = GRID) -> Ints:
    """At most so many numbers from `low` to `high`, evenly."""
    return np.unique(np.linspace(low, high, count).round().astype(np.int64))


def _reversed_bits(numbers: Ints) -> Ints:
    """Numbers from 0 on with their bits in reverse: in this order any first or last ones lie evenly."""
    bits = max(int(numbers.max(initial=0)).bit_length(), 1)
    return np.array([int(f"{number:0{bits}b}"[::-1], 2) for number in numbers.tolist()], dtype=np.int64)
