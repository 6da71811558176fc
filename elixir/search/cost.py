"""What one rank moves in a step, and the interface of time models, of which `SimulatedCost` is the one in use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from elixir.schedule import ScheduleResult
from elixir.search.memory import MemoryModel, Placement
from elixir.search.packing import Ints
from elixir.search.workload import Workload


@dataclass(frozen=True)
class Traffic:
    """What one rank moves and updates in one step."""

    fetched_forward_bytes: int
    """Host to device, beside forward: loads, and the updated weights that live on the device."""
    fetched_backward_bytes: int
    offloaded_bytes: int
    """Device to host: gradients, beside backward. Evictions are clean and move nothing."""
    network_forward_bytes: int
    """Received from other ranks when chunks are gathered."""
    network_backward_bytes: int
    """The same, and what reducing gradients takes."""
    host_adam_numel: int
    device_adam_numel: int
    disk_bytes: int
    """Read for updates on the host; as many are written."""

    @property
    def fetched_bytes(self) -> int:
        """Host to device."""
        return self.fetched_forward_bytes + self.fetched_backward_bytes

    @property
    def link_bytes(self) -> int:
        """Over the link between device and host, both directions."""
        return self.fetched_bytes + self.offloaded_bytes

    @property
    def network_bytes(self) -> int:
        """Received over the network."""
        return self.network_forward_bytes + self.network_backward_bytes


def traffic(model: MemoryModel, placement: Placement, schedule: ScheduleResult) -> Traffic:
    """Bytes and updates of one rank; formulas in `docs/search.md`."""
    work, world, chunks = model.work, model.setting.world_size, model.work.chunks
    fetched, network = [0, 0], [0, 0]
    for position, chunk in schedule.timeline:
        phase, size = int(position >= work.first_backward), chunks[chunk].bytes
        network[phase] += size - size // world
        if not placement.weight_on_device[chunk]:
            fetched[phase] += size // world
    offloaded = host_adam = device_adam = disk = 0
    for index, facts in enumerate(chunks):
        if not facts.grad_bytes:
            continue
        network[1] += facts.grad_bytes - facts.grad_bytes // world
        if placement.resident[index]:
            network[0] += facts.bytes - facts.bytes // world
        if placement.state_on_device[index]:
            device_adam += facts.numel // world
            continue
        host_adam += facts.numel // world
        offloaded += facts.grad_bytes // world
        disk += model.disk_shard_bytes(index) if index in placement.state_on_disk else 0
        if placement.weight_on_device[index]:
            fetched[0] += facts.bytes // world
    return Traffic(fetched[0], fetched[1], offloaded, network[0], network[1], host_adam, device_adam, disk)


class CostModel(Protocol):
    """Anything that says how long a step takes."""

    def estimate(
        self, work: Workload, placement: Placement, schedule: ScheduleResult, moved: Traffic, *, overlap: bool
    ) -> Mapping[str, float]:
        """Seconds by part; ``total`` is the step."""
        ...

    def in_backward(
        self, work: Workload, placement: Placement, schedule: ScheduleResult, *, overlap: bool
    ) -> frozenset[int]:
        """Chunks that the host updates while backward still runs."""
        ...

    def floor_s(
        self,
        work: Workload,
        chunks: Ints,
        resident: npt.NDArray[np.bool_],
        weight: npt.NDArray[np.bool_],
        state: npt.NDArray[np.bool_],
        blocks: Ints,
    ) -> npt.NDArray[np.float64]:
        """Seconds that no step with these homes of `chunks` ([placement, chunk]) and at most so many blocks can beat."""
        ...
