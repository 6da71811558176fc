"""Plans that step in backward: what their files say, which chunks they choose, and what asks for them or refuses them."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elixir.cli import main
from elixir.errors import InputError
from elixir.hardware import HardwareProfile, preset
from elixir.optimizer_states import StateSize
from elixir.plan import Plan
from elixir.search import minimum_waste_search, optimal_search, plan_from_trace, search_batches, simple_search
from elixir.search.problem import Setting, setting_of
from elixir.search.propose import SearchSpace
from elixir.search.replan import correct
from elixir.search.simulator import simulate_step
from elixir.search.whatif import faster, lever_effects
from elixir.search.whatif.explain import explain
from elixir.show import plan_record
from elixir.step_trace import ParamInfo, StepTrace
from elixir.units import GIB
from tests.common.chains import NUMEL, Speeds, chain, chain_plan, stepping
from tests.common.observed import steady
from tests.common.searching import HARDWARE, check_consistent
from tests.common.synthetic_trace import StackShape, TraceBuilder, stack_trace
from tests.common.tracing import cpu_trace, sum_step

SMALL = StackShape(hidden=256, layers=6, ffn=1024, vocab=1024, positions=256)
SLOW = replace(HARDWARE, flops_per_s={"bfloat16": 2e12, "float16": 2e12}, host_adam_numel_per_s=2.5e8)
"""The host's Adam takes longer than backward."""


@pytest.fixture(scope="module")
def stack() -> StepTrace:
    return stack_trace(SMALL, batch=2, seq=256)


def planned(trace: StepTrace, world_size: int = 1, machine: HardwareProfile = SLOW, **options: Any) -> Plan:
    """A plan with all states on the host."""
    given = {"device_memory": 1 << 40, "placement": "cpu", "step_in_backward": True} | options
    return plan_from_trace(trace, machine, world_size, **given).plan


# --- files ---------------------------------------------------------------------------------------------------------


def test_a_chunk_steps_in_backward_only_where_that_is_permitted() -> None:
    plan = chain_plan(blocks=1, depth=0, in_backward=True)
    with pytest.raises(InputError, match="'may_step_in_backward' must be true"):
        replace(plan, may_step_in_backward=False)
    allowed = replace(stepping(plan), may_step_in_backward=True)
    assert "0 stepped in backward" in str(allowed)
    with pytest.raises(InputError, match="2 batches"):
        replace(allowed, accumulation=2)


def test_a_permission_that_no_chunk_used_is_known_when_it_is_planned_again(stack: StepTrace) -> None:
    """Where all is on the device nothing steps in backward; with the host's memory in its place much could."""
    roomy = plan_from_trace(
        stack, SLOW, 1, device_memory=1 << 40, host_memory=64 * GIB, placement="cuda", step_in_backward=True
    ).plan
    assert roomy.may_step_in_backward
    assert not roomy.steps_in_backward
    assert setting_of(roomy, 1).step_in_backward
    assert plan_record(roomy)["may_step_in_backward"] is True
    assert replace(roomy, may_step_in_backward=False) != roomy


def test_plans_survive_json_and_say_how_many_chunks_step_in_backward(tmp_path: Path) -> None:
    plan = chain_plan(blocks=1, depth=0, homes="shd", in_backward=True)
    assert [chunk.steps_in_backward for chunk in plan.chunks] == [True, True, False]
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan
    assert "2 of 3 trainable chunks on the host, 2 stepped in backward" in str(plan)
    assert plan_record(plan)["step_in_backward"] is True
    later = stepping(plan)
    assert "in backward" not in str(later)
    assert plan_record(later)["step_in_backward"] is False
    assert later.fingerprint != plan.fingerprint


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"state_home": "device", "weight_home": "device", "resident": True}, "state_home 'device'"),
        ({"trainable": False}, "trainable False"),
        ({"grad_entry": None}, "grad_entry None"),
    ],
)
def test_a_chunk_that_the_host_does_not_step_is_refused(changes: dict[str, Any], says: str) -> None:
    chunk = chain_plan(blocks=1, depth=0, in_backward=True).chunks[0]
    assert chunk.steps_in_backward
    with pytest.raises(InputError, match=says):
        replace(chunk, **changes)


def test_a_plan_whose_gradients_are_not_whole_after_one_backward_is_refused() -> None:
    plan = chain_plan(blocks=1, depth=0, in_backward=True)
    with pytest.raises(InputError, match="2 batches"):
        replace(plan, accumulation=2)
    with pytest.raises(InputError, match="bfloat16"):
        replace(plan, dtype="float16")
    assert replace(stepping(plan), accumulation=2).accumulation == 2


# --- which chunks --------------------------------------------------------------------------------------------------


def _able(trace: StepTrace, capacity: int = NUMEL * 4) -> list[bool]:
    """By chunk of one parameter each."""
    work = SearchSpace(trace, Speeds().machine(), Setting(1, 1, StateSize(8), True)).model(capacity).work
    return [work.can_step_in_backward(chunk) for chunk in range(len(work.chunks))]


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
    """As a weight is whose gradient is there before the input's is worked out."""
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


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_search_takes_what_makes_the_step_faster(stack: StepTrace, world_size: int) -> None:
    plain = planned(stack, world_size, step_in_backward=False, speculate=False)
    plan = planned(stack, world_size)
    check_consistent(plan, stack)
    early = [chunk.steps_in_backward for chunk in plan.chunks]
    assert not plain.steps_in_backward
    assert 0 < sum(early) < len(early)  # the host is too slow for all
    assert plan.predicted.seconds["total"] < 0.95 * plain.predicted.seconds["total"]
    assert simulate_step(plan, stack, SLOW).step_s == plan.predicted.seconds["total"]
    quick = planned(stack, world_size, replace(SLOW, host_adam_numel_per_s=1e15))
    assert quick.predicted.seconds["total"] <= plan.predicted.seconds["total"]
    assert Plan.from_json(plan.to_json()) == plan


def test_with_overlap_given_up_too(stack: StepTrace) -> None:
    plan = planned(stack, overlap=False)
    assert plan.steps_in_backward
    assert simulate_step(plan, stack, SLOW).step_s == plan.predicted.seconds["total"]


def test_with_a_disk_the_prediction_is_the_simulation(stack: StepTrace) -> None:
    machine = replace(SLOW, disk_read_bytes_per_s=6e9, disk_write_bytes_per_s=3e9)
    host = planned(stack, machine=machine).predicted.host_step_bytes
    plan = planned(stack, machine=machine, host_memory=int(0.8 * host), disk_memory=GIB)
    assert plan.uses_disk
    assert plan.steps_in_backward
    assert simulate_step(plan, stack, machine).step_s == plan.predicted.seconds["total"]


class _Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(x)
        return found


def test_the_searches_of_a_model_know_it() -> None:
    options: dict[str, Any] = {
        "inp": {"x": torch.ones(8, 64)},
        "step_fn": sum_step,
        "hardware": replace(preset("cpu"), host_adam_numel_per_s=1e6),
        "device_memory": 1 << 30,
        "host_memory": 1 << 30,
        "placement": "cpu",
        "step_in_backward": True,
    }
    forward = _Body()
    for search in (optimal_search, simple_search):
        assert search(forward, 1, **options).steps_in_backward  # type: ignore[operator]
    for search in (optimal_search, minimum_waste_search, simple_search):
        with pytest.raises(InputError, match="in bfloat16"):
            search(forward, 1, **options, unified_dtype=torch.float16)  # type: ignore[operator]
    with pytest.raises(InputError, match="accumulation=1"):
        optimal_search(forward, 1, **options, accumulation=2)


# --- who is refused, and what others make of it --------------------------------------------------------------------


def test_steps_that_the_search_refuses(stack: StepTrace) -> None:
    with pytest.raises(InputError, match="4 batches a step.*accumulation=1"):
        planned(stack, accumulation=4)
    with pytest.raises(InputError, match="in bfloat16"):
        planned(stack_trace(SMALL, batch=2, seq=256, dtype="float16"), machine=SLOW)

    def twice(model: nn.Module, inp: dict[str, Any]) -> None:
        sum_step(model, inp)
        sum_step(model, inp)

    trace = cpu_trace(_Body(), {"x": torch.ones(8, 64)}, twice)
    with pytest.raises(InputError, match="forward again after a backward"):
        plan_from_trace(trace, preset("cpu"), 1, device_memory=GIB, host_memory=GIB, step_in_backward=True)


@pytest.mark.slow
def test_a_search_over_batches_refuses_it_where_it_would_try_several(stack: StepTrace) -> None:
    options: dict[str, Any] = {"device_memory": GIB, "host_memory": 64 * GIB, "step_in_backward": True}
    with pytest.raises(InputError, match="micro_batches=False"):
        search_batches(lambda batch, form: stack, SLOW, 1, samples=2, **options)
    choice = search_batches(lambda batch, form: stack, SLOW, 1, samples=2, micro_batches=False, **options)
    assert choice.option.accumulation == 1


def test_levers_and_explanations_plan_for_steps_in_backward(stack: StepTrace) -> None:
    """Planning again with nothing changed gains nothing, as it would not for a plan of another kind of step."""
    plan = planned(stack, host_memory=64 * GIB)
    again = next(lever for lever in lever_effects(plan, stack, SLOW) if "nothing changed" in lever.action)
    assert again.step_s == pytest.approx(plan.predicted.seconds["total"])
    quicker = next(lever for lever in lever_effects(plan, stack, SLOW) if "host's Adam" in lever.action)
    best = planned(stack, machine=faster(SLOW, "host_adam"), host_memory=64 * GIB)
    assert (
        quicker.step_s <= best.predicted.seconds["total"] < simulate_step(plan, stack, faster(SLOW, "host_adam")).step_s
    )
    later = stepping(plan)
    assert simulate_step(later, stack, SLOW).step_s > again.step_s
    assert explain(plan, stack, SLOW)


@pytest.mark.slow
def test_planning_again_goes_on_stepping_in_backward_but_not_with_several_batches(stack: StepTrace) -> None:
    """A host ten times as fast as was thought has time for all; with three batches nothing can step in backward."""
    free = planned(stack, placement="auto", host_memory=64 * GIB)
    budget = int(0.5 * free.predicted.device_peak_bytes)
    plan = plan_from_trace(stack, SLOW, 1, device_memory=budget, host_memory=64 * GIB, step_in_backward=True).plan
    stepped = sum(chunk.numel for chunk in plan.chunks if chunk.state_home == "host")
    busy = {"fetch": 0.0, "offload": 0.0, "host_adam": stepped / SLOW.host_adam_numel_per_s / 10, "refresh": 0.0}
    quicker = replace(SLOW, host_adam_numel_per_s=SLOW.host_adam_numel_per_s * 10)
    found = correct(
        stack, SLOW, plan, [steady(plan, busy_s=busy, step_s=simulate_step(plan, stack, quicker).step_s)], "Adam"
    )
    assert found.plan is None or found.plan.steps_in_backward
    took = simulate_step(plan, stack, SLOW, accumulation=3).step_s
    several = correct(stack, SLOW, plan, [steady(plan, step_s=took, batches=3)], "Adam")
    assert several.plan is None or (several.plan.accumulation, several.plan.steps_in_backward) == (3, False)


# --- command line --------------------------------------------------------------------------------------------------

CALL = ["plan", "opt-125m", "--hardware", "h200", "--batch", "2", "--seq", "64", "--host-memory", "8GiB"]


def test_the_command_line_plans_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main([*CALL, "--placement", "cpu", "--step-in-backward", "--brief", "--out", str(out)]) == 0
    assert "stepped in backward" in capsys.readouterr().out
    assert Plan.load(out).steps_in_backward
    assert main(["show", str(out)]) == 0
    assert "stepped in backward" in capsys.readouterr().out
    assert main(["explain", str(out), "opt-125m", "--batch", "2", "--seq", "64", "--hardware", "h200"]) in (0, 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--search-batch"], "leave out --search-batch"), (["--dtype", "fp16"], "step_in_backward=False, or in bfloat16")],
)
def test_the_command_line_refuses_it_in_one_line(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*CALL, "--step-in-backward", *options]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_sweep_and_fit_ask_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A T4 that holds little: its host's Adam is what a step waits for, unless that begins in backward."""
    table, seconds, memory = tmp_path / "rows.csv", [], ["--device-memory", "800MiB", "--host-memory", "8GiB"]
    for flag in ([], ["--step-in-backward"]):
        call = ["sweep", "opt-125m", "--hardware", "t4", "--batches", "2", "--seq", "64", "--csv", str(table)]
        assert main([*call, *memory, *flag]) == 0
        (row,) = csv.DictReader(table.open())
        seconds.append(float(row["step_s"]))
    assert seconds[1] < seconds[0]
    assert main(["fit", "opt-125m", "--hardware", "t4", "--host-memory", "8GiB", "--step-in-backward", "--json"]) == 0
    capsys.readouterr()
