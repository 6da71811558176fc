"""The states of one shard: which go on when they are loaded, moved or stepped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from elixir.wrapper.step import fused_states as fused_states_module
from elixir.wrapper.step.class_states import ClassStates
from elixir.wrapper.step.states import MovedStates, SmallStates, States
from tests.common import inside
from tests.common.one_shard import (
    SHAPES,
    Extent,
    Saved,
    User,
    class_states,
    fused_states,
    put,
    sgd,
    shard_of,
    transposed,
    zeros,
)


def saved_adam(states: States, value: float = 0.5, dtype: torch.dtype = torch.float32, step: int = 3) -> Saved:
    """States of Adam for the first two parameters."""
    values = {
        segment.name: {
            kind: torch.full(segment.slot.shape, value + number, dtype=dtype)
            for number, kind in enumerate(("exp_avg", "exp_avg_sq"))
        }
        for segment in states.segments[:2]
    }
    return Saved(values, **{name: SmallStates(step=step) for name in values})


def test_loaded_states_keep_their_dtype_or_are_rounded_with_a_note() -> None:
    states = class_states()
    note = "moments saved in bfloat16 are kept in float32 here, to the nearest value"
    assert states.load(saved_adam(states, dtype=torch.bfloat16)) == {note}
    assert states.load(saved_adam(states, dtype=torch.float64)) == set()
    assert states.state_of(states.segments[0])["exp_avg"].dtype == torch.float64
    wide = states.state_of(states.segments[0])["exp_avg"]
    states.load(saved_adam(states, dtype=torch.float64))
    assert states.state_of(states.segments[0])["exp_avg"] is wide
    states.load(saved_adam(states))
    assert states.state_of(states.segments[0])["exp_avg"].dtype == torch.float32


def test_states_that_a_constructor_makes_come_back_when_no_others_are_loaded() -> None:
    states = class_states(lambda groups: torch.optim.Adagrad(groups, initial_accumulator_value=0.25))
    for segment in states.segments:
        states.state_of(segment)["sum"].fill_(9)
    states.load(Saved({"w1": {"sum": torch.full((5, 4), 2.0)}}, w1=SmallStates(step=4)))
    assert [float(states.state_of(segment)["sum"].max()) for segment in states.segments] == [0.25, 2.0, 0.25]
    assert [float(states.state_of(segment)["step"]) for segment in states.segments] == [0.0, 4.0, 0.0]
    plain = class_states(sgd)
    plain.load(Saved({}))
    assert plain.without_states() == plain.segments


def test_small_states_come_back_as_what_they_were() -> None:
    states = class_states(sgd, ((3,), (1,)))
    count = torch.zeros((), dtype=torch.float64)
    put(states, {"step": count})
    others = {"count": ("int64", 4), "half": 0.5, "on": True}
    states.load(Saved({}, w0=SmallStates(step=2, others=others), w1=SmallStates(step=5, others={"step": 5})))
    first, second = (states.state_of(segment) for segment in states.segments)
    assert first["step"] is count
    assert (float(count), first["half"], first["on"]) == (2.0, 0.5, True)
    assert (first["count"].item(), first["count"].dtype) == (4, torch.int64)
    assert (second, type(second["step"])) == ({"step": 5}, int)
    states.load(Saved({}, w0=SmallStates(step=2)))
    assert list(states.state_of(states.segments[0])) == ["step"]
    states.load(Saved({}, w1=SmallStates(others={"half": 0.5})))
    assert states.state_of(states.segments[1]) == {"half": 0.5}
    assert states.without_states() == [states.segments[0]]


@pytest.mark.parametrize("ordinary", [False, True])
@pytest.mark.parametrize("like_weights", [False, True])
def test_loaded_states_of_weights_in_another_order_are_those_of_their_elements(
    ordinary: bool, like_weights: bool
) -> None:
    weight = transposed(2, 3)
    master, segments = shard_of(weight, ordinary=ordinary)
    states = ClassStates(User(sgd), master, segments)
    given = torch.arange(6.0).view(2, 3)
    given = given.t().contiguous().t() if like_weights else given
    saved = Saved({"w0": {"momentum_buffer": given}})
    saved.order = (1, 0)
    for made in (None, torch.zeros(segments[0].weights.shape), torch.zeros_like(segments[0].weights)):
        put(states, {} if made is None else {"momentum_buffer": made})
        states.load(saved)
        found = states.state_of(segments[0])["momentum_buffer"]
        assert made is None or found is made
        if ordinary:
            assert torch.equal(found, given)
            assert made is not None or found.stride() == given.stride()
        else:
            assert found.tolist() == [0, 3, 1, 4, 2, 5]
    put(states, {"momentum_buffer": torch.zeros(1).expand(segments[0].weights.shape)})
    states.load(saved)
    assert float(states.state_of(segments[0])["momentum_buffer"].sum()) == float(given.sum())


def test_steps_multiply_gradients_and_leave_them_as_they_are() -> None:
    for factor in (1.0, 0.5, torch.tensor(0.5)):
        states = class_states(lambda groups: torch.optim.SGD(groups, lr=1.0), ((3,), (2,)))
        before, gradient = states.master.clone(), torch.ones(3)
        states.step([(states.segments[0], gradient)], None, factor, None)
        assert (before - states.master).tolist() == [float(factor)] * 3 + [0.0] * 2
        assert gradient.tolist() == [1, 1, 1]
        assert [segment.weights.grad for segment in states.segments] == [None, None]
        seen: list[torch.Tensor | None] = []
        with states.with_gradients([(states.segments[0], gradient)]):
            seen = [segment.weights.grad for segment in states.segments]
        assert seen[1] is None
        assert seen[0] is not None
        assert seen[0].data_ptr() == gradient.data_ptr()


def moved_from(*left: States, passes: Sequence[str] = ()) -> MovedStates:
    return MovedStates({each.name: (states, each) for states in left for each in states.segments}, passes)


def test_states_stay_if_all_of_them_lay_in_one_memory_of_the_same_kind() -> None:
    old, new = class_states(), class_states()
    assert moved_from(old).stay_for(new) is old
    assert moved_from(old).stay_for(class_states(shapes=SHAPES[:2])) is old
    assert moved_from(old).stay_for(class_states(shapes=())) is None
    assert moved_from(class_states(shapes=SHAPES[:2])).stay_for(new) is None
    assert moved_from(old).stay_for(class_states(on_host=True)) is None
    assert moved_from(old, passes=("w1",)).stay_for(new) is None
    assert moved_from(old, passes=("other",)).stay_for(new) is old
    on_disk = class_states(extent=Extent())
    assert moved_from(on_disk).stay_for(class_states(extent=Extent())) is None
    two = MovedStates({each.name: (class_states(), each) for each in old.segments}, ())
    assert two.stay_for(new) is None
    assert moved_from().stay_for(new) is None


@pytest.mark.parametrize("passes", [False, True])
def test_states_of_a_class_move_as_they_are(passes: bool) -> None:
    old, new = class_states(sgd), class_states(sgd)
    mean, rows, count, early = torch.arange(3.0), torch.ones(2), torch.tensor(2.0), torch.full((20,), 0.5)
    put(old, {"step": count, "mean": mean, "rows": rows, "pair": (1, 2)}, {"mean": early.double()})
    names = [segment.name for segment in old.segments]
    old.let_go()
    assert old.master.numel() == 0
    assert [each.weights.shape for each in old.segments] == [(3,), (20,), (2,)]
    assert {each.weights.untyped_storage().nbytes() for each in old.segments} == {4}
    assert len(old.optimizer.state) == 0
    moved = moved_from(old, passes=names if passes else ())
    assert moved.forms("w2") == moved.forms("other") == {}
    assert moved.small("w0") == SmallStates(2, {"step": count, "rows": rows, "pair": (1, 2)}, are_live=True)
    assert moved.small("w1") == moved.small("other") == SmallStates(are_live=True)
    made = torch.zeros(20, dtype=torch.float64)
    put(new, {}, {"mean": made})
    assert new.load(moved) == set()
    first, second = (new.state_of(segment) for segment in new.segments[:2])
    assert first["step"] is count
    assert first["rows"] is rows
    assert first["pair"] == (1, 2)
    assert torch.equal(first["mean"], mean)
    assert (first["mean"].data_ptr() == mean.data_ptr()) != passes
    assert second["mean"] is made
    assert made.tolist() == [0.5] * 20
    assert new.without_states() == new.segments[2:]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("to", ["class", "float32", "bfloat16", "8bit"])
def test_moments_move_from_any_form_to_any_other(kind: Any, to: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.limit(monkeypatch, converted_numel=512)
    shapes, first = ((1536,), (300,)), 512
    old = fused_states(shapes, moments=kind, first=first)
    gradient = torch.linspace(1.0, 2.0, 1324)
    parts = [(segment, gradient[segment.part]) for segment in old.segments]
    for _ in range(2):
        old.step(parts, None, 1.0, None)
    new: Any = class_states(shapes=shapes, first=first)
    if to != "class":
        new = fused_states(shapes, moments=to, first=first)
    old.let_go()
    here = "float32" if to == "class" else to
    notes = new.load(moved_from(old, passes=("w0", "w1")))
    expected = f"moments saved in {kind} are kept in {here} here, to the nearest value"
    assert notes == (set() if kind == here else {expected})
    loose = 0.08 if "8bit" in (kind, to) else 0.01
    for segment, numel in zip(new.segments, (1024, 300), strict=True):
        found = [each for each in new.tensors() if each.name == segment.name and each.width == 1]
        values = {each.kind: new.widened(each) for each in found}
        assert float(new.scalars(segment)["step"]) == 2
        for name, share, power in (("exp_avg", 0.19, 1), ("exp_avg_sq", 0.001999, 2)):
            assert values[name].numel() == numel
            there = share * gradient[segment.part] ** power
            torch.testing.assert_close(values[name], there, rtol=loose, atol=0.0)


def test_moments_that_stay_are_taken_over_with_their_counts() -> None:
    old, new = fused_states(), fused_states()
    old.step([(each, torch.ones(each.slot.numel)) for each in old.segments[:2]], None, 1.0, None)
    assert new.load(moved_from(old)) == set()
    assert new.moments is old.moments
    assert [float(new.count(segment)) for segment in new.segments] == [1, 1, 0]
    new.load(Saved({}))
    assert {float(tensor.abs().sum()) for tensor in new.moments.tensors()} == {0.0}
    assert [float(new.count(segment)) for segment in new.segments] == [0, 0, 0]
    never = fused_states()
    never.load(Saved({}))
    assert never.nbytes == 0
    assert [each.name for each in old.tensors()] == ["w0", "w0", "w1", "w1"]
    assert old.scalars(old.segments[2]) == {}


def test_neighbours_of_one_group_at_the_same_step_are_stepped_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[int, int]] = []
    step = fused_states_module.adam_step

    def seen(gradient: torch.Tensor, *arguments: Any, at: int) -> str:
        runs.append((at, at + gradient.numel()))
        return step(gradient, *arguments, at=at)

    monkeypatch.setattr(fused_states_module, "adam_step", seen)
    shapes, groups = ((3,), (2,), (4,), (1,), (2,), (3,), (5,)), (0, 0, 1, 1, 1, 1, 1)
    one, other = (fused_states(shapes, groups) for _ in range(2))
    into = one.empty_like(torch.zeros(20), fused_states(shapes, groups).segments, zeros)
    gradients = torch.linspace(-1, 1, 20)
    for states in (one, other):
        states.count(states.segments[3]).fill_(2)
        states.moments.exp_avg_sq.fill_(0.5)
    arrived, others = (
        [(each, gradients[each.part]) for each in states.segments if each.place != 5] for states in (one, other)
    )
    out = torch.zeros(20, dtype=torch.bfloat16)
    one.step(arrived, gradients, 0.5, out, into)
    assert runs == []
    assert [float(one.count(each)) for each in one.segments] == [0, 0, 0, 2, 0, 0, 0]
    one.step(arrived, gradients, 0.5, None)
    assert runs == [(0, 5), (5, 9), (9, 10), (10, 12), (15, 20)]
    other.step(others, None, 0.5, None)
    for states in (other, into):
        stepped = [states.master[each.part] for each in states.segments if each.place != 5]
        assert all(map(torch.equal, stepped, [one.master[each.part] for each, _ in arrived]))
        assert [float(states.count(each)) for each in states.segments] == [1, 1, 1, 3, 1, 0, 1]
    assert torch.equal(one.master[12:15], other.master[12:15])
    assert torch.equal(out[:12], one.master[:12].bfloat16())


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "8bit"])
def test_a_step_into_other_states_is_the_step_in_place_and_changes_nothing_else(kind: Any) -> None:
    shapes = ((3,), (2,), (700,))
    one, other = (fused_states(shapes, moments=kind) for _ in range(2))
    gradients = torch.linspace(-1, 1, 705)

    def arrived(states: States) -> list[Any]:
        return [(segment, gradients[segment.part]) for segment in states.segments]

    for states in (one, other):
        states.step(arrived(states), gradients, 1.0, None)
    into = one.empty_like(zeros(705, torch.float32), fused_states(shapes).segments, zeros)
    before = [tensor.clone() for tensor in (one.master, *one.moments.tensors())]
    out, there = (zeros(705, torch.bfloat16) for _ in range(2))
    one.step(arrived(one), gradients, 0.5, out, into)
    other.step(arrived(other), gradients, 0.5, there)
    assert all(map(torch.equal, before, (one.master, *one.moments.tensors())))
    assert {float(one.count(segment)) for segment in one.segments} == {1}
    assert torch.equal(out, there)
    for copied in (into, fused_states(shapes, moments=kind)):
        if copied is not into:
            copied.copy_from(into)
        found, expected = ((states.master, *states.moments.tensors()) for states in (copied, other))
        assert all(map(torch.equal, found, expected))
        assert {float(copied.count(segment)) for segment in copied.segments} == {2}


def test_saved_moments_become_codes_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    inside.limit(monkeypatch, converted_numel=512)
    states = fused_states(((1536,), (300,)), moments="8bit")
    saved = saved_adam(states)
    states.load(saved)
    assert (saved.coming, saved.largest_numel) == ([], 512)
    values = {(each.name, each.kind): states.widened(each) for each in states.tensors() if each.width == 1}
    assert {key: {*each.tolist()} for key, each in values.items()} == {
        (name, kind): {value} for name in ("w0", "w1") for kind, value in (("exp_avg", 0.5), ("exp_avg_sq", 1.5))
    }
