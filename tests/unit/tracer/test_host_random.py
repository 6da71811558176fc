"""Random numbers that a step draws on the host are those of a real step, and the generator is afterwards as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.common.tracing import Seen, cpu_trace


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_trace_draws_what_a_real_step_draws(reentrant: bool | None) -> None:
    """Operators with a generator and without, also in a region that runs again, and between its runs."""
    seen = Seen()

    def draw() -> None:
        # The second takes no generator, in no overload.
        seen.append([torch.rand(3).tolist(), torch.native_dropout(torch.ones(32), 0.5, True)[1].tolist()])
        seen.append([torch.randn(2, generator=torch.Generator().manual_seed(1)).tolist(), torch.randperm(9).tolist()])

    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        def region(x: torch.Tensor) -> torch.Tensor:
            draw()
            y: torch.Tensor = model(x)
            draw()
            return y.tanh()

        draw()
        x = inp["x"].clone().requires_grad_()
        y = region(x) if reentrant is None else checkpoint(region, x, use_reentrant=reentrant)
        y.register_hook(lambda _: draw())
        draw()
        y.sum().backward()
        draw()

    def drawn(run: Any) -> list[Any]:
        torch.manual_seed(3)
        run(nn.Linear(4, 4).requires_grad_(), {"x": torch.ones(2, 4)})
        return list(seen)

    def traced(model: nn.Module, inp: dict[str, Any]) -> None:
        before = torch.get_rng_state()
        cpu_trace(model, inp, step)
        assert torch.equal(torch.get_rng_state(), before)

    assert drawn(traced) == drawn(step)
