"""Fingerprints: of the layout of a model, and of nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elixir.errors import InputError
from elixir.models.model_tensors import fingerprint
from tests.common.tiny_models import FAMILIES, tiny


class Pair(nn.Module):
    def __init__(
        self, *, width: int = 4, tied: bool = False, trainable: bool = True, buffer: int = 0, scratch: int = 0
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        if tied:
            self.second.weight = self.first.weight
        self.second.requires_grad_(trainable)
        if buffer:
            self.register_buffer("saved", torch.zeros(buffer))
        if scratch:
            self.register_buffer("scratch", torch.zeros(scratch), persistent=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_fingerprint_is_of_the_layout_not_of_values_or_dtype(family: str) -> None:
    real = fingerprint(tiny(family, seed=3))
    assert fingerprint(tiny(family, device="meta", dtype=torch.bfloat16, checkpoint="reentrant")) == real


def test_fingerprint_sees_everything_a_plan_depends_on() -> None:
    variants = [
        Pair(),
        Pair(width=5),
        Pair(tied=True),
        Pair(trainable=False),
        Pair(buffer=3),
        Pair(buffer=4),
        nn.Sequential(Pair()),
    ]
    assert len({fingerprint(model) for model in variants}) == len(variants)
    assert fingerprint(Pair(scratch=9)) == fingerprint(Pair())


def test_fingerprint_of_a_lazy_model_asks_for_a_forward() -> None:
    with pytest.raises(InputError, match="'weight' is lazy.*run one forward"):
        fingerprint(nn.LazyLinear(3))
    with pytest.raises(InputError, match="'0.running_mean' is lazy"):
        fingerprint(nn.Sequential(nn.LazyBatchNorm1d(affine=False)))
