"""Plans of the search by shapes over those of the search of today: seconds, regrets, CPU time, on up to 42 questions.

    python benchmark/shape_search.py [--only TEXT ...] [--no-record]

The questions are those of `golden_seconds`, forced placements left out, and the situations of `situations` and
`regret`. Each is planned four times in this process, by either search, for the rates of the profile and for all
scenarios; all plans are simulated in all scenarios. A regret is against the least seconds that any of the four plans
has, or that either search knows. `over_floor` is the nominal plan over the least floor of all shapes.

Nothing calls `elixir.search.propose.search` but this script. Appends to ``results/shape_search.csv``; fails while a bar
is missed.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from elixir.search.propose.best import Outcome

from benchmark import regret, situations
from benchmark.common import Row, append_rows, conditions
from elixir.garbage import garbage_collection_paused
from elixir.hardware.scenario import Scenario, scenarios
from elixir.optimizer_states import optimizer_name
from elixir.plan.plan import Plan
from elixir.search.planner import budgets_of, plan_or_shortage, setting_for
from elixir.search.propose.search import ShapeSearch
from elixir.search.propose.sizes import SearchSpace
from elixir.search.propose.units_as_one import with_units_as_one
from elixir.search.propose.written_plan import to_plan
from elixir.search.question import Question
from elixir.search.simulator.simulation import simulate_step
from tools.golden_seconds import PLANS, question

WORST_RATIO, WORST_REGRET, MEAN_REGRET = 1.005, 0.01, 0.045
"""Bars: nominal seconds over today's, regret above today's, and the mean of all regrets."""
T = TypeVar("T")


def questions(only: Sequence[str]) -> Iterator[tuple[str, Question]]:
    """Names and questions."""
    wanted = lambda name: any(text in name for text in only)  # noqa: E731
    for case in PLANS:
        name = "golden " + case.removeprefix("plan ").replace(" --json", "")
        if "--placement" not in case and wanted(name):
            yield name, question(case)
    for name, it in {**situations.SITUATIONS, **regret.CHOSEN}.items():
        if wanted(name):
            yield name, Question(situations.trace(it), it.hardware, regret.request(it))


def possible(asked: Question) -> tuple[Scenario, ...]:
    """The scenarios of a question, as the planner has them."""
    setting, request = setting_for(*asked), asked.request
    clips = request.clipping is not False and setting.clipping and setting.early_updates is None
    return scenarios(asked.hardware, clips=clips)


def shape_plan(asked: Question, among: Sequence[Scenario]) -> tuple[Plan, Outcome, float]:
    """The plan of the search by shapes, what it knows, and the least floor of all shapes."""
    setting, budgets = setting_for(*asked), budgets_of(asked.hardware, asked.request)
    for overlap in dict.fromkeys((setting.overlap, False)):
        space = SearchSpace(asked.trace, asked.hardware, replace(setting, overlap=overlap))
        for sizes in space.tiers(asked.request):
            with garbage_collection_paused():
                search = ShapeSearch(space, budgets, sizes(), among)
                outcome = search.find()
            if outcome.best is not None:
                space, outcome = with_units_as_one(space, outcome)
                assert outcome.best is not None
                optimizer = optimizer_name(asked.request.optimizer_type)
                return to_plan(space, outcome.best, budgets, optimizer, "auto"), outcome, search.least_s
    raise SystemExit(f"nothing fits: {asked.trace.model_name}")


def seconds(plan: Plan, asked: Question, among: Sequence[Scenario]) -> dict[Scenario, float]:
    """Simulated seconds in each scenario."""
    return {
        each: simulate_step(plan, asked.trace, each.machine(asked.hardware), clipped=each.clipped).step_s
        for each in among
    }


def timed(make: Callable[[], T]) -> tuple[T, float]:
    """Calls a function; its result and its CPU seconds."""
    began_s = time.process_time()
    found = make()
    return found, time.process_time() - began_s


def row(name: str, asked: Question) -> Row:
    """One question."""
    among = possible(asked)
    nominal = asked._replace(request=replace(asked.request, assume="nominal"))
    old, old_s = timed(lambda: plan_or_shortage(*nominal, moves=False))
    sure_old, sure_old_s = timed(lambda: plan_or_shortage(*asked, moves=False))
    (new, _, floor_s), new_s = timed(lambda: shape_plan(nominal, among[:1]))
    (sure_new, known, _), sure_new_s = timed(lambda: shape_plan(asked, among))
    taken = [seconds(plan, asked, among) for plan in (old, new, sure_old, sure_new)]
    best_s = {each: min(of[each] for of in taken) for each in among}
    for judged in (*sure_old.predicted.judgements, *known.judgements):
        best_s[judged.scenario] = min(best_s[judged.scenario], judged.best_s)
    worst_old, worst_new = (max(of[each] / best_s[each] - 1 for each in among) for of in taken[2:])
    in_nominal = among[0]
    return {
        "question": name,
        "chunks": len(sure_new.chunks),
        "nominal_s": round(taken[1][in_nominal], 5),
        "ratio": round(taken[1][in_nominal] / taken[0][in_nominal], 5),
        "over_floor": round(taken[1][in_nominal] / floor_s, 4) if floor_s < float("inf") else "",
        "regret_today": round(worst_old, 4),
        "regret": round(worst_new, 4),
        "cpu_nominal_today_s": round(old_s, 2),
        "cpu_nominal_s": round(new_s, 2),
        "cpu_today_s": round(sure_old_s, 2),
        "cpu_s": round(sure_new_s, 2),
    }


def main() -> int:
    """Compares; 1 while a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="questions that contain one of these texts")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    before, rows = conditions(), []
    for name, asked in questions(args.only):
        rows.append(row(name, asked))
        print(rows[-1], flush=True)
    ratios = [each["ratio"] for each in rows]
    means = {key: statistics.mean(each[key] for each in rows) for key in ("regret_today", "regret")}
    cpu = statistics.median(each["cpu_s"] / each["cpu_today_s"] for each in rows)
    print(f"ratio: median {statistics.median(ratios):.4f}, {min(ratios):.4f} to {max(ratios):.4f}")
    print(f"regret: mean {means['regret']:.4f}, today {means['regret_today']:.4f}; CPU over today's, median {cpu:.2f}")
    missed = [each["question"] for each in rows if each["ratio"] > WORST_RATIO]
    missed += [each["question"] for each in rows if each["regret"] > each["regret_today"] + WORST_REGRET]
    missed += ["mean of regrets"] * (means["regret"] > MEAN_REGRET)
    for name in missed:
        print(f"missed: {name}")
    if not args.no_record:
        print(append_rows("shape_search", [{**before, **each} for each in rows]))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
