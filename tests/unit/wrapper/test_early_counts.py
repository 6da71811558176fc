"""Reports count the chunks that are updated early, and those whose new states were kept."""

from __future__ import annotations

from typing import Any

import torch

from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.account.step_report import EarlyCounts
from tests.common import gpu
from tests.common.early import chain, updating_early
from tests.common.parity import Case

LAYERS = 4
ALWAYS, NEVER = 1e-3, 1e9
"""Limits of the norm that clip every step, and none."""


class Run:
    """A chain of layers, one chunk each, all of which the host updates early."""

    def __init__(self, homes: str = "streamed", optimizers: int = 1, scale: float = 2.0**16, **options: Any) -> None:
        self.case: Case = chain(LAYERS)
        plan = updating_early(self.case, homes, split_number=LAYERS, **options)
        assert len(plan.chunks) == LAYERS
        self.module = ElixirModule(self.case.model, plan, device=gpu.DEVICE)
        parameters = list(self.module.parameters())
        count = len(parameters) // optimizers
        parts = [parameters[first : first + count] for first in range(0, len(parameters), count)]
        self.optimizers = [
            ElixirOptimizer(self.module, torch.optim.AdamW(part), max_norm=NEVER, initial_scale=scale) for part in parts
        ]

    def step(self, max_norm: float = NEVER) -> EarlyCounts:
        """One step; its counts."""
        self.optimizers[0].backward(self.case.loss(self.module, self.case.inp))
        for optimizer in self.optimizers:
            optimizer.max_norm = max_norm
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return self.counts

    @property
    def counts(self) -> EarlyCounts:
        assert self.module.last_report is not None
        return self.module.last_report.early

    @property
    def so_far(self) -> EarlyCounts:
        assert self.module.last_report is not None
        return self.module.last_report.early_so_far


def test_several_optimizers_plan_and_make_none() -> None:
    """Several optimizers share the memory of chunks, so nothing is updated early."""
    run = Run(optimizers=2)
    assert run.step() == run.step(ALWAYS) == run.so_far == EarlyCounts()
