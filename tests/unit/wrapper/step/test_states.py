"""The states of one shard: which there are, how they are shown, loaded and copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elixir.chunk.chunk import ShardPart, Slot
from elixir.errors import InputError
from elixir.plan.chunk_plan import ParamSlot
from elixir.wrapper.step.rules import AdamRule
from elixir.wrapper.step.states import Segment, SmallStates, States, StateTensor, cut_segments, own_ranges, small_states
from tests.common import inside
from tests.common.one_shard import (
    Saved,
    another,
    class_rule,
    inputs_of,
    memory,
    sgd,
    shard_of,
    states_of,
    transposed,
    weights_of,
)

KINDS = ("float32", "bfloat16", "8bit")


def of_class(make: Any = torch.optim.AdamW, *shapes: tuple[int, ...]) -> States:
    return states_of(class_rule(make), shapes or ((3,), (5, 4), (2,)))


def of_adam(moments: Any = "float32", shapes: Any = ((3,), (5, 4), (2,)), **options: Any) -> States:
    return states_of(AdamRule(moments, decoupled=True), shapes, **options)


def saved_adam(states: States, dtype: torch.dtype = torch.float32) -> Saved:
    """States of Adam for the first two parameters."""
    values = {
        segment.name: {
            kind: torch.full(segment.slot.shape, 0.5 + number, dtype=dtype)
            for number, kind in enumerate(("exp_avg", "exp_avg_sq"))
        }
        for segment in states.segments[:2]
    }
    return Saved(values, **{name: SmallStates(step=3) for name in values})


def load(states: States, saved: Saved) -> set[str]:
    return states.load(saved.find, saved.wait)


# --- what there is -------------------------------------------------------------------------------------------------


def test_elementwise_states_are_shown_apart_from_the_others() -> None:
    states = of_class(sgd)
    for segment in states.segments[:2]:
        states.put(segment, ["momentum_buffer"], {"step": torch.tensor(1.0 - segment.place), "count": 4})
    states.part("momentum_buffer", states.segments[0]).copy_(torch.tensor([1.0, 2.0, 3.0]))
    (shown,) = states.to_save()
    assert (shown.kind, shown.name, shown.region, shown.start) == (
        "momentum_buffer",
        "w0",
        "momentum_buffer float32",
        0,
    )
    assert shown.values(1, 3).tolist() == [2, 3]
    assert states.numbers(states.segments[0]) == {"step": torch.tensor(1.0), "count": 4}
    assert states.kinds_of(states.segments[2]) == []


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"rows": torch.ones(2)}, r"'rows' of w0 has shape \[2\], neither that of its weights nor a number"),
        ({"step": 1.5}, "'step' of w0 is 1.5, expected a whole number"),
        ({"text": "words"}, "'text' of w0 is a str, which cannot be saved"),
        ({"step": torch.tensor(2.0)}, SmallStates(step=2)),
        (
            {"step": 2, "count": torch.tensor(4), "none": None, "half": 0.5},
            SmallStates(step=2, others={"step": 2, "count": ("int64", 4), "half": 0.5}),
        ),
    ],
)
def test_numbers_are_saved_as_what_they_are_or_refused(numbers: dict[str, Any], expected: Any) -> None:
    states = of_class(sgd)
    states.put(states.segments[0], [], numbers)
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            small_states(states)
    else:
        assert small_states(states) == {"w0": expected}


def test_states_that_a_class_has_made_elsewhere_are_moved_to_their_place() -> None:
    states = of_class(sgd)
    (segment, *_), optimizer = states.segments, states.optimizer
    assert optimizer is not None
    for value in (torch.arange(3.0), torch.tensor(0.5).expand(3), torch.ones(3)):
        optimizer.state[segment.weights] = {"momentum_buffer": value, "mean": value.double(), "count": 2}
        states.adopt(segment)
        assert {each.kind: each.tensor.tolist() for each in states.to_save()} == {
            "momentum_buffer": value.tolist(),
            "mean": value.tolist(),
        }
        found = optimizer.state[segment.weights]["momentum_buffer"]
        assert found.data_ptr() == states.tensor("momentum_buffer").data_ptr()
    optimizer.state[segment.weights] = {"mean": torch.ones(3)}
    with pytest.raises(InputError, match="'mean' of w0 is float32, of other weights float64"):
        states.adopt(segment)


def test_scales_have_a_place_for_each_block() -> None:
    states = of_adam("8bit", ((512,), (300,)))  # as in a plan, each parameter begins a block
    for segment in states.segments:
        states.put(segment, [], {"step": torch.ones(())})
    shown = {(each.name, each.kind): each for each in states.to_save()}
    assert {kind for _, kind in shown} == {"exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"}
    codes, scales = shown["w1", "exp_avg"], shown["w1", "exp_avg_scale"]
    assert (codes.shape, codes.first, codes.start, codes.dtype, codes.nbytes) == ((300,), 0, 512, torch.int8, 300)
    assert (scales.shape, scales.first, scales.start, scales.nbytes) == ((2,), 0, 2, 8)
    assert (shown["w0", "exp_avg_scale"].start, shown["w0", "exp_avg_scale"].nbytes) == (0, 8)
    assert (codes.has_codes, scales.has_codes, scales.order) == (True, False, None)
    second_half = ShardPart(states.segments[0].slot, 0, 256, slice(0, 256))
    later = StateTensor("exp_avg_scale", second_half, scales.tensor, width=256)
    assert (later.shape, later.first) == ((2,), 1)
    states.tensor("exp_avg_scale").copy_(torch.arange(1.0, 5.0))
    states.tensor("exp_avg").fill_(127)
    found = states.read("exp_avg", states.segments[1])
    assert found.shape == (300,)
    assert sorted(set(found.tolist())) == pytest.approx([3.0, 4.0])


def test_only_trained_parameters_of_the_optimizer_have_segments() -> None:
    first, second, third = weights_of((2,), (), (3,))
    held = shard_of(first, second, third)[1]
    assert [segment.weights.shape for segment in held] == [(2,), (1,), (3,)]
    second.requires_grad_(False)
    chunk: Any = SimpleNamespace(held={segment.name: segment.held for segment in held})
    assert [each.name for each in cut_segments(chunk, torch.zeros(6), {second: 0, third: 1})] == ["w2"]
    (segment,) = cut_segments(chunk, torch.arange(6.0), {third: 1})
    assert (segment.group, segment.weights.tolist(), segment.start) == (1, [3, 4, 5], 3)


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


# --- loading -------------------------------------------------------------------------------------------------------


def test_loaded_states_have_the_dtype_of_the_class_and_a_note_says_so() -> None:
    states = of_class()
    note = "moments saved in {} are kept in float32 here, to the nearest value"
    for dtype in (torch.bfloat16, torch.float64):
        name = str(dtype).removeprefix("torch.")
        assert load(states, saved_adam(states, dtype)) == {note.format(name)}
    assert load(states, saved_adam(states)) == set()
    found = states.state_of(states.segments[0])
    assert (found["exp_avg"].tolist(), found["exp_avg_sq"].tolist()) == ([0.5] * 3, [1.5] * 3)
    assert [states.has_stepped(segment) for segment in states.segments] == [True, True, False]
    assert float(states.tensor("exp_avg")[-2:].sum()) == 0.0
    load(states, Saved({}))
    assert not any(map(states.has_stepped, states.segments))


def test_a_class_keeps_saved_states_that_its_options_do_not_make() -> None:
    states = of_class(lambda groups: torch.optim.SGD(groups, lr=0.5))
    assert states.kinds == {}
    load(states, Saved({"w1": {"momentum_buffer": torch.full((5, 4), 2.0)}}))
    assert states.state_of(states.segments[1])["momentum_buffer"].tolist() == [2.0] * 20


@pytest.mark.parametrize(
    ("wide", "fused", "dtype"),
    [(False, False, torch.float32), (True, False, torch.float64), (True, True, torch.float32)],
)
def test_counts_of_steps_have_the_dtype_of_torch(wide: bool, fused: bool, dtype: torch.dtype) -> None:
    states = of_class(lambda groups: torch.optim.AdamW(groups, fused=fused))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64 if wide else torch.float32)
        load(states, saved_adam(states))
    finally:
        torch.set_default_dtype(before)
    assert states.state_of(states.segments[0])["step"].dtype == dtype


def test_numbers_come_back_as_what_they_were() -> None:
    states = of_class(sgd, (3,), (1,))
    others = {"count": ("int64", 4), "half": 0.5, "on": True}
    load(states, Saved({}, w0=SmallStates(step=2, others=others), w1=SmallStates(step=5, others={"step": 5})))
    first, second = (states.state_of(segment) for segment in states.segments)
    assert (float(first["step"]), first["half"], first["on"]) == (2.0, 0.5, True)
    assert (first["count"].item(), first["count"].dtype) == (4, torch.int64)
    assert (second, type(second["step"])) == ({"step": 5}, int)
    load(states, Saved({}, w1=SmallStates(others={"half": 0.5})))
    assert (states.state_of(states.segments[0]), states.state_of(states.segments[1])) == ({}, {"half": 0.5})


def test_loaded_states_of_weights_in_another_order_are_those_of_their_elements() -> None:
    master, segments = shard_of(transposed(2, 3))
    rule = class_rule(sgd)
    states = States(master, segments, rule.kinds(master.dtype, {0}), [slice(0, 6)], memory)
    rule.attach(states)
    for given in (torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3).t().contiguous().t()):
        load(states, Saved({"w0": {"momentum_buffer": given}}, (1, 0)))
        assert states.state_of(segments[0])["momentum_buffer"].tolist() == [0, 3, 1, 4, 2, 5]


def test_saved_moments_become_codes_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    inside.limit(monkeypatch, converted_numel=512)
    states = of_adam("8bit", ((1536,), (300,)))
    saved = saved_adam(states)
    load(states, saved)
    assert (saved.coming, saved.largest_numel) == ([], 512)
    for segment in states.segments:
        for kind, value in (("exp_avg", 0.5), ("exp_avg_sq", 1.5)):
            assert {*states.read(kind, segment).tolist()} == {value}


# --- copying -------------------------------------------------------------------------------------------------------


def test_a_copy_has_no_states_that_are_gone() -> None:
    rule = class_rule(sgd)
    states = states_of(rule, ((3,), (2,)))
    other = another(states, rule)
    states.put(states.segments[0], ["momentum_buffer"], {"count": torch.ones(()), "rows": torch.ones(2)})
    states.part("momentum_buffer", states.segments[0]).fill_(1)
    other.put(other.segments[0], [], {"old": 3})
    other.put(other.segments[1], [], {"old": 3})
    other.become(states)
    found = other.state_of(other.segments[0])
    assert list(found) == ["momentum_buffer", "count", "rows"]
    assert (found["momentum_buffer"].tolist(), found["count"].item()) == ([1, 1, 1], 1)
    assert found["count"] is not states.state_of(states.segments[0])["count"]
    assert other.state_of(other.segments[1]) == {}
    assert torch.equal(other.master, states.master)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("to", ["class", *KINDS])
def test_moments_move_from_any_form_to_any_other(kind: Any, to: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.limit(monkeypatch, converted_numel=512)
    shapes, rule = ((1536,), (300,)), AdamRule(kind, decoupled=True)
    old = states_of(rule, shapes, first=512)
    gradient = torch.linspace(1.0, 2.0, 1324)
    for _ in range(2):
        rule.step(old, inputs_of(old, gradient, together=False))
    new = states_of(class_rule() if to == "class" else AdamRule(to, decoupled=True), shapes, first=512)
    new.copy_from(old)
    loose = 0.08 if "8bit" in (kind, to) else 0.01
    for segment, numel in zip(new.segments, (1024, 300), strict=True):
        assert float(new.numbers(segment)["step"]) == 2
        for name, share, power in (("exp_avg", 0.19, 1), ("exp_avg_sq", 0.001999, 2)):
            found = new.read(name, segment)
            assert found.numel() == numel
            there = share * gradient[segment.part] ** power
            torch.testing.assert_close(found.float(), there, rtol=loose, atol=0.0)


def divided(rule: AdamRule, own: tuple[int, ...]) -> States:
    """The states of an optimizer that has these of four parameters in a shard with gaps."""
    weights = weights_of((304,), (256,), (512,), (4,))
    master, segments = torch.ones(1536), []
    for place, (weight, first, stop) in enumerate(
        zip(weights, (0, 512, 768, 1280), (304, 768, 1280, 1284), strict=True)
    ):
        slot = Slot.of(weight, ParamSlot(f"w{place}", first, weight.numel()), weight.dtype, "cpu")
        held = ShardPart(slot, place, 0, slice(first, stop))
        segments.append(Segment(held, 0, nn.Parameter(master[held.part]), 0))
    chunk: Any = SimpleNamespace(held={segment.name: segment.held for segment in segments}, shard_numel=1536)
    ranges = own_ranges(chunk, {weights[place]: 0 for place in own})
    return States(master, [segments[place] for place in own], rule.kinds(master.dtype, {0}), ranges, memory)


@pytest.mark.parametrize("moments", KINDS)
def test_several_optimizers_divide_a_shard_and_step_it_to_the_bits_of_one(moments: Any) -> None:
    rule, gradients = AdamRule(moments, decoupled=True), torch.linspace(-1.0, 1.0, 1536)
    one, *others = (divided(rule, own) for own in ((0, 1, 2, 3), (1,), (0, 2), (3,)))
    for states in (one, *others):
        for _ in range(2):
            rule.step(states, inputs_of(states, gradients, 0.5))
    assert [states.tensor("exp_avg").numel() for states in (one, *others)] == [1536, 256, 1024, 256]
    assert sum(tensor.nbytes for states in others for tensor in states.tensors.values()) == sum(
        tensor.nbytes for tensor in one.tensors.values()
    )
    shown = {(each.name, each.kind): each.tensor for each in one.to_save()}
    for states in others:
        second = states.like(states.master.clone(), states.segments, memory)
        second.copy_from(states)
        loaded = divided(rule, tuple(segment.place for segment in states.segments))
        loaded.load(one.saved(), lambda: None)
        for found in (states, second, *([] if moments == "8bit" else [loaded])):
            for each in found.to_save():
                assert torch.equal(each.tensor, shown[each.name, each.kind]), (each.name, each.kind)
        for segment in states.segments:
            assert torch.equal(states.master[segment.part], one.master[segment.part])
        out, into = states.master.clone(), states.like(states.master.clone(), states.segments, memory)
        rule.step(states, inputs_of(states, gradients, together=False), out, into)
        rule.step(states, inputs_of(states, gradients, together=False))
        assert all(torch.equal(states.tensor(kind), into.tensor(kind)) for kind in states.kinds)
