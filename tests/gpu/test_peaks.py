"""A step on a CUDA device takes what its trace says, by `torch.cuda.max_memory_allocated`.

`benchmark/proof/README.md` says which rules a GPU has confirmed, and at what a failure here points.
"""

from __future__ import annotations

import pytest

from benchmark.gpu_peaks import BAR_PERCENT, CASES, Case, measure
from tests.common.gpu import needs_real_gpu

pytestmark = needs_real_gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_peaks_are_as_predicted(case: Case) -> None:
    """Backward and whole step within the bar, states exact, whatever checkpointing and Adam."""
    row = measure(case)
    assert row["states_exact"], row
    assert abs(row["backward_percent"]) <= BAR_PERCENT, row
    assert abs(row["step_percent"]) <= BAR_PERCENT, row
