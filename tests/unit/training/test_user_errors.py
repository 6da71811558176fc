"""Mistakes and omissions of users end in a sentence they can act on: library and command line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elixir.cli import main
from elixir.errors import ArtifactError, InputError, InputTypeError
from elixir.hardware.profile import HardwareProfile
from elixir.models.loading import build
from elixir.search import optimal_search
from elixir.units import GIB
from tests.common.samples import make_hardware, make_plan, make_trace

BATCH = {"x": torch.ones(4, 256)}
KNOWN: dict[str, Any] = {"hardware": "h200", "host_budget": "64GiB"}


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))


def step(model: nn.Module, inp: dict[str, Any]) -> None:
    model(inp["x"]).sum().backward()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# -------------------------------------------------------------------------------------------------------- host memory


def test_the_short_form_works_where_there_is_no_gpu(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No machine is named: it is planned for this one's free host memory, and that is said."""
    monkeypatch.setattr("elixir.search.budgets.free_host_bytes", lambda: 20 * GIB)
    with caplog.at_level(logging.WARNING):
        plan = optimal_search(small(), 1, inp=BATCH, step_fn=step).plan
    assert plan.host_budget_bytes + plan.host_reserve_bytes == 20 * GIB
    assert plan.host_reserve_bytes == 4.5 * GIB
    assert "20.00 GiB" in caplog.text


# -------------------------------------------------------------------------------------------------- values and types


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"unified_dtype": torch.int8}, InputError, "float32, bfloat16"),
        ({"unified_dtype": torch.float8_e4m3fn}, InputError, "float32, bfloat16"),
        ({"optimizer_type": torch.optim.Adam}, InputTypeError, "a name such as 'Adam'"),
        ({"world_size": 10**20}, InputError, "at most 1,048,576"),
    ],
)
def test_values_that_cannot_be_meant(options: dict[str, Any], error: type[Exception], said: str) -> None:
    arguments: dict[str, Any] = {"world_size": 1, "inp": BATCH, "step_fn": step, **KNOWN} | options
    with pytest.raises(error, match=said):
        optimal_search(small(), **arguments)


# ------------------------------------------------------------------------------------------------ what does not fit


# -------------------------------------------------------------------------------------------------- the wrong file


def test_a_file_of_ours_is_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(make_trace(layers=1).save(tmp_path / "trace.json"))
    assert main(["profile", path]) == 2
    assert f"found a step trace, which `elixir show {path}` prints" in capsys.readouterr().err


def test_a_plan_is_no_hardware_profile(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="expected a hardware profile, but field 'artifact' is 'plan'"):
        HardwareProfile.load(make_plan(2).save(tmp_path / "plan.json"))


def test_a_trace_of_an_unknown_machine_asks_for_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import dataclasses

    path = str(dataclasses.replace(make_trace(layers=2), device="my-box").save(tmp_path / "trace.json"))
    assert main(["plan", path]) == 2
    assert "give --hardware" in capsys.readouterr().err
    hardware = str(make_hardware("my-box").save(tmp_path / "hw.json"))
    assert main(["plan", path, "--brief", "--hardware", hardware, "--host-budget", "64GiB"]) == 0
    assert capsys.readouterr().err == ""


# ------------------------------------------------------------------------------------------------------------ models


@pytest.mark.parametrize("name", ["", "mods", "mods:"])
def test_an_unknown_model_says_what_else_may_be_given(name: str) -> None:
    with pytest.raises(InputError, match=f"unknown model '{name}'.*config.json, or module:function"):
        build(name)


def test_an_error_in_a_factory_is_placed_in_the_callers_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_factories.py").write_text("def fails():\n    return 1 / 0\n\ndef needs(size):\n    return size\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"user_factories\.py:2\)$"):
        build("user_factories:fails")
    # Neither the call of `needs` nor the failing import is a line of the user's.
    with pytest.raises(InputError, match="missing 1 required positional argument: 'size'$"):
        build("user_factories:needs")
    with pytest.raises(InputError, match="No module named 'user_nothing'$"):
        build("user_nothing:f")


# ----------------------------------------------------------------------------------------------------------- showing


def test_tables_stay_readable_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(make_plan(2).save(tmp_path / "a.json"))
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["compare", path, path]) == 0
    assert any("hardware" in line and line.count("h200") == 2 for line in capsys.readouterr().out.splitlines())


def test_a_closed_output_is_no_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert main(["models"]) == 0
