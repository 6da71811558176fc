"""Errors on a lane are told, leave the states of one step or of the next, and are never saved for another's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir.checkpoint import save_checkpoint
from elixir.checkpoint_format.slice_reader import open_checkpoint
from elixir.errors import CheckpointError, DiskError, StepError
from elixir.wrapper.run_options import Debug
from elixir.wrapper.step.shard import SteppedShard
from tests.common import gpu, inside
from tests.common.early import all_early, attempts, backward_watched, chain, early_fails
from tests.common.failing import fails_at
from tests.common.file_faults import UnsyncedFiles
from tests.common.on_disk import on_disk
from tests.common.parity import Pair, case, make_plan, rehomed
from tests.common.resuming import Run, two_groups


class Failing:
    """A function that fails once."""

    def __init__(self, function: Callable[..., Any], error: Exception, at: int = 1) -> None:
        self.function, self.error, self.at, self.calls = function, error, at, 0

    def __get__(self, owner: Any, kind: Any = None) -> Callable[..., Any]:
        return lambda *args, **kwargs: self(owner, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return self.function(*args, **kwargs)


class FailingReads(UnsyncedFiles):
    """Once `left` is set, the read with that number fails."""

    def __init__(self, error: Exception) -> None:
        self.error, self.left = error, 0

    def call(self, operation: str, path: str, function: Callable[..., Any], *args: Any) -> Any:
        if operation == "read" and self.left:
            self.left -= 1
            if not self.left:
                raise self.error
        return super().call(operation, path, function, *args)


def neither(found: dict[str, Any], *others: dict[str, Any]) -> list[str]:
    """Tensors that are the same as in none of `others`."""
    tensors = [name for name, value in found.items() if isinstance(value, torch.Tensor)]
    return [name for name in tensors if not any(torch.equal(found[name], each[name]) for each in others)]


def after(plan: Any, *steps: int) -> list[dict[str, Any]]:
    """Bits after these numbers of steps."""
    found = {}
    with Run(case("gpt2"), plan, two_groups()) as run:
        for step in range(1, max(steps) + 1):
            run.step()
            found[step] = run.bits()
    return [found[step] for step in steps]


@contextlib.contextmanager
def failed_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run whose third step has failed for one chunk, which has not been reported."""
    it = case("gpt2")
    plan = rehomed(make_plan(it, "streamed", unified_dtype="bfloat16"), "states")
    with Run(it, plan, two_groups()) as run:
        run.train(2)
        run.module.settle()
        monkeypatch.setattr(SteppedShard, "step", Failing(SteppedShard.step, RuntimeError("once")))
        run.step()
        yield run


LATER = gpu.on_the_cpu("on CUDA a copy is issued by backward, which raises its error")


@LATER
def test_new_states_that_nothing_made_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients do not come home, so new states are never begun: the chunk keeps those of before, and says so."""
    plan = all_early(make_plan(case("gpt2"), "streamed"))
    before, stepped = after(plan, 3, 4)
    with Run(case("gpt2"), plan, two_groups()) as run:
        run.train(3)
        run.module.settle()
        fails_at(inside.lane(run.module, "offload"), len(plan.chunks), monkeypatch)
        run.optimizer.backward(run.case.loss(run.module, run.case.inp))
        monkeypatch.undo()
        assert len(attempts(run.module)) == len(plan.chunks)

        def step() -> None:
            run.optimizer.step()
            run.module.settle()

        with pytest.raises((StepError, MemoryError), match="no memory on the way"):
            step()
        found = run.bits()
    assert neither(found, before, stepped) == []
    assert neither(found, stepped) != []


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_new_states_that_fail_after_they_were_kept(dtype: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    it = case("gpt2")
    plan = all_early(make_plan(it, "streamed", unified_dtype=dtype))
    before, stepped = after(plan, 3, 4)
    held = threading.Event()
    with Run(it, plan, two_groups()) as run:
        run.train(3)
        run.module.settle()
        early_fails(monkeypatch, RuntimeError("once"), at=2, times=1)
        inside.lane(run.module, "host_adam").submit(held.wait)
        try:
            run.optimizer.backward(run.case.loss(run.module, run.case.inp))
            run.optimizer.step()
            report = run.module.last_report
        finally:
            held.set()
        assert report is not None
        assert report.early.kept == len(plan.chunks)
        with pytest.raises(StepError, match="once"):
            run.module.settle()
        found = run.bits()
    assert neither(found, before, stepped) == []
    assert neither(found, stepped) != []


def test_a_step_that_fails_leaves_those_of_other_chunks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks take turns with the memory through which new weights go to the device."""
    it = case("gpt2")
    plan = rehomed(make_plan(it, "streamed", unified_dtype="bfloat16"), "states")
    assert all(chunk.returns_rounded for chunk in plan.chunks)
    before, stepped = after(plan, 2, 3)
    with Run(it, plan, two_groups()) as run:
        run.train(2)
        run.module.settle()
        failing = Failing(SteppedShard.step, RuntimeError("once"))
        monkeypatch.setattr(SteppedShard, "step", failing)
        run.step()
        with pytest.raises(StepError, match="once"):
            run.module.settle()
        found = run.bits()
    chunk_of = {slot.name: index for index, chunk in enumerate(plan.chunks) for slot in chunk.parameters}
    assert neither(found, before, stepped) == []
    not_stepped = {name.removeprefix("model.") for name in neither(found, stepped)} & chunk_of.keys()
    assert len({chunk_of[name] for name in not_stepped}) == 1


@pytest.mark.parametrize("looks", [False, True])
def test_a_step_that_failed_is_not_saved(looks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with failed_step(monkeypatch) as run:
        save_checkpoint(tmp_path / "first", {"model": run.module}, files=UnsyncedFiles(), wait=True)
        if looks:  # as an evaluation does, which leaves the error to the next step or save
            with run.module.gathered():
                pass
        for _ in range(2):
            with pytest.raises(CheckpointError, match="once"):
                save_checkpoint(tmp_path / "run", run.state(), files=UnsyncedFiles(), wait=True)
            with pytest.raises(StepError, match="once"):
                run.module.settle()
        save_checkpoint(tmp_path / "weights", {"model": run.module}, files=UnsyncedFiles(), wait=True)


@pytest.mark.parametrize("settles", [False, True])
def test_states_that_a_disk_has_lost_are_not_saved(settles: bool, tmp_path: Path) -> None:
    """Whether or not the read has failed when the save begins, and whatever it fails with."""
    it = case("gpt2")
    plan = on_disk(make_plan(it, "streamed", unified_dtype="bfloat16"))
    disk = FailingReads(MemoryError("no memory for a request"))  # no error of a file
    with Run(it, plan, two_groups(), wrap={"disk_folder": tmp_path, "debug": Debug(files=disk)}) as run:
        run.train(2)
        run.module.settle()
        run.optimizer.backward(run.case.loss(run.module, run.case.inp))
        disk.left = 3
        run.optimizer.step()
        run.optimizer.zero_grad()
        if settles:
            with pytest.raises(DiskError, match="no memory for a request"):
                run.module.settle()
        with pytest.raises(CheckpointError, match="no memory for a request"):
            save_checkpoint(tmp_path / "run", run.state(), files=UnsyncedFiles(), wait=True)
        with pytest.raises(DiskError, match="no memory for a request"):
            run.optimizer.state_dict()
        save_checkpoint(tmp_path / "weights", {"model": run.module}, files=UnsyncedFiles(), wait=True)


def test_the_index_names_the_plan_of_the_moment_of_the_save(tmp_path: Path) -> None:
    it = case("gpt2")
    plan = make_plan(it, "streamed")
    moved = threading.Event()

    class LateFiles(UnsyncedFiles):
        def call(self, operation: str, *args: Any) -> Any:
            if operation == "sync":  # of a file into which all is written
                assert moved.wait(60)
            return super().call(operation, *args)

    with Run(it, plan, two_groups()) as run:
        run.train(2)
        saving = save_checkpoint(tmp_path / "run", run.state(), files=LateFiles())
        run.module.rehome(rehomed(plan, "states"))
        moved.set()
        saving.wait()
    with open_checkpoint(tmp_path / "run") as saved:
        assert saved.index.plan_fingerprint == plan.fingerprint


def test_a_step_that_failed_is_told_though_a_forward_raises_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with failed_step(monkeypatch) as run:

        def refuse(*_: object) -> None:
            raise ValueError("bad batch")

        hook = run.module.module.register_forward_pre_hook(refuse)
        with pytest.raises((ValueError, StepError), match="bad batch|once"):  # whichever is first
            run.module(**run.case.inp)
        hook.remove()
        with pytest.raises(StepError, match="once"):
            run.module.settle()


@LATER
@pytest.mark.parametrize("tells", ["step", "forward", "settle", "clip", "save"])
def test_a_gradient_that_did_not_come_home_is_told_though_backward_raises_something_else(
    tells: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = chain()
    with Pair(it, make_plan(it, "streamed", split_number=4)) as pair:
        pair.train(1)
        fails_at(inside.lane(pair.module, "offload"), 3, monkeypatch)

        def refuse(_: object) -> None:
            raise ValueError("bad batch")

        with pytest.raises(ValueError, match="bad batch"):
            backward_watched(pair, refuse)
        monkeypatch.undo()
        if tells == "save":
            pair.module.zero_grad()
        with pytest.raises((StepError, CheckpointError), match="no memory on the way"):
            {
                "step": pair.optimizer.step,
                "forward": lambda: pair.module(**it.inp),
                "settle": pair.module.settle,
                "clip": lambda: pair.optimizer.clip_grad_norm_(1.0),
                "save": lambda: save_checkpoint(
                    tmp_path / "run", {"model": pair.module, "optimizer": pair.optimizer}, files=UnsyncedFiles()
                ),
            }[tells]()


def test_an_error_of_a_lane_that_backward_has_raised_ends_training(monkeypatch: pytest.MonkeyPatch) -> None:
    it = chain()
    with Pair(it, make_plan(it, "streamed", split_number=4)) as pair:
        pair.train(1)
        loss = it.loss(pair.module, it.inp)
        fails_at(inside.lane(pair.module, "fetch"), 1, monkeypatch)
        with pytest.raises(MemoryError, match="no memory on the way"):
            pair.optimizer.backward(loss)
        monkeypatch.undo()
        pair.optimizer.zero_grad()
        with pytest.raises(StepError, match=r"training has ended.*no memory on the way"):
            pair.module(**it.inp)
