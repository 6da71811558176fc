"""Pictures and Chrome traces show every second of a simulated step, and nothing else."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from elixir.errors import InputError, InputTypeError
from elixir.plan.plan import Plan
from elixir.search import plan_from_trace
from elixir.search.planner import simple_plan
from elixir.search.request import SearchRequest
from elixir.search.simulator.replay import RESOURCES, WorkSpan
from elixir.search.simulator.simulation import Simulation, simulate_step
from elixir.show.style import RESOURCE_LABELS, render
from elixir.show.timeline import chrome_trace, plot_timeline, save_chrome_trace
from elixir.step_trace import StepTrace
from elixir.units import GIB
from tests.common.samples import make_hardware
from tests.common.synthetic_trace import StackShape, stack_trace
from tests.common.tracing import CPU, cpu_trace, sum_step
from tests.unit.wrapper.test_units_as_one import INP, Stack

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


def test_a_chrome_trace_has_every_span_once_on_its_resource(
    simulation: Simulation, plan: Plan, trace: StepTrace, tmp_path: Path
) -> None:
    path = save_chrome_trace(simulation, tmp_path / "step.json", plan, trace)
    loaded = json.loads(path.read_text(encoding="utf-8"))
    assert loaded == chrome_trace(simulation, plan, trace)
    threads = {event["tid"]: event["args"]["name"] for event in loaded["traceEvents"] if event["name"] == "thread_name"}
    assert len(set(threads.values())) == len(RESOURCES) + 1
    waits = next(tid for tid, name in threads.items() if name not in RESOURCE_LABELS.values())
    spans = [event for event in loaded["traceEvents"] if event["ph"] == "X" and event["tid"] != waits]
    del threads[waits]
    assert len(spans) == len(simulation.timeline)
    busy = {
        name: math.fsum(event["dur"] for event in spans if event["tid"] == tid) / 1e6 for tid, name in threads.items()
    }
    assert sorted(busy.values()) == pytest.approx(sorted(simulation.busy_s.values()))
    assert max(event["ts"] + event["dur"] for event in spans) / 1e6 == pytest.approx(simulation.step_s)


def test_a_plan_adds_names_bytes_waits_and_arrows(simulated: tuple[Simulation, Plan, StepTrace]) -> None:
    simulation, plan, trace = simulated
    events = chrome_trace(simulation, plan, trace)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    of_chunks = [event for event in slices if "chunk" in event["args"] and event["cat"] != "wait"]
    for event in of_chunks:
        chunk = plan.chunks[event["args"]["chunk"]]
        assert event["args"]["parameters"][0] == chunk.parameters[0].name
        assert event["args"]["bytes"] in (chunk.weight_bytes, chunk.weight_bytes // plan.world_size)
    # Compute and its waits fill the step from its beginning to the last of it.
    threads = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    waits = [event for event in slices if event["tid"] == threads["compute waits for"]]
    work = [event for event in slices if event["tid"] == threads["compute"]]
    assert waits
    assert all(":" in event["name"] for event in waits)
    assert math.fsum(event["dur"] for event in [*waits, *work]) / 1e6 == pytest.approx(simulation.step_s)
    assert math.fsum(event["dur"] for event in waits) / 1e6 == pytest.approx(sum(simulation.waited_s.values()))
    # An arrow begins inside of one slice and ends at the beginning of another one of the same chunk.
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins
    assert begins.keys() == ends.keys()
    starts = {(event["tid"], event["ts"], event["args"].get("chunk")) for event in slices}
    for number, end in ends.items():
        begin, chunk = begins[number], int(end["name"].split()[1])
        assert (end["tid"], end["ts"], chunk) in starts
        assert begin["ts"] <= end["ts"]
        assert any(
            event["tid"] == begin["tid"]
            and event["args"].get("chunk") == chunk
            and event["ts"] <= begin["ts"] <= event["ts"] + event["dur"] + 1e-6
            for event in slices
        )


def test_a_counter_shows_device_memory_up_to_the_peak(simulated: tuple[Simulation, Plan, StepTrace]) -> None:
    simulation, plan, trace = simulated
    counted = [event for event in chrome_trace(simulation, plan, trace)["traceEvents"] if event["ph"] == "C"]
    totals = [sum(event["args"].values()) for event in counted]
    compute = [span for span in simulation.timeline if span.resource == RESOURCES[0]]
    assert [event["ts"] for event in counted] == [span.start_s * 1e6 for span in compute]
    assert max(totals) <= plan.predicted.device_peak_bytes
    live = [event["args"]["activations"] for event in counted]
    forward = [amount for amount, span in zip(live, compute, strict=True) if span.name == "forward"]
    assert forward == sorted(forward)  # a stack keeps what backward needs
    assert max(live) >= 0.9 * max(access.live_bytes for access in trace.accesses)


def test_a_counter_shows_device_memory_of_layers_that_are_fetched_as_one() -> None:
    trace = cpu_trace(Stack(), INP, sum_step)
    request = SearchRequest(world_size=1)
    plan = simple_plan(trace, CPU, request, split_number=12, allocate_factor=1.0, shard_device="cpu")
    assert plan.step.fetched_whole
    events = chrome_trace(simulate_step(plan, trace, CPU), plan, trace)["traceEvents"]
    live = [event["args"]["activations"] for event in events if event["ph"] == "C"]
    assert max(live) == plan.predicted.device_parts["activations"] > min(live)


def test_the_picture_has_a_lane_per_resource_and_says_its_units(simulation: Simulation, tmp_path: Path) -> None:
    figure = plot_timeline(simulation, tmp_path / "step.png", title="a stack")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "disk", "new weights to device", "CPU Adam", "device to host", "network", "host to device", "compute",
    ]  # fmt: skip
    assert axes.get_xlabel().endswith(("(s)", "(ms)", "(µs)"))
    assert "bound by" in axes.get_title(loc="left")
    assert axes.get_title(loc="left").startswith("a stack: ")
    drawn = sum(len(collection.get_paths()) for collection in axes.collections)
    assert drawn == len(simulation.timeline)
    shares = {text.get_text() for text in axes.texts}
    assert shares == {f"{share:.0%}" for share in simulation.utilisation.values()}
    assert (tmp_path / "step.png").stat().st_size > 1000


def test_sums_of_gradients_and_their_norm_are_drawn(tmp_path: Path) -> None:
    trace = stack_trace(StackShape(hidden=256, layers=3, ffn=1024, vocab=2048, positions=256), batch=2, seq=256)
    plan = plan_from_trace(trace, HARDWARE, 1, device_memory=1 << 40, placement="cpu", accumulation=2).plan
    step = simulate_step(plan, trace, replace(HARDWARE, device_kind="cuda", compute_capability=(9, 0)))
    step = replace(step, timeline=(WorkSpan("compute", "norm", 0.0, step.step_s / 100, None), *step.timeline))
    assert {"add", "norm", "update"} <= {span.name for span in step.timeline}
    (axes,) = plot_timeline(step, tmp_path / "step.png").figure.axes
    assert sum(len(collection.get_paths()) for collection in axes.collections) == len(step.timeline)


def test_the_same_step_gives_the_same_file(simulation: Simulation) -> None:
    assert render(plot_timeline(simulation), "svg") == render(plot_timeline(simulation), "svg")


def test_bad_input_is_refused(simulation: Simulation, plan: Plan, trace: StepTrace, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="picture format"):
        plot_timeline(simulation, tmp_path / "step.txt")
    with pytest.raises(InputTypeError, match="simulate_step"):
        plot_timeline(simulation.timeline)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="nothing takes any time"):
        chrome_trace(replace(simulation, timeline=()), plan, trace)
