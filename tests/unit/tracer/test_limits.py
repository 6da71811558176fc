"""Limits of a trace hold for what is as large as they say, and for nothing larger."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from elixir.tracer import recorder
from elixir.tracer.values import expert_choice, shadows
from tests.common.tracing import Seen, cpu_trace

SIZE = 6


def written(x: torch.Tensor, ids: torch.Tensor) -> Any:
    copy = ids.clone()
    copy.add_(1)
    return copy[0].item()


def added_before_a_write(x: torch.Tensor, ids: torch.Tensor) -> Any:
    """The sum with values of the host as they were, if these were copied."""
    given = torch.zeros(SIZE, dtype=torch.int64)
    total = ids + given
    given.add_(1)
    return total[0].item() == 0


LIMITS: dict[str, tuple[ModuleType, str, Callable[[torch.Tensor, torch.Tensor], Any]]] = {
    "experts": (expert_choice, "MAX_EXPERTS", lambda x, ids: x.topk(2)[1][0, 0].item()),
    "values": (shadows, "MAX_SHADOW_NUMEL", lambda x, ids: (ids * 2)[0].item()),
    "values that are written to": (shadows, "MAX_COPIED_NUMEL", written),
    "values of the host": (shadows, "MAX_COPIED_NUMEL", added_before_a_write),
    "constants": (recorder, "MAX_COPIED_NUMEL", lambda x, ids: torch.zeros(SIZE, device=x.device)[0].item()),
}


@pytest.mark.parametrize("name", LIMITS)
def test_what_is_as_large_as_a_limit_is_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, limit, read = LIMITS[name]
    seen = Seen()

    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        y = model(inp["x"])
        seen.append(read(y, inp["ids"]))
        y.sum().backward()

    for most in (SIZE, SIZE - 1):
        monkeypatch.setattr(module, limit, most)
        cpu_trace(nn.Linear(4, SIZE), {"x": torch.ones(3, 4), "ids": torch.zeros(SIZE, dtype=torch.int64)}, step)
    at_the_limit, above = seen
    assert type(at_the_limit) in (int, float, bool)
    assert at_the_limit is not False
    assert type(above) is not type(at_the_limit) or above is False
