"""Plans for evaluation and generation: no gradients, no states, no loads on demand, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elixir.cli import main
from elixir.errors import InputError
from elixir.plan.plan import Plan
from elixir.search import optimal_search
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import inside
from tests.common.tiny_models import tiny

NEW, PROMPT = 64, 16
SMALL = {"hardware": "cpu", "device_memory": "600KiB", "host_budget": "64MiB"}


def model(family: str = "llama", **options: Any) -> Any:
    return tiny(family, layers=4, positions=128, **options).eval()


def batch(tokens: int = PROMPT) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(2, 128, (2, tokens), generator=torch.Generator().manual_seed(1))}


def generated(of: Any) -> torch.Tensor:
    ids = batch()["input_ids"]
    with torch.no_grad():
        return of.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
            pad_token_id=0, use_cache=True,
        )  # fmt: skip


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_is_evaluated_trainable_or_not(frozen: bool) -> None:
    expected = model()(**batch()).logits
    plan = optimal_search(model(), 1, optimizer_type=None, inp=batch(), **SMALL).plan
    assert plan.predicted.host_peak_bytes < sum(each.nbytes for each in model().parameters()) * 2
    assert not any(chunk.trainable for chunk in plan.chunks)
    assert not all(chunk.resident for chunk in plan.chunks)
    inner = model().requires_grad_(not frozen)
    wrapped = ElixirModule(inner, Plan.from_json(plan.to_json()))
    for _ in range(2):
        found = wrapped(**batch()).logits
        assert torch.equal(found, expected)
        assert found.grad_fn is None
    with pytest.raises(InputError, match=r"for forward alone \(optimizer_type=None\)"):
        ElixirOptimizer(wrapped, torch.optim.SGD(inner.parameters()))
    assert all(each.requires_grad is not frozen for each in wrapped.release().parameters())


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("how", ["forward", "generate", "training"])
@pytest.mark.parametrize("tied", [False, True])
def test_generation_loads_nothing_on_demand(how: str, tied: bool) -> None:
    options: dict[str, Any] = {
        "forward": {"optimizer_type": None, "inp": batch(64)},
        "generate": {"generate": (PROMPT, NEW)},
        "training": {"inp": batch() | {"labels": batch()["input_ids"]}, "device_memory": "2MiB", "placement": "cpu"},
    }[how]
    plan = optimal_search(model(tie_word_embeddings=tied), 1, **SMALL | options).plan
    wrapped = ElixirModule(model(tie_word_embeddings=tied), plan)
    assert torch.equal(generated(wrapped), generated(model(tie_word_embeddings=tied)))
    counts = inside.counts(wrapped)
    assert counts.calls == NEW
    assert counts.loads > 0
    assert counts.demand_loads == 0
    assert counts.deviations == 0
    if how != "training":
        assert counts.loads == plan.prediction_for(NEW).loads


def test_a_training_trace_is_no_forward_one() -> None:
    inp = batch() | {"labels": batch()["input_ids"]}
    trained = optimal_search(model(), 1, inp=inp, hardware="cpu", device_memory="64MiB", host_budget="64MiB")
    with pytest.raises(InputError, match="a training step was traced"):
        optimal_search(trained.question.trace, 1, optimizer_type=None, **SMALL)
    evaluated = optimal_search(model(), 1, optimizer_type=None, inp=inp, **SMALL)
    again = optimal_search(evaluated.question.trace, 1, **SMALL).plan
    assert again == evaluated.plan
    assert again.optimizer == "none"


def test_a_cache_that_grows_by_no_tokens_is_refused() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    recurrent = MambaForCausalLM(MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=16, state_size=2))
    with pytest.raises(InputError, match="MambaForCausalLM keeps a cache of another kind"):
        optimal_search(recurrent, 1, generate=(4, 4), **SMALL)


def test_only_causal_models_are_planned_by_name() -> None:
    with pytest.raises(InputError, match="causal language models"):
        optimal_search(tiny("t5"), 1, generate=(8, 8), **SMALL)


def test_the_command_line_plans_evaluation_and_generation(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    machine = "--hardware a100 --host-budget 8GiB --brief"
    assert main(["plan", "opt-125m", "--seq", "64", "--forward", *machine.split()]) == 0
    assert "none: forward alone, batches of 1 x 64 tokens" in capsys.readouterr().out
    trace = str(tmp_path / "trace.json")
    assert main(["profile", "opt-125m", "--generate", "32+32", "--batch", "2", "--brief", "--out", trace]) == 0
    capsys.readouterr()
    assert main(["plan", trace, *machine.split()]) == 0
    assert "batches of 2 x (32 + 32) tokens, the last one" in capsys.readouterr().out
    assert main(["plan", "opt-125m", "--forward", "--optimizer", "sgd", *machine.split()]) != 0
    assert "leave out --optimizer" in capsys.readouterr().err
