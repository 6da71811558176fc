"""Seq2SeqTrainer generates on two ranks, whose samples end at different lengths, what it does with DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.common.spawn import as_launched, run_ranks

ON_HOST = {"device_memory": "64MiB", "host_budget": "64MiB", "placement": "cpu"}


def generated(rank: int, world_size: int, folder: Path, elixir: dict[str, Any] | None) -> Any:
    as_launched(rank, world_size)
    import torch
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from elixir.integrations.transformers import ElixirSeq2SeqTrainer
    from tests.common.trainers import TIMED, collate, rows

    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=48, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=30,
        )
    )  # fmt: skip
    args = Seq2SeqTrainingArguments(
        str(folder), use_cpu=True, per_device_train_batch_size=2, per_device_eval_batch_size=1, max_steps=4,
        learning_rate=2e-2, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, seed=3,
        predict_with_generate=True, generation_max_length=9,
    )  # fmt: skip
    given = {} if elixir is None else {"elixir": elixir}
    kind = Seq2SeqTrainer if elixir is None else ElixirSeq2SeqTrainer
    trainer = kind(model=model, args=args, train_dataset=rows(12, 0), data_collator=collate, **given)
    trainer.train()
    said = trainer.predict(rows(6, 1)).predictions
    log = [
        {name: value for name, value in entry.items() if not any(part in name for part in TIMED)}
        for entry in trainer.state.log_history
    ]
    if elixir is not None:
        trainer.elixir.module.close()
    return log, said.tolist()


@pytest.mark.slow
def test_two_ranks_generate_what_they_do_with_ddp(tmp_path: Path) -> None:
    plain = run_ranks(2, generated, tmp_path / "plain", None, wait_s=600.0)
    ours = run_ranks(2, generated, tmp_path / "ours", ON_HOST, wait_s=600.0)
    tokens = [sum(map(bool, row)) for row in ours[0][1]]
    assert len(set(tokens)) > 1  # a rank that is done goes on for the other one
    assert max(tokens) <= 8  # generation_max_length holds, less the token that starts
    for (log, said), (log_of_ours, said_of_ours) in zip(plain, ours, strict=True):
        assert said_of_ours == said
        for entry, entry_of_ours in zip(log, log_of_ours, strict=True):
            assert entry_of_ours == pytest.approx(entry, rel=0, abs=1e-6)
