"""Pictures and Chrome traces show every second of a simulated step, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elixir.errors import InputError, InputTypeError
from elixir.plan.plan import Plan
from elixir.search import plan_from_trace
from elixir.search.simulator.replay import RESOURCES
from elixir.search.simulator.simulation import Simulation, simulate_step
from elixir.show.timeline import chrome_trace, plot_timeline
from elixir.step_trace import StepTrace
from elixir.units import GIB
from tests.common.samples import make_hardware
from tests.common.synthetic_trace import StackShape, stack_trace

HARDWARE = replace(make_hardware(), host_memory_bytes=512 * GIB, disk_read_bytes_per_s=6e9, disk_write_bytes_per_s=3e9)


@pytest.fixture(scope="module")
def simulated() -> tuple[Simulation, Plan, StepTrace]:
    """A step of two ranks in which every resource works: the states of one chunk live on a disk."""
    trace = stack_trace(
        StackShape(hidden=256, layers=3, ffn=1024, vocab=2048, positions=256), batch=2, seq=256, checkpoint=False
    )
    plan = plan_from_trace(trace, HARDWARE, 2, device_memory=1 << 40, placement="cpu", early_updates=False).plan
    refreshed = replace(plan.chunks[-1], resident=True, weight_home="device")
    on_disk = replace(plan.chunks[0], state_home="disk")
    plan = replace(plan, chunks=(on_disk, *plan.chunks[1:-1], refreshed))
    made = simulate_step(plan, trace, HARDWARE)
    assert all(made.busy_s[name] > 0 for name in RESOURCES)
    return made, plan, trace


@pytest.fixture(scope="module")
def simulation(simulated: tuple[Simulation, Plan, StepTrace]) -> Simulation:
    return simulated[0]


@pytest.fixture(scope="module")
def plan(simulated: tuple[Simulation, Plan, StepTrace]) -> Plan:
    return simulated[1]


@pytest.fixture(scope="module")
def trace(simulated: tuple[Simulation, Plan, StepTrace]) -> StepTrace:
    return simulated[2]


def test_bad_input_is_refused(simulation: Simulation, plan: Plan, trace: StepTrace, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="picture format"):
        plot_timeline(simulation, tmp_path / "step.txt")
    with pytest.raises(InputTypeError, match="simulate_step"):
        plot_timeline(simulation.timeline)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="nothing takes any time"):
        chrome_trace(replace(simulation, timeline=()), plan, trace)
