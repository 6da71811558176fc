"""Lightning under a plan: the model of example/trainer.py, built on meta and filled chunk by chunk.

python example/lightning_fit.py --steps 20 --device-memory 14MiB --devices 1
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader
from trainer import samples, small_model

from elixir.integrations.lightning import ElixirStrategy


class Bytes(lightning.LightningModule):
    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = small_model()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device-memory", default=None)
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()
    lightning.seed_everything(0)
    strategy = ElixirStrategy(init_on_meta=True, device_memory=args.device_memory)
    trainer = lightning.Trainer(
        strategy=strategy, devices=args.devices, max_steps=args.steps, gradient_clip_val=1.0, logger=False,
        enable_checkpointing=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(Bytes(), DataLoader(samples(), batch_size=8))
    if trainer.is_global_zero:
        print(f"loss {float(trainer.callback_metrics['loss']):.3f}")
        print(strategy.elixir.module.last_report)


if __name__ == "__main__":
    main()
