"""Packed batches: documents do not see each other, and train to the bit as in plain PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DataCollatorWithFlattening

from elixir.models.loading import build
from elixir.models.step import default_input
from tests.common.parity import Case, Pair, hf_loss, make_plan, report_of
from tests.common.tiny_models import tiny

WAYS = {  # mode, checkpointing
    "streamed": ("streamed", "none"),
    "mixed, checkpointed": ("mixed", "non-reentrant"),
    "streamed, reentrant": ("streamed", "reentrant"),
    "resident": ("resident", "none"),
}
QWEN2 = {
    "model_type": "qwen2", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def model_of(family: str, checkpoint: str = "none") -> nn.Module:
    if family == "llama":
        return tiny("llama", checkpoint=checkpoint)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(QWEN2, dtype=torch.float32, checkpoint=checkpoint, device="cpu")


def flattened(*lengths: int, seed: int = 0, kernels: bool = False) -> dict[str, Any]:
    """Documents of these lengths as transformers' collator makes one row of them."""
    generator = torch.Generator().manual_seed(seed)
    samples = [{"input_ids": torch.randint(128, (length,), generator=generator).tolist()} for length in lengths]
    made: dict[str, Any] = DataCollatorWithFlattening(return_flash_attn_kwargs=kernels, return_tensors="pt")(samples)
    return made


def in_rows(seed: int) -> dict[str, Any]:
    """Two rows with documents each, as Axolotl makes them."""
    rows = [flattened(*lengths, seed=seed) for lengths in ((3, 5, 2), (6, 4))]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def masked(batch: dict[str, Any]) -> dict[str, Any]:
    """The same with a block for each document in a mask of (1, 1, tokens, tokens)."""
    document = (batch["position_ids"][0] == 0).cumsum(0)
    return batch | {"attention_mask": (document[:, None] == document[None]).tril()[None, None]}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("way", WAYS)
def test_trains_with_the_bits_of_plain_pytorch(way: str, family: str) -> None:
    mode, checkpoint = WAYS[way]
    it = Case(model_of(family, checkpoint), flattened(9, 4, 12), hf_loss)
    plan = make_plan(it, mode)
    assert (plan.step.packed, plan.step.samples, plan.step.tokens) == ("3", 1, 25)
    assert "micro-batches of 1 x 25 tokens, 3 documents packed into each sample" in str(plan)
    with Pair(it, plan) as pair:
        for step in range(4):
            with_kernels = flattened(3, 11, seed=step, kernels=True)
            for batch in (flattened(9, 4, 12, seed=step), with_kernels, in_rows(step), masked(flattened(5, 8))):
                pair.backward(batch, scale=0.25)
            pair.step()


def test_the_default_batch_keeps_documents_apart() -> None:
    model = model_of("llama")
    inp = default_input(model, batch=3, seq=16, packed=5)
    begins = (inp["position_ids"][0] == 0).nonzero().flatten().tolist()
    lengths = [end - begin for begin, end in zip(begins, [*begins[1:], 48], strict=True)]
    assert lengths == [4, 3, 3, 3, 3] * 3
    assert inp["cu_seq_lens_q"].tolist() == inp["cu_seq_lens_k"].tolist() == [*begins, 48]
    assert inp["max_length_q"] == inp["max_length_k"] == 4
    samples = [{"input_ids": ids.tolist()} for ids in inp["input_ids"][0].split(lengths)]
    collated = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")(samples)
    for name, value in collated.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(inp[name])), name
    plain = default_input(model, batch=3, seq=16)
    assert torch.equal(plain["input_ids"].reshape(1, -1), inp["input_ids"])
    with torch.no_grad():
        packed = model(**inp).logits[0].split(lengths)
        alone = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in inp["input_ids"][0].split(lengths)]
    for one, other in zip(packed, alone, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("where", ["report", "forward", "backward"])
def test_a_batch_larger_than_planned_is_named(where: str, caplog: pytest.LogCaptureFixture) -> None:
    it = Case(model_of("llama"), flattened(9, 4, 12), hf_loss)
    plan = make_plan(it, "streamed")
    nothing = replace(plan.predicted, device_parts=dict.fromkeys(plan.predicted.device_parts, 0), device_peak_bytes=0)
    said = "batches of 25 tokens were planned, this one has 30: plan with the largest"
    larger, planned = flattened(9, 4, 17), flattened(9, 16)
    with Pair(it, replace(plan, predicted=nothing)) as pair, caplog.at_level(logging.WARNING):
        if where != "report":
            assert _notes_if_memory_runs_out(pair, where, planned) == []
            assert _notes_if_memory_runs_out(pair, where, larger) == [said]
            return
        reports = []
        for batch in (larger, planned):
            pair.backward(batch)
            pair.step()
            reports.append(report_of(pair.module))
        assert [report.outgrown for report in reports] == [said, ""]
        assert replace(reports[0], slowest_s=1e-9).slow_text().partition("causes: ")[2].startswith(said)
        (message,) = [text for text in caplog.messages if "differs from its plan" in text]
        assert message.endswith(said)


def _notes_if_memory_runs_out(pair: Pair, where: str, batch: dict[str, Any]) -> Sequence[str]:
    """Notes on the error of a device that has no memory left in forward, or in backward."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    layer = pair.module.module.model.layers[1].mlp
    hook = layer.register_forward_hook if where == "forward" else layer.register_full_backward_hook
    handle = hook(full)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            pair.optimizer.backward(pair.module(**batch).loss)
    finally:
        handle.remove()
    return getattr(caught.value, "__notes__", [])
