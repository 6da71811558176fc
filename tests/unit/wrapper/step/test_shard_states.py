"""The states of one shard: which are made ahead, shown and copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elixir.chunk.chunk import Held, Slot
from elixir.errors import InputError
from elixir.plan.chunk_plan import ParamSlot
from elixir.wrapper.step.fused_states import FusedStates
from elixir.wrapper.step.segments import Segment, cut_segments, own_ranges
from elixir.wrapper.step.states import MovedStates, SmallStates, StateTensor, small_states
from tests.common.one_shard import (
    Extent,
    class_states,
    fused_states,
    put,
    sgd,
    shard_of,
    weights_of,
    zeros,
)

# --- made ahead ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wide", "fused", "dtype"),
    [(False, False, torch.float32), (True, False, torch.float64), (True, True, torch.float32)],
)
def test_counts_of_steps_have_the_dtype_of_torch(wide: bool, fused: bool, dtype: torch.dtype) -> None:
    states = class_states(lambda groups: torch.optim.AdamW(groups, fused=fused))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64 if wide else torch.float32)
        states.make()
    finally:
        torch.set_default_dtype(before)
    assert {state["step"].dtype for state in states.optimizer.state.values()} == {dtype}


def test_a_copy_has_no_states_that_are_gone() -> None:
    states, other = class_states(sgd, ((3,),)), class_states(sgd, ((3,),))
    mean, count = torch.zeros(3), torch.zeros(())
    put(states, {"mean": torch.ones(3), "count": torch.ones(()), "rows": torch.ones(2)})
    put(other, {"mean": mean, "count": count, "rows": torch.ones(4), "old": torch.ones(3)})
    other.copy_from(states)
    found = other.state_of(other.segments[0])
    assert list(found) == ["mean", "count", "rows"]
    assert found["mean"] is mean
    assert found["count"] is count
    assert (mean.tolist(), count.item(), found["rows"].tolist()) == ([1, 1, 1], 1, [1, 1])


# --- what there is -------------------------------------------------------------------------------------------------


def test_elementwise_states_are_shown_apart_from_the_others() -> None:
    states = class_states(sgd)
    first = {"step": torch.ones(()), "mean": torch.tensor([1.0, 2.0, 3.0]), "rows": torch.ones(2), "count": 4}
    put(states, first, {"step": torch.zeros(()), "mean": torch.ones(20)})
    (shown,) = states.tensors()
    assert (shown.kind, shown.name, shown.region, shown.start) == ("mean", "w0", "mean float32", 0)
    assert shown.values(1, 3).tolist() == [2, 3]
    assert [each.name for each in states.tensors(moving=True)] == ["w0", "w1"]
    assert states.scalars(states.segments[0]) == {kind: first[kind] for kind in ("step", "rows", "count")}
    assert [(region, start) for region, _, start in states.memory()] == [
        ("mean float32", 0), (None, 0), ("mean float32", 3)
    ]  # fmt: skip
    assert states.nbytes == 4 * (3 + 2 + 20)
    with pytest.raises(InputError, match=r"'rows' of w0 has shape \[2\], neither that of its weights nor a number"):
        small_states(states)
    put(states, {"step": 2, "mean": first["mean"], "count": torch.tensor(4), "none": None, "half": 0.5})
    assert small_states(states) == {"w0": SmallStates(step=2, others={"step": 2, "count": ("int64", 4), "half": 0.5})}
    put(states, {"step": torch.tensor(2.0)})
    assert small_states(states) == {"w0": SmallStates(step=2)}
    put(states, {"step": 1.5})
    with pytest.raises(InputError, match="'step' of w0 is 1.5, expected a whole number"):
        small_states(states)
    put(states, {"text": "words"})
    with pytest.raises(InputError, match="'text' of w0 is a str, which cannot be saved"):
        small_states(states)


def test_states_with_gaps_are_copied_to_move_and_cannot_be_saved() -> None:
    states = class_states(sgd, ((3,),))
    put(states, {"mean": torch.tensor(0.5).expand(3)})
    with pytest.raises(InputError, match="'mean' of w0 has gaps between its elements"):
        list(states.tensors())
    (moved,) = states.tensors(moving=True)
    assert moved.tensor.tolist() == [0.5, 0.5, 0.5]
    assert moved.tensor.is_contiguous()
    mean = torch.ones(3)
    put(states, {"mean": mean})
    assert [each.tensor.data_ptr() for each in states.tensors(moving=True)] == [mean.data_ptr()]


def test_scales_have_a_place_for_each_block() -> None:
    states = fused_states(((512,), (300,)), moments="8bit")  # as in a plan, each parameter begins a block
    segments = states.segments
    states.count(segments[0]).fill_(1)
    states.count(segments[1]).fill_(2)
    shown = {(each.name, each.kind): each for each in states.tensors()}
    assert [each.kind for each in shown.values()][:4] == ["exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"]
    codes, scales = shown["w1", "exp_avg"], shown["w1", "exp_avg_scale"]
    assert (codes.shape, codes.first, codes.start, codes.dtype, codes.nbytes) == ((300,), 0, 512, torch.int8, 300)
    assert (scales.shape, scales.first, scales.start, scales.nbytes) == ((2,), 0, 2, 8)
    assert (shown["w0", "exp_avg_scale"].start, shown["w0", "exp_avg_scale"].nbytes) == (0, 8)
    assert scales.in_chunk(scales.tensor) is scales.tensor
    assert (codes.has_codes, scales.has_codes, codes.keeps_dtype) == (True, False, False)
    second_half = Held(segments[0].slot, 0, 256, slice(0, 256))
    later = StateTensor("exp_avg_scale", second_half, scales.tensor, None, "", 0, width=256)
    assert (later.shape, later.first) == ((2,), 1)
    part = states.moments.exp_avg_scale
    assert part is not None
    part.copy_(torch.arange(1.0, 5.0))
    states.moments.exp_avg.fill_(127)
    assert states.widened(codes).shape == (300,)
    assert sorted(set(states.widened(codes).tolist())) == pytest.approx([3.0, 4.0])


def test_only_trained_parameters_of_the_optimizer_have_segments() -> None:
    first, second, third = weights_of((2,), (), (3,))
    held = shard_of(first, second, third, ordinary=True)[1]
    assert [segment.weights is segment.source for segment in held] == [True, False, True]
    second.requires_grad_(False)
    chunk: Any = SimpleNamespace(held={segment.name: segment.held for segment in held})
    assert [each.name for each in cut_segments(chunk, torch.zeros(6), {second: 0, third: 1})] == ["w2"]
    (segment,) = cut_segments(chunk, torch.arange(6.0), {third: 1}, ordinary=False)
    assert (segment.group, segment.weights.tolist(), segment.start) == (1, [3, 4, 5], 3)


def test_the_shards_of_several_optimizers_have_separate_regions() -> None:
    for number, name in ((0, ""), (1, " of optimizer 1")):
        extent: Any = Extent()
        states = fused_states(number=number, extent=extent)
        assert list(states.memory()) == []
        states.make()
        found = [(region, tensor.data_ptr(), start) for region, tensor, start in states.memory()]
        names = [f"exp_avg{name} float32", f"exp_avg_sq{name} float32"]
        assert found == [(each, extent.regions[each].data_ptr(), 0) for each in names]
        states.count(states.segments[1]).fill_(1)
        assert [(each.region, each.start, each.extent) for each in states.tensors()] == [
            (each, 3, extent) for each in names
        ]


def divided(own: tuple[int, ...], **options: Any) -> FusedStates:
    """The states of an optimizer that has these of four parameters in a shard with gaps."""
    weights = weights_of((304,), (256,), (512,), (4,))
    master, segments = torch.ones(1536), []
    for place, (weight, first, stop) in enumerate(
        zip(weights, (0, 512, 768, 1280), (304, 768, 1280, 1284), strict=True)
    ):
        slot = Slot.of(weight, ParamSlot(f"w{place}", first, weight.numel()), weight.dtype, "cpu")
        held = Held(slot, place, 0, slice(first, stop))
        segments.append(Segment(held, 0, nn.Parameter(master[held.part]), 0))
    chunk: Any = SimpleNamespace(held={segment.name: segment.held for segment in segments}, shard_numel=1536)
    ranges = own_ranges(chunk, {weights[place]: 0 for place in own})
    group = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.5).param_groups[0]
    mine = [segments[place] for place in own]
    return FusedStates(master, mine, [group], decoupled=True, ranges=ranges, **options)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "8bit"])
def test_several_optimizers_divide_a_shard_and_step_it_to_the_bits_of_one(moments: Any) -> None:
    gradients = torch.linspace(-1.0, 1.0, 1536)
    one, *others = (divided(own, moments=moments) for own in ((0, 1, 2, 3), (1,), (0, 2), (3,)))
    for states in (one, *others):
        for _ in range(2):
            states.step([(each, gradients[each.part]) for each in states.segments], gradients, 0.5, None)
    assert [each.moments.exp_avg.numel() for each in (one, *others)] == [1536, 256, 1024, 256]
    assert sum(states.nbytes for states in others) == one.nbytes
    assert one.memory_kind != others[0].memory_kind != others[2].memory_kind
    shown = {(each.name, each.kind): (each, one) for each in one.tensors()}
    for states in others:
        second = states.empty_like(states.master.clone(), states.segments, zeros)
        second.copy_from(states)
        loaded = divided(tuple(segment.place for segment in states.segments), moments=moments)
        loaded.load(MovedStates({segment.name: (one, segment) for segment in one.segments}, ()))
        for found in (states, second, loaded):
            for each in found.tensors():
                expected = shown[each.name, each.kind][0]
                assert torch.equal(each.tensor, expected.tensor), (each.name, each.kind)
                if each.width == 1:
                    assert torch.equal(found.widened(each), one.widened(expected))
        for segment in states.segments:
            assert torch.equal(states.master[segment.part], one.master[segment.part])
        out, into = states.master.clone(), states.empty_like(states.master.clone(), states.segments, zeros)
        arrived = [(each, gradients[each.part]) for each in states.segments]
        states.step(arrived, None, 1.0, out, into)
        states.step(arrived, None, 1.0, None)
        assert all(map(torch.equal, states.moments.tensors(), into.moments.tensors()))


def test_a_gap_belongs_to_the_parameter_before_it_and_a_frozen_one_to_its_optimizer() -> None:
    weights = weights_of((3,), (5, 4), (2,))
    held = shard_of(*weights, first=1)[1]
    chunk: Any = SimpleNamespace(held={segment.name: segment.held for segment in held}, shard_numel=32)
    weights[1].requires_grad_(False)
    first, second, third = weights
    for own, expected in (
        ((first, second, third), [slice(0, 32)]),
        ((first, second), [slice(0, 22)]),
        ((first, third), [slice(0, 2), slice(22, 32)]),
        ((third,), [slice(22, 32)]),
        ((), []),
    ):
        assert own_ranges(chunk, dict.fromkeys(own, 0)) == expected
    chunk.held = {}  # padding alone, as the last rank may have it
    assert own_ranges(chunk, {first: 0}) == []
