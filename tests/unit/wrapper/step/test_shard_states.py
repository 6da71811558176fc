"""The states of one shard: which are made ahead, shown and copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elixir.chunk.chunk import Held, Slot
from elixir.errors import InputError
from elixir.kernels import HybridAdam
from elixir.plan.chunk_plan import ParamSlot
from elixir.wrapper.step.class_states import ClassStates
from elixir.wrapper.step.elementwise import same_options
from elixir.wrapper.step.fused_states import FusedStates
from elixir.wrapper.step.segments import Segment, cut_segments, own_ranges
from elixir.wrapper.step.states import MovedStates, SmallStates, StateForm, StateTensor, small_states
from tests.common.one_shard import (
    SHAPES,
    Extent,
    User,
    class_states,
    fused_states,
    put,
    sgd,
    shard_of,
    transposed,
    user_of,
    weights_of,
    zeros,
)

# --- made ahead ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [False, True])
def test_moments_made_ahead_are_aligned_parts_of_one_buffer_or_region(on_disk: bool) -> None:
    master, segments = shard_of(*weights_of(*SHAPES), groups=(0, 1, 0))
    extent: Any = Extent() if on_disk else None
    user = User(torch.optim.AdamW, {}, {"amsgrad": True})
    states = ClassStates(user, master, segments, extent=extent)
    assert states.without_states() == segments
    assert states.make()
    assert states.without_states() == []
    assert not any(states.has_stepped(segment) for segment in segments)
    made = [states.state_of(segment) for segment in segments]
    kinds = ["step", "exp_avg", "exp_avg_sq"]
    assert [list(state) for state in made] == [kinds, [*kinds, "max_exp_avg_sq"], kinds]
    for kind in kinds[1:]:
        memory = made[0][kind].untyped_storage()
        assert [state[kind].storage_offset() for state in made] == ([0, 3, 23] if on_disk else [0, 16, 48])
        assert {state[kind].untyped_storage().data_ptr() for state in made} == {memory.data_ptr()}
        assert memory.nbytes() == 4 * (25 if on_disk else 64)
        assert not on_disk or memory.data_ptr() == extent.regions[f"{kind} float32"].data_ptr()
    assert [(region, start) for region, _, start in states.memory()][:3] == [
        ("exp_avg float32", 0), ("exp_avg_sq float32", 0), ("exp_avg float32", 3)
    ]  # fmt: skip


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


def test_only_known_classes_make_states_ahead() -> None:
    for make, ahead in ((torch.optim.Adam, True), (HybridAdam, True), (sgd, False)):
        states = class_states(make)
        assert states.make() == ahead
        assert bool(states.nbytes) == ahead
        assert class_states(make, ()).make()
        states = class_states(make)
        assert states.make(allocate=False) == ahead
        assert states.nbytes == 0
    assert not class_states(HybridAdam, extent=Extent()).make()
    for shapes, allocate in ((SHAPES, True), (SHAPES, False), ((), True)):
        states = fused_states(shapes)
        assert states.make(allocate=allocate)
        assert states.nbytes == (200 if shapes and allocate else 0)


def test_states_go_on_in_memory_of_their_kind_only() -> None:
    kinds = [
        class_states().memory_kind,
        class_states(on_host=True).memory_kind,
        fused_states().memory_kind,
        fused_states(((4,),)).memory_kind,
        fused_states(moments="8bit").memory_kind,
    ]
    assert None not in kinds
    assert len(set(kinds)) == len(kinds)
    assert class_states().memory_kind == kinds[0]
    for states in (class_states(), fused_states()):
        states.make()
        second = states.empty_like(states.master.clone(), states.segments, zeros)
        assert second.memory_kind is None
    assert class_states(extent=Extent()).memory_kind is None
    assert fused_states(extent=Extent()).memory_kind is None


# --- what there is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "stepped", "can_copy"),
    [
        ({}, False, False),
        ({"step": torch.zeros(())}, False, True),
        ({"step": torch.ones(())}, True, True),
        ({"sum": torch.ones(3)}, True, True),
        ({"sum": None, "on": True, "number": 2.0, "count": 3}, True, True),
        ({"step": 1, "pair": (0.5, 2.0)}, True, False),
    ],
)
def test_segments_have_stepped_and_can_be_copied(state: dict[str, Any], stepped: bool, can_copy: bool) -> None:
    states = class_states(sgd)
    put(states, state, {"step": 1}, {"step": 1})
    first = states.segments[0]
    assert (states.has_stepped(first), states.can_copy) == (stepped, can_copy)
    assert states.without_states() == ([] if state else [first])
    if not can_copy:
        return
    other = states.empty_like(torch.zeros(25), class_states().segments, zeros)
    other.copy_from(states)
    assert torch.equal(other.master, states.master)
    copied = other.state_of(other.segments[0])
    assert same_options(copied, state)
    assert all(copied[kind] is not value for kind, value in state.items() if isinstance(value, torch.Tensor))


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


def test_states_on_a_disk_are_read_where_they_lie() -> None:
    extent: Any = Extent()
    states = class_states(extent=extent)
    states.make()
    for segment in states.segments:
        states.state_of(segment)["step"].fill_(1)
    extent.regions["exp_avg float32"].copy_(torch.arange(25))
    first, second, third = (each for each in states.tensors() if each.kind == "exp_avg")
    assert [each.values(0, 2).tolist() for each in (first, second, third)] == [[0, 1], [3, 4], [23, 24]]
    assert second.values(2, 4).tolist() == [5, 6]
    assert {each.extent for each in states.tensors()} == {extent}


@pytest.mark.parametrize("ordinary", [False, True])
def test_states_have_the_order_that_their_class_has_chosen(ordinary: bool) -> None:
    weight = transposed(2, 3)
    master, segments = shard_of(weight, ordinary=ordinary)
    states = ClassStates(User(sgd), master, segments)
    weights = segments[0].weights
    assert (weights is weight) == ordinary
    like, other = torch.zeros_like(weights), torch.arange(6.0).view(weights.shape)
    put(states, {"like": like.copy_(weights.detach()), "other": other})
    found = {each.kind: each for each in states.tensors()}
    assert [found[kind].order for kind in ("like", "other")] == ([(1, 0), None] if ordinary else [(1, 0), (1, 0)])
    assert found["like"].tensor.tolist() == [0, 1, 2, 3, 4, 5]
    assert found["other"].tensor.tolist() == [0, 1, 2, 3, 4, 5]
    in_chunk = [0, 3, 1, 4, 2, 5] if ordinary else [0, 1, 2, 3, 4, 5]
    assert found["other"].in_chunk(found["other"].tensor).tolist() == in_chunk
    assert found["like"].in_chunk(found["like"].tensor) is found["like"].tensor


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


@pytest.mark.parametrize(
    ("dtype", "has_codes", "here", "found"),
    [
        (torch.bfloat16, False, torch.float32, torch.float32),
        (torch.float32, False, torch.float32, torch.float32),
        (torch.float64, False, torch.float32, torch.float64),
        (torch.float16, False, torch.bfloat16, torch.float16),
        (torch.int8, False, torch.float32, torch.int8),
        (torch.int8, True, torch.float32, torch.float32),
    ],
)
def test_loaded_states_are_at_least_as_wide_as_weights(
    dtype: torch.dtype, has_codes: bool, here: torch.dtype, found: torch.dtype
) -> None:
    segment: Any = SimpleNamespace(weights=torch.zeros(1, dtype=here))
    assert StateForm(dtype, None, has_codes).dtype_in(segment) is found
    assert StateForm(dtype, None, has_codes, held=lambda: torch.zeros(1)).dtype_in(segment) is dtype


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


@pytest.mark.parametrize("update_home", ["device", "host"])
@pytest.mark.parametrize(
    ("make", "shares"),
    [
        (lambda groups: torch.optim.AdamW(groups, fused=True), True),
        (torch.optim.AdamW, False),
        (lambda groups: torch.optim.AdamW([{**groups[0], "fused": True}, groups[1]]), False),
        (lambda groups: torch.optim.SGD(groups, lr=0.5, fused=True), False),
    ],
)
def test_adams_with_one_kernel_for_any_number_of_tensors_share_a_call_on_the_device(
    make: Any, shares: bool, update_home: str
) -> None:
    weights = weights_of((3,), (2,))
    user = user_of(make([{"params": weights[:1]}, {"params": weights[1:]}]))
    chunk: Any = SimpleNamespace(plan=SimpleNamespace(state_home=update_home, update_home=update_home), stored=None)
    made: list[Any] = []
    for _ in range(2):
        master, segments = shard_of(*weights, groups=(0, 1))
        made.append(user.states_over(chunk, master, segments, weights=None, fuses=False, empty=False))
    assert (made[0].optimizer is made[1].optimizer) == made[0].shares_call == (shares and update_home == "device")
    assert made[0].memory_kind == (ClassStates, torch.float32, torch.device("cpu"), update_home == "host")


@pytest.mark.parametrize("empty", [False, True])
def test_states_of_a_constructor_are_dropped_if_others_follow(empty: bool) -> None:
    weights = weights_of((3,), (2,))
    user = user_of(torch.optim.Adagrad(weights))
    chunk: Any = SimpleNamespace(plan=SimpleNamespace(state_home="host", update_home="host"), stored=None)
    master, segments = shard_of(*weights)
    states = user.states_over(chunk, master, segments, weights=None, fuses=False, empty=empty)
    assert states.without_states() == (segments if empty else [])
