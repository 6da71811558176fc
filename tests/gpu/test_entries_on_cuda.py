"""Users' first programs run on a CUDA device unchanged: `elixir.wrap`, and the example."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import elixir
from elixir.errors import TraceError
from elixir.hardware.profile import preset
from elixir.models.step import default_input
from elixir.tracer.trace import trace_step
from tests.common import inside
from tests.common.gpu import needs_gpu, needs_pretended_gpu
from tests.common.parity import hf_loss, take_step
from tests.common.tiny_models import tiny
from tests.cuda_emulator import TOTAL_BYTES

pytestmark = needs_gpu

ROOT = Path(__file__).parents[2]


def test_wrap_takes_the_device_that_is_here() -> None:
    model = tiny("opt")
    inp = default_input(model, batch=2, seq=16)
    module, optimizer = elixir.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-3), inp=inp)
    assert module.device.type == "cuda"
    there = {name: value.cuda() for name, value in inp.items()}
    losses = []
    for _ in range(7):  # through the comparison of the first steps with the plan
        loss = hf_loss(module, there)
        take_step(optimizer, loss)
        losses.append(loss.item())
    assert not inside.may_replan(module)
    assert losses[-1] < losses[0]


@needs_pretended_gpu
def test_a_device_that_no_preset_knows_is_planned_for_with_the_memory_it_has(caplog: pytest.LogCaptureFixture) -> None:
    plan = elixir.search.optimal_search(tiny("opt"), 1).plan
    assert 0.9 * TOTAL_BYTES < plan.device_budget_bytes <= TOTAL_BYTES
    assert "no preset" in caplog.text


@pytest.mark.parametrize(
    "move", [lambda x: x.cuda(), lambda x: x.to("cuda"), lambda x: x.to(device=torch.device("cuda"))]
)
def test_a_traced_step_that_moves_a_tensor_is_told_of_the_device_of_others(
    move: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def step(model: torch.nn.Module, inp: dict[str, torch.Tensor]) -> None:
        model(move(inp["x"])).sum().backward()

    with pytest.raises(TraceError, match=r"moved to cuda, .*\(x\.device\)"):
        trace_step(torch.nn.Linear(4, 4), {"x": torch.randn(2, 4)}, step, hardware=preset("h200"))


@pytest.mark.parametrize("more", [[], ["--device-memory", "110MiB", "--activation-checkpointing"]])
def test_the_example_trains(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "--model opt-125m --layers 1 --batch 2 --seq 32 --steps 6 --lr 1e-3".split()
    monkeypatch.setattr(sys, "argv", ["train.py", *given, *more])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "example" / "train.py"), run_name="__main__")
    assert not ended.value.code
    said = capsys.readouterr().out
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", said)]
    assert losses[-1] < losses[0]
    line = re.search(r"^host_to_device +(.*)$", said, re.MULTILINE)
    assert line is not None
    observed, predicted = re.split(r" {2,}", line[1].strip())
    assert observed == predicted
