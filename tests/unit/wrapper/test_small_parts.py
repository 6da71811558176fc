"""The phases of a step, its clock, the loss scale, bytes of full state dicts, and optimizers that step whole shards."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import InputError
from elixir.kernels import HybridAdam
from elixir.wrapper.account.state_dict_bytes import state_dict_bytes
from elixir.wrapper.account.step_clock import Span, StepClock
from elixir.wrapper.loss_scale import LossScale
from elixir.wrapper.phase import Phase, StepPhase
from elixir.wrapper.step.fused_states import can_fuse, check_moments


def test_full_state_dicts_are_of_float32_or_wider_but_codes_of_one_byte() -> None:
    model = nn.Module()
    sizes = {torch.float32: 4, torch.bfloat16: 4, torch.float64: 8, torch.uint8: 1}
    for numel, dtype in enumerate(sizes, start=3):
        setattr(model, f"x{numel}", nn.Parameter(torch.zeros(numel, dtype=dtype), requires_grad=False))
    assert state_dict_bytes(model) == 3 * 4 + 4 * 4 + 5 * 8 + 6 * 1
    assert state_dict_bytes(model, only=lambda each: each.dtype == torch.float64) == 5 * 8
    layer = nn.Linear(2, 3)
    assert state_dict_bytes(layer, [torch.optim.AdamW(layer.parameters())]) == 9 * 4 * 3


def test_the_clock_runs_from_its_start_to_its_end() -> None:
    clock = StepClock(torch.device("cpu"))
    assert not clock.running
    assert clock.stop() is None
    clock.start()
    assert clock.running
    span = clock.stop()
    assert span is not None
    assert span.over
    assert 0 <= span.seconds() < 60
    assert not clock.running
    assert clock.stop() is None
    assert Span(2.0, 5.0).seconds() == 3.0


def test_a_loss_scale_doubles_after_good_steps_and_halves_once_per_backward() -> None:
    scale = LossScale(True, 8.0, 2)
    for value in (8.0, 16.0, 16.0, 32.0):
        scale.begins_backward()
        scale.stepped(scale.value)
        assert scale.value == value
    scale.stepped(scale.value)  # of the same backward, so it does not count
    scale.begins_backward()
    scale.stepped(16.0)  # gradients of a smaller scale prove nothing
    scale.stepped(32.0)
    assert (scale.value, scale.state()["good_steps"]) == (32.0, 5)
    scale.begins_backward()
    scale.overflowed(32.0)
    scale.overflowed(32.0)
    scale.stepped(32.0)
    assert scale.state() == {"value": 16.0, "good_steps": 0, "growth_interval": 2}
    other = LossScale(True, 1.0, 9)
    other.load(scale.state())
    assert other.state() == scale.state()
    unused = LossScale(False, 8.0, 1)
    unused.stepped(1.0)
    assert unused.value == 1.0
    for bad in (0.0, -1.0, float("inf")):
        with pytest.raises(InputError, match="initial_scale must be finite and above 0"):
            LossScale(True, bad, 1)
    assert LossScale(True, 1.0, 1).value == 1.0


@pytest.mark.parametrize(
    ("kind", "options", "fuses"),
    [
        (torch.optim.Adam, {}, True),
        (torch.optim.AdamW, {}, True),
        (HybridAdam, {}, True),
        (torch.optim.AdamW, {"amsgrad": True}, False),
        (torch.optim.AdamW, {"differentiable": True}, False),
        (torch.optim.SGD, {}, False),
    ],
)
def test_adams_without_further_options_step_whole_shards(kind: Any, options: dict[str, bool], fuses: bool) -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = kind([{"params": one.parameters()}, {"params": other.parameters(), **options}], lr=1e-3)
    assert can_fuse(optimizer) is fuses
    check_moments(optimizer, fuses, "float32")
    if kind is HybridAdam:
        with pytest.raises(InputError, match="keeps Adam's moments in 8bit, this HybridAdam in float32"):
            check_moments(optimizer, fuses, "8bit")
    elif fuses:
        check_moments(optimizer, fuses, "8bit")
    else:
        with pytest.raises(InputError, match="give one of these, or plan with moments='float32'"):
            check_moments(optimizer, fuses, "8bit")


def test_one_thread_is_in_a_forward_at_a_time_unless_threads_take_turns_or_backward_runs() -> None:
    phase = StepPhase(rank=0)

    def enters(inside: bool = False) -> str:
        """The error of a forward on another thread, inside of its backward or not."""
        found: list[str] = []

        def enter(*_: object) -> None:
            try:
                with phase.alone():
                    pass
            except InputError as error:
                found.append(str(error))

        def backward() -> None:
            x = torch.ones(1, requires_grad=True)
            x.register_hook(lambda gradient: enter())
            x.sum().backward()

        thread = threading.Thread(target=backward if inside else enter)
        thread.start()
        thread.join()
        return "".join(found)

    with phase.alone():
        with phase.alone():  # the same thread may
            assert "another thread is in a forward" in enters()
        assert "another thread is in a forward" in enters()
        assert enters(inside=True) == ""
        phase.takes_turns = True
        assert enters() == ""
        phase.takes_turns = False
    assert enters() == ""


@pytest.mark.parametrize("now", Phase)
def test_a_module_is_closed_in_any_phase(now: Phase) -> None:
    phase = StepPhase(rank=0)
    phase.now, phase.in_backward = now, now is Phase.BACKWARD
    if now is not Phase.CLOSED:
        phase.close()
    assert (phase.now, phase.in_backward, phase.closed) == (Phase.CLOSED, False, True)
    with pytest.raises(InputError, match="closed"):
        phase.refuse_closed()
