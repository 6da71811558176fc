"""Plans with one field changed are refused, or say of themselves, what was recorded.

A commit that means to change it records it anew and says why:

    python -m tests.unit.search.test_recorded_changes

Other tests say for some fields what a plan refuses. Here each limit is tried from both sides, in plans of all kinds.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from elixir.artifact import digest
from elixir.errors import InputError, InputTypeError
from elixir.hardware.process_memory import Resident
from elixir.plan.plan import Plan, plan_of, same_packing
from elixir.plan.process_need import process_need
from elixir.plan.step_traffic import Backwards, step_traffic
from elixir.search import plan_from_trace
from elixir.search.request import SearchRequest
from elixir.step_trace import INPUT, Result, UnitActivations
from tests.common.situations import situation
from tests.unit.search.test_recorded_plans import following, rounded

RECORDED = Path(__file__).with_suffix(".json")
KEPT = {
    "layers 119": UnitActivations(
        "", (Result("aten.mm.default", 0), Result("aten.mm.default", 1)), (Result(INPUT, 0),)
    ),
    "layers 62": UnitActivations("", ()),
}
"""Activations of the first unit where a search has chosen none."""
SITUATIONS = ("layers 9", "layers 40", "layers 133", *KEPT)
"""States on a disk and matrices in replicas, weights in files and moments of 8 bits, activations that move, states that
are updated early, and compiled layers."""
REQUESTS = ("layers 2", "layers 40", "layers 95", "18")
NAMES = (
    *(f"plan {name}" for name in SITUATIONS),
    *(f"bytes {name}" for name in SITUATIONS),
    *(f"request {name}" for name in REQUESTS),
)
WORDS = ("float32", "8bit", "SGD", "Muon + AdamW", "device", "host", "disk", "files", "early")


def others(value: Any) -> Iterator[Any]:
    """Values of the same kind near a value, and some that are far."""
    if isinstance(value, bool) or value is None:
        yield from (True, False, None, 1, 0.5)
    elif isinstance(value, (int, float)):
        yield from dict.fromkeys((-1, 0, 1, value - 1, value + 1, 2 * value))
    elif isinstance(value, str):
        yield from WORDS
    elif isinstance(value, tuple) and not hasattr(value, "_fields"):
        yield from ((), value[::-1], value[1:], value[:-1], (*value, *value[:1]))
    elif isinstance(value, dict):
        yield {}
        yield value | {"x": 1}
        for name in sorted(value)[:2]:
            yield value | {name: -1}
            yield value | {name: value[name] + 1}


def changed(item: Any) -> Iterator[tuple[str, Any]]:
    """Each field of a dataclass -> functions that make the class with another value there, or in what it holds."""
    for field in fields(item):
        value = getattr(item, field.name)
        yield from ((field.name, lambda f=field.name, o=other: replace(item, **{f: o})) for other in others(value))
        if dataclasses.is_dataclass(value):
            for name, make in changed(value):
                yield f"{field.name}.{name}", lambda f=field.name, m=make: replace(item, **{f: m()})
        if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            for at in dict.fromkeys((0, len(value) - 1)) if field.name == "chunks" else (0,):
                for name, make in changed(value[at]):
                    yield (
                        f"{field.name}.{name}",
                        lambda f=field.name, v=value, a=at, m=make: replace(item, **{f: (*v[:a], m(), *v[a + 1 :])}),
                    )


def said(make: Any, original: Any) -> Any:
    """The words of a changed plan, or request: an error, or all that follows from it."""
    try:
        made = make()
    except (InputError, InputTypeError) as error:
        return str(error)
    except (TypeError, AttributeError, KeyError, ValueError) as error:  # of a value whose type is another
        return type(error).__name__
    if isinstance(made, SearchRequest):
        return [made.sizes, repr(made)]
    try:
        need = [process_need(made, kind, host_bytes=0, given_bytes=10**9).peak_bytes for kind in ("cuda", "cpu")]
        text = str(made).replace(made.fingerprint, "")
        return [text, need, rounded(following(made)), same_packing(made, original)]
    except (InputError, InputTypeError) as error:
        return f"later: {error}"
    except (TypeError, AttributeError, KeyError, ValueError, IndexError, ZeroDivisionError) as error:
        return f"later: {type(error).__name__}"


def bytes_of(plan: Plan) -> dict[str, str]:
    """The bytes that its steps of so many backwards move, and a process's memory."""
    loads = plan.schedule().step(plan.block_count, 2).by_chunk
    moved, backwards = [], []
    for count, accumulation in itertools.product(range(5), (1, 2, 3)):
        backwards.append(made := Backwards.of(count, accumulation))
        for stepped, replicas, rank in itertools.product((True, False), (1, 3), (0, plan.world_size - 1)):
            options: dict[str, Any] = {"stepped": stepped, "replicas": replicas, "swap_bytes": 7}
            moved.append(step_traffic(plan.routes(rank), loads, made, **options))
    shares = (0, 1, plan.predicted.host_step_bytes, 4 * sum(chunk.numel for chunk in plan.chunks), 10**11)
    held = (None, Resident(own_bytes=10**9, file_bytes=10**8, peak_bytes=10**10))
    needs = [
        process_need(
            plan,
            kind,
            host_bytes=host,
            given_bytes=given,
            held=there,
            replaced_bytes=10**8,
            reserve_bytes=5,
            in_heap=heap,
        )
        for kind, host, given, there, heap in itertools.product(
            ("cuda", "cpu"), shares[:3], shares, held, (True, False)
        )
    ]
    together = [(need.own_bytes, need.machine_bytes(3)) for need in needs]
    found = {"moved": moved, "backwards": [(str(each), each.summed, each.finished, each.count) for each in backwards]}
    found |= {"needs": needs, "together": together}
    return {name: digest(rounded(each)) for name, each in found.items()}


@functools.cache
def plan_and_request(of: str) -> tuple[Plan, SearchRequest]:
    """The plan of a situation, and what was asked of it."""
    trace, machine, options = situation(of)
    request = SearchRequest.of(options.pop("asked"), **options)
    plan = plan_of(plan_from_trace(trace, machine, request))
    if of in KEPT:
        unit = trace.step.units[0].name
        plan = replace(plan, step=replace(plan.step, activations=(replace(KEPT[of], unit=unit),)))
    return plan, request


def outcome(name: str) -> dict[str, str]:
    """Field -> how many of the changes are refused, and a digest of all that is said."""
    kind, _, of = name.partition(" ")
    plan, request = plan_and_request(of)
    if kind == "bytes":
        return bytes_of(plan)
    item = request if kind == "request" else plan
    found: dict[str, list[Any]] = {}
    for field, make in changed(item):
        found.setdefault(field, []).append(said(make, item))
    refused = {field: sum(isinstance(each, str) for each in all_said) for field, all_said in found.items()}
    return {field: f"{refused[field]} of {len(each)}: {digest(each)}" for field, each in found.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_plan_is_refused_or_says_what_was_recorded(name: str) -> None:
    assert outcome(name) == json.loads(RECORDED.read_text())[name]


if __name__ == "__main__":
    rows = [f" {json.dumps(name)}: {json.dumps(outcome(name))}" for name in NAMES]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
