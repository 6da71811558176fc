"""How near the search comes to the best there is: against all plans of small instances, and against a lower bound.

    python benchmark/search_optimality.py [--only exhaustive bound] [--instances 200] [--models opt-13b ...] [--dry]

Three parts:

* ``exhaustive``: random instances of at most 8 chunks, one rank and two. All homes, block counts and prefetch depths of
  all packings that the search looks at are simulated, but for homes whose floor is above the best so far (floors are
  compared with simulations by tests). `ratio` is the chosen plan's step over the best one's.
* ``bound``: OPT models under five device and three host budgets on the H200 preset. `ratio` is the chosen plan's step
  over `benchmark.certificate.lower_bound`.
* ``activations`` (only if it is asked for): the cases of ``bound`` with ``activations="auto"``, at the profile's rates.
  `ratio` is the step of that plan over the faster one of two: all layers run again in backward, or none.

Appends to ``results/search_optimality.csv``. Fails if fewer than 95 % of the instances are equal to the best (to a
nanosecond), any is more than 1 % worse, any plan is below its bound, or any with chosen activations is slower than without.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.certificate.lower_bound import lower_bound
from benchmark.common import Row, append_rows, conditions, percentiles
from benchmark.search_vs_original import BATCH, SEQUENCE, trace
from elixir.errors import PlanError
from elixir.hardware.profile import HardwareProfile, preset
from elixir.hardware.scenario import Scenario
from elixir.optimizer_states import StateSize
from elixir.plan.activations import activations_text
from elixir.search import plan_from_trace
from elixir.search.advise.activations import trace_that_keeps
from elixir.search.planner import planned
from elixir.search.problem.placement import Setting
from elixir.search.propose.search import ShapeSearch
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.question import Question, StepQuestion
from elixir.search.request import SearchRequest
from elixir.step_trace import StepTrace
from elixir.units import GIB
from tests.common.small_searches import best_of_all, small_search

EQUAL_S = 1e-9
EQUAL_SHARE, WORST_RATIO = 0.95, 1.01
GAP_BAR = 1.05
MODELS = ("opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b", "opt-30b", "opt-66b", "opt-175b")
DEVICE_GIB = (16, 24, 40, 80, 140)
HOST_SHARES = (0.7, 0.9, 10.0)
"""Shares of what weights, gradients, master weights and Adam's states take together, which is
`HOST_BYTES_PER_NUMEL`."""
HOST_BYTES_PER_NUMEL = 2 + 2 + 4 + 8
WORLD_SIZES = (1, 8)
NO_PLAN = "no plan found"


def row(part: str, case: str, world_size: int, chunks: int, **values: object) -> Row:
    """One line of the results; seconds are those of a simulated step unless a name says otherwise."""
    columns: Row = {
        "part": part,
        "case": case,
        "world_size": world_size,
        "chunks": chunks,
        "device_bytes": None,
        "host_bytes": None,
        "step_s": None,
        "reference_s": None,
        "ratio": None,
        "search_s": None,
        "reference_search_s": None,
        "note": "",
    }
    return columns | values | conditions()


def exhaustive(instances: int) -> Iterator[Row]:
    """Instances that have a plan, until there are so many."""
    found = 0
    for seed in itertools.count():
        if found == instances:
            return
        search = small_search(seed)
        started = time.process_time()
        outcome = ShapeSearch(search.space, search.budgets, search.sizes, (Scenario(),)).find()
        step_s = None if outcome is None else outcome.fastest_s
        between = time.process_time()
        best = best_of_all(search, skip=True)
        ended = time.process_time()
        if best is None:
            continue
        found += 1
        best_s = best.seconds["total"]
        equal = step_s is not None and step_s <= best_s + EQUAL_S
        yield row(
            "exhaustive",
            f"seed {seed}",
            search.space.setting.world_size,
            len(best.work.chunks),
            device_bytes=search.budgets.device_bytes,
            host_bytes=search.budgets.host_bytes,
            step_s=step_s,
            reference_s=best_s,
            ratio=1.0 if equal else None if step_s is None else step_s / best_s,
            search_s=round(between - started, 4),
            reference_search_s=round(ended - between, 4),
            note="equal" if equal else NO_PLAN if step_s is None else "slower",
        )


def bound(models: Sequence[str]) -> Iterator[Row]:
    """All cases of the models that have a plan; one without a plan that the bound does not rule out is a row as
    well."""
    hardware = preset("h200")
    for name in models:
        step = trace(name)
        everything = step.numel * HOST_BYTES_PER_NUMEL
        for world_size, device_gib, share in itertools.product(WORLD_SIZES, DEVICE_GIB, HOST_SHARES):
            budgets = Budgets(device_gib * GIB, int(share * everything))
            yield from _against_bound(name, step, hardware, world_size, budgets)


def _against_bound(
    name: str, step: StepTrace, hardware: HardwareProfile, world_size: int, budgets: Budgets
) -> Iterator[Row]:
    setting = Setting(world_size, hardware.ranks_per_host(world_size), StateSize(8), True)
    space = SearchSpace(step, hardware, setting)
    started = time.process_time()
    try:
        plan = plan_from_trace(
            step,
            hardware,
            world_size,
            device_memory=budgets.device_bytes,
            host_budget=budgets.host_bytes,
            early_updates=False,  # the bound knows of no update before the norm
        ).plan
    except PlanError:
        plan = None
    between = time.process_time()
    least = lower_bound(space, budgets)
    ended = time.process_time()
    values = {"device_bytes": budgets.device_bytes, "host_bytes": budgets.host_bytes}
    seconds = {"search_s": round(between - started, 4), "reference_search_s": round(ended - between, 4)}
    if plan is None or not plan.overlap:
        if least is not None:
            note = NO_PLAN if plan is None else "only without overlap, which the bound is not for"
            yield row("bound", name, world_size, 0, **values, **seconds, note=note)
        return
    if least is None:
        raise SystemExit(f"{name} on {world_size} ranks has a plan where the bound says that there is none")
    step_s = plan.predicted.seconds["total"]
    yield row(
        "bound",
        name,
        world_size,
        len(plan.chunks),
        **values,
        **seconds,
        step_s=step_s,
        reference_s=least.step_s,
        ratio=step_s / least.step_s,
    )


def activations(models: Sequence[str]) -> Iterator[Row]:
    """All cases of the models that have a plan with chosen activations, or without."""
    hardware = preset("h200")
    for name in models:
        question = StepQuestion(model=name, batch=BATCH, seq=SEQUENCE, dtype="bf16")
        again, whole, built = trace(name), trace(name, "none"), question.build()
        everything = again.numel * HOST_BYTES_PER_NUMEL
        for world_size, device_gib, share in itertools.product(WORLD_SIZES, DEVICE_GIB, HOST_SHARES):
            request = SearchRequest(
                world_size=world_size,
                device_memory=device_gib * GIB,
                host_budget=int(share * everything),
                assume="nominal",
            )
            started = time.process_time()
            plans = [planned(Question(step, hardware, request)) for step in (again, whole)]
            between = time.process_time()
            chosen = trace_that_keeps(question, hardware, replace(request, activations="auto"), built, whole)
            plan = planned(Question(chosen, hardware, request))
            ended = time.process_time()
            seconds = [each.predicted.step_s for each in plans if each is not None]
            if plan is None and not seconds:
                continue
            step_s, reference_s = None if plan is None else plan.predicted.step_s, min(seconds, default=None)
            yield row(
                "activations",
                name,
                world_size,
                0 if plan is None else len(plan.chunks),
                device_bytes=request.device_memory,
                host_bytes=request.host_budget,
                step_s=step_s,
                reference_s=reference_s,
                ratio=None if step_s is None or reference_s is None else step_s / reference_s,
                search_s=round(ended - between, 4),
                reference_search_s=round(between - started, 4),
                note=NO_PLAN if plan is None else activations_text(plan.activations) or "all units keep everything",
            )


def failures(rows: Sequence[Row]) -> list[str]:
    """The rows that miss their bar."""
    found = []
    instances = [line for line in rows if line["part"] == "exhaustive"]
    equal = sum(line["note"] == "equal" for line in instances)
    if instances and equal < EQUAL_SHARE * len(instances):
        found.append(f"{equal} of {len(instances)} instances equal to the best, the bar is {EQUAL_SHARE:.0%}")
    for line in instances:
        if line["ratio"] is None or line["ratio"] > WORST_RATIO:
            found.append(f"{line['case']}: {line['ratio']} of the best")
    for line in rows:
        if line["part"] == "bound" and line["ratio"] is not None and line["ratio"] < 1:
            found.append(f"{line['case']}: {line['ratio']} of its lower bound")
        if line["part"] == "activations" and (line["note"] == NO_PLAN or (line["ratio"] or 0) > 1 + EQUAL_S):
            found.append(f"{line['case']}: {line['ratio']} of the plan without chosen activations")
    return found


def summary(rows: Sequence[Row]) -> None:
    """Ratios by part, and by model."""
    groups: dict[str, list[float]] = {}
    for line in rows:
        if line["ratio"] is not None:
            name = line["part"] if line["part"] == "exhaustive" else "{part} {case} x {world_size}".format(**line)
            groups.setdefault(name, []).append(float(line["ratio"]))
            groups.setdefault(f"all of {line['part']}", []).append(float(line["ratio"]))
    for name, ratios in groups.items():
        p20, p50, p80 = percentiles(ratios)
        within = sum(ratio <= GAP_BAR for ratio in ratios)
        print(
            f"{name}: p20 {p20:.4f}  p50 {p50:.4f}  p80 {p80:.4f}  max {max(ratios):.4f}  "
            f"within 5 %: {within} of {len(ratios)}"
        )
    for note in (NO_PLAN, "only without overlap, which the bound is not for"):
        print(f"{note}: {sum(line['note'] == note for line in rows)}")


def main() -> int:
    """Runs, appends, summarises; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=("exhaustive", "bound", "activations"), default=["exhaustive", "bound"]
    )
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--dry", action="store_true", help="append nothing")
    arguments = parser.parse_args()
    rows: list[Row] = []
    if "exhaustive" in arguments.only:
        rows += exhaustive(arguments.instances)
    for part, cases in (("bound", bound), ("activations", activations)):
        for line in cases(arguments.models) if part in arguments.only else ():
            rows.append(line)
            ratio = "" if line["ratio"] is None else f"{line['ratio']:.4f} of the reference "
            case = f"{line['case']} x {line['world_size']}, {line['device_bytes'] / GIB:.0f} GiB"
            print(f"{case}: {ratio}{line['note']}", flush=True)
    if not arguments.dry:
        append_rows("search_optimality", rows)
    summary(rows)
    missed = failures(rows)
    for text in missed:
        print("missed:", text)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
