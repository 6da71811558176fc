"""Models of which no step can be made by their name alone, and what is said of them."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from elixir.errors import InputError, InputTypeError
from elixir.models import build, default_input
from elixir.models.activation_checkpointing import enable_checkpointing
from elixir.step_trace import Transfer
from tests.common.synthetic_trace import StackShape, stack_trace
from tests.common.tiny_models import tiny


class Odd(nn.Module):
    """Takes labels and computes no loss that is known by the class's name."""

    def __init__(self, base: Any, **config: Any) -> None:
        super().__init__()
        self.base, self.main_input_name = base, base.main_input_name
        self.config: Any = base.config if config else SimpleNamespace(model_type="odd")
        for name, value in config.items():
            setattr(self.config, name, value)

    def forward(self, labels: Any = None) -> None:
        raise AssertionError("never run")

    def gradient_checkpointing_enable(self, **_: Any) -> None:
        raise ValueError("Odd does not support gradient checkpointing.")


class OddForImageClassification(Odd):
    """A model of images."""


class OddForSequenceClassification(Odd):
    """A model of text."""


@pytest.mark.parametrize(
    ("kind", "base", "config", "says"),
    [
        (Odd, "vit", {}, "no default input for Odd: pass inp"),
        (OddForImageClassification, "vit", {}, "the config of OddFor.* has no image_size: pass inp"),
        (Odd, "opt", {"main_input_name": "input_features"}, "no default input for Odd: pass inp"),
        (OddForSequenceClassification, "opt", {"num_labels": 1}, "no default labels for .* with 1 classes: pass inp"),
    ],
)
def test_no_input_is_made_up(kind: type[Odd], base: str, config: dict[str, Any], says: str) -> None:
    model = kind(tiny(base, device="meta"), **config)
    model.main_input_name = config.get("main_input_name", model.main_input_name)
    with pytest.raises(InputError, match=says):
        default_input(model)


def test_counts_that_no_machine_holds_are_refused() -> None:
    with pytest.raises(InputError, match=r"batch must be [\d,]+ or less, found 1"):
        default_input(tiny("opt", device="meta"), batch=10**30)


@pytest.mark.parametrize(
    ("checkpoint", "error", "says"),
    [
        (3, InputTypeError, "checkpoint must be a text such as 'non-reentrant' .*, got 3"),
        ("non-reentrant:x", InputError, "a form, or a form and how many layers, .* got 'non-reentrant:x'"),
        ("none:3", InputError, "a form, or a form and how many layers"),
        ("reentrant", InputError, "Odd cannot checkpoint activations: Odd does not support"),
    ],
)
def test_checkpointing_that_cannot_be_turned_on(checkpoint: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        enable_checkpointing(Odd(tiny("opt", device="meta")), checkpoint)


def test_a_package_that_transformers_lacks_is_named_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str) -> None:
        raise ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers")

    monkeypatch.setattr(importlib, "import_module", lacking)
    with pytest.raises(ModuleNotFoundError, match="tokenizers"):
        build("opt-125m")


def test_a_trace_has_transfers_within_its_step() -> None:
    trace = stack_trace(StackShape(hidden=8, layers=1, ffn=8, vocab=8, positions=8), batch=1, seq=8)
    with pytest.raises(
        InputError, match=r"field 'transfers\[0\]' must begin and end, in this order, at accesses below"
    ):
        replace(trace, transfers=(Transfer("device_to_host", 8, 3, 2),))
