"""Errors on a lane are told, leave the states of one step or of the next, and are never saved for another's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir.checkpoint import save_checkpoint
from elixir.errors import CheckpointError, DiskError, StepError
from elixir.wrapper.run_options import Debug
from elixir.wrapper.step.shard import SteppedShard
from tests.common import gpu, inside
from tests.common.early import all_early, attempts
from tests.common.failing import fails_at
from tests.common.file_faults import UnsyncedFiles
from tests.common.on_disk import on_disk
from tests.common.parity import case, make_plan, rehomed
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
