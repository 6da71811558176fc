"""Bytes that one rank moves in a step under a placement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elixir.plan.prediction import LINKS
from elixir.plan.step_traffic import StepTraffic
from elixir.schedule import Schedule
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.placement import Placement


@dataclass(frozen=True)
class BytesMoved(StepTraffic):
    """Bytes that one rank moves in one optimizer step, all its micro-batches together."""

    disk_bytes: int = 0
    """Read for updates on the host; as many are written."""
    loads: int = 0
    """Chunks brought into blocks."""
    hits: int = 0

    @property
    def by_link(self) -> dict[str, int]:
        """By the names of `elixir.plan.prediction.LINKS`."""
        read = self.disk_bytes + self.file_bytes
        amounts = self.host_to_device_bytes, self.device_to_host_bytes, self.network_bytes, self.replicas_bytes
        return dict(zip(LINKS, (*amounts, read, self.disk_bytes), strict=True))

    @property
    def link_bytes(self) -> int:
        """Over the link between device and host, both directions."""
        return self.host_to_device_bytes + self.device_to_host_bytes


def traffic(model: MemoryModel, placement: Placement, schedule: Schedule, blocks: int) -> BytesMoved:
    """Bytes of one rank; formulas in `docs/appendix/formulas.md`."""
    chunks, setting = model.work.chunks, model.setting
    loads = schedule.step(blocks, setting.accumulation)
    always, per_load = model.link_bytes
    here = np.arange(len(chunks)), placement.codes
    counts = np.array([loads.by_chunk.get(chunk, 0) for chunk in range(len(chunks))], dtype=np.int64)
    moved = (always[here] + counts[:, None] * per_load[here]).sum(axis=0)
    disk = sum(int(model.disk_shard_bytes[index]) for index in placement.state_on_disk if chunks[index].grad_bytes)
    down, up, network, files, replicas = moved.tolist()
    swapped = setting.accumulation * model.work.facts.trace.step.swap_bytes
    down, up = down + swapped, up + swapped
    return BytesMoved(down, up, network, files, replicas, disk_bytes=disk, loads=loads.loads, hits=loads.hits)
