"""The chunks that the host updates in backward, and what holds for a step whichever they are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir.optimizer_states import StateSize
from elixir.search.problem.placement import Setting
from elixir.search.propose.sizes import SearchSpace
from elixir.search.simulator.replay import RESOURCES
from elixir.search.simulator.simulated_cost import worth_stepping
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import ParamInfo, StepTrace
from tests.common.chains import NUMEL, Speeds, chain, chain_plan, updating_early
from tests.common.synthetic_trace import TraceBuilder


def _able(trace: StepTrace, capacity: int = NUMEL * 4) -> list[bool]:
    """Whether each chunk of one parameter can be updated early."""
    work = SearchSpace(trace, Speeds().machine(), Setting(1, 1, StateSize(8), True)).model(capacity).work
    return list(work.early_able)


def _with(trace: StepTrace, index: int, **changes: Any) -> StepTrace:
    parameters: list[ParamInfo] = list(trace.parameters)
    parameters[index] = replace(parameters[index], **changes)
    return replace(trace, parameters=tuple(parameters))


def test_a_chunk_must_have_all_its_gradients_each_at_once() -> None:
    trace = chain(3)
    assert _able(trace) == [True] * 3
    assert _able(_with(trace, 1, grad_arrivals=2)) == [True, False, True]
    assert _able(_with(trace, 1, grad_arrivals=0, grad_access=None, trainable=False)) == [True, False, True]
    # Two parameters to a chunk: what one lacks the chunk lacks.
    assert _able(_with(chain(4), 1, grad_arrivals=2), 2 * NUMEL * 4) == [False, True]


def test_a_chunk_that_is_read_behind_its_last_gradient_waits() -> None:
    """A weight is read after its last gradient if the gradient of the input comes later."""
    build = TraceBuilder("float32")
    first, second = (build.parameter(name, NUMEL) for name in ("first", "second"))
    for phase, used in (("forward", first), ("forward", second), ("backward", second), ("backward", first)):
        build.use(phase, used)  # type: ignore[arg-type]
    trace = build.build("read behind")
    assert _able(trace) == [True, True]
    build.use("recompute", second)
    again = replace(build.build("read behind"), parameters=trace.parameters)
    assert _able(again) == [True, False]
    assert not _able(replace(trace, parameters=_with(trace, 1, grad_access=1).parameters))[1]


@pytest.mark.parametrize(("adam", "chosen"), [(0.5, {1, 2}), (1.0, {1, 2}), (1.5, {1, 2}), (2.0, {2})])
def test_the_host_works_through_backward(adam: float, chosen: set[int]) -> None:
    """Gradients are home at 4, 5 and 6; what comes with the optimizer's step is no part of backward."""
    homes = {2: 4.0, 1: 5.0, 0: 6.0}
    assert worth_stepping(homes, 6.0, [adam] * 3, [0, 1, 2]) == chosen
    # Half a second later the host takes chunk 0 as well, wherever it is free by then; before chunk 1, if that waits.
    later = {0.5: {0, 1, 2}, 1.0: {0, 1, 2}, 1.5: {1, 2}, 2.0: {0, 2}}
    assert worth_stepping(homes, 6.5, [adam] * 3, [0, 1, 2]) == later[adam]


def test_of_several_that_are_home_forwards_first_is_taken() -> None:
    """Five come while one is stepped: two more fit, the latest to come each time."""
    homes = {index: 5.0 - index for index in range(6)}
    assert worth_stepping(homes, 6.0, [2.0] * 6, list(range(6))) == {5, 3, 1}
    assert worth_stepping({}, 6.0, [], []) == frozenset()


@settings(max_examples=40, deadline=None)
@given(
    homes=st.text("shdwke", min_size=1, max_size=6),
    world_size=st.sampled_from([1, 2]),
    spare=st.integers(0, 3),
    depth=st.integers(0, 2),
    kind=st.sampled_from(["cpu", "cuda"]),
    speeds=st.tuples(*[st.floats(0.01, 10.0)] * 8),
    some=st.integers(0, 63),
)
def test_steps_are_all_the_same_whichever_new_states_are_made_in_backward(
    homes: str, world_size: int, spare: int, depth: int, kind: str, speeds: Any, some: int
) -> None:
    """All steps equal the simulated one; every second of it is accounted for."""
    streamed = sum(home in "swk" for home in homes)
    depth = min(depth, max(streamed - 1, 0))
    blocks = min(1 + depth + spare, streamed)
    plan = chain_plan(blocks=blocks, depth=depth, homes=homes, world_size=world_size)
    plan = updating_early(plan, *(index for index, home in enumerate(homes) if home in "shw" and some >> index & 1))
    machine, trace = Speeds(*speeds).machine(kind), chain(len(homes))
    step = simulate_step(plan, trace, machine)
    for steps in (4, 9):
        assert simulate_step(plan, trace, machine, steps=steps).step_s == pytest.approx(step.step_s, rel=1e-9)
    assert sum(step.phases_s.values()) == pytest.approx(step.step_s)
    assert step.busy_s["compute"] + sum(step.waited_s.values()) == pytest.approx(step.step_s)
    assert sum(step.critical_s.values()) == pytest.approx(step.step_s)
    assert all(0 <= span.start_s < span.end_s <= step.step_s for span in step.timeline)
    for resource in RESOURCES:
        spans = [span for span in step.timeline if span.resource == resource]
        assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(spans))
        assert sum(span.end_s - span.start_s for span in spans) == pytest.approx(step.busy_s[resource])
    plain = simulate_step(updating_early(plan), trace, machine)
    for resource in ("refresh", "disk"):
        assert step.busy_s[resource] == pytest.approx(plain.busy_s[resource])
