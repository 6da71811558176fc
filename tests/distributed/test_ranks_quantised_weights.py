"""Frozen 4-bit weights under adapters on two ranks: losses and weights of DDP, loads and network bytes of the plan."""

from __future__ import annotations

import pytest

from tests.common.ddp import Twins
from tests.common.quantised import TORCHAO, quantised_case
from tests.common.spawn import run_ranks


def _train(rank: int, world_size: int, form: str, kind: str, checkpoint: str) -> None:
    it = quantised_case(form, checkpoint)
    inp = {name: value[rank::world_size].contiguous() for name, value in it.inp.items()}
    twins = Twins(it.model, inp, kind, max_norm=0.5)
    twins.train(4)
    twins.check()
    report = twins.module.last_report
    assert report is not None
    assert report.demand_loads == 0
    for key in ("loads", "network"):
        assert report.observed.get(key) == report.predicted.get(key), key
    twins.close()


@pytest.mark.parametrize(
    ("form", "kind", "checkpoint"),
    [
        ("nf4 double", "host", "non-reentrant"),
        ("torchao int8", "mixed", "non-reentrant"),
        pytest.param("torchao int8, embedding too", "host", "none", marks=pytest.mark.slow),
        pytest.param("nf4", "mixed", "none", marks=pytest.mark.slow),
        pytest.param("nf4 in bfloat16", "host", "none", marks=pytest.mark.slow),
        pytest.param("fp4 in float32", "mixed", "non-reentrant", marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_ddp(form: str, kind: str, checkpoint: str) -> None:
    pytest.importorskip("torchao" if form in TORCHAO else "bitsandbytes")
    run_ranks(2, _train, form, kind, checkpoint)
