"""The simulator takes its rates from profiles, with fits and without, from one machine to many, and refuses nonsense."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elixir.errors import InputError, InputTypeError
from elixir.hardware.profile import HardwareProfile
from elixir.hardware.rate_fit import RateFit
from elixir.search import plan_from_trace
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import StepTrace
from elixir.units import GIB, MIB
from tests.common.chains import INSTANT, NUMEL, Speeds, chain, chain_plan
from tests.common.samples import make_hardware
from tests.common.synthetic_trace import StackShape, stack_trace

SMALL = StackShape(hidden=256, layers=4, ffn=1024, vocab=2048, positions=256)
HARDWARE = replace(make_hardware(), flops_per_s={"bfloat16": 9e14, "float32": 4e14}, host_memory_bytes=512 * GIB)


@pytest.fixture(scope="module")
def stack() -> StepTrace:
    """A checkpointed stack, small enough to plan in no time."""
    return stack_trace(SMALL, batch=2, seq=256)


def test_several_machines_are_as_fast_as_their_network(stack: StepTrace, caplog: pytest.LogCaptureFixture) -> None:
    """A network that the profile does not know is as fast as the devices of one machine, with a warning."""
    plan = plan_from_trace(stack, HARDWARE, 1024, device_memory=1 << 40, placement="cpu", host_budget=1 << 45).plan
    caplog.clear()
    unknown = simulate_step(plan, stack, HARDWARE).step_s
    assert [record.levelname for record in caplog.records if "network_bytes_per_s" in record.getMessage()] == [
        "WARNING"
    ]
    caplog.clear()
    known = (replace(HARDWARE, network_bytes_per_s=rate) for rate in (50e9, 400e9))
    slow, fast = (simulate_step(plan, stack, machine).step_s for machine in known)
    assert slow > fast == unknown > 0  # the sample's devices have 400 GB/s between them
    assert not caplog.records


def test_fits_take_the_place_of_plain_rates(stack: StepTrace) -> None:
    """Latency counts once per transfer, and a measured collective is not modelled."""
    plan, machine = chain_plan(blocks=1, depth=0), Speeds(1.0, 0.5, 0.25).machine()
    fitted = replace(machine, fits={"host_to_device": RateFit(0.1, MIB / 0.5, 0.0)})
    assert simulate_step(plan, chain(), fitted).busy_s["host_to_device"] == pytest.approx(5 * 0.6)
    pair = chain_plan(blocks=3, depth=0, world_size=2)
    measured = replace(machine, fits={"all_gather.2": RateFit(0.5, INSTANT, 0.0)})
    assert simulate_step(pair, chain(), measured).busy_s["network"] == pytest.approx(3 * 0.5)


def _adam_s(machine: HardwareProfile, world_size: int = 1) -> float:
    plan = chain_plan(blocks=3, depth=0, world_size=world_size)
    return simulate_step(plan, chain(), machine).busy_s["host_adam"] * world_size / 3


def test_the_hosts_adam_has_the_threads_that_the_runtime_gives_it() -> None:
    """A CUDA machine of 8 cores: 6 for one rank, 3 for each of two; between measured counts on a straight line."""
    machine = replace(Speeds().machine("cuda"), devices_per_host=8)
    each = {1: 8.0, 4: 2.0, 8: 1.0}  # seconds of a chunk
    fits = {f"host_adam.{threads}": RateFit(0.0, NUMEL / seconds, 0.0) for threads, seconds in each.items()}
    machine = replace(machine, fits=fits)
    assert _adam_s(machine) == pytest.approx(1 / (0.5 + 2 / 4 * 0.5))
    assert _adam_s(machine, 2) == pytest.approx(1 / (1 / 8 + 2 / 3 * (1 / 2 - 1 / 8)))
    flat = {key: RateFit(0.0, NUMEL, 0.0) for key in fits}  # one thread takes all that memory gives
    assert _adam_s(replace(machine, fits=flat), 2) == pytest.approx(2.0)
    together = fits | {"host_adam.2.all_ranks": RateFit(0.0, NUMEL / 5.0, 0.0)}
    assert _adam_s(replace(machine, fits=together), 2) == pytest.approx(5.0)


def test_bad_input_says_what_to_do(stack: StepTrace) -> None:
    plan, machine = chain_plan(blocks=1, depth=0), Speeds().machine()
    with pytest.raises(InputTypeError, match="plan must be a Plan"):
        simulate_step("plan.json", chain(), machine)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="made from"):
        simulate_step(plan, stack, HARDWARE)
    for name, value in (("accumulation", 0), ("steps", True), ("ranks_per_host", 1.5)):
        with pytest.raises((InputError, InputTypeError), match=name):
            simulate_step(plan, chain(), machine, **{name: value})  # type: ignore[arg-type]
    reordered = replace(chain(), accesses=chain().accesses[::-1])
    with pytest.raises(InputError, match="order"):
        simulate_step(plan, reordered, machine)
    with pytest.raises(InputError, match="flops_per_s"):
        simulate_step(plan, chain(), replace(machine, flops_per_s={"bfloat16": 1.0}))
