"""`elixir try`: ten steps on this machine, whose bytes are those that were predicted, and a file that can be learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, PropertyMock, call

import pytest
import torch

from elixir.cli import main, trial
from elixir.hardware.profile import HardwareProfile
from elixir.torch_private import MEMORY_MOVES
from tests.common.command_line import fails, page_data

TINY = {
    "model_type": "opt", "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "ffn_dim": 512,
    "num_attention_heads": 4, "max_position_embeddings": 128, "word_embed_proj_dim": 128, "dropout": 0.0,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model, and a machine that is measured for less than two seconds."""
    monkeypatch.setattr(trial, "MEASURING_S", 0.2)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.mark.parametrize(
    "budget", [("--packed", "4"), ("--device-memory", "5.5MiB")], ids=["resident, packed", "streamed"]
)
def test_bytes_are_as_predicted_and_the_file_is_learned(
    config: Path, budget: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    saved, learned, page = (config.with_name(name) for name in ("try.json", "hw.json", "try.html"))
    words = ("try", str(config), "--batch", "2", "--seq", "64", "--host-budget", "1GiB", *budget, "--out", str(saved))
    assert main([*words, "--plot", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "buffers on the host" in printed
    found = json.loads(saved.read_text())
    by_name = {row["name"]: row for row in found["compared"]}
    assert by_name["host to device"]["measured"] > 0 or "--packed" in budget
    for name in ("host to device", "device to host", "buffers on the device"):
        assert by_name[name]["measured"] == by_name[name]["predicted"]
    assert all(row["agrees"] for row in found["compared"] if row["unit"] == "bytes"), by_name
    observed = MEMORY_MOVES or "--packed" in budget  # with blocks from torch 2.13 on
    assert ("peak, device and host" in by_name) == observed
    if observed:
        peak = by_name["peak, device and host"]
        assert peak["measured"] > 1.2 * by_name["buffers on the device"]["measured"], "activations and gradients count"
    (view,) = page_data(page)["views"]
    kinds, entries = [kind["values"] for kind in view["kinds_over_step"]], view["steps"][0]["entries"]
    shown = [sum(each[at] if isinstance(each, list) else each for each in kinds) for at in entries]
    assert max(shown) == found["plan"]["predicted"]["device_peak_bytes"]
    low_s, high_s = by_name["seconds a step"]["range_s"]
    assert low_s < high_s <= trial.MOST_RANGE * low_s
    assert len(found["steps"]) == trial.STEPS - trial.WARM_UP_STEPS - observed  # not timed

    for step in found["steps"]:  # a busy machine may be too slow to be believed
        step["step_s"] = 1.5 * step["predicted_step_s"]
    saved.write_text(json.dumps(found))
    assert main(["hardware", "--learn", str(saved), "--out", str(learned)]) == 0
    before, after = HardwareProfile.from_dict(found["hardware"]), HardwareProfile.load(learned)
    assert after.flops_per_s["float32"] == pytest.approx(before.flops_per_s["float32"] / 1.5)
    assert after.learned is not None
    assert after.learned.steps == len(found["steps"])


def test_learning_needs_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_text("{}")
    assert "--show NAME" in fails(capsys, "hardware", "--learn", str(tmp_path / "report.json"))


def test_what_is_no_report_is_not_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_text("[3]")
    said = fails(capsys, "hardware", "--show", "h200", "--learn", str(tmp_path / "report.json"))
    assert "report.json: expected the numbers of a step's report, or a list of such, found neither" in said


def test_steps_are_timed_after_the_warm_up_and_judged() -> None:
    model: Any = MagicMock(device=torch.device("cuda"), return_value={"loss": 3})
    type(model).last_report = PropertyMock(side_effect=lambda: model.step.call_count)
    timed = [*range(trial.WARM_UP_STEPS + 1, trial.STEPS + 1)]
    assert trial._steps(model, model, {"x": torch.ones(1)}) == (timed, None)
    assert model.method_calls == [call.backward(3), call.step(), call.zero_grad()] * trial.STEPS
    for measured, at_times, agrees in ((1000, 0, True), (1003, 0, False), (900, 0, False), (900, 100, True)):
        assert trial.compared_bytes("device to host", 1000, measured, at_times)["agrees"] is agrees
