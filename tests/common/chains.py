"""A chain of chunks, used one after the other and back: steps so simple that their seconds follow by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from elixir.hardware.profile import HardwareProfile
from elixir.optimizer_states import StateSize
from elixir.plan.chunk_plan import Home
from elixir.plan.plan import Plan
from elixir.search.problem.placement import Placement, Setting
from elixir.search.propose.candidate import weigh
from elixir.search.propose.judge import Outcome
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.propose.written_plan import to_plan
from elixir.search.request import SearchRequest
from elixir.search.simulator.simulation import Simulation, simulate_step
from elixir.step_trace import StepTrace
from elixir.units import MIB
from tests.common.samples import make_hardware
from tests.common.synthetic_trace import TraceBuilder

INSTANT = 1e30
"""A rate at which nothing takes any time to speak of."""
NUMEL = MIB // 4
ON_DISK_BYTES = 12 * NUMEL
"""States of a chunk: the master and two moments, in fp32."""
CHUNKS = 3


class Speeds(NamedTuple):
    """Seconds per chunk of 1 MiB: one use, fetch, offload, the host's Adam, the device's, a gather; states read from
    the disk, and written there."""

    use: float = 1.0
    fetch: float = 0.0
    offload: float = 0.0
    adam: float = 0.0
    device_adam: float = 0.0
    gather: float = 0.0
    read: float = 0.0
    write: float = 0.0

    def machine(self, kind: str = "cpu") -> HardwareProfile:
        """A machine with these speeds, and instant copies."""
        rate = lambda seconds, amount: amount / seconds if seconds else INSTANT  # noqa: E731
        return replace(
            make_hardware(),
            device_kind=kind,
            compute_capability=None if kind == "cpu" else (9, 0),
            flops_per_s={"float32": rate(self.use, NUMEL)},
            matmul_efficiency=1.0,
            device_memory_bytes_per_s=INSTANT,
            host_memory_bytes_per_s=INSTANT,
            host_to_device_bytes_per_s=rate(self.fetch, MIB),
            device_to_host_bytes_per_s=rate(self.offload, MIB),
            device_to_device_bytes_per_s=rate(self.gather, MIB),
            host_adam_numel_per_s=rate(self.adam, NUMEL),
            device_adam_numel_per_s=rate(self.device_adam, NUMEL),
            disk_read_bytes_per_s=rate(self.read, ON_DISK_BYTES),
            disk_write_bytes_per_s=rate(self.write, ON_DISK_BYTES),
        )


def chain(chunks: int = CHUNKS) -> StepTrace:
    """Parameters of one chunk each, used one after the other and back."""
    build = TraceBuilder("float32")
    indices = [build.parameter(f"p{index}", NUMEL) for index in range(chunks)]
    for index in indices:
        build.use("forward", index, flops=NUMEL)
    for index in reversed(indices):
        build.use("backward", index, flops=NUMEL)
    return build.build("chain")


LETTERS = {
    "s": Home.HOST, "h": Home.RESIDENT_HOST, "d": Home.RESIDENT, "w": Home.DEVICE_HOST, "k": Home.HOST_DISK,
    "e": Home.RESIDENT_DISK,
}  # fmt: skip


def chain_plan(
    *,
    blocks: int,
    depth: int,
    homes: str = "sss",
    world_size: int = 1,
    grad_blocks: int | None = None,
) -> Plan:
    """A plan of `chain`, a letter per chunk: ``s`` streamed from the host, ``h`` resident with its states on the host,
    ``d`` resident with everything on the device, ``w`` streamed with its weights on the device; ``k`` as ``s`` and
    ``e`` as ``h``, but with states on the disk."""
    trace = chain(len(homes))
    setting = Setting(world_size, world_size, StateSize(8), depth > 0)
    space = SearchSpace(trace, Speeds().machine(), setting)
    placement = Placement(tuple(LETTERS[home] for home in homes))
    candidate = weigh(space.model(MIB), placement, blocks, depth, space.cost)
    budgets = Budgets(1 << 50, 1 << 50, 1 << 50)
    plan = to_plan(space, Outcome(candidate), budgets, SearchRequest(world_size=world_size))
    return plan if grad_blocks is None else replace(plan, grad_block_count=grad_blocks)


def updating_early(plan: Plan, *chunks: int) -> Plan:
    """The plan with new states of just these chunks made in backward."""
    made = tuple(replace(c, update="early" if index in chunks else "after_norm") for index, c in enumerate(plan.chunks))
    return replace(plan, chunks=made, may_update_early=bool(chunks))


def simulated(plan: Plan, speeds: Speeds, *, kind: str = "cpu", **options: Any) -> Simulation:
    """The steady step of a plan of `chain`."""
    return simulate_step(plan, chain(len(plan.chunks)), speeds.machine(kind), **options)
