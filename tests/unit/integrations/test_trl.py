"""TRL's trainers under a plan log and save what they do alone; a trace leaves nothing in their metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from elixir.errors import InputError, TraceError
from elixir.integrations.transformers import with_elixir
from tests.common.trainers import llama, logged, rows

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

ROOMY = {"device_memory": "64MiB", "host_memory": "64MiB"}
ON_HOST = {**ROOMY, "placement": "cpu"}
SETTINGS: dict[str, dict[str, Any]] = {
    "nll": {},
    "dft": {"loss_type": "dft"},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "packing": {"packing": True, "gradient_checkpointing": True},
}


def tokenizer() -> Any:
    """One token for each number."""
    words = tokenizers.models.WordLevel({str(number): number for number in range(48)}, unk_token="0")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="0", bos_token="1", eos_token="2"
    )


def arguments(kind: Any, folder: Path, **more: Any) -> Any:
    given = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "max_steps": 4, "learning_rate": 3e-3, "logging_steps": 1,
        "save_strategy": "steps", "save_steps": 2, "report_to": [], "seed": 3, "disable_tqdm": True, "max_length": 16,
        "gradient_checkpointing": False,
    }  # fmt: skip
    return kind(**{**given, **more})


def fine_tuned(kind: Any, folder: Path, *, resume: Any = None, elixir: Any = None, **more: Any) -> Any:
    """A trainer of TRL's SFT after its run."""
    trainer = kind(
        model=llama(),
        args=arguments(trl.SFTConfig, folder, **more),
        train_dataset=datasets.Dataset.from_list(rows(20, 0)),
        processing_class=tokenizer(),
        **({} if elixir is None else {"elixir": elixir}),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("name", SETTINGS)
def test_sft_logs_and_saves_what_it_does_alone(name: str, tmp_path: Path) -> None:
    plain = fine_tuned(trl.SFTTrainer, tmp_path / "plain", **SETTINGS[name])
    ours = fine_tuned(with_elixir(trl.SFTTrainer), tmp_path / "ours", elixir=ON_HOST, **SETTINGS[name])
    assert logged(ours) == logged(plain)
    assert all("num_tokens" in entry and "entropy" in entry for entry in logged(ours)[:-1])
    for step in ("checkpoint-2", "checkpoint-4"):
        one, other = (load_file(tmp_path / run / step / "model.safetensors") for run in ("plain", "ours"))
        assert all(torch.equal(one[key], other[key]) for key in one.keys() | other.keys())
        state = json.loads((tmp_path / "ours" / step / "trainer_state.json").read_text(encoding="utf-8"))
        assert [entry["step"] for entry in state["log_history"]] == list(range(1, int(step[-1]) + 1))


def test_sft_is_resumed_with_the_same_losses(tmp_path: Path) -> None:
    kind = with_elixir(trl.SFTTrainer)
    whole = logged(fine_tuned(kind, tmp_path, elixir=ROOMY))
    again = logged(fine_tuned(kind, tmp_path, elixir=ROOMY, resume=str(tmp_path / "checkpoint-2")))
    assert [entry["loss"] for entry in again[:-1]] == [entry["loss"] for entry in whole[:-1]]


def test_a_plan_leaves_the_metrics_of_the_trainer_empty(tmp_path: Path) -> None:
    trainer = with_elixir(trl.SFTTrainer)(
        model=llama(),
        args=arguments(trl.SFTConfig, tmp_path),
        train_dataset=datasets.Dataset.from_list(rows(20, 0)),
        processing_class=tokenizer(),
        elixir=ROOMY,
    )
    before = repr((trainer._metrics, trainer._total_train_tokens))
    trainer.plan()
    assert repr((trainer._metrics, trainer._total_train_tokens)) == before


def test_dpo_names_its_reference_model_unless_it_is_frozen(tmp_path: Path) -> None:
    pairs = [{"prompt": "5 6", "chosen": f"{7 + n} 8", "rejected": f"9 {10 + n}"} for n in range(8)]

    def made(kind: Any, folder: str, **more: Any) -> Any:
        return kind(
            model=llama(),
            ref_model=llama(),
            args=arguments(trl.DPOConfig, tmp_path / folder),
            train_dataset=datasets.Dataset.from_list(pairs),
            processing_class=tokenizer(),
            **more,
        )

    ours = made(with_elixir(trl.DPOTrainer), "ours", elixir=ON_HOST)
    ours.ref_model.requires_grad_(True)
    with pytest.raises(
        TraceError, match=r"'ref_model' of the ElixirDPOTrainer, a second model.*requires_grad_\(False\)"
    ):
        ours.plan()
    ours.ref_model.requires_grad_(False)
    ours.train()
    plain = made(trl.DPOTrainer, "plain")
    plain.train()
    assert logged(ours) == logged(plain)


def test_generation_by_vllm_is_refused(tmp_path: Path) -> None:
    given = trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], use_vllm=True)
    with pytest.raises(InputError, match="use_vllm .* transformers generates under the plan"):
        with_elixir(trl.GRPOTrainer)(
            model=llama(),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=given,
            train_dataset=datasets.Dataset.from_list([{"prompt": "5 6"}] * 8),
            processing_class=tokenizer(),
        )
