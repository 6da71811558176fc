"""Sweeps and fits on paper: rows say what planning and simulating one by one would, and order means size."""

from __future__ import annotations

import dataclasses
import datetime
import re
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
import torch
from matplotlib.colors import rgb_to_hsv, to_rgb

from elixir.errors import InputError, InputTypeError, PlanError
from elixir.hardware.profile import preset
from elixir.models.loading import build
from elixir.models.step import default_input, default_step
from elixir.plan.activations import activations_text
from elixir.search import plan_from_trace
from elixir.search.question import StepQuestion
from elixir.search.request import SearchRequest
from elixir.search.searches import answer_to
from elixir.search.whatif.prices import Offer, Prices
from elixir.search.whatif.sweep import SweepRow, fit, sweep
from elixir.show.style import RESOURCE_LABELS
from elixir.show.sweep import cost_text, fit_table, plot_sweep, reasons, row_text, sweep_table, to_frame
from elixir.step_trace import StepTrace
from elixir.tracer.trace import trace_step
from elixir.units import GIB, MIB, format_bytes, format_seconds
from tests.common.asked_once import steps_are_traced_once  # noqa: F401

MODEL = "opt-125m"
STEP = StepQuestion(dtype="bf16", seq=64)


@pytest.fixture(scope="module")
def rows() -> list[SweepRow]:
    """Two machines, of which one takes four devices; the budget makes one batch too large."""
    return sweep([MODEL], ["t4", "h200"], [1, 8], [1, 64], step=STEP, device_memory=3 * GIB, host_budget="16GiB")


@pytest.fixture(scope="module")
def trace() -> StepTrace:
    """The trace that the sweep makes for the h200 at batch 1."""
    model = build(MODEL, dtype=torch.bfloat16)
    return trace_step(
        model,
        default_input(model, batch=1, seq=64),
        default_step,
        dtype=torch.bfloat16,
        hardware=preset("h200"),
        optimizer=None,
        model_name=MODEL,
    )


def test_a_row_for_every_combination_in_the_order_asked_for(rows: list[SweepRow]) -> None:
    expected = [(batch, machine, ranks) for batch in (1, 64) for machine in ("t4", "h200") for ranks in (1, 8)]
    assert [(row.batch, row.machine, row.world_size) for row in rows] == expected
    assert all(row.model == MODEL and row.dtype == "bfloat16" for row in rows)


@pytest.mark.sampled
@pytest.mark.parametrize("share", [0.79, 1.0])
def test_a_row_with_chosen_activations_is_that_of_their_plan(share: float) -> None:
    """It is never slower than without."""
    step = replace(STEP, seq=256, use_fused_kernels=True)
    budgets = {"device_memory": int(share * GIB), "host_budget": "16GiB", "assume": "nominal"}
    rows = [
        sweep([MODEL], ["h200"], batches=[16], step=each, activations=activations, **budgets)[0]
        for each, activations in ((step, None), (replace(step, checkpoint="non-reentrant"), None), (step, "auto"))
    ]
    whole, again, chosen = rows
    request = SearchRequest(world_size=1, optimizer_type="AdamW", activations="auto", **budgets)
    plan = answer_to(replace(step, model=MODEL, batch=16), preset("h200"), request, read_host=False).plan
    assert (chosen.step_s, chosen.device_peak_bytes) == (plan.predicted.step_s, plan.predicted.device_peak_bytes)
    assert chosen.activations == activations_text(plan.activations) != ""
    assert whole.activations is again.activations is None
    assert not whole.fits
    assert chosen.step_s is not None
    assert again.step_s is not None
    assert chosen.step_s <= again.step_s
    found = fit(MODEL, ["h200"], batch=16, counts=[1], step=step, activations="auto", **budgets)
    assert found.best == chosen


def test_one_combination_that_cannot_be_traced_does_not_end_the_sweep() -> None:
    rows = sweep(["bert-base", MODEL], ["h200"], step=StepQuestion(dtype="bf16", seq=1024))
    assert [row.fits for row in rows] == [False, True]
    assert "512 positions" in rows[0].reason


def test_where_nothing_can_be_traced_the_first_error_is_raised() -> None:
    with pytest.raises(InputError, match="512 positions"):
        sweep(["bert-base"], ["h200", "t4"], step=StepQuestion(dtype="bf16", seq=1024))
    with pytest.raises(InputError, match="opt-125m"):
        fit("opt-125n")
    with pytest.raises(InputError, match="no machine to try"):
        fit(MODEL, [])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"models": []}, InputError),
        ({"models": MODEL}, InputError),
        ({"machines": ["h2000"]}, InputError),
        ({"machines": [3]}, InputTypeError),
        ({"world_sizes": [0]}, InputError),
        ({"batches": [True]}, InputTypeError),
        ({"optimizer_type": "Adamm"}, InputError),
        ({"device_memry": "1GiB"}, InputTypeError),
        ({"device_memory": "much"}, InputError),
        ({"network_bytes_per_s": 0.0}, InputError),
    ],
)
def test_bad_input_is_refused_before_the_work(arguments: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        sweep(**{"models": [MODEL], "machines": ["h200"], **arguments})  # type: ignore[arg-type]


def test_a_training_step_checks_itself() -> None:
    with pytest.raises(InputError, match="dtype"):
        StepQuestion(dtype="bf17")


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("host_gib", [0, 2])
@pytest.mark.parametrize("device_mib", [100, 400, 1500])
def test_the_quick_refusal_never_refuses_what_a_search_would_find(
    trace: StepTrace, device_mib: int, host_gib: int, world_size: int
) -> None:
    """A row fits exactly where `plan_from_trace` finds a plan."""
    (row,) = sweep(
        [MODEL], ["h200"], [world_size], step=STEP, device_memory=device_mib * MIB, host_budget=host_gib * GIB
    )
    try:
        plan_from_trace(
            trace, preset("h200"), world_size, optimizer_type="AdamW",
            device_memory=device_mib * MIB, host_budget=host_gib * GIB,
        )  # fmt: skip
        found = True
    except PlanError:
        found = False
    assert row.fits == found


def test_fit_takes_the_smallest_and_then_the_fewest_devices_of_each_machine() -> None:
    machines = ["h200", "t4", "rtx4090"]
    found = fit(MODEL, machines, batch=2, step=STEP)
    assert found.best == found.rows[0]
    assert [row.machine for row in found.rows] == ["t4", "rtx4090", "h200"]
    assert all(row.fits and row.world_size == 1 and row.batch == 2 for row in found.rows)


def test_fit_says_so_where_nothing_does() -> None:
    found = fit("opt-13b", ["t4", "rtx4090"], counts=[1, 2], step=STEP)
    assert found.best is None
    assert [(row.machine, row.world_size, row.fits) for row in found.rows] == [("t4", 2, False), ("rtx4090", 2, False)]


def test_the_heat_map_has_a_cell_for_every_row(rows: list[SweepRow], tmp_path: Path) -> None:
    figure = plot_sweep(rows, tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000
    (axes,) = figure.axes
    (mesh,) = axes.collections
    speeds = mesh.get_array().filled(0.0)
    down = [label.get_text() for label in axes.get_yticklabels()]
    across = [label.get_text() for label in axes.get_xticklabels()]
    assert across == ["1\nt4", "8", "1\nh200", "8"]
    assert axes.get_ylim() == (len(down), 0)  # the first is the highest
    assert [line.get_xdata()[0] for line in axes.lines] == [2]
    names = dict(text.get_text().split(" ", 1) for text in axes.get_legend().get_texts())
    assert names.pop("does") == "not fit"
    used = set()
    for row, text in zip(rows, axes.texts, strict=True):
        x, y = (at - 0.5 for at in text.get_position())
        column, line = 2 * (row.machine == "h200") + (row.world_size == 8), down.index(f"{MODEL}, batch {row.batch}")
        assert (x, y, speeds[line, column]) == (column, line, row.tokens_per_s or 0.0)
        if not row.fits:
            assert text.get_text() == "\N{MULTIPLICATION SIGN}"
            continue
        shown, letter = text.get_text().split()
        assert float(shown.rstrip("kM")) * {"k": 1e3, "M": 1e6}.get(shown[-1], 1) == pytest.approx(
            row.tokens_per_s, 0.05
        )
        assert names[letter] == RESOURCE_LABELS[row.bound_by or ""]
        used.add(letter)
        ink, ground = (rgb_to_hsv(to_rgb(each))[2] for each in (text.get_color(), mesh.to_rgba(row.tokens_per_s)[:3]))
        assert abs(ink - ground) > 0.35
    assert used == set(names)
    with pytest.raises(InputError, match="no rows"):
        plot_sweep([])


def test_tables_have_the_numbers_of_every_row(rows: list[SweepRow]) -> None:
    offer = Offer("h200", 2, 5.0, "USD", "example.com", datetime.date(2026, 1, 31))
    prices, why, frame = Prices((offer,), "USD"), reasons(rows), to_frame(rows)
    assert len(why) == len(set(why)) > 0
    tables = sweep_table(rows, prices=prices), fit_table(rows, "fit", prices)
    swept, fitted = (zip(*(column.cells for column in table.columns), strict=True) for table in tables)
    for number, (row, cells, chosen) in enumerate(zip(rows, swept, fitted, strict=True)):
        for field in dataclasses.fields(SweepRow):
            found, value = frame[field.name][number], getattr(row, field.name)
            assert pandas.isna(found) if value is None else found == value
        named = f"{row.world_size} x {row.machine}"
        assert (cells[0], cells[1], chosen[0]) == (f"{MODEL}\nbatch {row.batch}", named, named)
        if not row.fits:
            assert cells[5] == chosen[1] == f"does not fit [{why.index(row.reason) + 1}]"
            assert row_text(row).endswith(f"does not fit: {row.reason}")
            continue
        assert None not in (row.step_s, row.tokens_per_s, row.fastest_s, row.slowest_s, row.device_flops_per_s)
        assert cells[2].split("\n")[0] == format_seconds(row.step_s)
        assert cells[3].split("\n")[0] == f"{row.tokens_per_s:,.0f} tokens"
        assert float(cells[3].split("\n")[1].split()[0]) == pytest.approx(row.device_flops_per_s / 1e12, 1e-2)
        peaks = [
            format_bytes(each or 0) for each in (row.device_peak_bytes, row.host_peak_bytes, row.must_be_free_bytes)
        ]
        assert (cells[4].split("\n"), [*chosen[3:5]]) == (peaks[:2], [peaks[0], peaks[2]])
        bound = RESOURCE_LABELS[row.bound_by or ""]
        assert (cells[5], chosen[5]) == (f"{bound}\n{row.states_on_host_chunks} of {row.chunks}", bound)
        speeds = [float(each) for each in re.findall(r"[\d.]+", chosen[2].replace(",", ""))]
        tokens = row.tokens_per_s * row.step_s
        assert speeds == pytest.approx([row.tokens_per_s, tokens / row.slowest_s, tokens / row.fastest_s], abs=0.5)
        assert f"{row.tokens_per_s:,.0f} tokens per s" in row_text(row)
        cost = prices.cost(row)
        assert (cost is None) is (row.machine == "t4") is (cells[6] == "-")
        if cost is not None:
            hourly = 5.0 * ((row.world_size + 1) // 2)
            assert cells[6] == chosen[6] == f"{hourly:.2f}\n{hourly / 3600 / row.tokens_per_s * 1e6:.3g}"
            days, said = 1e9 / row.tokens_per_s / 86400, cost_text(row, cost, "USD", 1e9)
            assert f", {days * 24 * hourly:,.2f} USD and {days:,.1f} days for 1,000,000,000 tokens" in said
            assert ("4 offers of 2" in said) is (row.world_size == 8)
