"""Random numbers that a step draws on the host are those of a real step, and none are taken from the process."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elixir.tracer.checkpointed_regions import HostRandom
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


def test_the_generator_of_the_process_is_borrowed_only_by_operators_that_take_no_other() -> None:
    """Another thread may be drawing from it."""

    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        with patch.object(torch, "set_rng_state", side_effect=RuntimeError("borrowed")):
            (
                torch.rand(3),
                torch.randn(3).uniform_(),
                torch.randperm(4),
                torch.randint(3, (2,)),
                torch.ones(3).bernoulli(),
            )
            with pytest.raises(RuntimeError, match="borrowed"):
                torch.native_dropout(torch.ones(3), 0.5, True)
        torch.native_dropout(torch.ones(3), 0.5, True)
        model(inp["x"]).sum().backward()

    model, before = nn.Linear(4, 4), torch.get_rng_state()
    cpu_trace(model, {"x": torch.ones(2, 4)}, step)
    HostRandom().call(torch.ops.aten.native_dropout.default, (torch.ones(3), 0.5, True), {})
    assert torch.equal(torch.get_rng_state(), before)
