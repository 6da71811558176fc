"""All that one search looks at: the trace in the forms it needs, the budgets, and the sizes worth packing with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile
from elixir.hardware.scenario import Scenario
from elixir.plan.plan import Plan, plan_of
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.packed_step import PackedStep, StepFacts
from elixir.search.problem.packing import MIN_CHUNK_BYTES, PackedChunk, ParamTable, minimum_waste_size, round_up
from elixir.search.problem.placement import Setting, Spill
from elixir.search.request import SearchRequest
from elixir.search.simulator.simulated_cost import SimulatedCost
from elixir.step_trace import StepTrace

FEWEST_CHUNKS = 16
"""Small models get chunks below `MIN_CHUNK_BYTES`, so that there are about so many to place."""
MAX_OUTSIZED = 4
"""Capacities below the largest parameters are tried as long as no more parameters than this become outsized."""
MOST_TOGETHER = 6
"""A capacity is tried, if nothing else fits, for up to so many parameters, a largest one first."""


@dataclass(frozen=True)
class Budgets:
    """The memory that a plan may use."""

    device_bytes: int
    """Bytes of one device."""
    host_bytes: int
    """Bytes of one machine, all its ranks together."""
    disk_bytes: int = 0
    """The same of the disk; 0: no disk."""
    device_reserve_bytes: int = 0
    """Bytes of one device, kept back for what no plan counts; not in `device_bytes`."""
    host_reserve_bytes: int = 0
    """Bytes of one machine, likewise."""
    device_slack_bytes: int = 0
    """The part of `device_reserve_bytes` that a plan may have before it is refused."""
    read: tuple[Literal["device", "host"], ...] = ()
    """The budgets that nobody gave; they are what is free on this machine."""
    machine_bytes: int | None = None
    """Memory of one machine that all its processes may take together, if that was given."""
    other_bytes: int = 0
    """The part of it that is not left to the plan's host, such as libraries; 0 if it was not given."""

    @property
    def given_host_bytes(self) -> int:
        """The value of the option that gave the host's memory, ``host_memory`` or ``host_budget``."""
        return self.host_bytes if self.machine_bytes is None else self.machine_bytes

    def with_slack(self) -> Budgets:
        """The budgets without a reserve that a plan may have, too."""
        slack = self.device_slack_bytes
        return replace(
            self,
            device_bytes=self.device_bytes + slack,
            device_reserve_bytes=self.device_reserve_bytes - slack,
            device_slack_bytes=0,
        )


class SearchSpace:
    """One trace on one machine, ready to be searched.

    Args:
        trace: the step.
        hardware: the machine.
        setting: world size, states, overlap.
        compute_scale: factor on the seconds of compute.
    """

    def __init__(
        self, trace: StepTrace, hardware: HardwareProfile, setting: Setting, compute_scale: float = 1.0
    ) -> None:
        self.trace = trace
        self.hardware = hardware
        self.setting = setting
        self.compute_scale = compute_scale
        self.cost = SimulatedCost(trace, hardware, setting, compute_scale=compute_scale)
        self._costs = {(setting, Scenario()): self.cost}
        self.table = ParamTable(trace, setting.shards, setting.moments, setting.matrices)
        self.facts = StepFacts(trace)
        self._steps: dict[tuple[PackedChunk, ...], PackedStep] = {}
        self._models: dict[tuple[Setting, PackedStep], MemoryModel] = {}

    def model(self, capacity_bytes: int) -> MemoryModel:
        """Memory model (and in it workload and packing) for a capacity; capacities that pack alike share one."""
        packing = self.table.pack(capacity_bytes)
        if packing.chunks not in self._steps:
            self._steps[packing.chunks] = PackedStep(self.facts, packing)
        step = self._steps[packing.chunks]
        known = self.setting, step
        if known not in self._models:
            self._models[known] = MemoryModel(step, self.setting)
        return self._models[known]

    @property
    def without_overlap(self) -> SearchSpace:
        """The same without overlap."""
        return self._under(replace(self.setting, overlap=False))

    def with_disk(self, budgets: Budgets) -> SearchSpace:
        """The same with states on the disk that the host has no room for, if there is a budget for it."""
        spill = Spill(budgets.host_bytes, budgets.disk_bytes) if budgets.disk_bytes else None
        return self._under(replace(self.setting, spill=spill))

    def _under(self, setting: Setting) -> SearchSpace:
        """The same with another setting that packs alike."""
        return self if setting == self.setting else self.on(Scenario(), setting)

    def on(self, scenario: Scenario, setting: Setting | None = None) -> SearchSpace:
        """The same in another scenario; packings, their memory, and what is known of other scenarios are shared."""
        other = copy.copy(self)
        other.setting = setting or self.setting
        other.cost = self._cost(other.setting, scenario)
        return other

    def _cost(self, setting: Setting, scenario: Scenario) -> SimulatedCost:
        key, unclipped = (setting, scenario), replace(scenario, clipped=False)
        if key not in self._costs:
            if scenario.clipped:  # at the same rates, so that all but what is discarded takes as long
                self._costs[key] = copy.copy(self._cost(setting, unclipped))
                self._costs[key].clipped = True
            else:
                machine, like = scenario.machine(self.hardware), self._costs.get((setting, Scenario()))
                self._costs[key] = SimulatedCost(
                    self.trace, machine, setting, compute_scale=self.compute_scale, like=like
                )
        return self._costs[key]

    @cached_property
    def waste_size(self) -> int:
        """`minimum_waste_size` of the model."""
        return minimum_waste_size(self.table)

    @cached_property
    def smallest_size(self) -> int:
        """Below this, chunks would be too small for the link, or needlessly many."""
        wanted = min(MIN_CHUNK_BYTES, self.table.total_bytes // FEWEST_CHUNKS)
        return round_up(max(wanted, 1), self.table.unit_bytes)

    def sizes(self, *, outsized: bool) -> tuple[int, ...]:
        """Capacities to try, smallest first: sizes of large parameters, parts and multiples of a layer, least waste.

        Args:
            outsized: also try capacities that leave up to `MAX_OUTSIZED` parameters outsized.
        """
        table = self.table
        largest, layer = table.largest_bytes, (table.layer_bytes or (table.total_bytes,))[0]
        tried = [largest, 2 * largest, 3 * largest, self.waste_size]
        tried += [layer // 4, layer // 3, layer // 2, layer, 2 * layer]
        tried += [self.smallest_size, 2 * self.smallest_size, 4 * self.smallest_size]
        if outsized:
            tried += self._param_sizes()[1 : MAX_OUTSIZED + 1]
        return self._kept(tried, self.smallest_size, outsized=outsized)

    def tiers(self, request: SearchRequest) -> tuple[Callable[[], tuple[int, ...]], ...]:
        """Groups of capacities, each to be tried only where nothing fits with those before it."""
        if request.chunks_of is not None:
            plan = plan_of(request.chunks_of)
            return (lambda: (self.size_of(plan),),)
        outsized = request.placement == "auto"
        if request.search != "optimal":
            return (lambda: (self.waste_size,),)
        return (lambda: self.sizes(outsized=outsized), lambda: self.tight_sizes(outsized=outsized))

    def size_of(self, plan: Plan) -> int:
        """The capacity that packs the step into the chunks of a plan.

        Raises:
            InputError: none does.
        """
        parameters = self.trace.parameters
        wanted = [
            (tuple(slot.name for slot in chunk.parameters), chunk.dtype, chunk.trainable, chunk.weight_bytes)
            for chunk in plan.chunks
        ]
        weights = sorted((chunk.weight_bytes for chunk in plan.chunks), reverse=True)
        for size in dict.fromkeys((plan.block_bytes, *weights)):
            packed = self.table.pack(size).chunks if size else ()
            found = [
                (tuple(parameters[member].name for member in each.parameters), each.dtype, each.trainable, each.bytes)
                for each in packed
            ]
            if found == wanted:
                return size
        raise InputError(
            f"no chunk size packs the step of {self.trace.model_name} into the chunks of the plan in chunks_of; ask "
            "with the plan's model, dtype, frozen parameters and moments, or leave chunks_of out"
        )

    def tight_sizes(self, *, outsized: bool) -> tuple[int, ...]:
        """Capacities for when nothing else fits: below `smallest_size`, and those of a largest parameter with the next
        ones, with which few chunks are much smaller than a block."""
        table = self.table
        found = [size for size in self._param_sizes()[: MAX_OUTSIZED + 1] if size < self.smallest_size]
        for members in table.groups.values():
            sizes = [table.aligned[index] for index in members]
            starts = [at for at, size in enumerate(sizes) if size == max(table.aligned)]
            found += [sum(sizes[at : at + 1 + more]) for at in starts[:1] for more in range(1, MOST_TOGETHER)]
        return self._kept(found, 1, outsized=outsized)

    def _param_sizes(self) -> list[int]:
        """Distinct parameter sizes, largest first, while few parameters are larger."""
        return sorted({round_up(size, self.table.unit_bytes) for size in self.table.aligned}, reverse=True)

    def _kept(self, sizes: Iterable[int], smallest: int, *, outsized: bool) -> tuple[int, ...]:
        whole = round_up(self.table.total_bytes, self.table.unit_bytes)
        kept = set()
        for size in sizes:
            rounded = min(round_up(max(size, smallest), self.table.unit_bytes), whole)
            larger = sum(amount > rounded for amount in self.table.aligned)
            if larger == 0 or (outsized and larger <= MAX_OUTSIZED):
                kept.add(rounded)
        return tuple(sorted(kept))
