"""The states of one shard: which there are, how they are shown, loaded and copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elixir.errors import InputError
from elixir.wrapper.step.rules import AdamRule
from elixir.wrapper.step.states import SmallStates, States
from tests.common import inside
from tests.common.one_shard import (
    Saved,
    class_rule,
    inputs_of,
    sgd,
    states_of,
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


# --- loading -------------------------------------------------------------------------------------------------------


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
