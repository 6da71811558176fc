"""Programs that run in plain PyTorch are planned and train with its bits under every kind of plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.common.parity import MODES, Case, Pair, make_plan


@pytest.fixture
def anomalies_detected() -> Iterator[None]:
    torch.autograd.set_detect_anomaly(True)
    yield
    torch.autograd.set_detect_anomaly(False)


@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize("mode", MODES)
def test_anomaly_detection_from_the_start(mode: str, anomalies_detected: None) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 4))
    it = Case(model, {"input": torch.randn(4, 8)}, lambda model, inp: model(**inp).square().mean())
    with Pair(it, make_plan(it, mode, split_number=3)) as pair:
        pair.train(3)
        pair.assert_same_weights()
        assert torch.is_anomaly_enabled()
        with pytest.raises(RuntimeError, match="returned nan values"):
            pair.module(pair.case.inp["input"]).mul(0).sum().sqrt().mul(0).backward()
