"""Mistakes in a training script end in a sentence that says what to do, or are done as they were meant."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from torch import nn

import elixir
from elixir.errors import ArtifactError, InputError, InputTypeError
from elixir.plan.plan import Plan
from elixir.search import simple_search
from elixir.wrapper import ElixirModule, ElixirOptimizer

BATCH = {"x": torch.ones(4, 32)}


def small(width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 32))


def loss(model: nn.Module, inp: dict[str, torch.Tensor] = BATCH) -> torch.Tensor:
    return model(inp["x"]).square().mean()


def planned(model: nn.Module, home: Any = "cpu", **options: Any) -> Plan:
    options = {"inp": BATCH, "hardware": "cpu"} | options
    return simple_search(
        model, 1, split_number=2, shard_device=home, step_fn=lambda m, inp: loss(m, inp).backward(), **options
    ).plan


@pytest.fixture
def model() -> ElixirModule:
    plain = small()
    return ElixirModule(plain, planned(plain), device="cpu")


# ------------------------------------------------------------------------------------------------------------- wrapping


def test_a_plan_that_is_forgotten_is_asked_for() -> None:
    with pytest.raises(
        InputTypeError, match=r"a plan is missing: give the answer of optimal_search.* or call elixir\.wrap"
    ):
        ElixirModule(small())


def test_something_else_than_a_plan() -> None:
    with pytest.raises(InputTypeError, match=r"got str; Plan\.load\(path\)"):
        ElixirModule(small(), "plan.json", device="cpu")  # type: ignore[arg-type]


def test_a_plan_of_another_model_says_where_they_differ() -> None:
    plan = planned(small())
    cases: dict[str, nn.Module] = {
        "of another size: 0.weight, 0.bias, 2.weight": small(65),
        "only in the plan: 2.weight, 2.bias": small()[:2],
        "only in the model: 3.weight, 3.bias": small().append(nn.Linear(32, 32)),
        "trained in the plan, frozen in the model: 2.weight, 2.bias": small(),
    }
    cases["trained in the plan, frozen in the model: 2.weight, 2.bias"][2].requires_grad_(False)  # type: ignore[index]
    for told, other in cases.items():
        with pytest.raises(ArtifactError) as error:
            ElixirModule(other, plan, device="cpu")
        assert told in str(error.value)


def test_a_model_is_wrapped_once(model: ElixirModule) -> None:
    with pytest.raises(InputError, match="run by an ElixirModule already"):
        ElixirModule(model.module, model.plan, device="cpu")


@pytest.mark.parametrize("dtype", ["bf16", torch.bfloat16])
def test_a_dtype_that_the_plan_does_not_have(dtype: Any) -> None:
    """A plan without unified_dtype keeps the model's: asking for another was passed over in silence."""
    plain = small()
    with pytest.raises(InputError, match=r"for float32, .* bfloat16; plan with unified_dtype=torch\.bfloat16"):
        ElixirModule(plain, planned(plain), dtype=dtype, device="cpu")


@pytest.mark.parametrize("unified", [None, "float32"])
def test_a_dtype_may_be_a_name(unified: str | None) -> None:
    plain = small()
    module = ElixirModule(plain, planned(plain, unified_dtype=unified), dtype="fp32", device="cpu")
    assert module(BATCH["x"].double()).dtype == torch.float32


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "must be 'cpu' or a CUDA"),
        ("meta", "must be 'cpu' or a CUDA device such as 'cuda:0', got 'meta'"),
        ("cuda:0", "finds no CUDA here"),
    ],
)
def test_a_device_that_is_not_there(device: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plain = small()
    with pytest.raises(InputError, match=message):
        ElixirModule(plain, planned(plain), device=device)


def test_a_compiled_part_runs_wherever_its_weights_are() -> None:
    for where in ("cpu", "cuda"):
        plain: nn.Module = small()
        plain[2] = torch.compile(plain[2], backend="eager")  # type: ignore[index, operator]
        ElixirModule(plain, planned(plain, where), device="cpu").close()


def test_processes_without_a_process_group(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    plain = small()
    alone = planned(plain)
    with caplog.at_level(logging.WARNING):
        ElixirModule(plain, alone, device="cpu").close()
    assert "2 processes were started" in caplog.text
    plain = small()
    step = {"inp": BATCH, "hardware": "cpu", "step_fn": lambda m, inp: loss(m).backward()}
    with pytest.raises(ArtifactError, match=r"init_process_group\(\) has not been called"):
        ElixirModule(plain, simple_search(plain, 2, **step), device="cpu")  # type: ignore[arg-type]


def test_without_a_gpu_wrap_plans_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plain = small()
    adamw = torch.optim.AdamW(plain.parameters())
    module, _ = elixir.wrap(plain, adamw, inp=BATCH, step_fn=lambda m, inp: loss(m).backward())
    assert module.plan.hardware_name == "cpu"


# ------------------------------------------------------------------------------------------------------------- training


def test_an_argument_that_there_is_not(model: ElixirModule) -> None:
    with pytest.raises(TypeError, match="clip_norm"):
        ElixirOptimizer(model, torch.optim.AdamW(model.parameters()), clip_norm=1.0)  # type: ignore[call-arg]


def test_a_loss_that_is_a_number(model: ElixirModule) -> None:
    optimizer = ElixirOptimizer(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(InputTypeError, match="got float; call item"):
        optimizer.backward(loss(model).item())  # type: ignore[arg-type]


def test_gathered_takes_a_module_or_one_parameter_and_nothing_foreign(model: ElixirModule) -> None:
    expected = small()
    weight = model.module[0].weight
    for some in (model, model.module[0], weight, [weight], (p for p in [weight])):
        with model.gathered(some):
            assert torch.equal(weight, expected[0].weight)
    for foreign in (expected, ["0.weight"], [weight, expected[0].weight]):
        with pytest.raises(InputError, match="parameters of this model"), model.gathered(foreign):  # type: ignore[arg-type]
            pass


def test_a_forward_on_another_thread_is_refused_there_and_harms_nobody() -> None:
    plain = small()
    module = ElixirModule(plain, planned(plain), device="cpu")
    errors: list[Exception] = []

    def second() -> None:
        try:
            loss(module)
        except InputError as error:
            errors.append(error)

    def during(*_: object) -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    handle = next(module.module.children()).register_forward_hook(during)
    expected = loss(module)
    handle.remove()
    assert len(errors) == 1
    assert "another thread is in a forward" in str(errors[0])
    assert torch.equal(loss(module), expected)
    module.close()
