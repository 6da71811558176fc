"""Whatever touches the same memory is ordered by streams, events and waits: on the pretended device, which writes down all."""

from __future__ import annotations

import pytest
import torch

from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.gpu import needs_pretended_gpu
from tests.common.parity import MODES, case, make_plan
from tests.pretend_cuda.races import watching

pytestmark = needs_pretended_gpu


@pytest.mark.parametrize("mode", MODES)
def test_a_training_has_no_races(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = case("opt")
    plan = make_plan(it, mode)
    inp = {name: value.cuda() for name, value in it.inp.items()}
    with watching(monkeypatch) as races:
        module = ElixirModule(it.model, plan, device="cuda")
        optimizer = ElixirOptimizer(module, torch.optim.AdamW(it.model.parameters(), lr=1e-3), max_norm=1.0)
        for _ in range(3):
            optimizer.backward(it.loss(module, inp))
            optimizer.step()
            optimizer.zero_grad()
        module.close()
    assert not races.found
