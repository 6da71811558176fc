"""The Python examples of README and docs run, page by page, on a model small enough for seconds."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark.quoted import documents
from elixir.hardware.profile import preset
from elixir.models.loading import build
from elixir.models.model_shape import describe
from elixir.models.step import default_input, default_step
from elixir.plan.plan import Plan
from elixir.search import optimal_search
from elixir.step_trace import StepTrace
from elixir.tracer.trace import trace_step
from elixir.wrapper import ElixirModule

ROOT = Path(__file__).parents[3]
DOCUMENTS = documents()


def examples(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)


def make_model() -> torch.nn.Module:
    """An OPT of two layers, on the device that is the default."""
    shape = describe("opt-125m").changed(layers=2, hidden=64, heads=4, kv_heads=4, ffn=128, vocabulary=96, positions=64)
    return build(shape, device=str(torch.get_default_device()))


@functools.cache
def trace_and_plan() -> tuple[StepTrace, Plan]:
    """Made once; both are frozen."""
    model = make_model()
    batch = default_input(model, batch=2, seq=16)
    trace = trace_step(model, batch, default_step, hardware=preset("cpu"))
    return trace, optimal_search(trace, 1, hardware="cpu", device_memory="64MiB", host_budget="64MiB")


def namespace() -> dict[str, Any]:
    """Names that the pages suppose: a model, its batch, a step, data, and a plan with its trace and machine."""
    torch.manual_seed(0)
    model = make_model()
    batch = default_input(model, batch=2, seq=16)
    trace, plan = trace_and_plan()
    return {
        "torch": torch,
        "make_model": make_model,
        "model": model,
        "batch": batch,
        "data": [batch, batch],
        "dataset": [{name: value[0] for name, value in batch.items()}] * 16,
        "train_step": default_step,
        "hardware": preset("cpu"),
        "trace": trace,
        "plan": plan,
    }


PAGES = [document for document in DOCUMENTS if examples(document)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = namespace()
    try:
        for number, example in enumerate(examples(page), 1):
            exec(compile(example, f"{page.name}, example {number}", "exec"), names)
    finally:
        for value in names.values():
            if isinstance(value, ElixirModule):
                value.close()
