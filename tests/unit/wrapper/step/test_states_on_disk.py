"""Optimizer states on a disk while a model trains: the bits of states in memory, and the bytes of the plan."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir.chunk.lanes import Emulation
from elixir.errors import DiskError, StateError
from elixir.plan.plan import Plan
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.run_options import Debug
from tests.common import inside
from tests.common.early import all_early
from tests.common.on_disk import BrokenDisk, in_memory, on_disk
from tests.common.parity import Case, Pair, case, make_plan, take_step
from tests.common.spawn import child

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("every", [1, 2])
def test_same_bits_as_plain_pytorch(name: str, every: int, tmp_path: Path) -> None:
    """Whatever makes its states when: before the first step, with it, in the constructor, or never."""
    it = case("gpt2")
    plan = on_disk(make_plan(it, "streamed"), every)
    with Pair(it, plan, optimizer=OPTIMIZERS[name], disk_folder=tmp_path, max_norm=0.5) as pair:
        for _ in range(2):
            pair.train(2)
            pair.assert_same_weights()  # between steps masters come into memory
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["AdamW", "momentum"])
def test_same_bits_where_new_states_on_a_disk_are_made_in_backward(name: str, tmp_path: Path) -> None:
    it = case("gpt2")
    plan = all_early(on_disk(make_plan(it, "streamed"), 2))
    delays = Emulation(delay_s=0.003, seed=1)
    with Pair(it, plan, optimizer=OPTIMIZERS[name], disk_folder=tmp_path, emulation=delays) as pair:
        for _ in range(2):
            pair.train(2)
            pair.assert_same_weights()


def run(it: Case, plan: Plan, steps: int = 4, **options: Any) -> tuple[ElixirModule, ElixirOptimizer]:
    module = ElixirModule(it.model, plan, **options)
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.module.parameters(), lr=1e-3), max_norm=1.0)
    for _ in range(steps):
        take_step(optimizer, module(**it.inp).loss)
    return module, optimizer


def assert_same(one: Any, other: Any) -> None:
    """Nested dicts of tensors and numbers have the same bits."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for each, its in zip(one, other, strict=True):
            assert_same(each, its)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def test_weights_that_are_written_reach_the_masters_on_the_disk(tmp_path: Path) -> None:
    plan = make_plan(case("gpt2"), "streamed", unified_dtype="bfloat16")
    module, optimizer = run(case("gpt2"), on_disk(plan), disk_folder=tmp_path)
    twin, its_optimizer = run(case("gpt2"), in_memory(plan))
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    states = optimizer.state_dict()
    for each, its in ((module, optimizer), (twin, its_optimizer)):
        with each.gathered(write=True):
            for parameter in each.module.parameters():
                parameter.data.mul_(1.5)
        take_step(its, each(**case("gpt2").inp).loss)
    assert_same(module.state_dict(), twin.state_dict())
    for name, value in module.state_dict().items():  # written in bfloat16, then stepped once
        torch.testing.assert_close(value, 1.5 * saved[name], rtol=2**-7, atol=2e-3)
    for each, its in ((module, optimizer), (twin, its_optimizer)):
        each.load_state_dict(saved)
        its.load_state_dict(states)
    assert_same(dict(module.state_dict()), saved)
    assert_same(optimizer.state_dict(), its_optimizer.state_dict())
    one, other = [chunk.stored for chunk in inside.chunks(module) if chunk.stored is not None][:2]
    with one.in_memory(), pytest.raises(StateError, match="still in use"), other.in_memory():
        pass


# --- what fails ----------------------------------------------------------------------------------------------------


def test_a_full_disk_is_told_before_training(tmp_path: Path) -> None:
    it = case("gpt2")
    plan = on_disk(make_plan(it, "streamed"))
    full = BrokenDisk(errno.ENOSPC, ("allocate",), at=3)
    with pytest.raises(DiskError, match="chunk 2") as caught:
        ElixirModule(it.model, plan, disk_folder=tmp_path, debug=Debug(files=full))
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["read", "write"])
def test_a_disk_that_fails_stops_the_training_and_weights_can_be_saved(way: str, tmp_path: Path) -> None:
    it = case("gpt2")
    disk = BrokenDisk(errno.EIO, (way,))
    plan = make_plan(it, "streamed")
    module, optimizer = run(it, on_disk(plan), steps=2, disk_folder=tmp_path, debug=Debug(files=disk))
    module.settle()
    disk.break_it()

    def train() -> None:
        for _ in range(2):
            optimizer.backward(module(**it.inp).loss)
            optimizer.step()

    with pytest.raises(DiskError, match="chunk") as caught:
        train()
    assert (caught.value.errno, caught.value.operation) == (errno.EIO, way)
    for again in (module.settle, optimizer.step):
        with pytest.raises(DiskError):
            again()
    state = module.state_dict()
    assert all(bool(value.isfinite().all()) for value in state.values() if value.is_floating_point())
    module.close()
    assert all(not parameter.is_meta for parameter in it.model.parameters())


# --- checkpoints and kills -----------------------------------------------------------------------------------------


MOMENTS = 50


def _train_until_killed(say: Any, folder: Path) -> None:
    it = case("gpt2")
    plan = on_disk(make_plan(it, "streamed"))
    say.send("begin")
    run(it, plan, steps=100_000, disk_folder=folder)


@pytest.mark.slow
def test_nothing_is_left_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    """The process is killed before the file is made, in the first step, and in many others."""
    for number in range(MOMENTS):
        with child(_train_until_killed, tmp_path) as (process, hear):
            assert hear.recv() == "begin"
            time.sleep(1.5 * number / MOMENTS)
            assert process.is_alive()  # killed at work, and not after an error
            process.kill()
            process.join()
            assert list(tmp_path.iterdir()) == []
