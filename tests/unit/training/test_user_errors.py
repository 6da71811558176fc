"""Mistakes and omissions of users end in a sentence they can act on: library and command line."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elixir.cli import main
from elixir.errors import ArtifactError, InputError, InputTypeError, Lever, PlanError
from elixir.hardware.profile import HardwareProfile, preset
from elixir.models.loading import build
from elixir.search import optimal_search, plan_from_trace, simple_search
from elixir.units import GIB, format_seconds, parse_bytes, parse_dtype
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


def test_a_named_machine_takes_no_memory_from_this_one(no_gpu: None) -> None:
    with pytest.raises(InputError, match="--host-memory 512GiB"):
        optimal_search(small(), 1, inp=BATCH, step_fn=step, hardware="h200")


def test_the_command_line_does_the_same(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("elixir.search.budgets.free_host_bytes", lambda: 20 * GIB)
    trace = str(make_trace(layers=2).save(tmp_path / "trace.json"))
    assert main(["plan", trace, "--brief"]) == 0
    assert "of 15.50 GiB, 4.50 GiB kept back" in capsys.readouterr().out
    assert main(["plan", trace, "--brief", "--host-reserve", "1GiB", "--device-reserve", "0"]) == 0
    shown = capsys.readouterr().out
    assert "of 19.00 GiB, 1.00 GiB kept back" in shown
    assert shown.count("kept back") == 1
    assert main(["plan", trace, "--brief", "--hardware", "h200"]) == 2
    assert "--host-memory" in capsys.readouterr().err


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


@pytest.mark.parametrize("factor", ["half", None, True])
def test_allocate_factor_is_a_number(factor: Any) -> None:
    with pytest.raises(InputTypeError, match="allocate_factor must be a number"):
        simple_search(small(), 1, allocate_factor=factor, inp=BATCH, step_fn=step, **KNOWN)


def test_every_dtype_known_by_name_is_taken_as_itself() -> None:
    for name in ("fp32", "bf16", "fp16", "fp64"):
        assert parse_dtype(parse_dtype(name)) is parse_dtype(name)


# ------------------------------------------------------------------------------------------------ what does not fit


def test_levers_say_whether_they_save_or_add() -> None:
    levers = (Lever("give the host more memory", GIB, effect="adds"), Lever("halve the batch", GIB // 2))
    lines = str(PlanError("too small", needed_bytes=2 * GIB, available_bytes=GIB, levers=levers)).splitlines()
    assert lines[1:] == ["  - give the host more memory (adds 1.00 GiB)", "  - halve the batch (saves 512.00 MiB)"]


@pytest.mark.parametrize("needed", [3, 5 * 2**10 + 1, 17 * 2**20 + 12345, 139 * GIB + 7])
def test_how_far_is_said_in_digits_that_can_be_given(needed: int) -> None:
    text = str(PlanError("too small", needed_bytes=needed, available_bytes=needed - 1))
    said = re.search(r"needed (.+), available (.+), short by 1 B", text)
    assert said is not None
    assert parse_bytes(said[1]) >= needed > parse_bytes(said[2])


def test_a_parameter_that_leaves_no_room_for_its_gradient_is_named() -> None:
    def one_large() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(256, 4_000_000), nn.Linear(4_000_000, 8))

    with pytest.raises(PlanError, match=r"'0\.weight' .*gradient is larger than every chunk") as caught:
        optimal_search(one_large(), 1, inp=BATCH, step_fn=step, device_memory="5GiB", **KNOWN)
    assert caught.value.needed_bytes > 5 * GIB


def test_too_little_host_memory_under_placement_cpu_says_so() -> None:
    with pytest.raises(PlanError, match="where placement 'cpu' puts all weights and states"):
        plan_from_trace(make_trace(layers=4), preset("h200"), 1, host_budget=1, placement="cpu")


# -------------------------------------------------------------------------------------------------- the wrong file


def test_a_file_of_ours_is_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(make_trace(layers=1).save(tmp_path / "trace.json"))
    assert main(["profile", path]) == 2
    assert f"found a step trace, which `elixir show {path}` prints" in capsys.readouterr().err


def test_a_plan_is_no_hardware_profile(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="expected a hardware profile, but field 'artifact' is 'plan'"):
        HardwareProfile.load(make_plan(2).save(tmp_path / "plan.json"))


def test_a_trace_of_another_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A trace is planned for the machine it was made for; --hardware names another, and a line says so."""
    path = str(make_trace(layers=2).save(tmp_path / "trace.json"))
    assert main(["plan", path, "--brief", "--host-budget", "64GiB"]) == 0
    out, err = capsys.readouterr()
    assert "on 1 x h200" in out
    assert err == ""
    assert main(["plan", path, "--brief", "--host-budget", "64GiB", "--hardware", "a100"]) == 0
    out, err = capsys.readouterr()
    assert "on 1 x a100" in out
    assert "traced for h200" in err


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


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0, "0.000 s"), (1.7054, "1.705 s"), (0.075, "0.075 s"), (0.00302, "3.020 ms"), (2.5e-6, "2.500 us")],
)
def test_short_times_do_not_vanish(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown


def test_a_plan_without_streamed_chunks_does_not_speak_of_blocks() -> None:
    plan = optimal_search(small(), 1, inp=BATCH, step_fn=step, **KNOWN).plan
    assert all(chunk.resident for chunk in plan.chunks)
    assert "rCache        none: every chunk is resident" in str(plan)
    assert "host to device 0 B" in str(plan)


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
