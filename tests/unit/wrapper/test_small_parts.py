"""Parts of the wrapper alone: the phases of a step, its clock, the loss scale, bytes of full state dicts, contexts around
calls, errors of before, and which optimizers step whole shards."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from elixir.chunk.memory import Fate
from elixir.errors import DiskError, FileError, InputError
from elixir.kernels import HybridAdam
from elixir.wrapper.account.plan_promise import state_dict_bytes
from elixir.wrapper.phase import Phase, RunErrors, StepPhase
from elixir.wrapper.step.user_optimizer import can_fuse, check_moments
from elixir.wrapper.weight_uses import WeightUses


def test_full_state_dicts_are_of_float32_or_wider_but_codes_of_one_byte() -> None:
    model = nn.Module()
    sizes = {torch.float32: 4, torch.bfloat16: 4, torch.float64: 8, torch.uint8: 1}
    for numel, dtype in enumerate(sizes, start=3):
        setattr(model, f"x{numel}", nn.Parameter(torch.zeros(numel, dtype=dtype), requires_grad=False))
    assert state_dict_bytes(model) == 3 * 4 + 4 * 4 + 5 * 8 + 6 * 1
    assert state_dict_bytes(model, only=lambda each: each.dtype == torch.float64) == 5 * 8
    layer = nn.Linear(2, 3)
    assert state_dict_bytes(layer, [torch.optim.AdamW(layer.parameters())]) == 9 * 4 * 3


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


# --- contexts around calls ------------------------------------------------------------------------------------------


# --- parts of the engine --------------------------------------------------------------------------------------------


class Stream:
    """A stream of a device, which notes whom it waits for."""

    def __init__(self, waited: list[str], name: str) -> None:
        self.waited, self.name = waited, name

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(f"{self.name} for {other.name}")


def test_a_stream_that_uses_weights_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    streams = {name: Stream(waited, name) for name in ("one", "other")}
    nobody: Any = None
    uses = WeightUses(nobody, [], {}, nobody, torch.device("cuda"), lambda: None)
    for name in ("one", "one", "other", "other", "one"):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, name=name: streams[name])
        uses.order_compute()
    assert waited == ["other for one", "one for other"]


# --- errors of before -----------------------------------------------------------------------------------------------


def with_error(error: Exception | None, rank_count: int) -> RunErrors:
    fate = Fate()
    fate.meet(error)
    return RunErrors(fate, rank_count)


LOST = DiskError(FileError(5, "broken", "/disk", "read"), "chunk 0")
