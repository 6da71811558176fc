"""`elixir.wrap`: one call to a training, and one correction of its plan that changes no number."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import elixir
from elixir import HybridAdam, api
from elixir.errors import ArtifactError, InputError, InputTypeError, PlanError
from elixir.hardware.profile import preset
from elixir.plan.plan import Plan
from elixir.search.replan import Correction, Observation, calibrated, correct, simulated_s
from elixir.search.simulator.simulation import simulate_step
from elixir.wrapper import ElixirModule
from elixir.wrapper.account.step_report import EarlyCounts
from tests.common import gpu, inside
from tests.common.failing import Fault
from tests.common.observed import steady
from tests.common.on_disk import on_disk
from tests.common.parity import ROUNDED, Case, case, distance, hf_loss, make_plan, mixed, rehomed
from tests.common.tiny_models import tiny
from tests.common.twins import step_alike


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def wrapped(it: Case, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> tuple[Any, Any]:
    """The model of a case and its optimizer under a plan that is searched for; where scenarios are no matter, in one."""
    options = {"inp": it.inp, "hardware": "cpu", "host_budget": "1GiB", "assume": "nominal"} | options
    return elixir.wrap(it.model, optimizer or adamw(it.model), **options)


def trained(model: nn.Module, optimizer: Any, inp: dict[str, Any], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = hf_loss(model, inp)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.sampled
@pytest.mark.parametrize("replan", [True, False])
@pytest.mark.parametrize("memory", ["1600KiB", "1GiB"])
def test_trains_as_plain_pytorch_does(memory: str, replan: bool) -> None:
    it = case("gpt2")
    plain = copy.deepcopy(it.model)
    plain_optimizer = adamw(plain)
    model, optimizer = wrapped(it, device_memory=memory, replan=replan)
    assert (inside.may_replan(model)) == replan
    assert all(chunk.resident for chunk in model.plan.chunks) == (memory == "1GiB")
    assert trained(model, optimizer, it.inp, 8) == trained(plain, plain_optimizer, it.inp, 8)
    assert not inside.may_replan(model)
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())


def test_moves_chunks_once_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    it = case("llama")
    plain = copy.deepcopy(it.model)
    plain_optimizer = adamw(plain)
    seen: list[Observation] = []

    def other_homes(
        trace: Any, hardware: Any, plan: Plan, observations: list[Observation], optimizer: str
    ) -> Correction:
        seen.extend(observations)
        return Correction(mixed(plan), "a test says so")

    monkeypatch.setattr(api, "correct", other_homes)
    model, optimizer = wrapped(it)
    before = model.plan
    losses = trained(model, optimizer, it.inp, api.WARM_UP_STEPS + api.MEASURED_STEPS)
    assert model.plan is before
    losses += trained(model, optimizer, it.inp, 5)
    assert model.plan.chunks == mixed(before).chunks
    assert len(seen) == 1
    assert losses == trained(plain, plain_optimizer, it.inp, len(losses))
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())


def test_a_correction_that_fails_is_logged_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    it = case("llama")
    plain = copy.deepcopy(it.model)
    plain_optimizer = adamw(plain)
    monkeypatch.setattr(
        api, "correct", lambda trace, hardware, plan, seen, optimizer: Correction(rehomed(plan, "states"), "")
    )
    model, optimizer = wrapped(it)
    before, fault, count = model.plan, Fault("zeros"), api.WARM_UP_STEPS + api.MEASURED_STEPS
    losses = trained(model, optimizer, it.inp, count)
    with fault.armed(1):
        losses += trained(model, optimizer, it.inp, 1)
    assert model.plan == before
    assert "chunks stay where they are" in caplog.text
    losses += trained(model, optimizer, it.inp, 2)
    assert losses == trained(plain, plain_optimizer, it.inp, len(losses))


def test_a_correction_that_ends_in_a_closed_module_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def closes(module: ElixirModule, plan: Plan) -> None:
        module.close()
        raise RuntimeError("a rank is gone")

    it = case("llama", layers=1)
    monkeypatch.setattr(
        api, "correct", lambda trace, hardware, plan, seen, optimizer: Correction(rehomed(plan, "states"), "")
    )
    monkeypatch.setattr(ElixirModule, "rehome", closes)
    model, optimizer = wrapped(it)
    with pytest.raises(RuntimeError, match="a rank is gone"):
        trained(model, optimizer, it.inp, api.WARM_UP_STEPS + api.MEASURED_STEPS + 1)


def test_asks_no_longer_where_every_forward_begins_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    it = case("opt", layers=1)
    monkeypatch.setattr(api, "correct", lambda *_: pytest.fail("there was no moment between steps"))
    model, optimizer = wrapped(it)
    for _ in range(api.WARM_UP_STEPS + api.MEASURED_STEPS + api.MOST_REFUSALS + 2):
        loss = hf_loss(model, it.inp)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert not inside.may_replan(model)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Observation]:
    """Gives what corrections are made from; all of them leave the plan."""
    found: list[Observation] = []

    def stay(trace: Any, hardware: Any, plan: Plan, observations: list[Observation], optimizer: str) -> Correction:
        found.extend(observations)
        return Correction(None, "")

    monkeypatch.setattr(api, "correct", stay)
    return found


def test_a_run_that_is_always_clipped_is_planned_again_without_early_states(monkeypatch: pytest.MonkeyPatch) -> None:
    it = case("opt", layers=4)
    # Backward is long enough for CPU Adam, which is slower than the device's.
    cpu = preset("cpu")
    flops = dict.fromkeys(cpu.flops_per_s, 1e10)
    machine = replace(cpu, flops_per_s=flops, host_adam_numel_per_s=3e7, device_adam_numel_per_s=1e8)
    found: list[tuple[Observation, Correction]] = []

    def without_noise(
        trace: Any, hardware: Any, plan: Plan, observations: list[Observation], optimizer: str
    ) -> Correction:
        (seen,) = observations
        step_s, busy = simulated_s(plan, trace, hardware, seen), dict.fromkeys(seen.busy_s, 0.0)
        made = correct(trace, hardware, plan, [replace(seen, step_s=step_s, busy_s=busy)], optimizer)
        found.append((seen, made))
        return made

    monkeypatch.setattr(api, "correct", without_noise)
    model, optimizer = wrapped(it, hardware=machine, device_memory="2500KiB", early_updates=True, max_norm=1e-6)
    planned = sum(chunk.home.early for chunk in model.plan.chunks)
    assert planned
    trained(model, optimizer, it.inp, 1)
    assert model.last_report.early == EarlyCounts(planned, planned, 0)
    trained(model, optimizer, it.inp, api.WARM_UP_STEPS + api.MEASURED_STEPS)
    ((seen, correction),) = found
    assert seen.early.kept == 0
    assert correction.plan is not None
    assert model.plan.chunks == correction.plan.chunks
    assert not any(chunk.home.early for chunk in model.plan.chunks)
    assert model.last_report.early == EarlyCounts()


@pytest.fixture(scope="module")
def planned() -> tuple[Any, Any, Plan]:
    """A trace, a machine, and a plan with some chunks on the host."""
    from elixir.search import plan_from_trace
    from elixir.tracer.trace import trace_step

    model = tiny("opt", layers=4, device="meta")
    it = case("opt")
    machine = preset("cpu")
    trace = trace_step(model, it.inp, lambda m, i: m(**i).loss.backward(), hardware=machine, optimizer=None)
    free = plan_from_trace(trace, machine, 1, device_memory="1GiB", host_budget="1GiB", assume="nominal").plan
    budget = int(0.6 * free.predicted.device_peak_bytes)
    return (
        trace,
        machine,
        plan_from_trace(trace, machine, 1, device_memory=budget, host_budget="1GiB", assume="nominal").plan,
    )


def test_several_batches_a_step_are_planned_for_as_such(planned: tuple[Any, Any, Plan]) -> None:
    trace, machine, plan = planned
    took = simulate_step(plan, trace, machine, accumulation=4)
    for batches, accumulation in ((4, 4), (None, 1)):
        found = correct(trace, machine, plan, [steady(plan, step_s=took.step_s, batches=batches)], "Adam")
        _, scale = calibrated(
            trace, machine, replace(plan, accumulation=accumulation), steady(plan, step_s=took.step_s)
        )
        # Compute is as fast as was foreseen; that there were four batches is why the step took longer.
        assert (scale == pytest.approx(1, rel=0.01)) == (batches == 4)
        assert found.plan is None or found.plan.accumulation == accumulation


def test_what_cannot_work_is_refused() -> None:
    it = case("opt", layers=1)
    with pytest.raises(PlanError, match="needed"):
        wrapped(it, device_memory="1KiB")
    with pytest.raises(InputTypeError, match="torch optimizer"):
        elixir.wrap(it.model, None, inp=it.inp)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="dict"):
        elixir.wrap(it.model, adamw(it.model), inp=[1], hardware="cpu", host_budget="1GiB")  # type: ignore[arg-type]
    lbfgs = torch.optim.LBFGS(it.model.parameters())
    with pytest.raises(InputError, match="elementwise"):
        wrapped(it, lbfgs)


@pytest.mark.parametrize("device_memory", ["1MiB", "1024MiB"])
def test_several_optimizers_are_clipped_by_the_norm_of_all(device_memory: str) -> None:
    it = case("opt", layers=1)
    plain, inp = copy.deepcopy(it.model).to(gpu.DEVICE), gpu.there(it.inp)
    exact = gpu.has_cpu_kernels() or device_memory == "1024MiB"  # else the host sums some norms

    def halves(model: nn.Module) -> list[torch.optim.Optimizer]:
        parameters = list(model.parameters())
        return [torch.optim.AdamW(parameters[::2]), torch.optim.AdamW(parameters[1::2])]

    module, mine = elixir.wrap(
        it.model, halves(it.model), inp=it.inp, device_memory=gpu.with_cublas(device_memory), host_budget="1GiB",
        max_norm=0.1, assume="nominal",
    )  # fmt: skip
    assert module.plan.clipping
    theirs = [step_alike(half, module, dict(plain.named_parameters())) for half in halves(plain)]
    for step in range(4):
        it.loss(plain, inp).backward()
        mine[0].backward(it.loss(module, it.inp))
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        if step == 2:  # the module's own call is one norm of all, too; the smaller limit holds
            module.clip_grad_norm_(0.5)
        for each in (*theirs, *mine):
            each.step()
            each.zero_grad()
        for each in mine:
            found, expected = each.grad_norm.cpu(), norm.cpu()
            assert torch.equal(found, expected) if exact else distance([found], [expected]) < ROUNDED
    state = module.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value.cpu()) if exact else distance([state[name]], [value]) < ROUNDED
    mine[0].backward(it.loss(module, it.inp))
    mine[0].step()
    with pytest.raises(InputError, match="before all of them have stepped"):
        mine[0].backward(it.loss(module, it.inp))


def test_a_refused_optimizer_leaves_the_model_as_it_was() -> None:
    it = case("gpt2")
    with pytest.raises(InputError, match="1 parameters of the optimizer are not the model's"):
        elixir.wrap(it.model, torch.optim.AdamW([nn.Parameter(torch.ones(2))]), inp=it.inp, hardware="cpu")
    wrapped(it)[0].close()


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "more", "says"),
    [
        (lambda model: torch.optim.Adafactor(model.parameters()), {}, "Adafactor is not elementwise"),
        (lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True), {"moments": "8bit"}, "without amsgrad"),
        (stepped, {}, "has stepped already"),
        (adamw, {"host_threads": 0}, "host_threads must be"),
        (adamw, {"initial_scale": 0.0}, "initial_scale must be"),
        (adamw, {"weights": {"nothing": torch.ones(1)}}, "unexpected nothing"),
        (adamw, {"weights": "/nowhere"}, "no safetensors at /nowhere"),
    ],
    ids=["adafactor", "amsgrad", "stepped", "threads", "scale", "other weights", "no weights"],
)
def test_a_dry_run_refuses_what_the_run_does(
    make: Any, more: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("opt", layers=1)
    optimizer = make(model)

    def traced(*_: Any, **__: Any) -> None:
        raise AssertionError("this is refused before a step is traced")

    monkeypatch.setattr(api, "answer_to", traced)
    for call in (elixir.wrap, api.dry_run):
        with pytest.raises(InputError, match=says):
            call(model, optimizer, hardware="cpu", **more)


def test_a_dry_run_of_a_plan_for_something_else_is_refused() -> None:
    plan = make_plan(case("opt"), "streamed")
    one, other = tiny("opt"), tiny("opt", layers=1)
    assert api.dry_run(one, adamw(one), plan=plan) == plan
    with pytest.raises(InputError, match="Adafactor is not elementwise"):
        api.dry_run(one, torch.optim.Adafactor(one.parameters()), plan=plan)
    with pytest.raises(ArtifactError, match="only in the plan"):
        api.dry_run(other, adamw(other), plan=plan)


def test_a_dry_run_refuses_a_plan_without_a_folder_for_its_disk_as_the_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = case("gpt2")
    found = on_disk(make_plan(it, "streamed"))
    monkeypatch.setattr(api, "answer_to", lambda *_, **__: SimpleNamespace(plan=found, trace=None))
    for call in (api.dry_run, elixir.wrap):
        with pytest.raises(InputError, match="say on which with disk_folder="):
            call(it.model, adamw(it.model), hardware="cpu")
        with pytest.raises(InputError, match="is no folder"):
            call(it.model, adamw(it.model), hardware="cpu", disk_folder=tmp_path / "absent")
    assert api.dry_run(it.model, adamw(it.model), hardware="cpu", disk_folder=tmp_path) == found


@pytest.mark.parametrize(("verbose", "lines"), [(True, 10), (None, 3), (False, 0)])
def test_a_plan_is_shown_before_it_runs(
    verbose: bool | None, lines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.logger, "hasHandlers", lambda: False)
    it = case("gpt2")
    model, _ = elixir.wrap(it.model, adamw(it.model), inp=it.inp, verbose=verbose)
    printed = "".join(capsys.readouterr())
    if lines == 10 and gpu.DEVICE == "cuda":
        lines += 1  # of what the plan is judged by: a GPU's rates are not all known
    assert len(printed.splitlines()) == lines
    assert not lines or printed.startswith(f"plan {model.plan.fingerprint}: ")
    assert lines != 3 or "\n  chunks " in printed


def test_what_a_plan_settles_and_what_no_plan_holds_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, inp = nn.Linear(8, 8), {"input": torch.randn(2, 8)}

    def step(model: Any, inp: Any) -> None:
        model(**inp).sum().backward()

    plan = elixir.simple_search(model, 1, inp=inp, step_fn=step, hardware="cpu").plan
    with pytest.raises(
        InputError, match=r"a plan that is given was made with .* leave out accumulation, inp, or leave"
    ):
        elixir.wrap(model, torch.optim.SGD(model.parameters()), plan=plan, accumulation=2, inp=inp)
    optimizers = [
        HybridAdam([model.weight], moments="bfloat16"),
        torch.optim.AdamW([model.bias]),
    ]
    with pytest.raises(InputError, match=r"keeps all moments alike, found \['bfloat16', 'float32'\]; use one kind"):
        elixir.wrap(model, optimizers, inp=inp, step_fn=step, hardware="cpu", device="cpu")

    def unknown(*_: Any) -> None:
        raise InputError("no way to that disk")

    monkeypatch.setattr("elixir.microbench.disk.with_disk", unknown)
    save_file({"weight": model.weight.detach()}, tmp_path / "model.safetensors")
    model.weight.requires_grad_(False)
    with pytest.raises(InputError, match=r"no way to that disk: to plan with frozen_weights='files', .* disk_folder="):
        elixir.wrap(
            model, torch.optim.SGD([model.bias]), inp=inp, step_fn=step, frozen_weights="files", weights=tmp_path,
            strict=False, hardware="cpu", device="cpu",
        )  # fmt: skip
