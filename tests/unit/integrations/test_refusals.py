"""The integrations refuse in words what they cannot use."""

from __future__ import annotations

import importlib
import sys
from functools import partialmethod

import pytest
import torch
from torch import nn

from elixir.errors import InputError, InputTypeError
from elixir.integrations.lightning import ElixirPrecision, ElixirStrategy
from elixir.integrations.optimizer_list import OptimizerList
from elixir.integrations.run import read_options
from elixir.integrations.transformers import ElixirMixin

ON_HOST = {"device_memory": "64MiB", "host_budget": "64MiB", "placement": "cpu"}


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("accelerate", "accelerate"),
        ("lightning", "lightning.pytorch.strategies"),
        ("pytorch_lightning", "pytorch_lightning.strategies"),
        ("transformers", "transformers"),
    ],
)
def test_a_package_that_is_missing_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"elixir.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match="this needs .* pip install"):
        importlib.import_module(f"elixir.integrations.{name}")


def test_options_and_groups_of_other_kinds() -> None:
    with pytest.raises(InputTypeError, match="must hold options by name, got list"):
        read_options([1], {})  # type: ignore[arg-type]
    weight = nn.Parameter(torch.ones(2))
    made = OptimizerList([torch.optim.SGD([weight], lr=0.1)])
    made.add_param_group(made.param_groups[0])
    with pytest.raises(InputError, match="takes no groups"):
        made.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_gradients_are_clipped_by_norm_only() -> None:
    with pytest.raises(InputError, match="clipped by norm only"):
        ElixirPrecision("32-true").clip_grad_by_value(None, 1.0)


def test_a_fit_without_a_step_has_no_plan() -> None:
    class Idle(ElixirMixin):
        def fit(self, model: object, **data: object) -> None:
            """Ends at once."""

        train = partialmethod(fit, None)

    with pytest.raises(InputError, match="ended before it came to a plan"):
        ElixirStrategy().dry_run(Idle.__new__(Idle), None)
    with pytest.raises(InputError, match=r"train\(\) ended before it came to a plan"):
        Idle.__new__(Idle).plan()
