"""Parts of the wrapper alone: the phases of a step, its clock, the loss scale, bytes of full state dicts, contexts around
calls, errors of before, and which optimizers step whole shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import InputError
from elixir.wrapper.account.plan_promise import state_dict_bytes
from elixir.wrapper.phase import Phase, StepPhase
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
