"""A checkpoint in a run of another kind: other moments, another dtype, plain PyTorch, adapters; and saves that wait."""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elixir.checkpoint import load_checkpoint, loading, save_checkpoint
from elixir.checkpoint_format import slices as saved_tensor
from elixir.checkpoint_format.slice_reader import open_checkpoint, verify
from elixir.checkpoint_format.slices import Piece
from elixir.errors import CheckpointError
from elixir.files import Files
from tests.common import gpu
from tests.common.checkpoints import save
from tests.common.file_faults import FailingFiles, UnsyncedFiles
from tests.common.parity import Case, adamw, case, distance, make_plan
from tests.common.resuming import Run, two_groups

FILES = UnsyncedFiles()


def saved_run(it: Case, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Weights, or their masters if it has any, of a run that was saved after two steps."""
    with Run(it, make_plan(it, "mixed", **options), two_groups()) as run:
        run.train(2)
        save_checkpoint(folder, run.state(), wait=True, files=FILES)
        return {name: value.clone() for name, value in run.module.state_dict().items()}


@pytest.mark.parametrize("formats", [(0, 1), (1, 0)])
def test_weights_that_lay_in_another_order_come_back_by_position(formats: tuple[int, int], tmp_path: Path) -> None:
    theirs, mine = [case("cnn"), case("cnn")]
    for it, last in zip((theirs, mine), formats, strict=True):
        it.model.to(memory_format=torch.channels_last if last else torch.contiguous_format)  # type: ignore[call-overload]
    weights = saved_run(theirs, tmp_path / "run")
    with Run(mine, make_plan(mine, "mixed"), two_groups()) as run:
        loaded = load_checkpoint(tmp_path / "run", run.state(), files=FILES)
        assert loaded.exact, loaded.notes
        assert all(torch.equal(value, weights[name]) for name, value in run.module.state_dict().items())
        with open_checkpoint(tmp_path / "run") as saved:
            expected = saved.optimizer_state_dict()["state"]
        for number, state in run.optimizer.state_dict()["state"].items():
            for kind in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(state[kind], expected[number][kind]), (number, kind)
        run.train(1)


def test_plain_pytorch_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    it = case("opt", layers=1)
    with Run(it, make_plan(it, "mixed"), two_groups()) as run:
        run.train(3)
        save_checkpoint(tmp_path / "run", run.state(), wait=True, files=FILES)
        losses = [run.step() for _ in range(3)]
        weights = run.module.state_dict()
    plain = copy.deepcopy(it.model)
    optimizer = two_groups()(plain)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
    rounded = 0.0 if gpu.DEVICE == "cpu" else 1e-3  # the run's device is not that of the model
    with open_checkpoint(tmp_path / "run") as saved:
        plain.load_state_dict(saved.weights())
        optimizer.load_state_dict(saved.optimizer_state_dict())
        scheduler.load_state_dict(saved.value("scheduler"))
    for expected in losses:
        loss = it.loss(plain, it.inp)
        assert loss.item() == pytest.approx(expected, rel=rounded)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert distance([weights[name] for name in plain.state_dict()], list(plain.state_dict().values())) <= rounded


@pytest.mark.sampled
@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_folder_that_nobody_may_write_to_fails_the_save_alone(code: int, tmp_path: Path) -> None:
    it = case("opt", layers=1)
    with Run(it, make_plan(it, "mixed"), adamw) as run:
        run.train(1)
        files = FailingFiles(1, code, forever=True, only=("create", "make"))
        saving = save_checkpoint(tmp_path / "run", run.state(), files=files)
        run.train(1)
        with pytest.raises(CheckpointError, match=os.strerror(code)):
            saving.wait()
        run.train(1)
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(CheckpointError, match="Not a directory|File exists"):
            save_checkpoint(tmp_path / "file", run.state(), wait=True, files=Files())
        save_checkpoint(tmp_path / "run", run.state(), wait=True, files=FILES)
    assert verify(tmp_path / "run") == ()


def test_what_is_read_in_parts_is_cut_where_spans_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each span, which has one checksum, is read once."""
    for module in (loading, saved_tensor):
        monkeypatch.setattr(module, "SPAN_BYTES", 40)
    pieces = tuple(Piece(f"{start}.safetensors", start, 25, 8, (1, 2, 3)) for start in (0, 25))
    saved = saved_tensor.SavedTensor("float32", (50,), None, None, pieces)
    read = list[tuple[int, int]]()

    def noted(key: str, first: int, stop: int) -> torch.Tensor:
        read.append((first, stop))
        return torch.arange(first, stop)

    index = SimpleNamespace(tensors={"weight/w": saved}, state_kinds=lambda names: {}, holds_scales=lambda *_: False)
    source: Any = SimpleNamespace(index=index, read=noted)
    out = torch.empty(46, dtype=torch.float64)
    loading.CheckpointStates(source, ["w"], {}).fill("weight", "w", 4, out)
    assert read == [(4, 10), (10, 20), (20, 25), (25, 35), (35, 45), (45, 50)]
    assert out.tolist() == list(range(4, 50))


@pytest.mark.parametrize(
    ("theirs", "mine", "is_said"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.float16, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, False),
        (torch.float32, torch.float32, False),
    ],
)
def test_weights_that_are_rounded_are_said(
    theirs: torch.dtype, mine: torch.dtype, is_said: bool, tmp_path: Path
) -> None:
    save(tmp_path, {"weight/w": torch.ones(3, dtype=theirs)})
    out = torch.empty(3, dtype=mine)
    with open_checkpoint(tmp_path) as saved:
        states = loading.CheckpointStates(saved, ["w"], {})
        assert bool(states.fill_weights("w", 0, out)) == is_said
        saved.finish()
    assert out.tolist() == [1.0] * 3
