"""A plan in the scenarios that its profile thinks possible: seconds, bounds, and the measurement worth most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elixir.hardware.scenario import Scenario
from elixir.plan.plan import Plan
from elixir.show.tables import list_table
from elixir.units import format_seconds

if TYPE_CHECKING:
    from rich.table import Table

_NOTICEABLE = 0.01
"""A regret below is none, and a measurement that removes less of it is not named."""
_MEASUREMENTS = {
    "host_adam": "to measure CPU Adam (`elixir hardware --measure`)",
    "link": "to measure the links between host and device (`elixir hardware --measure`)",
    "clipped": "to learn from a run how often its norm is clipped (`elixir hardware --learn`)",
}
"""By the field of `Scenario` that it makes known."""


def scenario_text(scenario: Scenario) -> str:
    """The scenario as a condition."""
    parts = (
        "CPU Adam is slow" * (scenario.host_adam != 1),
        "links are slow" * (scenario.link != 1),
        "every step is clipped" * scenario.clipped,
    )
    return " and ".join(part for part in parts if part) or "all is as the profile says"


def regret_text(plan: Plan) -> str:
    """How much slower than the best plan it is at most, and what would tell most; empty if it was judged by nothing."""
    judged = plan.predicted.judgements
    if not judged:
        return ""
    worst = max(judged, key=lambda each: each.regret)
    if worst.regret < _NOTICEABLE:
        return f"  regret        less than 1 % slower than the best plan in all of {len(judged)} scenarios"
    # Those in which one thing is not as the profile says, and the worst.
    shown = dict.fromkeys([worst, *(each for each in judged if _unlike(each.scenario, judged[0].scenario) == 1)])
    first, *others = ((_percent(each.regret), f"if {scenario_text(each.scenario)}") for each in shown)
    text = f"  regret        at most {first[0]} slower than the best plan {first[1]}"
    text += "".join(f", {share} {condition}" for share, condition in others)
    known = plan.predicted.regret_if_known
    name = min(known, key=lambda each: known[each], default="")
    if name and known[name] < worst.regret - _NOTICEABLE:
        text += f"\n                {_MEASUREMENTS[name]} would leave {_percent(known[name])}"
    return text


def scenarios_table(plan: Plan) -> Table:
    """Seconds in each scenario (rich)."""
    rows = [
        [
            f"{it.scenario.host_adam:.2g}",
            f"{it.scenario.link:.2g}",
            "yes" if it.scenario.clipped else "no",
            format_seconds(it.step_s),
            format_seconds(it.best_s),
            _percent(it.regret),
        ]
        for it in plan.predicted.judgements
    ]
    columns = ("CPU Adam", "links", "clipped", "step", "best plan", "slower by")
    return list_table("in each scenario, rates as parts of the profile's", columns, rows)


def _unlike(one: Scenario, other: Scenario) -> int:
    return sum((one.host_adam != other.host_adam, one.link != other.link, one.clipped != other.clipped))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
