"""The gradient norm is summed while gradients leave for the host; it is never that of other gradients than the step's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from elixir.chunk.gradients.chunk_gradient import PIECE_NUMEL, ROW_NUMEL, norms_of
from elixir.wrapper.step import gradient_norm
from tests.common import inside
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [3, ROW_NUMEL, 2 * ROW_NUMEL, PIECE_NUMEL + ROW_NUMEL + 3])
def test_norms_on_the_host_are_those_of_wide_gradients(numel: int, dtype: torch.dtype) -> None:
    """Norms of float32 and wider are those of torch to the bit, which adds in one order whatever comes together."""
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    (norm,) = norms_of([gradient])
    wide = gradient.double().norm()
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert abs(norm.double() / wide - 1) < 2e-6
    if dtype.itemsize >= 4:
        assert torch.equal(norm, torch.nn.utils.get_total_norm([gradient]))


def clear(pair: Pair) -> None:
    pair.optimizer.zero_grad()
    pair.plain_optimizer.zero_grad()
    pair.backward(scale=0.5)


def test_hooks_change_gradients_before_they_are_summed(pair: Pair, reads: Reads) -> None:
    for model in (pair.module.module, pair.plain):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)
    pair.train(2)
    assert reads.take() == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_low_precision_it_is_that_of_what_is_stepped(dtype: str, reads: Reads) -> None:
    it = case("opt", layers=1)
    with Pair(
        it, make_plan(it, "streamed", unified_dtype=dtype), plain=it.model.to(getattr(torch, dtype)), alike=False
    ) as pair:
        pair.optimizer.max_norm = 1.0
        for batches in (1, 2):
            for _ in range(batches):
                pair.optimizer.backward(it.loss(pair.module, pair.case.inp))
            mine = pair.module.clip_grad_norm_(1.0)
            assert reads.take() == 0
            exact = sum(
                shard.memory.tensor[slot.offset : slot.offset + slot.numel].double().square().sum()
                for index, shard in inside.gradients(pair.module).by_chunk.items()
                for slot in inside.chunks(pair.module)[index].slots
            )
            assert abs(mine.double().cpu() * pair.optimizer.loss_scale / exact.sqrt() - 1) < 1e-5
            pair.optimizer.step()
            pair.optimizer.zero_grad()


def test_pieces_do_not_show_in_the_bits() -> None:
    gradient, before = torch.randn(PIECE_NUMEL * 3 + ROW_NUMEL + 5).bfloat16(), torch.get_num_threads()
    try:
        norms = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            norms += norms_of([gradient])
    finally:
        torch.set_num_threads(before)
    assert norms[0] == norms[1] == norms[2]
    assert abs(norms[0].double() / gradient.double().norm() - 1) < 5e-6
