"""A load checks everything that it can check before it writes, and the user's objects come last; also of damaged files."""

from __future__ import annotations

import collections
import errno
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elixir.checkpoint import PerRank, load_checkpoint, save_checkpoint
from elixir.checkpoint.user_state import restore_rng, rng_state
from elixir.checkpoint_format.index import INDEX_NAME
from elixir.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch, InputError
from tests.common import gpu, inside
from tests.common.file_faults import Crash, FailingFiles, RecordingFiles, UnsyncedFiles
from tests.common.parity import adamw, case, make_plan
from tests.common.resuming import Run, differing, values_left
from tests.unit.checkpoint.test_checkpoint_format_damage import damage

FILES = UnsyncedFiles()
Edit = Callable[[dict[str, Any]], Any]


class Fragile:
    """A user's object that may fail to load."""

    def __init__(self, value: int = 0, fails: bool = False) -> None:
        self.value, self.fails = value, fails

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        if self.fails:
            raise KeyError("no such thing")
        self.value = saved["value"]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    it = case("cnn")
    with Run(it, make_plan(it, "mixed"), adamw) as made:
        made.train(1)
        yield made


@pytest.fixture
def saved(run: Run, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, and the bits of a run that has gone on since."""
    values = {"ema": torch.full((4,), 0.97, dtype=torch.float64), "fragile": Fragile(7)}
    save_checkpoint(tmp_path, run.state(**values), wait=True, files=FILES)
    run.train(1)
    return tmp_path, run.bits()


def edited(folder: Path, edit: Edit) -> None:
    """Changes the index by hand, with the checksum that it then should have."""
    body = json.loads((folder / INDEX_NAME).read_text())
    del body["checksum"]
    edit(body)
    (folder / INDEX_NAME).write_text(inside.index_text(body))


@pytest.mark.parametrize("mine", [torch.zeros(5, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)])
def test_a_tensor_that_cannot_take_what_was_saved_changes_nothing(
    run: Run, saved: tuple[Path, dict[str, Any]], mine: torch.Tensor
) -> None:
    folder, before = saved
    with pytest.raises(CheckpointMismatch, match="'ema'"):
        load_checkpoint(folder, run.state(ema=mine), files=FILES)
    assert not mine.any()
    assert differing(before, run.bits()) == []


def test_a_tensor_that_is_cast_is_said(run: Run, saved: tuple[Path, dict[str, Any]]) -> None:
    state = run.state(ema=torch.zeros(4))
    loaded = load_checkpoint(saved[0], state, files=FILES)
    assert state["ema"].tolist() == torch.full((4,), 0.97).tolist()
    assert loaded.notes == ("'ema', saved in float64, is cast to float32",)
    assert not loaded.exact


def test_an_object_that_raises_is_named_and_the_module_waits_for_a_whole_load(
    run: Run, saved: tuple[Path, dict[str, Any]]
) -> None:
    state = run.state(fragile=Fragile(fails=True), ema=torch.zeros(4, dtype=torch.float64))
    with pytest.raises(CheckpointError, match="load_state_dict of 'fragile', a Fragile, raised KeyError"):
        load_checkpoint(saved[0], state, files=FILES)
    assert state["ema"].any(), "an object was loaded before a plain value"
    for refused in (run.step, run.module.state_dict, lambda: save_checkpoint(saved[0], run.state(), files=FILES)):
        with pytest.raises(InputError, match="load a checkpoint that is whole"):
            refused()  # type: ignore[operator]
    state["fragile"].fails = False
    assert load_checkpoint(saved[0], state, files=FILES).exact
    assert state["fragile"].value == 7
    run.step()


def drop(key: str) -> Edit:
    return lambda body: body["rng"][0].pop(key)


def rename_optimizer(body: dict[str, Any], *names: str) -> None:
    """Gives the saved optimizer several names, the groups the first."""
    (said,) = body["optimizers"].values()
    body["optimizers"] = dict.fromkeys(names, said)
    for group in body["param_groups"]:
        group["optimizer"] = names[0]


EDITS: dict[str, Edit] = {
    "rng lacks a generator": drop("numpy"),
    "rng is no dict": lambda body: body.__setitem__("rng", [3]),
    "rng of python": lambda body: body["rng"][0].__setitem__("python", [1]),
    "rng of torch": lambda body: body["rng"][0].__setitem__("torch", body["rng"][0]["python"]["items"][1]),
    "rng of numpy": lambda body: body["rng"][0].__setitem__("numpy", "MT19937"),
    "options are no dict": lambda body: body["param_groups"][0].__setitem__("options", 3),
    "optimizer is no dict": lambda body: body["optimizers"].__setitem__("optimizer", [1]),
    "loss scale": lambda body: body.__setitem__("loss_scale", {"value": {"$": "int", "hex": hex(10**400)}}),
    "scalar": lambda body: body["scalars"].__setitem__("0.weight", {"x": "text"}),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edited_index_is_refused_before_anything_is_written(
    run: Run, saved: tuple[Path, dict[str, Any]], edit: Edit
) -> None:
    folder, before = saved
    edited(folder, edit)
    with pytest.raises((CheckpointCorrupt, CheckpointMismatch)):
        load_checkpoint(folder, run.state(), files=FILES)
    assert differing(before, run.bits()) == []


def test_weights_of_another_shape_are_refused(run: Run, saved: tuple[Path, dict[str, Any]]) -> None:
    folder, before = saved
    edited(folder, lambda body: body["tensors"]["weight/0.weight"]["shape"].reverse())
    with pytest.raises(CheckpointMismatch, match=r"1 parameters have another shape, such as 0\.weight"):
        load_checkpoint(folder, run.state(), files=FILES)
    assert differing(before, run.bits()) == []


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda body: body["tensors"].pop("buffer/1.running_mean"), "buffers differ: missing 1.running_mean"),
        (lambda body: body["param_groups"][0]["names"].pop(), "are in no group, or in several"),
        (
            lambda body: rename_optimizer(body, "one", "two"),
            "has no optimizer 'optimizer', only one, two; leave it out",
        ),
        (lambda body: body["values"]["ema"].__setitem__("key", "value/none"), "a value names this tensor"),
    ],
)
def test_parts_that_the_checkpoint_lacks_are_refused(
    run: Run, saved: tuple[Path, dict[str, Any]], edit: Edit, words: str
) -> None:
    folder, before = saved
    edited(folder, edit)
    with pytest.raises((CheckpointCorrupt, CheckpointMismatch), match=words):
        load_checkpoint(folder, run.state(ema=torch.zeros(4, dtype=torch.float64)), files=FILES)
    assert differing(before, run.bits()) == []


def test_optimizers_that_are_only_in_the_checkpoint_are_noted(
    run: Run, saved: tuple[Path, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    edited(saved[0], lambda body: rename_optimizer(body, "optimizer", "other"))
    with caplog.at_level("INFO", "elixir.checkpoint.loading"):
        notes = load_checkpoint(saved[0], run.state(), files=FILES).notes
    assert "optimizers that are not in the state are skipped: other" in notes
    assert f"{saved[0]}: {notes[0]}" in caplog.messages


def test_parameters_that_the_checkpoint_lacks_are_left_if_it_need_not_be_strict(
    run: Run, saved: tuple[Path, dict[str, Any]]
) -> None:
    def rename_bias(body: dict[str, Any]) -> None:
        body["tensors"] = {key.replace("/1.bias", "/9.bias"): each for key, each in body["tensors"].items()}
        for group in body["param_groups"]:
            group["names"] = [name.replace("1.bias", "9.bias") for name in group["names"]]
        body["steps"]["9.bias"] = body["steps"].pop("1.bias")

    folder, before = saved
    edited(folder, rename_bias)
    with pytest.raises(CheckpointMismatch, match=r"another model: missing 1\.bias, unexpected 9\.bias"):
        load_checkpoint(folder, run.state(), files=FILES)
    notes = load_checkpoint(folder, run.state(order=PerRank(3)), strict=False, files=FILES).notes
    assert "values that the checkpoint lacks are left as they are: order" in notes
    assert "parameters that the checkpoint lacks are left as they are: 1.bias" in notes
    assert "parameters that are not here are skipped: 9.bias" in notes
    assert torch.equal(run.bits()["model.1.bias"], before["model.1.bias"])


def test_values_of_each_rank_need_as_many_ranks(run: Run, tmp_path: Path) -> None:
    state = run.state(order=PerRank([3, 1]))
    save_checkpoint(tmp_path, state, wait=True, files=FILES)
    edited(
        tmp_path,
        lambda body: body.update({"world_size": 2, "rng": body["rng"] * 2, "rank_values": body["rank_values"] * 2}),
    )
    with pytest.raises(CheckpointMismatch, match="order for each of 2 ranks, here are 1"):
        load_checkpoint(tmp_path, state, files=FILES)
    del state["order"]
    assert load_checkpoint(tmp_path, state, files=FILES).notes


@gpu.on_the_cpu("a CUDA device is here")
def test_random_numbers_of_a_device_that_is_not_here_are_noted(run: Run, saved: tuple[Path, dict[str, Any]]) -> None:
    edited(saved[0], lambda body: body["rng"][0].__setitem__("cuda", body["rng"][0]["torch"]))
    loaded = load_checkpoint(saved[0], run.state(), files=FILES)
    assert not loaded.exact
    assert "random numbers of a CUDA device" in loaded.notes[0]


def test_the_generator_of_a_device_is_saved_tried_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    device, numbers, told = torch.device("cuda", 1), torch.arange(4, dtype=torch.uint8), list[tuple[Any, ...]]()
    ordinary = torch.Generator

    def generator(of: Any) -> Any:
        return ordinary(of) if of != device else SimpleNamespace(set_state=lambda state: told.append(("try", state)))

    monkeypatch.setattr(torch, "Generator", generator)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda of: {device: numbers}[of])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, of: told.append((of, state)))
    state = rng_state(device)
    before = torch.get_rng_state()
    torch.rand(1)
    assert restore_rng(state, device, try_only=True) == set()
    assert not torch.equal(torch.get_rng_state(), before)
    assert told == [("try", numbers)]
    assert restore_rng(state, device) == set()
    assert torch.equal(torch.get_rng_state(), before)
    assert told[1:] == [(device, numbers)]
    (note,) = restore_rng(state, torch.device("cpu"))
    assert restore_rng(rng_state(torch.device("cpu")), device) == {note}


READS = ("open", "size", "list", "read")


def test_whatever_fails_in_a_load_it_changed_nothing_or_the_module_waits_for_a_whole_one(
    run: Run, saved: tuple[Path, dict[str, Any]]
) -> None:
    state = run.state(ema=torch.zeros(4, dtype=torch.float64), fragile=Fragile())
    counted = FailingFiles(0, only=READS)
    load_checkpoint(saved[0], state, files=counted)
    whole, ends = run.bits(), []
    for at in range(1, counted.count + 1):
        if not ends or ends[-1] == "waiting":
            run.train(1)
        before = run.bits()
        with pytest.raises(CheckpointError, match="Input/output error"):
            load_checkpoint(saved[0], state, files=FailingFiles(at, errno.EIO, only=READS))
        try:
            assert differing(before, run.bits()) == [], at
            ends.append("unchanged")
        except InputError as error:
            assert "load a checkpoint that is whole" in str(error)  # noqa: PT017
            load_checkpoint(saved[0], state, files=FILES)
            assert differing(whole, run.bits()) == [], at
            ends.append("waiting")
    assert set(ends) == {"unchanged", "waiting"}


# --- damaged files --------------------------------------------------------------------------------------------------


def outcomes_of(run: Run, place: Path, seeds: range) -> collections.Counter[str]:
    whole, bomb = place / "whole", place / "executed"
    save_checkpoint(whole, run.state(number=7, table=torch.arange(5)), wait=True, files=FILES)
    expected, outcomes = run.bits(), collections.Counter[str]()
    for seed in seeds:
        folder = place / "damaged"
        shutil.copytree(whole, folder)
        what = damage(folder, random.Random(seed), bomb)
        state = run.state(number=0, table=torch.zeros(5, dtype=torch.int64))
        try:
            load_checkpoint(folder, state, files=FILES)
            assert differing(expected, run.bits()) == [], f"wrong data after {what}, seed {seed}"
            assert state["number"] == 7
            assert state["table"].tolist() == [0, 1, 2, 3, 4]
            outcomes["right"] += 1
            with run.module.gathered(write=True), torch.no_grad():  # the next load has something to do
                for parameter in run.module.module.parameters():
                    parameter.zero_()
        except CheckpointError as error:
            outcomes[type(error).__name__] += 1
            assert state["number"] == 0, f"half loaded after {what}, seed {seed}"
        shutil.rmtree(folder)
    assert not bomb.exists()
    load_checkpoint(whole, run.state(), files=FILES)
    assert differing(expected, run.bits()) == []
    return outcomes


def test_damage_is_an_error_of_one_family_or_does_not_matter(run: Run, tmp_path: Path) -> None:
    outcomes = outcomes_of(run, tmp_path, range(40))
    assert outcomes["CheckpointCorrupt"] > 20
    assert outcomes["right"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("portion", range(20))
def test_damage_ten_thousand_times(run: Run, tmp_path: Path, portion: int) -> None:
    outcomes = outcomes_of(run, tmp_path, range(500 * portion, 500 * (portion + 1)))
    assert outcomes["CheckpointCorrupt"] > 250


def test_every_prefix_of_a_whole_save_leaves_the_old_or_the_new(run: Run, tmp_path: Path) -> None:
    """Also with all or a part of what was not synchronised dropped: bytes, names and renames."""
    folder = tmp_path / "run"
    save_checkpoint(folder, run.state(number=1), wait=True, files=FILES)
    crash, recorded = Crash(folder), RecordingFiles()
    save_checkpoint(folder, run.state(number=2), wait=True, files=recorded)
    assert values_left(crash, recorded.log, tmp_path, seeds=2) == {1, 2}
