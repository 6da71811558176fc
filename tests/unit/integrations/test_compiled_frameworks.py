"""Frameworks that are asked for torch.compile compile the layers of a model under a plan: plain PyTorch's bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from torch import nn

from elixir.access.compiled_units import compiled_units
from elixir.errors import InputError
from elixir.integrations.accelerate import ElixirAccelerator
from elixir.integrations.lightning import ElixirStrategy
from elixir.integrations.transformers import ElixirTrainer
from elixir.models.layer_units import repeated_layers
from tests.common.accelerated import Loop, same
from tests.common.lit import Module, fitted
from tests.common.trainers import PLAIN, llama, train

ON_HOST = {"device_memory": "64MiB", "host_budget": "64MiB", "placement": "cpu"}
LAYERS = ("model.layers.0", "model.layers.1")
BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    """Every Accelerator of a process shares a state, and every model the compiler's cache."""
    AcceleratorState._reset_state(True)
    torch._dynamo.reset()
    yield
    AcceleratorState._reset_state(True)
    torch._dynamo.reset()


def layers_compiled(model: nn.Module) -> nn.Module:
    for layer in repeated_layers(model):
        layer.compile(backend=BACKEND)
    return model


class Layer(nn.Linear):
    """A module of torch.nn would stay as it is, since the compiler skips its file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Deep(Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(Layer(8, 8) for _ in range(3)))
        self.head = nn.Linear(8, 3)


@pytest.mark.slow
def test_accelerates_plugin_compiles_the_layers() -> None:
    plugin = TorchDynamoPlugin(backend=BACKEND, use_regional_compilation=True)
    plain = Loop(Accelerator(cpu=True, dynamo_plugin=plugin))
    expected = plain.epoch(), plain.weights()
    torch._dynamo.reset()
    AcceleratorState._reset_state(True)
    ours = Loop(ElixirAccelerator(cpu=True, dynamo_plugin=plugin, elixir=ON_HOST))
    assert tuple(compiled_units(ours.model.module).values()) == LAYERS == ours.model.plan.step.compiled
    assert ours.epoch() == expected[0]
    assert same(ours.weights(), {name.replace("_orig_mod.", ""): value for name, value in expected[1].items()})
    assert ours.accelerator.state.dynamo_plugin is plugin


def test_accelerates_plugin_with_cuda_graphs_is_refused() -> None:
    plugin = TorchDynamoPlugin(backend="inductor", mode="reduce-overhead")
    with pytest.raises(InputError, match=r"model.layers.0 is compiled with CUDA graphs.*mode='default'"):
        Loop(ElixirAccelerator(cpu=True, dynamo_plugin=plugin, elixir=ON_HOST))


@pytest.mark.slow
def test_trainers_torch_compile_compiles_the_layers(tmp_path: Path) -> None:
    short: dict[str, Any] = {"samples": 5, "num_train_epochs": 1}
    plain = train(PLAIN, tmp_path / "plain", model=layers_compiled(llama()), **short)
    torch._dynamo.reset()
    ours = train(
        ElixirTrainer, tmp_path / "ours", torch_compile=True, torch_compile_backend=BACKEND, elixir=ON_HOST, **short
    )
    assert ours.trainer.elixir.module.plan.step.compiled == LAYERS
    assert ours.history == plain.history
    assert np.array_equal(ours.predictions, plain.predictions)


def test_a_lightning_strategy_compiles_the_layers(tmp_path: Path) -> None:
    once = {"max_epochs": 1}
    plain, of_plain = fitted("ddp", tmp_path / "plain", layers_compiled(Deep()), **once)
    torch._dynamo.reset()
    ours, _ = fitted(ElixirStrategy(**ON_HOST, compile={"backend": BACKEND}), tmp_path / "ours", Deep(), **once)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert ours.strategy.model.plan.step.compiled == ("body.0", "body.1", "body.2")
    assert ours.logger.plain() == plain.logger.plain()
    assert same(ours.strategy.model.state_dict(), dict(of_plain.state_dict()))
    with pytest.raises(InputError, match=r"ElixirStrategy\(compile=True\), which compiles its layers"):
        fitted(ElixirStrategy(**ON_HOST), tmp_path / "whole", torch.compile(Deep()), **once)
