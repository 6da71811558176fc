"""transformers' Trainer under a plan: a tiny GPT-2 learns bytes of Python's standard library.

    python example/trainer.py --output_dir out --max_steps 20 --elixir '{"device_memory": "14MiB"}'
    torchrun --nproc-per-node 2 example/trainer.py --output_dir out --max_steps 20

All flags are those of `transformers.TrainingArguments`, and ``--elixir``.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, set_seed

from elixir.integrations.transformers import ElixirTrainer, ElixirTrainingArguments

LENGTH = 64


def samples(count: int = 256) -> list[dict[str, torch.Tensor]]:
    """Pieces of source text, a byte a token."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.tensor(list(b"".join(path.read_bytes() for path in files[:20])))
    pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)[:count]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def small_model() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    )


def main() -> None:
    (args,) = HfArgumentParser(ElixirTrainingArguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    trainer = ElixirTrainer(small_model(), args, train_dataset=samples())
    plan = trainer.plan()  # nothing is wrapped yet
    if args.process_index == 0:
        print(plan)
    trainer.train()
    if args.process_index == 0:
        print(trainer.elixir.module.last_report)
    trainer.save_model()
    trainer.elixir.module.close()


if __name__ == "__main__":
    main()
