"""TRL's trainers under a plan log and save what they do alone; a trace leaves nothing in their metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from elixir.errors import InputError
from elixir.integrations.transformers import with_elixir
from tests.common.trainers import llama, logged, rows

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

ROOMY = {"device_memory": "64MiB", "host_budget": "64MiB"}
ON_HOST = {**ROOMY, "placement": "cpu"}
SETTINGS: dict[str, dict[str, Any]] = {
    "nll": {},
    "dft": {"loss_type": "dft"},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "packing": {"packing": True, "gradient_checkpointing": True},
    "padding free": {"padding_free": True, "max_length": None},
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


@pytest.mark.sampled
@pytest.mark.parametrize("name", SETTINGS)
def test_sft_logs_and_saves_what_it_does_alone(name: str, tmp_path: Path) -> None:
    plain = fine_tuned(trl.SFTTrainer, tmp_path / "plain", **SETTINGS[name])
    ours = fine_tuned(with_elixir(trl.SFTTrainer), tmp_path / "ours", elixir=ON_HOST, **SETTINGS[name])
    assert logged(ours) == logged(plain)
    assert (ours.elixir.module.plan.step.packed is not None) == (name in ("packing", "padding free"))
    assert all("num_tokens" in entry and "entropy" in entry for entry in logged(ours)[:-1])
    for step in ("checkpoint-2", "checkpoint-4"):
        one, other = (load_file(tmp_path / run / step / "model.safetensors") for run in ("plain", "ours"))
        assert all(torch.equal(one[key], other[key]) for key in one.keys() | other.keys())
        state = json.loads((tmp_path / "ours" / step / "trainer_state.json").read_text(encoding="utf-8"))
        assert [entry["step"] for entry in state["log_history"]] == list(range(1, int(step[-1]) + 1))


def preferred(kind: Any, folder: Path, *, lora: str = "", elixir: Any = None, **more: Any) -> Any:
    """A trainer of TRL's DPO: with a reference model, or with adapters, whose base is the reference."""
    peft = pytest.importorskip("peft") if lora else None
    new = peft and peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    rows = [{"prompt": "5 6", "chosen": f"{7 + n} 8", "rejected": f"9 {10 + n}"} for n in range(8)]
    return kind(
        model=llama(lora == "given"),
        args=arguments(trl.DPOConfig, folder, **more),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        **({"peft_config": new} if lora == "made" else {} if lora else {"ref_model": llama()}),
        **({} if elixir is None else {"elixir": elixir}),
    )


def same_weights(one: Path, other: Path) -> bool:
    found = [load_file(next(folder.glob("*model.safetensors"))) for folder in (one, other)]
    return found[0].keys() == found[1].keys() and all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.sampled
@pytest.mark.parametrize("placement", ["cpu", "cuda"])
@pytest.mark.parametrize("lora", ["", "given", "made"])
def test_dpo_logs_and_saves_what_it_does_alone(lora: str, placement: str, tmp_path: Path) -> None:
    plain = preferred(trl.DPOTrainer, tmp_path / "plain", lora=lora)
    plain.train()
    options = {**ROOMY, "placement": placement}
    ours = preferred(with_elixir(trl.DPOTrainer), tmp_path / "ours", lora=lora, elixir=options)
    ours.train()
    assert logged(ours) == logged(plain)
    assert same_weights(tmp_path / "plain" / "checkpoint-4", tmp_path / "ours" / "checkpoint-4")
    report = ours.elixir.module.last_report
    assert (report.not_compared, report.demand_loads, report.deviations) == ("", 0, 0)
    assert report.observed["loads"] == report.predicted["loads"]
    assert report.observed["device_buffers"] <= report.predicted["device_buffers"]
    assert report.observed["host_peak"] <= report.predicted["host_peak"]


def test_a_reference_is_planned_and_left_as_it_was(tmp_path: Path) -> None:
    ours = preferred(with_elixir(trl.DPOTrainer), tmp_path, elixir=ON_HOST)
    plan = ours.plan()
    weights = sum(each.nbytes for model in (ours.model, ours.ref_model) for each in model.parameters())
    assert weights <= plan.predicted.host_parts["weights"] < 1.2 * weights
    assert all(each.requires_grad for each in ours.ref_model.parameters())
    assert sum(chunk.trainable for chunk in plan.chunks) < len(plan.chunks)
    with pytest.raises(InputError, match="sync_ref_model writes to the reference"):
        preferred(with_elixir(trl.DPOTrainer), tmp_path, elixir=ON_HOST, sync_ref_model=True)
    with pytest.raises(InputError, match="cannot be read into a model next to ref_model; load all models before"):
        preferred(with_elixir(trl.DPOTrainer), tmp_path, elixir={**ON_HOST, "weights": str(tmp_path)}).plan()


def reinforced(kind: Any, folder: Path, *, lora: bool = False, elixir: Any = None, **more: Any) -> Any:
    """A trainer of TRL's GRPO; its model is loaded from a folder, as its reference will be."""
    llama().save_pretrained(folder / "start")
    model = llama(lora)
    if not lora:
        model = type(model).from_pretrained(folder / "start", dtype=torch.float32)
    generation = {"num_generations": 2, "max_completion_length": 6, "max_length": None}
    given = arguments(trl.SFTConfig, folder).to_dict()
    names = ("use_cpu", "bf16", "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "seed",
             "learning_rate", "logging_steps", "save_strategy", "save_steps", "report_to", "disable_tqdm")  # fmt: skip
    args = {name: given[name] for name in names} | {key: value for key, value in generation.items() if value} | more
    return kind(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
        args=trl.GRPOConfig(output_dir=str(folder), gradient_checkpointing=False, **args),
        train_dataset=datasets.Dataset.from_list([{"prompt": f"5 {6 + n}"} for n in range(16)]),
        processing_class=tokenizer(),
        **({} if elixir is None else {"elixir": elixir}),
    )


GENERATIONS: dict[str, dict[str, Any]] = {
    "no reference": {},
    "a reference": {"beta": 0.1},
    "adapters": {"beta": 0.1, "lora": True},
    "two looks at each": {"num_iterations": 2},
}


@pytest.mark.sampled
@pytest.mark.parametrize("placement", ["cpu", "cuda"])
@pytest.mark.parametrize("name", GENERATIONS)
def test_grpo_logs_and_saves_what_it_does_alone(name: str, placement: str, tmp_path: Path) -> None:
    def entries(trainer: Any) -> list[dict[str, float]]:
        trainer.train()
        return [{key: value for key, value in each.items() if key != "step_time"} for each in logged(trainer)]

    plain = entries(reinforced(trl.GRPOTrainer, tmp_path / "plain", **GENERATIONS[name]))
    options = {**ROOMY, "placement": placement}
    ours = reinforced(with_elixir(trl.GRPOTrainer), tmp_path / "ours", elixir=options, **GENERATIONS[name])
    assert entries(ours) == plain
    assert any("reward" in entry and "entropy" in entry for entry in plain)
    assert same_weights(tmp_path / "plain" / "checkpoint-4", tmp_path / "ours" / "checkpoint-4")
    report = ours.elixir.module.last_report
    assert report.deviations == 0
    assert report.observed["device_buffers"] <= report.predicted["device_buffers"]
    assert report.observed["host_peak"] <= report.predicted["host_peak"]


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["cpu", "cuda"])
def test_distillation_logs_what_it_does_alone(placement: str, tmp_path: Path) -> None:
    def entries(kind: Any, folder: str, **more: Any) -> list[dict[str, float]]:
        teacher = llama()
        for each in teacher.parameters():
            each.data.mul_(1.5)
        trainer = kind(
            model=llama(),
            teacher_model=teacher,
            args=trl.DistillationConfig(
                output_dir=str(tmp_path / folder), use_cpu=True, bf16=False, report_to=[], save_strategy="no",
                per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, logging_steps=1, seed=3,
                max_completion_length=6, learning_rate=3e-3, disable_tqdm=True,
            ),
            train_dataset=datasets.Dataset.from_list([{"prompt": f"5 {6 + n}"} for n in range(16)]),
            processing_class=tokenizer(),
            **more,
        )  # fmt: skip
        trainer.train()
        return [{key: value for key, value in each.items() if key != "step_time"} for each in logged(trainer)]

    plain = entries(trl.DistillationTrainer, "plain")
    assert all(entry["grad_norm"] > 0 for entry in plain[:-1])
    options = {**ROOMY, "placement": placement}
    assert entries(with_elixir(trl.DistillationTrainer), "ours", elixir=options) == plain


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
