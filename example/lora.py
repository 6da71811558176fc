"""LoRA adapters on a frozen base whose weights stay on the host, with PEFT and transformers' Trainer.

python example/lora.py --output_dir out --max_steps 20 --elixir '{"placement": "cpu"}'
"""

from __future__ import annotations

from peft import LoraConfig, get_peft_model
from trainer import samples, small_model
from transformers import HfArgumentParser, set_seed

from elixir.integrations.transformers import ElixirTrainer, ElixirTrainingArguments


def main() -> None:
    (args,) = HfArgumentParser(ElixirTrainingArguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    trainer = ElixirTrainer(get_peft_model(small_model(), adapters), args, train_dataset=samples())
    trainer.train()
    trainer.save_model()  # adapters alone are gathered and saved
    if args.process_index == 0:
        chunks = trainer.elixir.module.plan.chunks
        print(f"{sum(not chunk.trainable for chunk in chunks)} frozen chunks, {len(chunks)} in all")
        print(trainer.elixir.module.last_report)
    trainer.elixir.module.close()


if __name__ == "__main__":
    main()
