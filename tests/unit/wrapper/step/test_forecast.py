"""The forecast that decides whether new states are made before the norm is known."""

from __future__ import annotations

import itertools

from elixir.wrapper.step.early_updates import LONGEST_PAUSE_STEPS, REFUSALS, Forecast


def stepped(forecast: Forecast, *, clipped: bool = False, made: int = 1, kept: int | None = None) -> None:
    kept = made * (not clipped) if kept is None else kept
    forecast.stepped(other_factor=clipped, scale=1.0, started=made, kept=kept)


def test_the_first_step_is_tried() -> None:
    assert Forecast().expects_to_keep(1.0)


def test_a_run_that_clips_in_every_step_pays_for_two_of_them() -> None:
    forecast, made = Forecast(), 0
    for _ in range(100):
        tried = forecast.expects_to_keep(1.0)
        made += tried
        stepped(forecast, clipped=True, made=int(tried))
    assert made == REFUSALS


def test_a_run_that_ceases_to_clip_is_noticed_after_one_step() -> None:
    forecast = Forecast()
    for _ in range(10):
        stepped(forecast, clipped=True, made=0)
    assert not forecast.expects_to_keep(1.0)
    stepped(forecast, made=0)
    assert forecast.expects_to_keep(1.0)


def test_one_clipped_step_changes_nothing() -> None:
    forecast = Forecast()
    for clipped in (False, True, False, True):
        stepped(forecast, clipped=clipped)
        assert forecast.expects_to_keep(1.0)


def test_a_scale_that_has_grown_may_overflow() -> None:
    forecast = Forecast()
    stepped(forecast)
    assert not forecast.expects_to_keep(2.0)
    forecast.stepped(other_factor=False, scale=2.0, started=0, kept=0)
    assert forecast.expects_to_keep(2.0)


def test_options_that_change_after_every_backward_are_tried_ever_more_rarely() -> None:
    forecast, tries = Forecast(), []
    for step in range(600):
        tried = forecast.expects_to_keep(1.0)
        tries += [step] * tried
        stepped(forecast, made=int(tried), kept=0)
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert pauses == sorted(pauses)
    assert [each > 1 for each in pauses[:REFUSALS]] == [False] * (REFUSALS - 1) + [True]
    assert LONGEST_PAUSE_STEPS <= pauses[-1] <= LONGEST_PAUSE_STEPS + 1
    stepped(forecast)  # kept once
    for _ in range(LONGEST_PAUSE_STEPS):
        stepped(forecast, made=0)
    assert forecast.expects_to_keep(1.0)
