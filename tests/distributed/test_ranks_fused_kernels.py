"""Fused kernels on several ranks: the training of DDP over the plain model, to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.common.ddp import LR, Twins, batch_of
from tests.common.spawn import run_ranks
from tests.common.tiny_models import tiny


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    # The usual epsilon would blow the last bit of gradients that all but vanish up to a hundredth of the learning rate.
    return torch.optim.AdamW(parameters, lr=LR, eps=1e-6)


def _as_ddp(rank: int, world_size: int, family: str, kind: str, checkpoint: Any) -> None:
    model = tiny(family, checkpoint=checkpoint)
    options: dict[str, Any] = {"wrap": {"use_fused_kernels": True}, "use_fused_kernels": True, "optimizer": _adamw}
    twins = Twins(model, batch_of(model, rank, world_size), kind, **options)
    twins.train()
    for mine, plain in twins.losses:
        assert abs(mine - plain) <= 1e-5 * abs(plain)
    state = twins.module.state_dict()
    for name, value in twins.plain.module.state_dict().items():
        limit = (0.5 if name.endswith("k_proj.bias") else 1e-2) * LR  # gradients of key biases are noise
        assert (state[name] - value).abs().max() <= limit, (name, (state[name] - value).abs().max())
    twins.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "checkpoint"),
    [("llama", "host", "non-reentrant"), ("opt", "mixed", "none"), ("t5", "device", "none")],
)
def test_as_ddp_over_the_plain_model(family: str, kind: str, checkpoint: str) -> None:
    run_ranks(2, _as_ddp, family, kind, checkpoint)
