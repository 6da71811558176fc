"""A folder of checkpoints: retention, the newest that is whole, saves that fail, saves that are cut off."""

from __future__ import annotations

import contextlib
import copy
import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import elixir
from elixir.checkpoint import Checkpoints, load_checkpoint, save_checkpoint
from elixir.checkpoint.saving import SaveOptions, Saves
from elixir.checkpoint.shared_folder import HeartbeatGroup
from elixir.checkpoint.snapshot import Snapshot
from elixir.checkpoint.user_state import UserState
from elixir.checkpoint_format.index import INDEX_NAME
from elixir.checkpoint_format.slice_reader import open_checkpoint, verify
from elixir.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    FileError,
    InputError,
    InputTypeError,
)
from elixir.plan.plan import Plan
from elixir.wrapper.training_states import ChunkStates
from tests.common import inside
from tests.common.file_faults import FailingFiles, UnsyncedFiles
from tests.common.parity import Case, adamw, case, make_plan
from tests.common.resuming import Run, differing

FILES = UnsyncedFiles()


@cache
def planned(name: str, mode: str) -> tuple[Case, Plan]:
    it = case(name)
    return it, make_plan(it, mode)


@pytest.fixture
def run() -> Iterator[Run]:
    with Run(*planned("cnn", "mixed"), adamw) as made:
        made.train(1)
        yield made


def damage(folder: Path) -> None:
    with open_checkpoint(folder) as saved:
        key = next(key for key in saved.keys() if key.startswith("weight/"))  # noqa: SIM118
        piece = saved.index.tensors[key].pieces[0]
    path = folder / piece.file
    content = bytearray(path.read_bytes())
    content[piece.offset] ^= 1
    path.write_bytes(content)


def test_a_checkpoint_and_a_folder_of_them_are_told_apart(run: Run, tmp_path: Path) -> None:
    with Checkpoints(tmp_path, files=FILES) as checkpoints:
        checkpoints.save(3, run.state())
    one = tmp_path / "step-00000003"
    with pytest.raises(InputError, match="is one checkpoint: give Checkpoints the folder around it"):
        Checkpoints(one).load(run.state())
    for wrong in (lambda: open_checkpoint(tmp_path), lambda: load_checkpoint(tmp_path, run.state())):
        with pytest.raises(CheckpointNotFound, match=f"name one, such as {one}"):
            wrong()


def test_saves_that_were_all_cut_off_are_told(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training begins anew then, as if there had been no run: nobody must find that out by the loss."""
    with Checkpoints(tmp_path, files=FILES) as checkpoints:
        assert checkpoints.load(run.state()) is None
        assert not caplog.records
        checkpoints.save(3, run.state())
    (tmp_path / "step-00000003" / INDEX_NAME).unlink()
    assert Checkpoints(tmp_path).load(run.state()) is None
    assert "all saves were cut off, so nothing is loaded: step-00000003" in caplog.text


def test_the_last_ones_stay(run: Run, tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "runs", keep=2, files=FILES) as checkpoints:
        assert checkpoints.load(run.state()) is None
        assert checkpoints.latest() is None
        for step in (500, 1000, 30):  # a run that was begun anew: the latest is not the largest
            run.train(1)
            checkpoints.save(step, run.state())
        checkpoints.close()
        assert checkpoints.steps() == [30, 1000]
        assert checkpoints.latest() == tmp_path / "runs" / "step-00000030"
        bits = run.bits()
        run.train(1)
        loaded = checkpoints.load(run.state())
        assert loaded is not None
        assert (loaded.step, loaded.sequence) == (30, 3)
        assert differing(bits, run.bits()) == []
        assert sorted(os.listdir(tmp_path / "runs")) == ["step-00000030", "step-00001000"]
        with pytest.raises(CheckpointNotFound):
            checkpoints.load(run.state(), 500)


class CountingFiles(UnsyncedFiles):
    """Counts the bytes that are read of each file."""

    def __init__(self) -> None:
        self.read: dict[str, int] = {}

    def call(self, operation: str, path: str, function: Any, *args: Any) -> Any:
        result = super().call(operation, path, function, *args)
        if operation == "read":
            self.read[path] = self.read.get(path, 0) + result
        return result


@pytest.mark.parametrize("keep", [None, 4])
def test_a_save_reads_only_how_the_indexes_next_to_it_begin(run: Run, tmp_path: Path, keep: int | None) -> None:
    """Reading whole indexes of a thousand checkpoints would take seconds in each save."""
    with Checkpoints(tmp_path, keep=None, wait=True, files=FILES) as checkpoints:
        for step in range(4):
            checkpoints.save(step, run.state())
        files = CountingFiles()
        (tmp_path / "step-00000003" / INDEX_NAME).write_text("{")  # damaged: it neither counts nor goes
        assert Checkpoints(tmp_path, keep=keep, wait=True, files=files).save(4, run.state()).wait().sequence == 4
        assert checkpoints.steps() == [0, 1, 2, 4]
        if keep is None:
            read = {path: files.read.get(str(path), 0) for path in tmp_path.glob(f"*/{INDEX_NAME}")}
            assert all(0 < count <= 256 for path, count in read.items() if path.parent.name < "step-00000003"), read


def test_a_damaged_one_is_left_out_and_may_be_saved_again(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=None, wait=True, files=FILES)
    for step in (1, 2, 3):
        checkpoints.save(step, run.state(step=step))
        run.train(1)
    damage(tmp_path / "step-00000003")
    (tmp_path / "step-00000002" / "index.json").write_text("{")
    state = run.state(step=0)
    with caplog.at_level(logging.WARNING):
        loaded = checkpoints.load(state)
    assert loaded is not None
    assert (loaded.step, state["step"]) == (1, 1)
    assert "step-00000003" in caplog.text
    assert "step-00000002" in caplog.text
    run.train(1)  # loading has failed in between, and then it has not
    with pytest.raises(CheckpointCorrupt):
        checkpoints.load(run.state(), 3)
    with pytest.raises(InputError, match="load a checkpoint that is whole"):
        run.train(1)
    with pytest.raises(InputError, match="load a checkpoint that is whole"):
        run.module.state_dict()
    checkpoints.load(run.state(), 1)
    for step in (2, 3):
        checkpoints.save(step, run.state(step=step))
        assert verify(tmp_path / f"step-{step:08}") == ()
        assert len(os.listdir(tmp_path / f"step-{step:08}")) == 3  # index, rank, shared: nothing of the damaged one
    with pytest.raises(InputError, match="step must be 0 or more, found -1"):
        checkpoints.save(-1, run.state())
    for step in (1, 2, 3):
        damage(tmp_path / f"step-0000000{step}")
    with pytest.raises(CheckpointCorrupt, match="step-00000003"):
        checkpoints.load(run.state())


def test_a_save_that_fails_leaves_the_one_before(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "run"
    save_checkpoint(folder, run.state(number=1), wait=True, files=FILES)
    run.train(1)
    counter = FailingFiles(10**9)
    save_checkpoint(tmp_path / "other", run.state(number=2), wait=True, files=counter)
    for at in (1, 2, 5, counter.count // 2, counter.count - 4):
        saving = save_checkpoint(folder, run.state(number=2), files=FailingFiles(at, errno.ENOSPC))
        run.train(1)  # training goes on
        with contextlib.suppress(CheckpointError):  # what comes last may fail after the commit
            saving.wait()
        assert not [
            each
            for fd in os.listdir("/proc/self/fd")
            if (each := os.path.realpath(f"/proc/self/fd/{fd}")).startswith(str(folder))
        ]
        assert verify(folder) == ()
        with open_checkpoint(folder) as saved:
            number = saved.value("number")
        assert len([name for name in os.listdir(folder) if name.startswith(saved.index.id)]) == 2
        assert number in (1, 2)
        save_checkpoint(folder, run.state(number=1), wait=True, files=FILES)
    # Nobody has waited: the next save says so, and the one after goes on.
    caplog.clear()
    save_checkpoint(folder, run.state(), files=FailingFiles(3))
    with pytest.raises(CheckpointError, match="No space left"):
        save_checkpoint(folder, run.state(), files=FILES)
    assert f"{folder} was not saved: " in caplog.text
    save_checkpoint(folder, run.state(number=3), files=FILES).wait()
    with open_checkpoint(folder) as saved:
        assert saved.value("number") == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_save_that_cannot_tell_the_other_ranks_has_its_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(ranks: HeartbeatGroup, error: BaseException) -> CheckpointError:
        raise RuntimeError("a rank is lost")

    monkeypatch.setattr(HeartbeatGroup, "fail", lost)
    before = set(threading.enumerate())
    saving = save_checkpoint(tmp_path / "run", run.state(), files=FailingFiles(3))
    with pytest.raises(CheckpointError, match="was not saved: .*No space left"):
        saving.wait()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=60)  # its error is reported when it ends, which may be after that


class HeldFiles(UnsyncedFiles):
    """Has a save wait when it has written a rank's file."""

    def __init__(self) -> None:
        self.written, self.go = threading.Event(), threading.Event()

    def call(self, operation: str, path: str, function: Any, *args: Any) -> Any:
        if operation == "sync" and "-rank-" in path:
            self.written.set()
            assert self.go.wait(60)
        return super().call(operation, path, function, *args)


def test_of_two_saves_at_once_into_one_folder_none_is_lost(run: Run, tmp_path: Path) -> None:
    """Each takes the other's files for those of a save that was cut off."""
    held = HeldFiles()
    saving = save_checkpoint(tmp_path / "run", run.state(number=1), files=held)
    assert held.written.wait(60)
    it = case("opt", layers=1)
    with Run(it, make_plan(it, "mixed"), adamw) as other:
        save_checkpoint(tmp_path / "run", other.state(number=2), wait=True, files=FILES)
    with pytest.raises(CheckpointError, match=r"run is still being written after 0\.01 s"):
        saving.wait(0.01)
    held.go.set()
    with pytest.raises(CheckpointError, match="another save into the same folder"):
        saving.wait()
    assert verify(tmp_path / "run") == ()
    with open_checkpoint(tmp_path / "run") as saved:
        assert saved.value("number") == 2


def test_states_that_change_their_layout_in_a_save_fail_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ChunkStates.tensors
    monkeypatch.setattr(
        ChunkStates,
        "tensors",
        lambda states: real(states)[: -1 if threading.current_thread().name == "elixir save" else None],
    )
    with pytest.raises(CheckpointError, match=r"states of chunk \d+ changed their layout while they were saved"):
        save_checkpoint(tmp_path / "run", run.state(), wait=True, files=FILES)
    with pytest.raises(CheckpointNotFound):
        load_checkpoint(tmp_path / "run", run.state(), files=FILES)


def test_close_tells_of_a_save_that_failed(tmp_path: Path) -> None:
    it, plan = planned("cnn", "mixed")
    run = Run(it, plan, adamw)
    run.train(1)
    save_checkpoint(tmp_path / "run", run.state(), files=FailingFiles(3))
    with pytest.raises(CheckpointError, match="No space left"):
        run.module.close()
    checkpoints = Checkpoints(tmp_path, files=FailingFiles(3))
    with Run(*planned("cnn", "mixed"), adamw) as other:
        checkpoints.save(1, other.state())
        with pytest.raises(CheckpointError, match="No space left") as caught:
            checkpoints.close()
        assert isinstance(caught.value.__cause__, FileError)
    assert not any(parameter.is_meta for parameter in run.case.model.parameters())  # and gives the model back


def test_an_error_of_the_program_is_not_replaced_by_that_of_a_save(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step, files, says in ((1, FailingFiles(3), True), (2, FILES, False), (None, FILES, False)):
        caplog.clear()
        with pytest.raises(ZeroDivisionError), Checkpoints(tmp_path, files=files) as checkpoints:  # noqa: PT012
            if step is not None:
                checkpoints.save(step, run.state())
            _ = 1 / 0
        assert ("the last checkpoint was not saved" in caplog.text) == says
        assert Checkpoints(tmp_path).steps() == ([] if says else [2]), "it has ended"


def test_memory_for_copies_of_another_size_takes_the_place_of_the_old(run: Run, tmp_path: Path) -> None:
    user, parts = UserState.of(run.state()), inside.arena(run.module).parts
    saves = Saves.of(user.states)
    for nbytes in (4096, 4096, 8192, 0, 4096):
        saves.start(user, SaveOptions(tmp_path, files=FILES, pool_bytes=nbytes + 1)).wait()
        pool = inside.checkpoint_pool(run.module)
        area = pool.take(64)
        assert parts("host").get("checkpoint", 0) == nbytes
        if area is not None:
            pool.give_back(area)


def test_a_disk_that_is_too_small_is_told_before_a_byte_is_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UnsyncedFiles, "free_bytes", lambda self, folder: 1000)
    with pytest.raises(CheckpointError, match="are free") as caught:
        save_checkpoint(tmp_path / "run", run.state(), wait=True, files=FILES)
    assert caught.value.__cause__ is None, "it was raised as it is"
    assert os.listdir(tmp_path / "run") == []


def test_not_the_moment(run: Run, tmp_path: Path) -> None:
    loss = run.case.loss(run.module, run.case.inp)
    run.optimizer.backward(loss)
    for call in (save_checkpoint, load_checkpoint):
        with pytest.raises(InputError, match="between backward and step"):
            call(tmp_path / "run", run.state())  # type: ignore[operator]
    run.optimizer.step()
    save_checkpoint(tmp_path / "run", run.state(), files=FILES)  # before zero_grad: as Lightning does
    run.optimizer.zero_grad()
    load_checkpoint(tmp_path / "run", run.state(), files=FILES)  # waits for the save
    with run.module.gathered(), pytest.raises(InputError, match="outside of gathered"):
        save_checkpoint(tmp_path / "run", run.state())
    with pytest.raises(InputError, match="one ElixirModule"):
        save_checkpoint(tmp_path / "run", {"epoch": 3})
    for wrong in ([run.module], {0: run.module}):
        with pytest.raises(InputTypeError, match="must be a dict by name, such as .*, got (list|dict)"):
            save_checkpoint(tmp_path / "run", wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="value: a "):
        save_checkpoint(tmp_path / "run", run.state(value=lambda: 0))


class Slow(UnsyncedFiles):
    """A disk on which every write takes 10 ms."""

    def call(self, operation: str, path: str, function: Any, *args: Any) -> Any:
        if operation == "write":
            time.sleep(0.01)
        return super().call(operation, path, function, *args)


class Late(Slow):
    """Begins to write the states when an update of the next step waits for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.update_has_come, release = threading.Event(), Snapshot.release

        def released(snapshot: Snapshot, index: int) -> None:
            self.update_has_come.set()
            release(snapshot, index)

        monkeypatch.setattr(Snapshot, "release", released)

    def call(self, operation: str, path: str, function: Any, *args: Any) -> Any:
        if operation == "write" and "rank" in path:
            self.update_has_come.wait(60)
        return super().call(operation, path, function, *args)


@pytest.mark.parametrize("spare", [True, False])
def test_host_memory_keeps_to_the_plan_during_a_save(
    tmp_path: Path, spare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = case("opt")
    plan = make_plan(it, "streamed")
    if not spare:
        plan = make_plan(it, "streamed", host_budget=plan.predicted.host_step_bytes)
    assert bool(plan.predicted.checkpoint_bytes) is spare
    with Run(it, plan, adamw) as run:
        run.train(2)
        saving = save_checkpoint(tmp_path / "run", run.state(), files=Late(monkeypatch))
        run.train(2)
        saving.wait()
        run.train(1)
        arena, report = inside.arena(run.module), run.module.last_report
        assert bool(saving.snapshot.copied_bytes) is spare
        assert saving.stall_s > 0
        assert arena.parts("host").get("checkpoint", 0) == plan.predicted.checkpoint_bytes
        assert 0.95 * plan.predicted.host_peak_bytes <= arena.peak_bytes["host"] <= plan.predicted.host_peak_bytes
        assert report is not None
        assert "host_peak" not in report.surprises()


@pytest.mark.parametrize(("mode", "dtype"), [("resident", None), ("resident", "bfloat16"), ("streamed", None)])
def test_a_weight_that_is_written_to_by_hand_fails_the_save(mode: str, dtype: str | None, tmp_path: Path) -> None:
    """A step writes to the weights of the model, too. It fails no save: a save has masters, or a copy of weights."""
    written = threading.Event()

    class Held(UnsyncedFiles):
        def call(self, operation: str, path: str, function: Any, *args: Any) -> Any:
            if operation == "create" and "rank" in path:
                assert written.wait(60)
            return super().call(operation, path, function, *args)

    it, by_hand = planned("cnn", "mixed")[0], (mode, dtype) == ("resident", None)
    with Run(it, make_plan(it, mode, unified_dtype=dtype), adamw) as run:
        run.train(1)
        saving = save_checkpoint(tmp_path / "run", run.state(), files=Held())
        if by_hand:
            with torch.no_grad():
                next(run.module.module.parameters()).add_(1)
        else:
            threading.Timer(0.05, written.set).start()
            run.train(1)
        written.set()
        if by_hand:
            with pytest.raises(CheckpointError, match="was written to while it was being saved"):
                saving.wait()
        else:
            assert saving.wait().exact
        run.train(1)


def test_frozen_parameters_may_be_left_out(tmp_path: Path) -> None:
    it = case("opt")
    for name, parameter in it.model.named_parameters():
        parameter.requires_grad_("fc1" in name)  # as adapters of LoRA
    plan = make_plan(it, "mixed")
    with Run(it, plan, adamw) as run:
        run.train(2)
        saving = save_checkpoint(tmp_path / "run", run.state(), frozen=False, files=FILES)
        run.train(1)
        saving.wait()
        expected = run.bits()
        weights = list(open_checkpoint(tmp_path / "run").index.names)
    assert weights
    assert all("fc1" in name for name in weights)
    changed = copy.deepcopy(it)
    with torch.no_grad():
        next(p for n, p in changed.model.named_parameters() if "fc2" in n).add_(1)
    with Run(changed, plan, adamw) as run:
        loaded = load_checkpoint(tmp_path / "run", run.state(), files=FILES)
        assert loaded.exact
        found = run.bits()
        assert any("fc2" in name for name in differing(expected, found))  # left as it is here
    with Run(it, plan, adamw) as run:
        load_checkpoint(tmp_path / "run", run.state(), files=FILES)
        run.train(1)
        assert differing(expected, run.bits()) == []


def test_the_public_names() -> None:
    assert elixir.save_checkpoint is save_checkpoint
    assert elixir.load_checkpoint is load_checkpoint
    assert elixir.Checkpoints is Checkpoints
    with pytest.raises(InputError, match="keep"):
        Checkpoints("x", keep=0)
    for keep in (1.5, True):
        with pytest.raises(InputTypeError, match="keep must be a whole number"):
            Checkpoints("x", keep=keep)  # type: ignore[arg-type]


def test_the_package_unpickles_nothing() -> None:
    for path in [
        *Path(elixir.__path__[0], "checkpoint").glob("*.py"),
        *Path(elixir.__path__[0], "checkpoint_format").glob("*.py"),
    ]:
        text = path.read_text()
        assert "pickle" not in text
        assert "torch.load" not in text
