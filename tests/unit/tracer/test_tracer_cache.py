"""Remembering shape propagation changes nothing but the time; nor do a second trace and another hash seed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir.models.step import default_input, default_step
from elixir.step_trace import StepTrace
from elixir.tracer.device import target_for
from elixir.tracer.operator_cache import META, Arguments, OperatorCache, traits
from elixir.tracer.trace import trace_step
from tests.common.tiny_models import FAMILIES, tiny
from tests.common.tracing import CPU, H200

aten = torch.ops.aten

ROOT = Path(__file__).parents[3]
OPTIMIZERS = ("AdamW", "SGD", "Adagrad", "NAdam")
QUICK = {("bert", "NAdam", "cuda"), ("gpt2", "SGD", "cpu"), ("mixtral", "AdamW", "cuda"), ("t5", "Adagrad", "cuda")}


def assert_same(one: StepTrace, other: StepTrace) -> None:
    for field in dataclasses.fields(StepTrace):  # one by one, for a message that says which
        if field.compare:
            assert getattr(one, field.name) == getattr(other, field.name), field.name
    assert one == other


def cache_cases() -> list[Any]:
    found = []
    for family in FAMILIES:
        for optimizer in OPTIMIZERS:
            for kind in ("cuda", "cpu"):
                marks = [] if (family, optimizer, kind) in QUICK else [pytest.mark.slow]
                found.append(pytest.param(family, optimizer, kind, marks=marks, id=f"{family}-{optimizer}-{kind}"))
    return found


@pytest.mark.parametrize(("family", "optimizer", "kind"), cache_cases())
def test_the_cache_changes_nothing(family: str, optimizer: str, kind: str) -> None:
    model = tiny(family, dropout=0.1, checkpoint="non-reentrant")
    inp = default_input(model, batch=2, seq=None if family == "vit" else 16)
    hardware = H200 if kind == "cuda" else CPU

    def traced(cache: bool) -> StepTrace:
        return trace_step(model, inp, default_step, hardware=hardware, optimizer=optimizer, cache=cache)

    cached, again, plain = traced(True), traced(True), traced(False)
    assert_same(again, cached)
    assert_same(plain, cached)


@pytest.mark.slow
def test_another_hash_seed_gives_the_same_text() -> None:
    program = """
import torch
from torch import nn
from elixir.hardware.profile import preset
from elixir.tracer.trace import trace_step
layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
model = nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 50))
step = lambda model, inp: model(inp["x"]).pow(2).sum().backward()
print(trace_step(model, {"x": torch.zeros(2, 16, dtype=torch.int64)}, step, hardware=preset("h200")).to_json())
"""
    texts = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        data = json.loads(done.stdout)
        del data["trace_s"]
        texts.append(json.dumps(data))  # keeps the order of keys
    assert texts[0] == texts[1]


def test_results_next_to_lengths_and_to_nothing_are_remembered() -> None:
    cache = OperatorCache(target_for(H200), lambda func, args, kwargs: func(*args, **kwargs))
    x = torch.empty(2, 4, 16, 8, device="meta", dtype=torch.bfloat16)
    row = x.new_empty(8)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten._scaled_dot_product_flash_attention.default, (x, x, x)),
        (aten.native_layer_norm_backward.default, (x, x, [8], x[..., :1], x[..., :1], row, row, [True, False, True])),
        (aten.topk.default, (x, 2)),
    ]
    for func, args in calls:
        op, arguments = traits(func), Arguments(args, {})
        assert cache.recall(op, arguments) is None
        result, tensors, _ = cache.run(op, args, {}, arguments)
        remembered = cache.recall(op, arguments)
        assert remembered is not None
        kinds = [tuple if isinstance(each, torch.Tensor) else type(each) for each in result]
        assert [type(each) for each in remembered.outputs] == kinds
        specs = [each for each in remembered.outputs if isinstance(each, tuple)]
        made = [torch.empty_strided(size, stride, dtype=dtype, device=META) for size, stride, dtype, _ in specs]
        assert [(each.shape, each.dtype) for each in made] == [(each.shape, each.dtype) for each in tensors]
