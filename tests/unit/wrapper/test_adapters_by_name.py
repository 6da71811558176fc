"""Adapters over a quantised model by name, next to the same model as peft and bitsandbytes build it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import elixir
from elixir.errors import InputError
from elixir.models.loading import build
from elixir.models.model_shape import describe
from elixir.models.step import default_step, input_to_trace
from elixir.search.question import StepQuestion
from tests.common.parity import assert_as_planned, take_step
from tests.common.quantised import quantise

FORMS = {None: None, "nf4": "nf4", "nf4-double": "nf4 double"}
"""Form by name -> that of the test's own quantisation."""
SHAPES = {
    "llama-3-8b": {"layers": 2, "hidden": 64, "heads": 8, "ffn": 160, "vocab_size": 320},
    "gpt2": {"layers": 2, "hidden": 64, "heads": 4, "ffn": 192, "vocab_size": 320},
}


def shape_of(name: str) -> Any:
    return describe(name).changed(**SHAPES[name])


def from_libraries(name: str, form: str | None, checkpoint: str, device: str = "cpu") -> nn.Module:
    """The model of the libraries, whose weights are real if they are quantised."""
    peft = pytest.importorskip("peft")
    model = build(shape_of(name), checkpoint=checkpoint, device=device)
    if FORMS[form] is not None:
        quantise(model, FORMS[form])
    if checkpoint != "none":
        model.enable_input_require_grads()
    # Not "all-linear", which asks whether transformers has quantised the model.
    output = model.get_output_embeddings()
    kinds = ("Linear", "Linear4bit", "Conv1D")
    names = [key for key, layer in model.named_modules() if type(layer).__name__ in kinds and layer is not output]
    model.is_loaded_in_4bit = form is not None  # how peft knows, as transformers sets it
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM")).train()


def test_a_plan_by_name_runs_the_model_of_the_libraries() -> None:
    model = from_libraries("llama-3-8b", "nf4", "none")
    named = build(shape_of("llama-3-8b"), lora=4, quantised="nf4")
    inp = input_to_trace(model, batch=2, seq=32)
    sr = elixir.optimal_search(
        named,
        1,
        inp=inp,
        step_fn=default_step,
        hardware="cpu",
        device_memory="1200KB",
        host_budget="64MiB",
        assume="nominal",
    )
    assert any(not chunk.resident for chunk in sr.plan.chunks)
    twin = copy.deepcopy(model)
    module = elixir.ElixirModule(model, sr, device="cpu")
    optimizer = elixir.ElixirOptimizer(module, torch.optim.AdamW([p for p in module.parameters() if p.requires_grad]))
    plain = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad])
    for _ in range(3):
        loss = module(**inp).loss
        take_step(optimizer, loss)
        alone = twin(**inp).loss
        alone.backward()
        plain.step()
        plain.zero_grad()
        assert torch.equal(loss, alone)
    assert_as_planned(module)


def test_what_makes_no_sense_is_refused() -> None:
    shape = shape_of("gpt2")
    for said, options in (
        ("form of quantised weights.*nf4", {"lora": 4, "quantised": "nf5"}),
        ("rank of the adapters", {"lora": 0}),
        ("on meta", {"quantised": "nf4", "device": "cpu"}),
    ):
        with pytest.raises(InputError, match=said):
            build(shape, **options)
    with pytest.raises(InputError, match="nothing would train; add adapters"):
        StepQuestion(model="gpt2", quantised="nf4")
    assert StepQuestion(model="gpt2", quantised="nf4", forward=True).quantised == "nf4"
