"""Compiled layers through a run's life: compiled late, replaced, moved, saved, resumed; and compilers that cannot be."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir
from elixir.access.compiled_units import compiled_units
from elixir.check import refusals
from elixir.checkpoint import load_checkpoint, save_checkpoint
from elixir.errors import ArtifactError, InputError
from elixir.wrapper import ElixirModule
from elixir.wrapper.run_options import Debug
from tests.common import gpu
from tests.common.parity import MODES, Case, Pair, adamw, case
from tests.unit.wrapper.test_compiled_layers import compiled, fresh, plan_of

POISON = Debug(poison=True)
LAYERS = ("model.layers.0", "model.layers.1")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    fresh()
    yield
    fresh()


def replaced(model: nn.Module) -> nn.Module:
    """The layers as many scripts compile them: a compiled module in place of each."""
    layers = model.model.layers
    for number in range(len(layers)):
        layers[number] = torch.compile(layers[number], backend="aot_eager")
    return model


@pytest.mark.parametrize("whole", ["model", "wrapper", "function"])
def test_a_whole_model_compiled_after_wrapping_is_refused(whole: str) -> None:
    it = case("llama")
    module = ElixirModule(it.model, plan_of(it, "streamed"), device="cpu")
    run: Any = module
    if whole == "model":
        it.model.compile(backend="eager")
    elif whole == "wrapper":
        run = torch.compile(module, backend="eager")
    else:
        run = torch.compile(lambda **inp: module(**inp), backend="eager")
    with pytest.raises(InputError, match=r"given to torch.compile.*compile its layers instead \(elixir.wrap"):
        run(**it.inp)
    it.model._compiled_call_impl = None
    it.loss(module, it.inp).backward()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_compiled_autograd_is_refused(mode: str) -> None:
    it = case("llama")
    with Pair(
        Case(compiled(it.model), it.inp, it.loss), plan_of(it, mode), plain=compiled(case("llama").model)
    ) as pair:
        loss = it.loss(pair.module, it.inp)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            with pytest.raises(InputError, match="compiled autograd makes one graph of all of backward"):
                pair.optimizer.backward(loss)
            with pytest.raises(InputError, match="compiled autograd"):
                pair.module(**it.inp)
        pair.module.zero_grad()
        pair.train(1)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("mode", MODES)
def test_layers_that_torch_compile_has_replaced_keep_their_plain_names(mode: str, tmp_path: Path) -> None:
    it = case("llama")
    names = list(it.model.state_dict())
    plain = compiled(copy.deepcopy(it.model))
    before = replaced(it.model).model.layers[0]
    plan = plan_of(it, mode)
    assert plan.step.compiled == LAYERS
    assert it.model.model.layers[0] is before, "planning changes nothing"
    assert plan == plan_of(Case(plain, it.inp, it.loss), mode), "the plan of layers compiled in place"
    with pytest.raises(ArtifactError):
        ElixirModule(it.model, plan_of(case("opt"), mode), device="cpu")
    assert it.model.model.layers[0] is before, "nor does a refusal"
    with Pair(it, plan, plain=plain, debug=POISON, alike=False) as pair:
        pair.train(3)
        pair.assert_same_weights()
        assert list(pair.module.state_dict()) == names == list(it.model.state_dict())
        save_checkpoint(tmp_path, {"model": pair.module, "optimizer": pair.optimizer}, wait=True)
        after = pair.train(1)
        of_replaced = replaced(copy.deepcopy(pair.plain)).state_dict()
        assert any("_orig_mod." in name for name in of_replaced)
        pair.module.load_state_dict({name: value.zero_() for name, value in of_replaced.items()})
        assert not any(value.any() for value in pair.module.state_dict().values())
    assert tuple(compiled_units(it.model).values()) == LAYERS
    fresh()
    other = case("llama")  # a checkpoint of replaced layers goes on with layers that are not compiled, and back
    with Pair(other, plan_of(other, mode), plain=copy.deepcopy(other.model), alike=False) as pair:
        load_checkpoint(tmp_path, {"model": pair.module, "optimizer": pair.optimizer})
        assert pair.case.loss(pair.module, other.inp).item() == after[0]


def test_a_replaced_module_with_hooks_is_refused() -> None:
    it = case("llama")
    replaced(it.model).model.layers[1].register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match=r"model.layers.1 is a torch.compile\(module\) with hooks on it"):
        plan_of(it, "streamed")
    assert type(it.model.model.layers[0]).__name__ == "OptimizedModule"


def test_a_strict_wrap_checks_the_step_uncompiled_and_compiles() -> None:
    it = case("llama")
    model, _ = elixir.wrap(
        it.model, adamw(it.model), inp=it.inp, compile={"backend": "aot_eager"}, strict=True, host_budget="1GiB", assume="nominal",
        device_memory=gpu.with_cublas("64MiB", biased=False),
    )  # fmt: skip
    assert model.plan.step.compiled == LAYERS
    model.close()
    other = case("llama")
    assert refusals(replaced(other.model), adamw(other.model), other.inp) == ()
