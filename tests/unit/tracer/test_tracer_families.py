"""Every model family: the predicted peak of a step on the CPU is the peak of a real one.

The residue of a few bytes is the Python scalars that autograd keeps as 0-dim tensors, 8 bytes each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmark.observe import observe_step
from elixir.models.loading import build
from elixir.models.model_shape import describe
from elixir.models.step import default_input, default_step
from elixir.tracer.values.expert_choice import RecordedRouting
from tests.common.tiny_models import FAMILIES, tiny
from tests.common.tracing import predicted_bytes, real_routing

SCALARS_BYTES = 8 * 8
CHECKPOINTS = ("none", "reentrant", "non-reentrant")
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
PER_LAYER: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "global_head_dim": 32,
    "sliding_window": 8,
}
LATENT = {
    "kv_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
SIZES = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 64, "vocabulary": 128, "head_dim": 16}
NEWER: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "qwen3.5-9b": {"layers": 4, **DELTA},
    "qwen3.5-35b-a3b": {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64, **DELTA},
    "gemma-4-e2b": PER_LAYER
    | {"layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128},
    "gemma-4-26b-a4b": {"num_experts": 4, "top_k_experts": 2, "vocab_size_per_layer_input": 128, **PER_LAYER},
    "glm-4.5-air": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "llama-4-scout": {"layers": 4, "num_local_experts": 4, "attention_chunk_size": 8},
    "deepseek-v3": LATENT
    | {"first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
}
"""A model by name -> what makes it tiny, in addition to `SIZES`: sinks, linear attention, layers that share keys and values,
experts in one parameter, experts in groups, chunks of attention."""
QUICK_DROPOUT = {("opt", "reentrant"), ("gpt2", "none"), ("t5", "non-reentrant"), ("bert", "none")}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Steps are tiny: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batch_for(family: str, model: torch.nn.Module, batch: int = 2) -> dict[str, Any]:
    return default_input(model, batch=batch, seq=None if family == "vit" else 16)


def routing_for(family: str, model: torch.nn.Module, inp: dict[str, Any]) -> RecordedRouting | None:
    return real_routing(model, inp, default_step) if family == "mixtral" else None


def cases() -> list[Any]:
    return [
        pytest.param(
            family,
            checkpoint,
            dropout,
            marks=[pytest.mark.slow] if dropout and (family, checkpoint) not in QUICK_DROPOUT else [],
            id=f"{family}-{checkpoint}-dropout{dropout}",
        )
        for family in FAMILIES
        for checkpoint in CHECKPOINTS
        for dropout in (0.0, 0.1)
    ]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("family", "checkpoint", "dropout"), cases())
def test_predicted_peak_is_the_real_one(family: str, checkpoint: str, dropout: float) -> None:
    model = tiny(family, dropout=dropout, checkpoint=checkpoint)
    inp = batch_for(family, model)
    routing = routing_for(family, model, inp)
    predicted = predicted_bytes(model, inp, default_step, routing=routing)
    real = observe_step(model, inp, default_step).peak_bytes
    assert abs(predicted - real) <= SCALARS_BYTES, f"predicted {predicted}, real {real}"
    assert abs(predicted - real) <= 0.002 * real


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("family", "checkpoint"), [("llama", "none"), ("gpt2", "non-reentrant"), ("opt", "none")])
def test_predicted_peak_of_documents_in_one_row_is_the_real_one(family: str, checkpoint: str, attention: str) -> None:
    model = tiny(family, checkpoint=checkpoint)
    model.set_attn_implementation(attention)
    inp = default_input(model, batch=4, seq=48, packed=3)
    predicted = predicted_bytes(model, inp, default_step)
    real = observe_step(model, inp, default_step).peak_bytes
    assert abs(predicted - real) <= SCALARS_BYTES, f"predicted {predicted}, real {real}"
    if family != "opt":  # whose own mask lets documents see each other
        apart = predicted_bytes(model, default_input(model, batch=4, seq=48), default_step)
        assert predicted - apart >= 192 * 192


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("checkpoint", ["none", "non-reentrant"])
@pytest.mark.parametrize("name", NEWER)
def test_predicted_peak_of_newer_models_is_the_real_one(name: str, checkpoint: str) -> None:
    shape = describe(name).changed(**SIZES | NEWER[name])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(shape, dtype=torch.float32, device="cpu", checkpoint=checkpoint)
    inp = default_input(model, batch=2, seq=16)
    predicted = predicted_bytes(model, inp, default_step, routing=real_routing(model, inp, default_step))
    real = observe_step(model, inp, default_step).peak_bytes
    assert abs(predicted - real) <= SCALARS_BYTES, f"predicted {predicted}, real {real}"
