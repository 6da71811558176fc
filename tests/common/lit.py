"""A small LightningModule, data, a logger that remembers, and fits of it under any strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
import torchmetrics
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, default_collate


class Module(lightning.LightningModule):
    """Two layers, a metric, and a schedule for each step."""

    def __init__(self, wide: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh())
        self.head = nn.Linear(wide, 3)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("loss", loss, on_step=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Late(Module):
    """Builds in `configure_model`, which may be on meta."""

    def __init__(self) -> None:
        super().__init__(4)
        del self.body, self.head

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 3)


class Checkpointed(Module):
    """Layers that run again in backward, on lists of micro-batches or on single ones."""

    def __init__(self) -> None:
        super().__init__(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 2):
            x = checkpoint(self.body[index], x, use_reentrant=False).tanh()
        return self.head(x)


class ByHand(Module):
    """Manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.log("loss", loss, on_step=True)


class Log(Logger):
    """Remembers everything."""

    name, version = "log", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.rows.append({**metrics, "step": step})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def plain(self) -> list[dict[str, Any]]:
        rows = [row for row in self.rows if not any(name.startswith("elixir/") for name in row)]
        # LearningRateMonitor logs the same number under this name too, since schedulers hold the optimizer given.
        return [{name: value for name, value in row.items() if name != "lr-ElixirOptimizer"} for row in rows]


def data(count: int = 20, micro_batches: int = 0) -> DataLoader[Any]:
    """Batches of 4; with `micro_batches`, lists of so many of them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 8, generator=generator)
    samples = TensorDataset(x, x[:, :3].argmax(1))

    def collate(rows: list[Any]) -> list[Any]:
        return [default_collate(rows[first : first + 4]) for first in range(0, len(rows), 4)]

    return DataLoader(samples, batch_size=4 * micro_batches or 4, collate_fn=collate if micro_batches else None)


def trainer(strategy: Any, folder: Path, **more: Any) -> Any:
    given = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 2, "log_every_n_steps": 1, "logger": Log(),
        "enable_progress_bar": False, "enable_model_summary": False, "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.3, "val_check_interval": 3, "num_sanity_val_steps": 1, "default_root_dir": str(folder),
    }  # fmt: skip
    return lightning.Trainer(strategy=strategy, **{**given, **more})


def fitted(strategy: Any, folder: Path, module: Any = None, resume: Any = None, **more: Any) -> tuple[Any, Any]:
    torch.manual_seed(5)
    module = Module() if module is None else module
    made = trainer(strategy, folder, **more)
    made.fit(module, data(), data(8), ckpt_path=resume)
    return made, module


def states(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=False)["state_dict"]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
