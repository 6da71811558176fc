"""A tiny Llama, data of different lengths, and runs of transformers' Trainer over them, plain or under a plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

Row = dict[str, list[int]]


def rows(count: int, seed: int) -> list[Row]:
    """Samples that can be learned: each token is three more than the one before it."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(4, 13, (), generator=generator))
        start = int(torch.randint(0, 47, (), generator=generator))
        ids = [(start + 3 * k) % 47 + 1 for k in range(length)]
        found.append({"input_ids": ids, "attention_mask": [1] * length, "labels": ids})
    return found


def collate(batch: list[Row]) -> dict[str, torch.Tensor]:
    """Padded to the longest."""
    longest = max(len(row["input_ids"]) for row in batch)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in batch])
        for name, value in fill.items()
    }


def llama(lora: bool = False) -> Any:
    """Two layers of 16, the same each time; with adapters for LoRA."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        model = get_peft_model(
            model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )
    return model


@dataclass
class Trained:
    """The outcome of a run."""

    trainer: Any
    history: list[dict[str, float]]
    """Everything logged that is no time and nothing of Elixir's."""
    predictions: Any


TIMED = ("runtime", "per_second", "elixir/", "train_loss")
"""Parts of names that are times, Elixir's, or of one call of `train` alone."""


def arguments(folder: Path, kind: type = TrainingArguments, **more: Any) -> Any:
    """Accumulation with a ragged end, clipping, a schedule, evaluation and checkpoints."""
    given = {
        "output_dir": str(folder), "use_cpu": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "learning_rate": 3e-3, "lr_scheduler_type": "cosine", "warmup_steps": 1, "weight_decay": 0.1,
        "max_grad_norm": 0.5, "num_train_epochs": 2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2,
        "save_strategy": "steps", "save_steps": 2, "report_to": [], "seed": 3, "disable_tqdm": True,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
    }  # fmt: skip
    return kind(**{**given, **more})


OF_TRAINER = ("elixir", "callbacks", "optimizers", "optimizer_cls_and_kwargs")
"""Keyword arguments of a Trainer, not of training arguments."""


def muon_and_adamw(model: Any) -> list[torch.optim.Optimizer]:
    """Muon over the layers' matrices, AdamW over all else."""
    named = dict(model.named_parameters())
    whole = {name for name, each in named.items() if each.ndim == 2 and "layers" in name}
    return [
        torch.optim.Muon([each for name, each in named.items() if name in whole], lr=1e-2),
        torch.optim.AdamW([each for name, each in named.items() if name not in whole], lr=3e-3),
    ]


def make(kind: type, folder: Path, *, model: Any = None, lora: bool = False, samples: int = 10, **more: Any) -> Any:
    """A trainer; keyword arguments are of the training arguments, but for those of a Trainer."""
    of_trainer = {name: more.pop(name) for name in OF_TRAINER if name in more}
    dataset = more.pop("train_dataset", rows(samples, 0))
    given = more.pop("args", None) or arguments(folder, **more)
    return kind(
        model=llama(lora) if model is None else model,
        args=given,
        train_dataset=dataset,
        eval_dataset=rows(4, 1),
        data_collator=collate,
        **of_trainer,
    )


def train(kind: type, folder: Path, *, resume: Any = None, **more: Any) -> Trained:
    """A whole run, then predictions; the model is saved in ``final``."""
    trainer = make(kind, folder, **more)
    trainer.train(resume_from_checkpoint=resume)
    predictions = trainer.predict(rows(4, 2)).predictions
    trainer.save_model(str(folder / "final"))
    return Trained(trainer, logged(trainer), predictions)


def logged(trainer: Any) -> list[dict[str, float]]:
    """The log, without times."""
    return [
        {name: value for name, value in entry.items() if not any(part in name for part in TIMED)}
        for entry in trainer.state.log_history
    ]


PLAIN = Trainer
