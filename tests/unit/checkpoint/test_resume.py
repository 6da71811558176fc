"""Three steps, a checkpoint and three more steps, in another model, are the bits of six steps."""

from __future__ import annotations

import contextlib
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elixir.checkpoint import load_checkpoint, save_checkpoint
from elixir.checkpoint_format.slice_reader import open_checkpoint
from elixir.errors import InputError
from elixir.plan.plan import Plan
from elixir.wrapper.training_states import ChunkStates
from tests.common import inside
from tests.common.early import all_early, attempts
from tests.common.file_faults import UnsyncedFiles
from tests.common.parity import Case, case, make_plan, rehomed, report_of
from tests.common.resuming import Lion, Make, Run, differing, two_groups
from tests.common.user_optimizers import Own

FILES = UnsyncedFiles()


def interrupted(
    it: Case,
    plan: Plan,
    make: Make,
    folder: Path,
    *,
    another: Plan | None = None,
    writes: bool = False,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """Results of six steps, and of three, a load and three; saved while the first run goes on, perhaps after a write to
    a weight."""
    with Run(it, plan, make, **options) as run:
        run.train(3)
        if writes:
            next(run.module.parameters()).data.mul_(2)
        saving = save_checkpoint(folder, run.state(epoch=3), step=3, files=FILES)
        losses = run.train(3)
        drawn = torch.rand(3).tolist(), random.random(), float(np.random.rand())  # noqa: NPY002
        saved = saving.wait()
        whole = run.bits() | {"losses": losses, "drawn": drawn}
    assert saved.exact
    torch.manual_seed(99)  # what a new process would have drawn differently
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002
    with Run(it, plan if another is None else another, make, **options) as run:
        state = run.state(epoch=0)
        loaded = load_checkpoint(folder, state, files=FILES)
        assert state["epoch"] == 3
        losses = run.train(3)
        drawn = torch.rand(3).tolist(), random.random(), float(np.random.rand())  # noqa: NPY002
        return whole, run.bits() | {"losses": losses, "drawn": drawn}, loaded


def check(it: Case, plan: Plan, make: Make, folder: Path, **options: Any) -> None:
    whole, resumed, loaded = interrupted(it, plan, make, folder, **options)
    assert differing(whole, resumed) == []
    assert loaded.exact, loaded.notes
    assert (loaded.step, loaded.world_size, loaded.sequence) == (3, 1, 1)


def test_float16_in_the_middle_of_a_loss_scale_interval(tmp_path: Path) -> None:
    it = case("opt")
    plan = make_plan(it, "mixed", unified_dtype="float16")
    with Run(it, plan, two_groups(), initial_scale=2.0**10, growth_interval=4) as run:
        run.step(scale=1e38)  # overflows: the scale is halved and counts begin anew
        run.train(3)
        assert run.optimizer.loss_scale == 2.0**9
        saving = save_checkpoint(tmp_path / "run", run.state(), files=FILES)
        run.step()
        assert run.optimizer.loss_scale == 2.0**10  # the fourth good step, of which three were before the save
        whole = run.bits()
        saving.wait()
    with Run(it, plan, two_groups()) as run:
        load_checkpoint(tmp_path / "run", run.state(), files=FILES)
        run.step()
        assert differing(whole, run.bits()) == []


@pytest.mark.parametrize("split_number", [8, 3])
def test_float32_weights_with_8_bit_moments(split_number: int, tmp_path: Path) -> None:
    """No block of codes is shared by parameters, so codes go into other chunks as they are."""
    it = case("opt")
    plan, another = (make_plan(it, "mixed", moments="8bit", split_number=number) for number in (8, split_number))
    assert plan.alignment_bytes == 1024
    whole, resumed, loaded = interrupted(it, plan, two_groups(), tmp_path / "run", another=another)
    assert loaded.exact, loaded.notes
    with open_checkpoint(tmp_path / "run") as saved:
        codes = [key for key, each in saved.index.tensors.items() if each.block_numel is not None]
        assert len(codes) == 2 * len(saved.index.names)
    if split_number == 8:
        assert differing(whole, resumed) == []


@pytest.mark.parametrize(
    "make",
    [
        two_groups(torch.optim.SGD, momentum=0.9),
        two_groups(torch.optim.Adagrad),
        two_groups(torch.optim.NAdam),  # a separate product for every parameter
        two_groups(torch.optim.AdamW, amsgrad=True),
        two_groups(Lion),
    ],
    ids=["sgd", "adagrad", "nadam", "amsgrad", "lion"],
)
def test_other_optimizers(make: Make, tmp_path: Path) -> None:
    it = case("cnn")  # batch norm has buffers
    check(it, make_plan(it, "mixed", optimizer_type="AdamW"), make, tmp_path / "run")


def test_a_save_that_is_refused_leaves_new_states_right(tmp_path: Path) -> None:
    it = case("gpt2")
    with Run(it, all_early(rehomed(make_plan(it, "streamed"), "states")), two_groups()) as run:
        run.train(1)
        run.optimizer.backward(it.loss(run.module, run.case.inp))
        begun = attempts(run.module)
        with pytest.raises(InputError, match="between backward and step"):
            save_checkpoint(tmp_path / "run", run.state(), files=FILES)
        run.optimizer.step()
        report = report_of(run.module)
        assert 0 < report.early.kept == report.early.made == len(begun)


@pytest.mark.parametrize("homes", ["streamed", "states"])
def test_states_exchanged_before_the_save_reads_them(homes: str, tmp_path: Path) -> None:
    """The old states are saved, although the chunk has other memory by the time at which anybody looks at them."""
    it = case("gpt2")
    plan = all_early(rehomed(make_plan(it, "streamed"), homes))
    exchanged = threading.Event()

    def released() -> None:
        assert exchanged.wait(60)

    class LateFiles(UnsyncedFiles):
        def call(self, *args: Any) -> Any:
            released()
            return super().call(*args)

    with Run(it, plan, two_groups()) as run, contextlib.ExitStack() as at_last:
        at_last.callback(exchanged.set)
        run.train(3)
        wanted = run.bits()
        host_adam = inside.lane(run.module, "host_adam")
        saving = save_checkpoint(tmp_path / "run", run.state(), step=3, files=LateFiles())
        held = host_adam.submit(released)
        run.optimizer.backward(it.loss(run.module, run.case.inp))
        run.optimizer.step()
        report = report_of(run.module)
        assert report.early.kept == len([chunk for chunk in plan.chunks if chunk.home.early]) > 0
        assert not held.done()
        exchanged.set()
        saving.wait()
        assert differing(wanted, run.bits()) != []
    with Run(it, plan, two_groups()) as run:
        load_checkpoint(tmp_path / "run", run.state(), files=FILES)
        assert differing(wanted, run.bits()) == []


class _Averaging(Lion):
    """Makes one more state in its third step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.state[parameter]["step"] >= 3:
                    average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                    average.lerp_(parameter, 0.1)


def test_a_state_that_a_class_makes_late_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save comes while the step that makes it has not begun; the thread that waits for that step lets it begin."""
    it = case("gpt2")
    plan, begins = make_plan(it, "streamed"), threading.Event()
    wait = ChunkStates.wait

    def release_and_wait(states: ChunkStates) -> None:
        begins.set()
        wait(states)

    monkeypatch.setattr(ChunkStates, "wait", release_and_wait)
    with Run(it, plan, two_groups(_Averaging)) as run:
        run.train(2)
        run.module.settle()
        inside.lane(run.module, "host_adam").submit(begins.wait)
        run.step()
        save_checkpoint(tmp_path / "run", run.state(), step=3, files=FILES).wait()
        wanted = run.bits()
    assert any("average" in name for name in wanted)
    with Run(it, plan, two_groups(_Averaging)) as run:
        load_checkpoint(tmp_path / "run", run.state(), files=FILES)
        assert differing(wanted, run.bits()) == []


class _Naming(Own):
    """Keeps a state under a name that a checkpoint uses itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for _, parameters in self.stepped():
            for p in parameters:
                self.state[p].setdefault("weight", torch.zeros_like(p)).add_(p)
        super().step()


def test_a_state_that_is_named_like_a_weight_is_refused(tmp_path: Path) -> None:
    it = case("cnn")
    with Run(it, make_plan(it, "mixed", optimizer_type="AdamW"), two_groups(_Naming)) as run:
        run.train(1)
        with pytest.raises(InputError, match="a state of an optimizer cannot be named 'weight'"):
            save_checkpoint(tmp_path / "run", run.state(), wait=True, files=FILES)
