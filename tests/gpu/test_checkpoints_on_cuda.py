"""Checkpoints of runs on CUDA: the same bits after a break, and no access to states without a wait."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elixir.checkpoint import load_checkpoint, saving, snapshot
from elixir.checkpoint.saving import SaveOptions, Saves
from elixir.checkpoint.user_state import UserState
from elixir.checkpoint_format.slice_reader import open_checkpoint
from elixir.chunk.chunk import Chunk
from elixir.plan.plan import Plan
from tests.common import gpu
from tests.common.file_faults import UnsyncedFiles
from tests.common.gpu import needs_gpu, needs_pretended_gpu
from tests.common.parity import MODES, Case, case, make_plan
from tests.common.resuming import Run, differing, two_groups
from tests.cuda_emulator import install
from tests.cuda_emulator.races import HostAccesses, Races, Signal, watching

pytestmark = needs_gpu

KEPT: tuple[dict[str, Any], ...] = ({}, {"unified_dtype": "bfloat16", "moments": "8bit"})


def started(run: Run, folder: Path, pool_bytes: int | None, files: UnsyncedFiles) -> saving.Saving:
    user = UserState.of(run.state())
    return Saves.of(user.states).start(user, SaveOptions(folder, files=files, pool_bytes=pool_bytes))


@pytest.mark.sampled
@pytest.mark.parametrize("options", KEPT, ids=["float32", "8bit"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_goes_on_with_the_same_bits(mode: str, options: dict[str, Any], tmp_path: Path) -> None:
    it = case("opt")
    plan = make_plan(it, mode, **options)
    with Run(it, plan, two_groups()) as run:
        run.train(2)
        under_way = started(run, tmp_path / "run", None, UnsyncedFiles())
        losses = run.train(2)
        under_way.wait()
        whole = run.bits() | {"losses": losses}
    with Run(it, plan, two_groups()) as run:
        loaded = load_checkpoint(tmp_path / "run", run.state(), files=UnsyncedFiles())
        losses = run.train(2)
        assert loaded.exact, loaded.notes
        assert differing(whole, run.bits() | {"losses": losses}) == []


@needs_pretended_gpu
def test_only_the_first_save_pins_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver waits for the device to pin memory, and to give it up, and launches wait for the driver."""
    calls: list[str] = []
    runtime = torch.cuda.cudart()
    for name in ("cudaHostRegister", "cudaHostUnregister"):
        inner = getattr(runtime, name)
        monkeypatch.setattr(runtime, name, lambda *args, name=name, inner=inner: (calls.append(name), inner(*args))[1])
    it = case("opt")
    with Run(it, make_plan(it, "mixed"), two_groups()) as run:
        run.train(1)
        found = []
        for _ in range(3):
            calls.clear()
            started(run, tmp_path / "run", 0, UnsyncedFiles()).wait()
            found.append(list(calls))
            run.train(1)
    assert found == [["cudaHostRegister"], [], []]


# --- order ---------------------------------------------------------------------------------------------------------


class Watched(UnsyncedFiles):
    """Writes down which memory is read for the file: the operating system reads it, and no operator of torch."""

    def call(self, operation: str, path: str, function: Any, *args: Any) -> Any:
        if operation == "write":
            view = args[1]
            start = np.frombuffer(view, dtype=np.uint8).ctypes.data
            install().note("where", 0, [], [], "for the file")
            install().note("host", 0, [(start, start + len(view))], [], "pwrite")
        return super().call(operation, path, function, *args)


class _Condition(threading.Condition):
    """Passes the clocks of the threads on that take turns under it."""

    def __enter__(self) -> bool:
        found = super().__enter__()
        install().note("acquire", id(self), [], [], "")
        return found

    def __exit__(self, *error: Any) -> None:
        install().note("release", id(self), [], [], "")
        super().__exit__(*error)

    def wait(self, timeout: float | None = None) -> bool:
        install().note("release", id(self), [], [], "")
        found = super().wait(timeout)
        install().note("acquire", id(self), [], [], "")
        return found


class _Thread(threading.Thread):
    """A worker, whose work comes after that of the thread that starts it."""

    def start(self) -> None:
        install().note("release", id(self), [], [], "")
        super().start()

    def run(self) -> None:
        install().note("worker", 0, [], [], "")
        install().note("acquire", id(self), [], [], "")
        with HostAccesses():
            super().run()


class _Threading:
    Condition, Event, Thread = _Condition, Signal, _Thread

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class _Hook:
    """`Chunk.before_write`: who finds that a save has taken its hook away comes after that save."""

    def __get__(self, chunk: Any, owner: type | None = None) -> Any:
        install().note("acquire", id(self), [], [], "")
        return chunk.__dict__.get("_hook")

    def __set__(self, chunk: Any, hook: Any) -> None:
        # A thread that finds the hook gone has to find this in the log.
        install().note("release", id(self), [], [], "")
        chunk.__dict__["_hook"] = hook


def watched_saves(monkeypatch: pytest.MonkeyPatch, it: Case, plan: Plan, pool_bytes: int | None, folder: Path) -> Races:
    """Saves while steps go on, one after the other."""
    for module in (snapshot, saving):
        monkeypatch.setattr(module, "threading", _Threading())
    monkeypatch.setattr(Chunk, "before_write", _Hook(), raising=False)
    with watching(monkeypatch) as races:
        run = Run(it, plan, two_groups(), wrap={"debug": None})
        run.train(1)
        for number in range(2):
            under_way = started(run, folder / str(number), pool_bytes, Watched())
            run.train(2)
            under_way.wait()
        run.module.close()
    return races


_EVERY = [(mode, pool_bytes, options) for mode in MODES for pool_bytes in (None, 0) for options in KEPT]


@needs_pretended_gpu
@pytest.mark.parametrize(
    ("mode", "pool_bytes", "options"),
    [it if it[0] == "mixed" and not it[2] else pytest.param(*it, marks=pytest.mark.slow) for it in _EVERY],
)
def test_no_access_without_a_wait(
    mode: str, pool_bytes: int | None, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = case("opt", layers=1)
    it = replace(it, inp=gpu.there(it.inp))
    races = watched_saves(monkeypatch, it, make_plan(it, mode, **options), pool_bytes, tmp_path)
    assert not races.found, races.found[:3]
    for number in range(2):
        with open_checkpoint(tmp_path / str(number)) as saved:
            assert set(saved.index.steps.values()) == {1 + 2 * number}


@needs_pretended_gpu
@pytest.mark.parametrize("mode", ["streamed", pytest.param("resident", marks=pytest.mark.slow)])
def test_updates_that_do_not_wait_are_found(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: updates that never ask whether their chunk is still being written."""
    monkeypatch.setattr(snapshot.Snapshot, "release", lambda self, index: None)
    # Whether the save itself finds that resident weights have changed depends on which thread is first.
    monkeypatch.setattr("elixir.checkpoint.snapshot.ChunkReader.check", lambda self: None)
    it = case("opt", layers=1)
    it = replace(it, inp=gpu.there(it.inp))
    assert watched_saves(monkeypatch, it, make_plan(it, mode), 0, tmp_path).found
