"""FSDP2 on two ranks takes the memory that is predicted for it."""

from __future__ import annotations

import pytest

from benchmark.peer_runtimes import FAMILIES, observed_peak, predicted_peak
from tests.common.spawn import run_ranks

QUICK = ("opt", "t5")
PERCENT = 2.0


def _observed(rank: int, world_size: int, family: str, keep: bool, checkpoint: str, accumulation: int) -> int:
    return observed_peak(family, keep=keep, checkpoint=checkpoint, accumulation=accumulation)


@pytest.mark.parametrize("checkpoint", ["none", pytest.param("non-reentrant", marks=pytest.mark.slow)])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in FAMILIES]
)
def test_the_peak_of_a_real_step(family: str, keep: bool, checkpoint: str) -> None:
    observed = run_ranks(2, _observed, family, keep, checkpoint, 1)[0]
    predicted = predicted_peak(family, 2, keep=keep, checkpoint=checkpoint)
    assert abs(predicted / observed - 1) <= PERCENT / 100, (predicted, observed)


def test_whole_gradients_of_earlier_micro_batches_count() -> None:
    observed = run_ranks(2, _observed, "opt", False, "none", 2)[0]
    assert predicted_peak("opt", 2, keep=False, accumulation=2) == pytest.approx(observed, rel=1e-4)
