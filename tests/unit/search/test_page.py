"""A page holds all of a plan's figures, and a browser shows them: hover, clicks, phones, nothing loaded from anywhere."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elixir.hardware.profile import HardwareProfile, preset
from elixir.search import plan_from_trace
from elixir.search.advise.answer import Answer
from elixir.search.simulator.simulation import simulate_step
from elixir.search.whatif.explanation import explain
from elixir.show.page import plan_view, trace_view, write_page
from elixir.show.style import RESOURCE_LABELS
from elixir.show.timeline import LANE_ORDER, SPAN_COLOURS, device_memory, entries_over_step, modules_over_step
from elixir.step_trace import StepTrace
from elixir.units import GIB, MIB, format_bytes
from tests.common.command_line import fails, page_data, run
from tests.common.samples import make_hardware, make_trace
from tests.common.synthetic_trace import StackShape, stack_trace

TICKS = 100_000
ODD_NAME = 'a </script><b>"odd" & name'
LARGEST_PAGE_BYTES = 1_000_000
HARDWARE = replace(make_hardware(), host_memory_bytes=512 * GIB)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
REQUIRED = bool(os.environ.get("CI"))
ASKED: dict[str, dict[str, Any]] = {
    "resident": {"device_memory": 1 << 40},
    "streamed": {"device_memory": 56 * MIB},
    "two ranks": {"world_size": 2, "device_memory": 36 * MIB},
    "in parts": {"device_memory": 56 * MIB, "accumulation": 3},
    "8-bit": {"device_memory": 36 * MIB, "moments": "8bit"},
    "matrices, averaged": {"device_memory": 60 * MIB, "optimizer_type": "Muon + AdamW + EMA"},
}


@functools.cache
def made(name: str) -> tuple[Answer, StepTrace, HardwareProfile]:
    asked = dict(ASKED[name])
    shape = StackShape(hidden=256, layers=3, ffn=1024, vocab=2048, positions=256)
    trace = stack_trace(shape, batch=2, seq=256, checkpoint=False)
    trace = replace(trace, model_name=ODD_NAME)
    return plan_from_trace(trace, HARDWARE, asked.pop("world_size", 1), **asked), trace, HARDWARE


@pytest.mark.parametrize("name", list(ASKED))
def test_memory_over_a_step_has_the_peak_of_the_plan(name: str) -> None:
    """All bytes of every entry of the order, each of which compute comes to in time, and no more than was predicted."""
    answer, trace, hardware = made(name)
    plan, parts = answer.plan, device_memory(answer.plan, trace, hardware.device_kind)
    total = np.sum(list(parts.values()), axis=0)
    assert total.max() == plan.predicted.device_peak_bytes
    assert any(
        {part: int(amounts[at]) for part, amounts in parts.items()} == plan.predicted.device_parts
        for at in np.flatnonzero(total == total.max())
    )
    assert all(about for budget in plan_view(plan)["budgets"] for *_, about in budget["parts"])
    assert len(modules_over_step(plan, trace)) == len(plan.order) == len(total) - 1
    simulated = simulate_step(plan, trace, hardware)
    moments, entries = zip(*entries_over_step(simulated, plan), strict=True)
    assert list(moments) == sorted(moments)
    assert moments[-1] < simulated.step_s
    assert set(entries) >= set(range(len(plan.order)))
    phases = [plan.order[entry].phase for entry in entries if entry < len(plan.order)]
    assert phases.count("backward") >= plan.passes * sum(use.phase == "backward" for use in plan.order)


@pytest.mark.parametrize("name", ["two ranks", "in parts"])
def test_a_page_holds_every_span_and_chunk(name: str, tmp_path: Path) -> None:
    answer, trace, hardware = made(name)
    plan = answer.plan
    why = explain(plan, trace, hardware, levers=False)
    levers = answer.levers() if name == "two ranks" else ()
    path = write_page(tmp_path / "plan.html", plan_view(answer, trace, hardware, explanation=why, levers=levers))
    (view,) = page_data(path)["views"]
    assert trace.model_name in view["title"]
    for budget, memory, peak in zip(
        view["budgets"],
        ("device", "host"),
        (plan.predicted.device_peak_bytes, plan.predicted.host_peak_bytes),
        strict=True,
    ):
        assert budget["memory"] == memory
        assert sum(size for _, size, *_ in budget["parts"]) == peak
        assert format_bytes(peak) in view["verdict"]
    judged = plan.predicted.judgements
    assert view["steps"][0]["scenario"] == str(judged[0].scenario)
    worst = max(judged, key=lambda it: it.regret)
    assert str(worst.scenario) in {step["scenario"] for step in view["steps"]}
    for step in view["steps"]:
        scenario = next(it.scenario for it in judged if str(it.scenario) == step["scenario"])
        simulated = simulate_step(plan, trace, scenario.machine(hardware), clipped=scenario.clipped)
        assert step["step_s"] == simulated.step_s
        rows, start = np.array(step["spans"]).reshape(-1, 5), 0
        assert len(rows) == len(simulated.timeline)
        for (lane, kind, chunk, after, length), span in zip(rows, simulated.timeline, strict=True):
            start += after
            assert (LANE_ORDER[lane], list(SPAN_COLOURS)[kind]) == (span.resource, span.name)
            assert chunk == (-1 if span.chunk is None else span.chunk)
            ends = start / TICKS * step["step_s"], (start + length) / TICKS * step["step_s"]
            assert ends == pytest.approx((span.start_s, span.end_s), abs=step["step_s"] / TICKS)
    chunks = {row[0]: row for row in view["chunks"]["rows"]}
    assert chunks.keys() == set(range(len(plan.chunks)))
    for index, (_, size, weights, states, early, about, elsewhere) in chunks.items():
        chunk = plan.chunks[index]
        assert (size, early) == (chunk.weight_bytes, chunk.home.early)
        assert (weights, states) == ("resident" if chunk.resident else chunk.weight_home, chunk.state_home)
        assert about.startswith(chunk.parameters[0].name)
        spots = [(str(each.spot), each.change.change_s) for each in why.chunks[index].elsewhere]
        assert [(view["chunks"]["texts"][spot], change) for spot, _, change in elsewhere] == [
            (spot, pytest.approx(change, rel=0.01)) for spot, change in spots
        ]
    assert [row[0] for row in view["levers"]] == [lever.action for lever in levers]


def test_a_page_loads_nothing_and_carries_its_license(tmp_path: Path) -> None:
    answer, trace, hardware = made("streamed")
    other = replace(make_trace(layers=3), model_name=ODD_NAME)
    path = write_page(tmp_path / "both.html", plan_view(answer, trace, hardware), trace_view(other))
    text = path.read_text("utf-8")
    assert "default-src 'none'" in text
    ours = text.replace((files("elixir.show") / "html" / "echarts.common.min.js").read_text("utf-8"), "")
    assert len(ours) < len(text)
    assert not re.search(r"<(link|img|iframe)\b|<script[^>]*\bsrc=|@import|https?://(?!www\.apache|github)", ours)
    assert "Apache License" in text
    assert "Redistribution and use in source and binary forms" in text
    assert text.count("</script>") == 3  # the name of the model has ended none
    views = page_data(path)["views"]
    assert views[1]["memory"]["at"] == sorted(views[1]["memory"]["at"])
    total = np.sum([kind["values"] for kind in views[1]["memory"]["kinds"]], axis=0)
    assert total.tolist() == [sample.total for sample in other.curve]


def test_commands_write_pages_of_what_they_know(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    answer, trace, _ = made("streamed")
    plan, other, step, report, page = (
        str(tmp_path / name) for name in ("a.json", "b.json", "t.json", "r.json", "page.html")
    )
    named = replace(
        answer.plan, model_name="mine", hardware_name="h200", hardware_fingerprint=preset("h200").fingerprint
    )
    named.save(plan)
    replace(named, start_up_s=5.0).save(other)
    trace.save(step)
    Path(report).write_text(json.dumps([{"step_s": 2.0, "predicted_step_s": 1.0, "loads": 3, "predicted_loads": 3}]))

    def views(*words: str) -> list[dict[str, Any]]:
        status, out, err = run(capsys, *words, "--plot", page)
        assert (status, f"written: {page}" in out) == (0, True), err
        return list(page_data(Path(page))["views"])

    (shown,) = views("show", plan)
    assert shown["chunks"]["rows"]
    assert "steps" not in shown  # the step of "mine" does not follow from its name
    assert [view["title"] for view in views("compare", plan, other)] == [shown["title"]] * 2
    assert ["start_up_s", "0.000 s", "5.000 s", True] in page_data(Path(page))["rows"]
    (measured,) = views("compare", plan, report)
    assert [each["measured"] for each in measured["measured"]] == [2.0, 3]
    for odd in ('{"predicted_step_s": null, "step_s": 2.0}', '{"predicted_step_s": NaN, "step_s": "1"}'):
        Path(report).write_text(odd)
        assert "no figure" in fails(capsys, "compare", plan, report)
    Path(report).write_text('{"artifact": "trial", "compared": [{"name": "step"}]}')
    assert "expected a JSON object" in fails(capsys, "show", report)
    (explained,) = views("explain", plan, step, "--brief", "--no-levers")
    assert explained["chunks"]["texts"]
    assert explained["steps"]
    planned = ("plan", step, "--hardware", "h200", "--host-memory", "64GiB", "--brief", "--no-levers")
    (view,) = views(*planned)
    assert view["steps"]
    assert view["budgets"][1]["must_be_free"] > 0
    assert "end it in .html" in fails(capsys, "show", plan, "--plot", str(tmp_path / "plan.png"))
    assert "no picture format" in fails(capsys, "sweep", "opt-125m", "--plot", page)
    assert "or in .html for a page" in fails(capsys, "profile", "opt-125m", "--plot", str(tmp_path / "plan.gif"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright") if not REQUIRED else None
    if BROWSER is None and not REQUIRED:
        pytest.skip("there is no Chromium")
    if playwright is None:
        from playwright import sync_api as playwright
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """A function that opens a page of views in a window; afterwards nothing was loaded and nothing complained."""
    complaints: list[str] = []

    def open_page(*views: dict[str, Any], width: int = 1200) -> Any:
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request", lambda request: complaints.append(request.url) if not request.url.startswith("file:") else None
        )
        page.goto(write_page(tmp_path / "page.html", *views).as_uri())
        page.locator(".budget canvas, .step canvas").first.wait_for()
        return page

    yield open_page
    assert not complaints


def spot(page: Any, name: str, across: float, down: float) -> tuple[float, float]:
    box = page.locator(f".{name} canvas").first.bounding_box()
    return box["x"] + box["width"] * across, box["y"] + down


def test_hover_clicks_and_scenarios_in_a_browser(opened: Any) -> None:
    answer, trace, hardware = made("two ranks")
    why = explain(answer, trace, hardware, levers=False)
    view = plan_view(answer, trace, hardware, explanation=why, notes="elixir.wrap(model)")
    page = opened(view)
    page.locator(".step").scroll_into_view_if_needed()
    tip = page.locator(".step div").filter(has_text="on the device").last
    for nudge in range(40):  # a browser that is busy misses the first
        page.mouse.move(*spot(page, "step", 0.6 + 1e-3 * nudge, 120))
        page.wait_for_timeout(50)
        if tip.count():
            break
    tip.wait_for()
    said = tip.inner_text()
    assert re.search(r"at [\d.]+ m?s, in \S+", said)
    assert "activations" in said
    assert all(f"{RESOURCE_LABELS[name]}:" in said for name in ("compute", "host_to_device", "network"))

    row = view["chunks"]["rows"][len(view["chunks"]["rows"]) // 2]
    page.locator(".chunks").scroll_into_view_if_needed()
    page.mouse.click(*spot(page, "chunks", 0.55, 30))
    chunk = page.locator(".said .chunk")
    chunk.wait_for()
    assert re.match(r"chunk \d+: ", chunk.inner_text())
    assert chunk.locator("tbody tr").count() == len(row[6]) > 0

    steps = view["steps"]
    page.locator(".scenarios button").nth(len(steps) - 1).click()
    assert page.locator(".step-verdict").inner_text() == steps[-1]["verdict"] != steps[0]["verdict"]
    assert page.locator(".scenarios button[aria-pressed=true]").count() == 1
    page.locator("button", has_text="copy").last.click()
    page.locator("button", has_text="copied").wait_for()  # the browser may ask first


@pytest.mark.parametrize("width", [360, 1200])
def test_the_peak_tells_what_is_alive_on_a_phone_as_well(opened: Any, width: int) -> None:
    trace = make_trace(layers=3)
    page = opened(trace_view(trace), width=width)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    # The mark is where the total is highest; the pointer looks for it along the upper edge of the curve.
    view = trace_view(trace)["memory"]
    total = np.sum([kind["values"] for kind in view["kinds"]], axis=0)
    at = (view["at"][int(total.argmax())] - view["at"][0]) / (view["at"][-1] - view["at"][0])
    box = page.locator(".step canvas").first.bounding_box()
    x = box["x"] + 92 + at * (box["width"] - 106)
    for down in range(30, 120, 4):
        page.mouse.click(x, box["y"] + down)
        if page.locator(".said .alive").count():
            break
    first = trace_view(trace)["peak"]["holders"][0]
    assert format_bytes(first[-1]) in page.locator(".said .alive tbody tr").first.inner_text()


def test_two_plans_stand_side_by_side(opened: Any) -> None:
    first, trace, hardware = made("streamed")
    second, *_ = made("resident")
    views = [plan_view(each, trace, hardware) for each in (first, second)]
    page = opened(*views, width=1400)
    boxes = [page.locator("section").nth(index).bounding_box() for index in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]


@pytest.mark.slow
def test_the_page_of_the_largest_model_is_small(tmp_path: Path) -> None:
    import torch

    from elixir.hardware.profile import preset
    from elixir.models import build, default_input, default_step
    from elixir.tracer import trace_step

    model = build("opt-175b", dtype=torch.bfloat16, checkpoint="non-reentrant", device="meta")
    machine = preset("h200")
    inp = default_input(model, batch=8, seq=2048)
    trace = trace_step(model, inp, default_step, dtype=torch.bfloat16, hardware=machine, model_name="opt-175b")
    answer = plan_from_trace(trace, machine, 8, host_budget="64TiB")
    why = explain(answer, trace, machine, levers=False)
    view = plan_view(answer, trace, machine, explanation=why, levers=answer.levers())
    assert write_page(tmp_path / "plan.html", view).stat().st_size <= LARGEST_PAGE_BYTES
