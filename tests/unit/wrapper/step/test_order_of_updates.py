"""One step: what is submitted in which order, in how many calls, and the states that a shard goes through."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.common.parity import Pair, case, make_plan


def fused(parameters: Any) -> torch.optim.Optimizer:
    """torch's own Adam that steps any number of tensors by one kernel."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


@pytest.mark.parametrize("max_norm", [None, 1e-2])
def test_one_call_steps_all_chunks_on_the_device(max_norm: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    it = case("gpt2")
    plan = make_plan(it, "resident")
    assert len(plan.chunks) > 2
    with Pair(it, plan, optimizer=lambda model: fused(model.parameters()), max_norm=max_norm) as pair:
        calls: list[int] = []
        step = torch.optim.AdamW.step

        def counted(self: torch.optim.AdamW, closure: Any = None) -> Any:
            if self is not pair.plain_optimizer:
                calls.append(sum(len(group["params"]) for group in self.param_groups))
            return step(self, closure)

        monkeypatch.setattr(torch.optim.AdamW, "step", counted)
        pair.train(1)
        weights = len(list(it.model.parameters()))
        assert calls == [1] * weights, "the first step makes states, weight by weight"
        calls.clear()
        pair.train(2)
        pair.assert_same_weights()
        assert calls == [weights] * 2
