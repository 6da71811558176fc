"""Ways to fill the device of one packing, for any number of blocks and any depth of prefetch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.placement import Placement
from elixir.search.propose.candidate import Candidate, settled, weigh
from elixir.search.propose.disk_overflow import spilled
from elixir.search.propose.greedy import PlacementBuilder, by_saving, loads_per_chunk
from elixir.search.simulator.simulated_cost import SimulatedCost
from elixir.units import LARGEST_BYTES


class Fillings:
    """Candidates of one packing with the homes that simple rules choose.

    The rules know depth only by the order of chunks that they give, so a filling is shared by depths of the same order.

    Args:
        model: memory of the packing.
        device_bytes: budget.
        cost: the time model.
    """

    def __init__(self, model: MemoryModel, device_bytes: int, cost: SimulatedCost) -> None:
        self.model, self._device_bytes, self._cost = model, device_bytes, cost
        self._single = model.setting.world_size == 1
        self._filled: dict[tuple[object, ...], PlacementBuilder | None] = {}
        self._known: dict[tuple[Placement, int, int], Candidate] = {}

    @cached_property
    def _empty(self) -> PlacementBuilder:
        return PlacementBuilder(self.model, 0)

    @cached_property
    def _most_blocks(self) -> int:
        return self._empty.most_blocks(self._device_bytes)

    def block_range(self, depth: int) -> range:
        """Legal block counts when all that can be streamed is; the one fewest count where not even that fits."""
        fewest = self.model.work.schedule(self._empty.placement().residents, depth).min_blocks
        return range(fewest, max(self._most_blocks, fewest) + 1)

    def at(
        self, blocks: int, depth: int, most_s: float = math.inf, most_host_bytes: int = LARGEST_BYTES
    ) -> Iterator[Candidate]:
        """Candidates with so many blocks, each with homes chosen otherwise; without those that need more than
        `most_host_bytes`, and maybe without those that take longer than `most_s`."""
        for builder in self._placed(blocks, depth):
            choice = settled(self.model, builder, depth, self._device_bytes)
            candidate = None if choice is None else self._weighed(*choice, depth, most_s, most_host_bytes)
            if candidate is not None:
                yield candidate

    def _weighed(
        self, placement: Placement, blocks: int, depth: int, most_s: float, most_host_bytes: int
    ) -> Candidate | None:
        key = (placement, blocks, depth)
        if key not in self._known:
            # What cannot be taken is not simulated.
            host_bytes = sum(self.model.host_parts(spilled(self.model, placement)).values())
            if host_bytes > most_host_bytes:
                return None
            if most_s < math.inf and self._cost.lower_bound_of(self.model.work, placement, blocks, depth) > most_s:
                return None
            self._known[key] = weigh(self.model, placement, blocks, depth, self._cost)
        return self._known[key]

    def _placed(self, blocks: int, depth: int) -> Iterator[PlacementBuilder]:
        chunks = tuple(range(len(self.model.work.chunks)))
        plain = self._fill(blocks, weights=(), whole=chunks, others=not self._single)
        if plain is None:
            return
        yield plain
        schedule = self.model.work.schedule(self._empty.placement().residents, depth)
        if blocks < schedule.min_blocks:
            return
        loads = loads_per_chunk(len(chunks), schedule.simulate(blocks).chunks)
        weights = () if self._single else (c for c in by_saving(self.model, loads, whole=False) if loads[c] > 1)
        whole = by_saving(self.model, loads, whole=True)
        saving = self._fill(blocks, weights=tuple(weights), whole=tuple(whole), others=False)
        if saving is not None:
            yield saving

    def hosting(self, hosted: int, blocks: int, depth: int, part: float = 1.0) -> tuple[Placement, int] | None:
        """Homes with the states of the last `hosted` chunks that forward asks for on the host, or of more if not so
        many fit the device, and at least `blocks` blocks: their number; None if that does not fit.

        Updates of these come last, and their gradients first. Weights stay on the device as far as they fit `part` of
        its memory.
        """
        order = self.update_order
        away = frozenset(order[len(order) - hosted :]) if hosted else frozenset()
        whole = tuple(c for c in self._by_use if c not in away)
        builder = self._fill(blocks, weights=(), whole=whole, others=True, part=part)
        return None if builder is None else settled(self.model, builder, depth, int(part * self._device_bytes))

    @property
    def update_order(self) -> list[int]:
        """Chunks that the optimizer steps, in the order in which forward asks for them."""
        return self._cost.known(self.model.work).times.update_order

    @cached_property
    def _by_use(self) -> tuple[int, ...]:
        """All chunks in the order in which forward asks for them."""
        place = {chunk: index for index, chunk in enumerate(self.update_order)}
        count = len(self.model.work.chunks)
        return tuple(sorted(range(count), key=lambda chunk: (place.get(chunk, count), chunk)))

    def _fill(
        self, blocks: int, *, weights: tuple[int, ...], whole: tuple[int, ...], others: bool, part: float = 1.0
    ) -> PlacementBuilder | None:
        """`part` of the device with as many as fit of `weights`, then of `whole` with their states, then of all other
        weights."""
        key = (blocks, weights, whole, others, part)
        if key not in self._filled:
            builder, budget = self._empty.with_blocks(blocks), int(part * self._device_bytes)
            fits = builder.squeeze(budget)
            if fits:
                builder.move_all(weights, state=False, resident=False, budget_bytes=budget)
                builder.move_all(whole, state=True, resident=self._single, budget_bytes=budget)
                rest = [chunk for chunk in self._by_use if not builder.weight[chunk]] if others else []
                builder.move_all(rest, state=False, resident=self._single, budget_bytes=budget)
            self._filled[key] = builder if fits else None
        return self._filled[key]
