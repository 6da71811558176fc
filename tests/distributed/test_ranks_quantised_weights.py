"""Frozen 4-bit weights under adapters on two ranks: losses and weights of DDP, loads and network bytes of the plan."""

from __future__ import annotations

import itertools

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


FORMS = ("nf4", "nf4 double", "nf4 in bfloat16", "fp4 in float32", *TORCHAO)
QUICK = {("nf4 double", "host", "non-reentrant"), ("torchao int8", "mixed", "non-reentrant")}


@pytest.mark.parametrize(
    ("form", "kind", "checkpoint"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
        for each in itertools.product(FORMS, ("host", "mixed", "resident"), ("none", "non-reentrant"))
    ],
)
def test_steps_are_those_of_ddp(form: str, kind: str, checkpoint: str) -> None:
    pytest.importorskip("torchao" if form in TORCHAO else "bitsandbytes")
    run_ranks(2, _train, form, kind, checkpoint)
