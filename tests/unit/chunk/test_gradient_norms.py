"""The gradient norm is summed while gradients leave for the host; it is never that of other gradients than the step's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from elixir.chunk.gradients.chunk_gradient import norms_of
from elixir.wrapper.step import gradient_norm
from tests.common.parity import Pair, case, make_plan


class Reads:
    """Gradients that a step has read for their norm, because nobody had summed them on the way."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.count += len(gradients)
        return norms_of(gradients)

    def take(self) -> int:
        """How many since this was last asked."""
        count, self.count = self.count, 0
        return count


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found = Reads()
    monkeypatch.setattr(gradient_norm, "norms_of", found)
    return found


@pytest.fixture
def pair() -> Iterator[Pair]:
    it = case("opt", layers=1)
    with Pair(it, make_plan(it, "streamed")) as made:
        made.optimizer.max_norm = 0.05
        made.max_norm = 0.05
        yield made


@pytest.mark.parametrize("dtypes", [("float64",), ("float64", "float32")])
def test_norms_on_a_device_are_as_wide_as_their_gradients(dtypes: tuple[str, ...]) -> None:
    gradients = [torch.empty(3, dtype=getattr(torch, dtype), device="meta") for dtype in dtypes]
    assert [str(norm.dtype) for norm in norms_of(gradients)] == [f"torch.{dtype}" for dtype in dtypes]


def test_hooks_change_gradients_before_they_are_summed(pair: Pair, reads: Reads) -> None:
    for model in (pair.module.module, pair.plain):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)
    pair.train(2)
    assert reads.take() == 0
