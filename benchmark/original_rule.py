"""The first Elixir's rule, written down as a peer: what it would choose, measured as our plans are.

Chunk size and block count are those with the fewest moves times size. Then weights and states of each chunk, in order
of use, get the device or the host together. Whether the rCache or the shards are served first follows from two benefits
per byte, computed with its constants for one A100 machine. It is measured generously: our schedule (clean evictions
cost nothing), our packing and our memory model (chunks that live on the device of a single rank need no block), and
none of its safety margins unless asked for.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from elixir.plan.chunk_plan import Home
from elixir.schedule import Schedule
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.packed_step import PackedStep, StepFacts
from elixir.search.problem.packing import Packing, ParamTable
from elixir.search.problem.placement import Placement, Setting
from elixir.search.propose.candidate import Candidate, weigh
from elixir.search.propose.sizes import SearchSpace
from elixir.step_trace import StepTrace

MIB = 2**20
TRIES = 4096
"""Steps between the smallest and the largest chunk size."""
REACH = 3
SMALLEST_BYTES = 32 * MIB
MARGIN_SHARE, MARGIN_BYTES, MARGIN_ACTIVATION = 0.95, 2 * 2**30, 1.25
"""It used 0.95 * (memory - 2 GiB - buffers - 1.25 * activation peak)."""


@dataclass(frozen=True)
class Choice:
    """The rule's choice and the bytes that it moves over the link in one step, per rank."""

    chunk_bytes: int
    blocks: int
    device_chunks: int
    chunks: int
    link_bytes: int
    placement: Placement

    def candidate(self, space: SearchSpace, prefetch_depth: int) -> Candidate:
        """The step of the original's plan by our time model."""
        blocks = min(self.blocks, self.placement.resident.count(False))
        return weigh(space.model(self.chunk_bytes), self.placement, blocks, prefetch_depth, space.cost)


class OriginalRule:
    """The rule for one trace and world size; `choose` may be asked for several budgets."""

    def __init__(self, trace: StepTrace, setting: Setting) -> None:
        self.trace = trace
        self.setting = setting
        self.depth = 1 if setting.overlap else 0
        table = ParamTable(trace, setting.world_size, setting.moments)
        unit = table.unit_bytes
        smallest = max(table.largest_bytes, -(-SMALLEST_BYTES // unit) * unit)
        facts = StepFacts(trace)
        self._region = self._largest_region(table)
        self._packed: list[tuple[int, MemoryModel, Schedule]] = []
        same_below = 0
        for step in range(TRIES + 1):
            size = smallest + (REACH - 1) * smallest * step // TRIES
            size = -(-size // unit) * unit
            if size < same_below:
                continue  # the same chunks in larger blocks: more bytes for the same moves
            packing = table.pack(size)
            same_below = _next_change(table, packing)
            work = PackedStep(facts, packing)
            model = MemoryModel(work, setting)
            self._packed.append((size, model, Schedule(work.required, self.depth)))

    def choose(self, device_bytes: int, *, margins: bool = False) -> Choice | None:
        """The rule's plan for a device budget; None where it finds no chunk size that fits.

        Args:
            device_bytes: of one device, for everything.
            margins: keep its safety margins.
        """
        if margins:
            activations = self.trace.activation_peak_bytes
            buffers = self.trace.buffer_bytes
            free = MARGIN_SHARE * (device_bytes - MARGIN_BYTES - buffers - MARGIN_ACTIVATION * activations)
            device_bytes = min(device_bytes, int(free) + buffers + activations)
        best: tuple[int, int, MemoryModel, Schedule, int, int] | None = None
        for size, model, schedule in self._packed:
            lower, upper = self._block_bounds(size, model, schedule, device_bytes)
            if upper < lower:
                continue
            moves = schedule.simulate(upper).loads
            if best is None or (moves * size, size) < best[:2]:
                best = (moves * size, size, model, schedule, lower, upper)
        if best is None:
            return None
        _, size, model, _, lower, upper = best
        return self._with_homes(size, model, lower, upper, device_bytes)

    def _with_homes(self, size: int, model: MemoryModel, lower: int, upper: int, device_bytes: int) -> Choice:
        cache_first = rcache_first(self.setting.world_size, self._weight_bytes(), self.setting.states.block_bytes)
        blocks = upper if cache_first else lower
        count = len(model.work.chunks)
        flags = [False] * count
        for chunk in range(count):
            flags[chunk] = True
            if model.need(self._placement(flags), blocks).device_bytes > device_bytes:
                flags[chunk] = False
        placement = self._placement(flags)
        streamed = placement.resident.count(False)
        while blocks < streamed and model.need(placement, blocks + 1).device_bytes <= device_bytes:
            blocks += 1
        return Choice(size, blocks, sum(flags), count, self._link_bytes(model, placement, blocks), placement)

    def _placement(self, flags: list[bool]) -> Placement:
        there = Home.RESIDENT if self.setting.world_size == 1 else Home.DEVICE
        return Placement(tuple(there if flag else Home.HOST for flag in flags))

    def _link_bytes(self, model: MemoryModel, placement: Placement, blocks: int) -> int:
        """Loads of chunks whose shard is on the host, and gradients that leave for states there."""
        world, chunks = self.setting.world_size, model.work.chunks
        required = [[c for c in used if not placement.resident[c]] for used in model.work.required]
        loads = Counter(Schedule(required, self.depth).simulate(blocks).chunks)
        fetched = sum(
            times * chunks[c].bytes // world for c, times in loads.items() if not placement.weight_on_device[c]
        )
        left = sum(c.grad_bytes // world for c, here in zip(chunks, placement.state_on_device, strict=True) if not here)
        return fetched + left

    def _block_bounds(self, size: int, model: MemoryModel, schedule: Schedule, device_bytes: int) -> tuple[int, int]:
        count = len(model.work.chunks)
        nowhere = self._placement([False] * count)
        spare = device_bytes - model.need(nowhere, 0).device_bytes
        upper = min(spare // model.work.packing.block_bytes, count)
        lower = max(4, math.ceil(self._region / size) + 1) + (2 if self.setting.overlap else 0)
        return max(min(lower, count), schedule.min_blocks), upper

    def _largest_region(self, table: ParamTable) -> int:
        """Bytes of the largest checkpointed module."""
        sizes = [0]
        for module in self.trace.checkpointed_modules:
            inside = [i for i, param in enumerate(self.trace.parameters) if param.name.startswith(module + ".")]
            sizes.append(sum(table.aligned[i] for i in inside))
        return max(sizes)

    def _weight_bytes(self) -> int:
        sizes = {"float64": 8, "float32": 4}
        return max(sizes.get(param.dtype, 2) for param in self.trace.parameters)


def _next_change(table: ParamTable, packing: Packing) -> int:
    """The smallest capacity at which some chunk would take its successor's first parameter as well."""
    changes = [1 << 62]
    for group in table.groups.values():
        members = set(group)
        chunks = [chunk for chunk in packing.chunks if chunk.parameters[0] in members]
        for chunk, after in pairwise(chunks):
            end = chunk.offset_bytes[-1] + table.aligned[chunk.parameters[-1]]
            changes.append(end + table.aligned[after.parameters[0]])
    return min(changes)


def rcache_first(gpus: int, weight_bytes: int, state_bytes: int) -> bool:
    """Whether one more rCache byte is worth more than moving a shard to the GPU, by its A100 constants.

    Args:
        gpus: ranks on the machine.
        weight_bytes: per element.
        state_bytes: optimizer states per element, 8 for Adam and 4 for SGD.
    """
    to_device, to_host = 16.3 * gpus + 8.7, 15.8 * gpus + 2.3  # GB/s
    adam_gpu, adam_cpu = 50.0 * gpus, 1.66 * math.log(gpus) + 5.15  # G elements/s
    # States (and, below fp32, master weights and gradients) in units of weights.
    states = {(2, 8): 7, (2, 4): 5, (4, 8): 4, (4, 4): 3}.get((min(weight_bytes, 4), state_bytes), 7)
    cache = weight_bytes / to_device + weight_bytes / to_host
    shard = gpus / states * (4 / to_device + cache + weight_bytes / to_host + 1 / adam_cpu - 1 / adam_gpu)
    return cache > shard
