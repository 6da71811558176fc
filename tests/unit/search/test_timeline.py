"""Pictures and Chrome traces show every second of a simulated step, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from matplotlib.colors import to_hex

from elixir.errors import InputError, InputTypeError
from elixir.plan.plan import Plan
from elixir.search import plan_from_trace
from elixir.search.simulator.replay import RESOURCES
from elixir.search.simulator.simulation import Simulation, simulate_step
from elixir.show.style import RESOURCE_LABELS
from elixir.show.timeline import SPAN_COLOURS, chrome_trace, plot_timeline
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


def test_the_picture_has_each_span_in_its_lane_and_its_colour(simulation: Simulation) -> None:
    (axes,) = plot_timeline(simulation, title="a stack").axes
    unit_s = {"(s)": 1.0, "(ms)": 1e-3, "(µs)": 1e-6}[axes.get_xlabel().split()[-1]]
    lanes = {row: label.get_text() for row, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)}
    assert [*lanes.values()] == [
        "disk", "new weights to device", "CPU Adam", "device to host", "network", "host to device", "compute",
    ]  # fmt: skip
    drawn = []
    for bars in axes.collections:
        for box in (path.get_extents() for path in bars.get_paths()):
            lane = lanes[round((box.y0 + box.y1) / 2, 6)]
            drawn.append((lane, to_hex(bars.get_facecolor()[0]), round(box.x0, 6), round(box.x1, 6)))
    timeline = simulation.timeline
    assert sorted(drawn) == sorted(
        (RESOURCE_LABELS[span.resource], SPAN_COLOURS[span.name].lower(),
         round(span.start_s / unit_s, 6), round(span.end_s / unit_s, 6)) for span in timeline
    )  # fmt: skip
    assert axes.get_xlim() == (0, simulation.step_s / unit_s)
    legend = axes.get_legend()
    named = {text.get_text(): to_hex(patch.get_facecolor())
             for text, patch in zip(legend.get_texts(), legend.get_patches(), strict=True)}  # fmt: skip
    assert named == {span.name: SPAN_COLOURS[span.name].lower() for span in timeline}
    shares = {RESOURCE_LABELS[name]: f"{share:.0%}" for name, share in simulation.utilisation.items()}
    assert {lanes[text.xy[1]]: text.get_text() for text in axes.texts} == shares
    work = [span for span in timeline if span.resource == RESOURCES[0]]
    groups = groupby(work, key=lambda span: {"recompute": "backward", "norm": "optimizer"}.get(span.name, span.name))
    turns = [(name, next(spans).start_s / unit_s) for name, spans in groups]
    assert [line.get_xdata()[0] for line in axes.lines] == [at for name, at in turns[turns[0][0] == "forward" :]]
    assert {"forward", "backward"} <= {name for name, _ in turns}
    title = axes.get_title(loc="left")
    assert title.startswith("a stack: ")
    assert title.endswith(f"bound by {RESOURCE_LABELS[simulation.bound_by]}")


def test_a_chrome_trace_has_every_span_once_and_waits_and_arrows_between(
    simulation: Simulation, plan: Plan, trace: StepTrace
) -> None:
    events = chrome_trace(simulation, plan, trace)["traceEvents"]
    threads = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    busy = {name: sum(e["dur"] for e in slices if e["tid"] == tid) / 1e6 for name, tid in threads.items()}
    waited_s = busy.pop("compute waits for")
    assert busy == pytest.approx({RESOURCE_LABELS[name]: seconds for name, seconds in simulation.busy_s.items()})
    assert waited_s == pytest.approx(sum(simulation.waited_s.values()))
    assert waited_s + busy["compute"] == pytest.approx(simulation.step_s)
    for event in slices:
        if "parameters" in event["args"]:
            chunk = plan.chunks[event["args"]["chunk"]]
            whole = event["cat"] in ("gather", "reduce") or event["tid"] == threads["compute"]
            assert event["args"]["bytes"] == chunk.weight_bytes // (1 if whole else plan.world_size)
            assert event["args"]["states"] == chunk.state_home
            assert event["name"] == f"{event['cat']} chunk {event['args']['chunk']}"
            assert event["args"]["parameters"][0] == chunk.parameters[0].name
    # An arrow begins inside of one slice and ends at the beginning of another one of the same chunk.
    begins, ends = ({e["id"]: e for e in events if e["ph"] == kind} for kind in "sf")
    assert begins.keys() == ends.keys() != set()
    for number, end in ends.items():
        begin, chunks = begins[number], [e for e in slices if end["name"] == f"chunk {e['args'].get('chunk')}"]
        assert any((e["tid"], e["ts"]) == (end["tid"], end["ts"]) for e in chunks)
        assert any(e["tid"] == begin["tid"] and e["ts"] <= begin["ts"] <= e["ts"] + e["dur"] + 1e-6 for e in chunks)
        assert begin["tid"] != end["tid"]
        assert begin["ts"] <= end["ts"]
    counted = [event for event in events if event["ph"] == "C"]
    work = [span for span in simulation.timeline if span.resource == RESOURCES[0]]
    assert [event["ts"] for event in counted] == [span.start_s * 1e6 for span in work]
    live = [event["args"]["activations"] for event in counted]
    forward = [amount for amount, span in zip(live, work, strict=True) if span.name == "forward"]
    assert forward == sorted(forward)  # a stack keeps what backward needs
    assert max(live) >= 0.9 * max(access.live_bytes for access in trace.accesses)


def test_bad_input_is_refused(simulation: Simulation, plan: Plan, trace: StepTrace, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="picture format"):
        plot_timeline(simulation, tmp_path / "step.txt")
    with pytest.raises(InputTypeError, match="simulate_step"):
        plot_timeline(simulation.timeline)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="nothing takes any time"):
        chrome_trace(replace(simulation, timeline=()), plan, trace)
