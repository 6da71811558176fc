"""A training loop over an Accelerator, plain or of Elixir's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.common.trainers import collate, llama, rows


class Loop:
    """A script of the user's: accumulation, clipping and a schedule.

    Args:
        accelerator: plain, or of Elixir's.
        samples: of the data.
        make: creates the optimizer of a model; AdamW by default.
        checkpoint: whether layers run again in backward.
        model: to train; a tiny Llama by default.
    """

    def __init__(
        self,
        accelerator: Any,
        samples: int = 6,
        make: Callable[[Any], torch.optim.Optimizer] | None = None,
        *,
        checkpoint: bool = False,
        model: Any = None,
    ) -> None:
        model = llama() if model is None else model
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3) if make is None else make(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        loader = DataLoader(rows(samples, 0), batch_size=2, collate_fn=collate, shuffle=True)
        self.accelerator, self.max_norm = accelerator, 0.5
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )

    def epoch(self) -> list[float]:
        """The losses and norms of a pass over the data."""
        found = []
        torch.manual_seed(7)
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                found.append(loss.item())
                if self.accelerator.sync_gradients:
                    found.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return found

    def epoch_in_passes(self, count: int) -> list[float]:
        """The same, with so many micro-batches at a time."""
        found = []
        torch.manual_seed(7)
        batches = list(self.loader)
        for first in range(0, len(batches), count):
            found += self.accelerator.one_pass(self._micro_batch, batches[first : first + count])
            found.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return found

    def _micro_batch(self, model: Any, batch: Any) -> float:
        loss = model(**batch).loss
        self.accelerator.backward(loss)
        return loss.item()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
