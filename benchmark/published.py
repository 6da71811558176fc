"""Tokens per second as predicted, compared with what others have published for the same jobs.

    python benchmark/published.py [--points FILE] [--only TEXT] [--no-record]

Each resident run of ``published_points.json`` is traced with the shapes, batch, accumulation, dtype and activation
checkpointing of its source, planned on the preset that its machine is (with the fields that the file changes), and
simulated. Shown for every point, as predicted over published tokens/s:

* `preset`: with the rates that the preset has;
* `left out`: with sustained shares of FLOP/s and memory bandwidth that are fitted to the other points of its card, and a
  rate of attention, as a part of that of matrix products, that is fitted to the other points of all cards;
* `card out`: with shares that the points of all other cards give, as for a card of which nothing is known.

The last two come with the range that a plan prints: how many of them contain the published value, and how wide they are.

`--fit` prints the shares that all points of a card give, which are those of the presets. Appends a row for every point
to ``results/published.csv``; fails where a bar is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import numpy.typing as npt

from benchmark.common import append_rows, conditions, print_table
from elixir.hardware.profile import HardwareProfile, preset
from elixir.hardware.scenario import extremes
from elixir.models.loading import build
from elixir.models.step import default_step, input_to_trace
from elixir.plan.plan import Plan
from elixir.search import plan_from_trace
from elixir.search.simulator.rates import Rates, main_dtype
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import StepTrace
from elixir.tracer.trace import trace_step
from elixir.units import parse_dtype

POINTS = Path(__file__).parent / "published_points.json"
MEDIAN_BAR, WORST_BAR = 0.12, 0.30
"""Errors of tokens/s with the point left out of the fit."""
CARD_OF = {"a100": "a100", "a100-40gb": "a100", "h100": "h100", "v100": "v100"}
"""Preset -> the card whose points are fitted together: one chip, whatever its memory."""
FEWEST = 3
"""Points of a card to fit it on its own; with fewer it gets what the other cards give."""
SHARES = np.arange(0.35, 0.95, 0.01)
MEMORY_SHARES = np.arange(0.40, 1.01, 0.05)
ATTENTION_PARTS = np.arange(0.30, 1.01, 0.10)
"""Rates of attention over those of matrix products. Only runs of long sequences tell them apart, one of each card, so
there is one for all cards."""
USUAL_MEMORY_SHARE = 0.6
"""Measured norms, activations and residual adds reach about so much together (vidur's tables: 0.3 to 0.9). Runs of large
products say little about it, so the fit is drawn there, weakly."""
DRAWN = 0.05

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run and what is predicted of it."""

    point: dict[str, Any]
    hardware: HardwareProfile
    trace: StepTrace
    plan: Plan

    @property
    def card(self) -> str:
        """The card whose points it is fitted with."""
        return CARD_OF[self.hardware.name]

    @property
    def tokens(self) -> int:
        """Tokens of one rank and step."""
        point = self.point
        return int(point["batch"] * point["seq"] * point["accumulation"])

    @property
    def published_s(self) -> float:
        """Seconds of a step."""
        return self.tokens / float(self.point["published"]["tokens_per_s_per_gpu"])

    @cached_property
    def table(self) -> Floats:
        """Log of predicted over published seconds, by `ATTENTION_PARTS`, `SHARES` and `MEMORY_SHARES`: the plan's step
        with other compute."""
        rest_s = self.plan.predicted.seconds["total"] - self._compute_s(self.hardware)
        found = [
            [
                [self._compute_s(sustained(self.hardware, share, memory, part)) for memory in MEMORY_SHARES]
                for share in SHARES
            ]
            for part in ATTENTION_PARTS
        ]
        logs: Floats = np.log((np.array(found) + rest_s) / self.published_s)
        return logs

    def _compute_s(self, hardware: HardwareProfile) -> float:
        ranks = self.plan.world_size
        rates = Rates(hardware, main_dtype(self.trace), ranks, hardware.ranks_per_host(ranks))
        return float(rates.accesses_s(self.trace).sum()) * self.plan.accumulation

    def on(self, hardware: HardwareProfile) -> float:
        """Predicted over published tokens/s of the same plan on a machine with other rates."""
        return self.published_s / simulate_step(self.plan, self.trace, hardware).step_s

    def range_on(self, hardware: HardwareProfile) -> tuple[float, float]:
        """The range of seconds predicted for a step there."""
        fast, slow = (
            simulate_step(self.plan, self.trace, scenario.machine(hardware), compute_scale=scale).step_s
            for scenario, scale in extremes(hardware)
        )
        return fast, slow


def sustained(hardware: HardwareProfile, share: float, memory_share: float, attention_part: float) -> HardwareProfile:
    """The machine whose training steps reach these shares of its FLOP/s, the last in attention as a part of the first,
    and of its memory's bandwidth."""
    return dataclasses.replace(
        hardware,
        sustained_flops_share=share,
        sustained_memory_share=memory_share,
        sustained_attention_share=share * attention_part,
    )


def machine(points: dict[str, Any], name: str) -> HardwareProfile:
    """The preset that a machine of the file is, with what the file changes."""
    changed = {key: value for key, value in points["machines"][name].items() if key not in ("preset", "note")}
    return dataclasses.replace(preset(points["machines"][name]["preset"]), **changed)


def planned(point: dict[str, Any], trace: StepTrace, hardware: HardwareProfile) -> Plan:
    """The plan of a point; what others keep back of a device is not known, so nothing is. None of them updates early."""
    return plan_from_trace(
        trace,
        hardware,
        point["world_size"],
        accumulation=point["accumulation"],
        host_budget=point["host_budget"],
        placement=point["placement"],
        moments=point["moments"],
        device_reserve=0,
        early_updates=False,
    ).plan


def traced(point: dict[str, Any], hardware: HardwareProfile) -> StepTrace:
    """One batch of the run, with the shapes of its source."""
    dtype = parse_dtype(point["dtype"])
    if isinstance(point["model"], str):
        model = build(point["model"], dtype=dtype, checkpoint=point["checkpoint"], max_positions=_longer(point))
    else:
        values = dict(point["model"])
        if "attention" in point:
            values["attn_implementation"] = point["attention"]
        model = build(values, dtype=dtype, checkpoint=point["checkpoint"])
    inp = input_to_trace(model, batch=point["batch"], seq=point["seq"])
    fused = bool(point.get("fused"))
    return trace_step(model, inp, default_step, dtype=dtype, hardware=hardware, use_fused_kernels=fused)


def _longer(point: dict[str, Any]) -> int | None:
    """Positions of a model that ran with more than it was published with."""
    return int(point["seq"]) if point["model"].startswith("llama-2") and point["seq"] > 4096 else None


def _errors(runs: Sequence[Run]) -> Floats:
    """Mean errors of some runs, as logarithms, by attention's part and both shares."""
    drawn = DRAWN * np.log(MEMORY_SHARES / USUAL_MEMORY_SHARE) ** 2
    errors: Floats = np.mean([np.abs(run.table) for run in runs], axis=0) + drawn
    return errors


def of_cards(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs of each card that has enough of them."""
    cards = [[run for run in runs if run.card == card] for card in sorted({run.card for run in runs})]
    return [theirs for theirs in cards if len(theirs) >= FEWEST]


def attention_part(runs: Sequence[Run]) -> int:
    """The index of the part of the products' rate with the least mean error if each card has its best shares."""
    errors = sum(len(theirs) * _errors(theirs).min(axis=(1, 2)) for theirs in of_cards(runs))
    return int(np.argmin(errors))


def fitted(runs: Sequence[Run], part: int) -> tuple[float, float, float]:
    """The shares of FLOP/s and of memory bandwidth with the least mean error over these runs, and attention's part."""
    errors = _errors(runs)[part]
    share, memory = np.unravel_index(int(errors.argmin()), errors.shape)
    found = (SHARES[share], MEMORY_SHARES[memory], ATTENTION_PARTS[part])
    return round(float(found[0]), 3), round(float(found[1]), 3), round(float(found[2]), 3)


def of_other_cards(runs: Sequence[Run], card: str, hardware: HardwareProfile) -> HardwareProfile:
    """A card of which no run is known: it loses as much of the rate of its best products as the others do."""
    lost, memory, part = borrowed([run for run in runs if run.card != card])
    return sustained(hardware, hardware.matmul_efficiency * lost, memory, part)


def borrowed(runs: Sequence[Run]) -> tuple[float, float, float]:
    """Share of `matmul_efficiency`, and share of memory bandwidth: the geometric means over cards with enough runs; and
    attention's part."""
    lost, memories, chosen = [], [], attention_part(runs)
    for theirs in of_cards(runs):
        share, memory, _ = fitted(theirs, chosen)
        lost.append(share / statistics.geometric_mean(run.hardware.matmul_efficiency for run in theirs))
        memories.append(memory)
    return statistics.geometric_mean(lost), statistics.geometric_mean(memories), float(ATTENTION_PARTS[chosen])


def left_out(runs: Sequence[Run], run: Run) -> HardwareProfile:
    """The run's machine, its shares fitted to the other runs of its card."""
    known = [other for other in runs if other is not run]
    others = [other for other in known if other.card == run.card]
    if len(others) < FEWEST:
        return of_other_cards(runs, run.card, run.hardware)
    return sustained(run.hardware, *fitted(others, attention_part(known)))


def known_runs(points: dict[str, Any], only: str) -> list[Run]:
    """Every resident run with a published speed, traced and planned."""
    runs = []
    for point in points["points"]:
        if point["kind"] != "resident" or "tokens_per_s_per_gpu" not in point["published"] or only not in point["id"]:
            continue
        hardware = machine(points, point["machine"])
        trace = traced(point, hardware)
        runs.append(Run(point, hardware, trace, planned(point, trace, hardware)))
        print(point["id"], file=sys.stderr, flush=True)
    return runs


def main() -> int:
    """Predict, compare with what is published, and with the bars; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=Path, default=POINTS)
    parser.add_argument("--only", default="", help="points whose name contains this text")
    parser.add_argument("--fit", action="store_true", help="print the shares that all points of a card give, and stop")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    runs = known_runs(json.loads(args.points.read_text()), args.only)
    if args.fit:
        for card in sorted({run.card for run in runs}):
            print(card, *fitted([run for run in runs if run.card == card], attention_part(runs)))
        lost, memory, part = borrowed(runs)
        print(
            f"other cards: {lost:.3f} of the rate of their best products, {memory:.3f} of memory bandwidth, {part:.2f}"
        )
        return 0
    rows = [row_of(runs, run) for run in runs]
    kinds = ("preset", "left_out", "card_out")
    print_table(
        "predicted over published tokens/s",
        ("point", "published tokens/s", *kinds),
        [(row["point"], row["published_tokens_per_s"], *(f"{row[kind]:.3f}" for kind in kinds)) for row in rows],
    )
    for kind in ("left_out", "card_out"):
        within = sum(bool(row[f"{kind}_contains"]) for row in rows)
        width = statistics.median(row[f"{kind}_width"] for row in rows)
        print(f"{kind}: {within} of {len(rows)} ranges contain the published value, median width {width:.2f}")
    for kind in kinds:
        errors = sorted(abs(row[kind] - 1) for row in rows)
        bias = math.exp(statistics.median(math.log(row[kind]) for row in rows))
        print(f"{kind}: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}, median ratio {bias:.3f}")
    if not args.no_record:
        append_rows("published", rows)
    errors = [abs(row["left_out"] - 1) for row in rows]
    return int(statistics.median(errors) > MEDIAN_BAR or max(errors) > WORST_BAR)


def row_of(runs: Sequence[Run], run: Run) -> dict[str, Any]:
    """One point as a row of results."""
    without, foreign = left_out(runs, run), of_other_cards(runs, run.card, run.hardware)
    ratios = {"left_out": run.on(without), "card_out": run.on(foreign)}
    ranges = {
        "left_out": run.range_on(without),
        "card_out": run.range_on(dataclasses.replace(foreign, step_range=None)),
    }
    return {
        "point": run.point["id"],
        "card": run.card,
        "published_tokens_per_s": run.point["published"]["tokens_per_s_per_gpu"],
        "preset": round(run.published_s / run.plan.predicted.seconds["total"], 4),
        **{kind: round(ratio, 4) for kind, ratio in ratios.items()},
        "left_out_share": round(without.sustained_flops_share or 0.0, 4),
        "left_out_memory_share": round(without.sustained_memory_share or 0.0, 4),
        **{f"{kind}_contains": ranges[kind][0] <= run.published_s <= ranges[kind][1] for kind in ranges},
        **{f"{kind}_width": round(ranges[kind][1] / ranges[kind][0], 3) for kind in ranges},
        **conditions(),
    }


if __name__ == "__main__":
    raise SystemExit(main())
