"""Bytes that one rank moves in a step under a placement."""

from __future__ import annotations

from dataclasses import dataclass

from elixir.schedule import StepSchedule
from elixir.search.problem.memory import MemoryModel
from elixir.search.problem.placement import Placement
from elixir.step_traffic import Backwards, ChunkRoute, StepTraffic, step_traffic


@dataclass(frozen=True)
class Traffic(StepTraffic):
    """Bytes that one rank moves in one optimizer step, all its micro-batches together."""

    disk_bytes: int
    """Read for updates on the host; as many are written."""
    loads: int
    """Chunks brought into blocks."""
    hits: int

    @property
    def link_bytes(self) -> int:
        """Over the link between device and host, both directions."""
        return self.host_to_device_bytes + self.device_to_host_bytes


def traffic(model: MemoryModel, placement: Placement, schedule: StepSchedule, blocks: int) -> Traffic:
    """Bytes of one rank; formulas in `docs/appendix/packing.md`."""
    chunks, setting = model.work.chunks, model.setting
    routes = [
        ChunkRoute(
            facts.bytes,
            facts.bytes // setting.world_size,
            home.resident,
            home.weights_on_device,
            home.states_on_device,
            facts.trainable,
            facts.grad_bytes > 0,
        )
        for facts, home in zip(chunks, placement.homes, strict=True)
    ]
    loads = schedule.step(blocks, setting.accumulation)
    several = setting.world_size > 1
    moved = step_traffic(routes, loads.by_chunk, Backwards(setting.accumulation), several_ranks=several)
    disk = sum(int(model.disk_shard_bytes[index]) for index in placement.state_on_disk if chunks[index].grad_bytes)
    return Traffic(**vars(moved), disk_bytes=disk, loads=loads.loads, hits=loads.hits)
