"""Several ranks under a plan train as DistributedDataParallel does: losses and weights after ten AdamW steps."""

from __future__ import annotations

import pytest

from tests.common.ddp import PLANS, parity
from tests.common.spawn import run_ranks
from tests.common.tiny_models import FAMILIES

CHECKPOINTS = ("none", "non-reentrant", "reentrant")
SAMPLE = (
    ("opt", "host", "non-reentrant"),
    ("opt", "resident", "none"),
    ("llama", "mixed", "reentrant"),
    ("t5", "device", "none"),
    ("mixtral", "host", "none"),
    ("bert", "mixed", "non-reentrant"),
)


@pytest.mark.parametrize(("family", "kind", "checkpoint"), SAMPLE)
def test_two_ranks(family: str, kind: str, checkpoint: str) -> None:
    run_ranks(2, parity, family, kind, checkpoint, {})


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_every_family(family: str, kind: str, checkpoint: str) -> None:
    if (family, kind, checkpoint) in SAMPLE:
        pytest.skip("is in the sample")
    run_ranks(2, parity, family, kind, checkpoint, {})


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), [(f, PLANS[i % len(PLANS)]) for i, f in enumerate((*FAMILIES, "opt"))])
def test_four_ranks(family: str, kind: str) -> None:
    run_ranks(4, parity, family, kind, "none", {})
