"""Twelve families in passes of several micro-batches, with all that makes it harder at once: the bits of a loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from benchmark.transformers_classes import build, new_batch
from elixir.access import activations as swapping
from tests.common.one_pass import Make, Steps, batches, family, in_passes, plainly, plan_for
from tests.common.tiny_models import FAMILIES

CLASSES = {
    "bart": ("seq2seq", "BartForConditionalGeneration"),
    "wav2vec2": ("ctc", "Wav2Vec2ForCTC"),
    "gemma2": ("causal", "Gemma2ForCausalLM"),
    "qwen3_moe": ("causal", "Qwen3MoeForCausalLM"),
    "deberta-v2": ("masked", "DebertaV2ForMaskedLM"),
}
"""Model type -> task and class of those that `tiny` does not know."""
DROPOUT, COUNT, STEPS = 0.1, 3, 2


def case(name: str) -> tuple[Make, Steps]:
    """A family with dropout, and its micro-batches, with a seed each."""
    if name in FAMILIES:  # images come without seeds
        return family(name, dropout=DROPOUT * (name != "vit")), batches(name, COUNT, STEPS, seeds=name != "vit")
    task, kind = CLASSES[name]

    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            model, _ = build(task, name, kind)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = DROPOUT
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    model = make()
    made: list[dict[str, Any]] = [new_batch(model, task) | {"seed": number} for number in range(COUNT * STEPS)]
    return make, [made[first : first + COUNT] for first in range(0, len(made), COUNT)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *CLASSES])
def test_dropout_clipping_early_states_and_inputs_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "SMALLEST_BYTES", 256)
    make, steps = case(name)
    plan = plan_for(make(), steps[0][0], accumulation=COUNT, on_host=True)
    chunks = tuple(replace(chunk, update="early") if chunk.grad_entry is not None else chunk for chunk in plan.chunks)
    found = in_passes(make, steps, replace(plan, chunks=chunks, may_update_early=True), max_norm=0.5)
    assert found.reports[-1].early.made > 0
    assert found.same_as(plainly(make, steps, max_norm=0.5))
    for report in found.reports:
        for way in ("loads", "host_to_device", "device_to_host"):
            assert report.observed[way] == report.predicted[way]
