"""``elixir checkpoint``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from elixir.cli import main
from elixir.files import aligned_buffer
from tests.common import checkpoints
from tests.common.command_line import fails


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three checkpoints of one run, and a save that was cut off."""
    for step in (10, 20, 30):
        folder = tmp_path / f"step-{step:08}"
        tensors = {"weight/a": torch.full((8, 4), float(step)), "exp_avg/a": torch.ones(8, 4)}
        tensors |= {"ema_weights/a": torch.ones(8, 4)} if step == 30 else {}
        checkpoints.save(folder, tensors, step=step, steps={"a": step}, values={"epoch": step})
    cut = tmp_path / "step-00000040"
    cut.mkdir()
    (cut / "0123456789abcdef-rank-00000-of-00001.safetensors").write_bytes(bytes(aligned_buffer(8)))
    return tmp_path


def test_show(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(runs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["step"] for each in found] == [30, 20, 10]
    assert found[0]["parameters"] == 32
    assert [each["average"] for each in found] == [True, False, False]
    assert main(["checkpoint", "show", str(runs / "step-00000010")]) == 0
    shown = capsys.readouterr().out
    assert "epoch" in shown
    assert " KiB" in shown


def test_verify(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(runs)]) == 0
    path = next((runs / "step-00000020").glob("*-rank-00001-*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert main(["checkpoint", "verify", str(runs / "step-00000020")]) == 2
    assert "wrong checksum" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(runs), "--json"]) == 2
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert [Path(each).name for each in found["whole"]] == ["step-00000030", "step-00000010"]
    assert [Path(each).name for each in found["damaged"]] == ["step-00000020"]
    assert f"load {runs / 'step-00000030'}" in said.err


def test_every_action_has_a_record(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_action = {"verify": ["whole", "damaged"], "export": ["written"], "prune": ["removed"]}
    for action, names in of_action.items():
        more = ["--hf", str(tmp_path / "hf")] if action == "export" else []
        assert main(["checkpoint", action, str(runs), "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [*found] == names
        assert found[names[0]]


def test_export(runs: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    assert main(["checkpoint", "export", str(runs), "--hf", str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a"], torch.full((8, 4), 30.0).bfloat16())
    assert main(["checkpoint", "export", str(runs)]) == 2
    assert main(["checkpoint", "show", str(runs), "--hf", "x"]) == 2


def test_prune(runs: Path) -> None:
    assert main(["checkpoint", "prune", str(runs)]) == 0
    assert sorted(path.name for path in runs.iterdir()) == ["step-00000010", "step-00000020", "step-00000030"]
    (runs / "latest").symlink_to("step-00000030")
    assert main(["checkpoint", "prune", str(runs), "--keep", "2"]) == 0
    (runs / "latest").unlink()
    assert sorted(path.name for path in runs.iterdir()) == ["step-00000020", "step-00000030"]
    assert main(["checkpoint", "prune", str(runs), "--keep", "1"]) == 0
    assert [path.name for path in runs.iterdir()] == ["step-00000030"]
    assert main(["checkpoint", "prune", str(runs / "step-00000030"), "--keep", "1"]) == 2


def test_a_folder_without_a_whole_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{tmp_path} holds no checkpoint" in fails(capsys, "checkpoint", "show", str(tmp_path))
    assert f"{tmp_path} holds no checkpoints" in fails(capsys, "checkpoint", "prune", str(tmp_path))
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "index.json").write_text("{")
    assert "step-00000001" in fails(capsys, "checkpoint", "show", str(tmp_path))
