"""The gradient norm is summed while gradients leave for the host; it is never that of other gradients than the step's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from elixir.chunk.gradients.chunk_gradient import PIECE_NUMEL, ROW_NUMEL, PartNorms, norms_of
from elixir.wrapper.step import gradient_norm
from tests.common import inside
from tests.common.parity import Case, Pair, case, make_plan, report_of


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


def same_norm(pair: Pair) -> None:
    mine = pair.module.clip_grad_norm_(0.05)
    plain = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
    assert pair.agree(mine, plain, are_norms=True), f"{mine.item()} is not {plain.item()}"


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


def test_a_step_reads_no_gradient_for_its_norm(pair: Pair, reads: Reads) -> None:
    pair.train(3)
    assert reads.take() == 0


@pytest.mark.parametrize("make", [None, lambda model: torch.optim.AdamW(model.parameters(), fused=True)])
@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_gradients_stay_clipped_until_they_are_cleared(mode: str, make: Any) -> None:
    """A second step, and one with more gradients, go on from clipped gradients, as after torch's clip_grad_norm_."""
    it = case("opt", layers=1)
    with Pair(it, make_plan(it, mode), optimizer=make) as pair:
        pair.optimizer.max_norm = 0.05
        pair.backward()
        for more in (False, True):
            if more:
                pair.backward()
            for max_norm in (0.05, 0.03):
                pair.optimizer.max_norm = max_norm
                torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), max_norm)
                pair.optimizer.step()
                pair.plain_optimizer.step()


def test_without_clipping_nobody_sums(pair: Pair) -> None:
    pair.optimizer.max_norm = 0.0
    pair.backward()
    assert all(shard.norms is None for shard in inside.gradients(pair.module).by_chunk.values())


def test_whoever_asks_for_the_norm_is_expected_to_ask_again(pair: Pair, reads: Reads) -> None:
    pair.optimizer.max_norm = pair.max_norm = 0.0
    for step in range(3):
        pair.backward()
        same_norm(pair)
        assert bool(reads.take()) is (step == 0)  # asked after backward, nobody could know
        pair.step()
        reads.take()


def test_gradients_that_stay_are_read_once_for_one_norm(reads: Reads) -> None:
    it = case("opt", layers=1)
    with Pair(it, make_plan(it, "resident"), alike=False) as pair:
        count = len(list(pair.plain.parameters()))
        for changed in (False, True):
            pair.backward()
            norm = pair.optimizer.clip_grad_norm_(0.05)
            assert torch.equal(norm, torch.nn.utils.get_total_norm(p.grad for p in pair.plain.parameters()))
            assert reads.take() == count
            if changed:
                for model in (pair.module, pair.plain):
                    next(model.parameters()).grad.mul_(3.0)  # type: ignore[union-attr]
            limit = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
            pair.optimizer.step()
            pair.plain_optimizer.step()
            assert reads.take() == changed
            assert pair.optimizer.grad_norm is not None
            assert torch.equal(pair.optimizer.grad_norm, limit)
            report = report_of(pair.module)
            assert report.to_dict()["grad_norm"] == float(limit)
            pair.optimizer.zero_grad()
            pair.plain_optimizer.zero_grad()
        pair.assert_same_weights()
        pair.backward()
        pair.optimizer.step()
        assert pair.optimizer.grad_norm is None
        assert reads.take() == 0


def test_of_accumulated_gradients_the_last_sum_counts(reads: Reads) -> None:
    it = case("opt", layers=1)
    with Pair(it, replace(make_plan(it, "streamed"), accumulation=2), max_norm=0.05) as pair:
        for batches, read in ((2, False), (1, True), (3, False), (2, False)):
            for _ in range(batches):
                pair.backward()
            pair.step()
            assert bool(reads.take()) is read, batches  # a step before its time reads for itself


def drop_some(pair: Pair) -> None:
    for model in (pair.module, pair.plain):
        for parameter in list(model.parameters())[::3]:
            parameter.grad = None


def drop_all(pair: Pair) -> None:
    for model in (pair.module, pair.plain):
        for parameter in model.parameters():
            parameter.grad = None
    pair.backward()


def drop_and_add(pair: Pair) -> None:
    drop_some(pair)
    pair.backward()


def another_backward(pair: Pair) -> None:
    pair.backward(scale=3.0)


def clear(pair: Pair) -> None:
    pair.optimizer.zero_grad()
    pair.plain_optimizer.zero_grad()
    pair.backward(scale=0.5)


def asked_before(pair: Pair) -> None:
    pair.module.clip_grad_norm_(0.05)
    another_backward(pair)


@pytest.mark.parametrize("change", [drop_some, drop_all, drop_and_add, another_backward, clear, asked_before])
def test_a_norm_is_never_of_other_gradients(pair: Pair, change: Callable[[Pair], None]) -> None:
    pair.max_norm = None  # `same_norm` clips the twin
    for _ in range(2):
        pair.backward()
        change(pair)
        same_norm(pair)
        pair.step()


def test_hooks_change_gradients_before_they_are_summed(pair: Pair, reads: Reads) -> None:
    for model in (pair.module.module, pair.plain):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)
    pair.train(2)
    assert reads.take() == 0


def test_a_parameter_without_a_gradient_has_no_part_in_the_norm(pair: Pair) -> None:
    for model in (pair.module.module, pair.plain):
        first = next(iter(model.parameters()))
        first.register_hook(torch.zeros_like)
    pair.train(2)


class WithEmpty(nn.Module):
    """Layers between which lie parameters without elements, every other of which gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.empty = nn.ParameterList(nn.Parameter(torch.empty(0, 3)) for _ in range(6))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().sum() + sum(part.sum() for part in self.empty[::2])


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["streamed", "mixed", "resident"])
def test_empty_gradients_have_the_part_in_the_norm_that_they_have_in_torch(mode: str) -> None:
    it = Case(WithEmpty(), {"x": torch.randn(4, 16)}, lambda model, inp: model(**inp))
    with Pair(it, make_plan(it, mode)) as pair:
        for _ in range(20):  # one in four has other bits without the zeros
            pair.backward({"x": torch.randn(4, 16)})
            same_norm(pair)
            pair.step()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adding_and_summing_in_one_pass(dtype: torch.dtype) -> None:
    it = case("opt", layers=1)
    with Pair(it, make_plan(it, "streamed")) as pair:
        chunk = max(inside.chunks(pair.module), key=lambda chunk: len(chunk.slots))
        home, more = (torch.randn(chunk.shard_numel).to(dtype) for _ in range(2))
        expected = home + more
        norms = PartNorms(chunk, "cpu")
        norms.add_and_measure(home, more)
        for place, slot in enumerate(chunk.slots):
            part = expected[slot.offset : slot.offset + slot.numel]
            assert torch.equal(home[slot.offset : slot.offset + slot.numel], part)
            assert torch.equal(norms.of(place), norms_of([part])[0])


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
