"""Tiny models with frozen weights in 4 or 8 bits under adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.common.parity import Case, case
from tests.common.trainers import llama

FORMS: dict[str, dict[str, Any]] = {
    "nf4": {},
    "nf4 double": {"compress_statistics": True},
    "nf4 in bfloat16": {"quant_storage": torch.bfloat16},
    "fp4 in float32": {"quant_storage": torch.float32, "quant_type": "fp4"},
}
"""Form of quantisation -> options of bitsandbytes' `Linear4bit`."""
TORCHAO = ("torchao int8", "torchao int8, embedding too")
"""Forms of torchao: each row of a weight has a scale."""


def quantised_case(form: str, checkpoint: str = "none") -> Case:
    """A tiny Llama whose linear layers are quantised, with LoRA over some of them."""
    peft = pytest.importorskip("peft")
    it = case("llama", checkpoint)
    it.model.requires_grad_(False)
    quantise(it.model, form)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "gate_proj"], init_lora_weights=False
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(it.model, config)
    if checkpoint != "none":
        model.enable_input_require_grads()
    return Case(model.train(), it.inp, it.loss)


def quantise(model: nn.Module, form: str) -> None:
    """Replaces the linear layers of a model, but for its head."""
    if form in TORCHAO:
        return _quantise_by_torchao(model, form)
    bnb = pytest.importorskip("bitsandbytes")
    options = {"compress_statistics": False, "quant_type": "nf4", "quant_storage": torch.uint8} | FORMS[form]
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and name != "lm_head":
            made = bnb.nn.Linear4bit(layer.in_features, layer.out_features, False, **options)
            made.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, module=made, **options)
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, made)
    model.to("cpu")  # which packs the weights


def _quantise_by_torchao(model: nn.Module, form: str) -> None:
    ao = pytest.importorskip("torchao.quantization")
    kinds = (nn.Linear, nn.Embedding) if "embedding" in form else (nn.Linear,)
    ao.quantize_(
        model, ao.Int8WeightOnlyConfig(), filter_fn=lambda layer, name: isinstance(layer, kinds) and name != "lm_head"
    )


def loaded(library: str, folder: Path, *, lora: bool = False) -> Any:
    """A tiny Llama as transformers loads it with quantised linear layers; with peft's adapters in float32.

    Args:
        library: "nf4", which is double quantised, or "torchao".
        folder: for the files.
        lora: whether peft's adapters are on all linear layers.
    """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes" if library == "nf4" else library)
    config = llama().config
    config.hidden_size, config.intermediate_size = 64, 128  # blocks have 64 numbers
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    if library == "nf4":
        how: Any = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    else:
        how = transformers.TorchAoConfig(quant_type=pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig())
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, quantization_config=how, device_map="cpu", dtype=torch.float32)
    if lora:
        peft = pytest.importorskip("peft")
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        model = peft.get_peft_model(model, config).train()
    return model
