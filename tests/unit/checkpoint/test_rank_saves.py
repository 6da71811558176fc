"""Saves and loads as their users see them: on several ranks, each a thread, and while another save is under way."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir.checkpoint import PerRank, load_checkpoint, save_checkpoint
from elixir.checkpoint import loading as module
from elixir.checkpoint_format import slice_reader, slices
from elixir.checkpoint_format import slices as saved_tensor
from elixir.checkpoint_format.slice_reader import open_checkpoint
from elixir.chunk import group
from elixir.errors import CheckpointError, CheckpointNotFound, ElixirError, FileError, InputError
from elixir.memory_order import flattened
from tests.common import inside
from tests.common.checkpoints import save
from tests.common.file_faults import FailingFiles, UnsyncedFiles
from tests.common.rank_threads import results
from tests.unit.wrapper.test_rank_threads import Rank, Situation

FILES = UnsyncedFiles()
ONE = Situation(size=1)


def state_of(run: Rank, **more: Any) -> dict[str, Any]:
    return {"model": run.module, "optimizer": run.optimizer, **more}


# --- one rank --------------------------------------------------------------------------------------------------------


def test_a_save_that_cannot_be_committed_gives_its_room_back(tmp_path: Path) -> None:
    run = Rank(ONE, 0)
    save_checkpoint(tmp_path, state_of(run), wait=True, files=FILES)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="No space left") as caught:
        save_checkpoint(tmp_path, state_of(run), wait=True, files=FailingFiles(1, only=("rename",)))
    assert isinstance(caught.value.__cause__, FileError)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    run.module.close()


def test_a_save_reports_the_error_of_the_one_before_if_nobody_has_seen_it(tmp_path: Path) -> None:
    run = Rank(ONE, 0)
    save_checkpoint(tmp_path / "a", state_of(run), files=FailingFiles(2))
    with pytest.raises(CheckpointError, match="No space left"):
        save_checkpoint(tmp_path / "a", state_of(run), files=FILES)
    assert save_checkpoint(tmp_path / "a", state_of(run), wait=True, files=FILES).done()
    failed = save_checkpoint(tmp_path / "a", state_of(run), files=FailingFiles(2))
    with pytest.raises(CheckpointError, match="No space left") as caught:
        failed.wait()
    assert isinstance(caught.value.__cause__, FileError)
    assert save_checkpoint(tmp_path / "a", state_of(run), wait=True, files=FILES).done(), "it was seen"
    run.module.close()


class FailingInACircle(FailingFiles):
    """Fails with an error and its cause, whose cause is the error."""

    def call(self, *args: Any) -> Any:
        try:
            return super().call(*args)
        except FileError as error:
            error.__cause__ = OSError("the disk")
            error.__cause__.__cause__ = error
            raise


@pytest.mark.parametrize(
    "files",
    [FILES, FailingFiles(1, only=("write",)), FailingInACircle(1, only=("write",))],
    ids=["whole", "failed", "failed in a circle"],
)
def test_who_keeps_a_save_keeps_no_memory_of_a_closed_module(tmp_path: Path, files: Any) -> None:
    run = Rank(ONE, 0)
    run.step(0)
    saving = save_checkpoint(tmp_path, state_of(run), files=files)
    failed = saving.end()
    engine = inside.engine(run.module)
    parts = (engine, engine.arena, inside.checkpoint_pool(run.module), *engine.chunks)
    kept = [weakref.ref(each) for each in parts]
    run.module.close()
    del run, engine, parts
    gc.collect()
    assert (failed is not None) == (files is not FILES)
    assert [each() for each in kept] == [None] * len(kept)


def test_who_keeps_an_error_keeps_no_tensor_that_was_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[weakref.ref[torch.Tensor]] = []

    def failing(self: slices.SliceWriter, key: str, tensor: torch.Tensor) -> None:
        given.append(weakref.ref(tensor))
        raise FileError(key)

    monkeypatch.setattr(slices.SliceWriter, "write_tensor", failing)
    saving = save_checkpoint(tmp_path, state_of(Rank(ONE, 0), other=torch.ones(3)), files=FILES)
    failed = saving.end()
    gc.collect()
    assert isinstance(failed, CheckpointError)
    assert [each() for each in given] == [None]


@pytest.mark.parametrize("missing", ["load_state_dict", "state_dict"])
def test_an_object_that_cannot_both_save_and_load_is_refused(tmp_path: Path, missing: str) -> None:
    class Half:
        def __getattr__(self, name: str) -> Any:
            if name in {"state_dict", "load_state_dict"} - {missing}:
                return dict
            raise AttributeError(name)

    run = Rank(ONE, 0)
    with pytest.raises(InputError, match=r"half: a .*Half cannot be saved"):
        save_checkpoint(tmp_path, state_of(run, half=Half()), files=FILES)
    with pytest.raises(CheckpointNotFound) as caught:
        load_checkpoint(tmp_path / "none", state_of(run), files=FILES)
    assert not str(caught.value).startswith("rank"), "there is only one"
    run.module.close()


# --- several ranks ---------------------------------------------------------------------------------------------------


def test_ranks_save_and_load_what_is_theirs_and_refuse_what_differs(tmp_path: Path, monkeypatch: Any) -> None:
    inside.limit(monkeypatch, look_s=0.05)
    closed, close = [], group.Group.close
    monkeypatch.setattr(group.Group, "close", lambda self: (closed.append(self), close(self)))

    def message_of(call: Any, run: Rank, folder: str, more: dict[str, Any] | None = None, **options: Any) -> str:
        with pytest.raises(ElixirError) as caught:
            call(tmp_path / folder, state_of(run, **(more or {})), **{"files": FILES} | options)
        return f"{type(caught.value).__name__}: {caught.value}"

    def work(rank: int) -> list[str]:
        run, own, mine = Rank(Situation(), rank), PerRank({"position": rank}), {f"n{rank}": 1}
        run.step(0)
        save_checkpoint(tmp_path / "run", state_of(run, own=own, n=rank), wait=True, files=FILES)
        own.value = None
        state = state_of(run, own=own, n=5)
        load_checkpoint(tmp_path / "run", state, files=FILES)
        assert (own.value, state["n"]) == ({"position": rank}, 0), "rank 0's values are those of all"
        files = FailingFiles(3, only=("write",)) if rank else FILES
        cleaning = FILES if rank else FailingFiles(3, only=("remove",))
        texts = [
            message_of(save_checkpoint, run, f"run{rank}"),
            message_of(save_checkpoint, run, "run", step=rank),
            message_of(save_checkpoint, run, "run", mine),
            message_of(load_checkpoint, run, "run", mine),
            message_of(save_checkpoint, run, "run", {"x": object() if rank else 1}),
            message_of(load_checkpoint, run, "none"),
            message_of(save_checkpoint, run, "run", wait=True, files=files),
            message_of(save_checkpoint, run, "run", {"own": own}, wait=True, files=cleaning),
        ]
        assert load_checkpoint(tmp_path / "run", state_of(run, own=own), files=FILES).world_size == 2
        run.module.close()
        texts.append(message_of(save_checkpoint, run, "run"))
        return texts

    one, two = results(2, work)
    assert [text.partition(": ")[0] for text in one] == [text.partition(": ")[0] for text in two]
    differ = "InputError: ranks save different things: rank 0 ("
    assert all(text.startswith(differ) and "rank 1 (" in text for text in one[:3])
    assert "run0" in one[0]
    assert "run1" in one[0]
    assert one[3].startswith("InputError: ranks load into different things")
    assert one[4].startswith("InputError: rank 1: x: a ")
    assert one[5].startswith("CheckpointNotFound: rank 0: ")
    assert one[6].startswith("CheckpointError: rank 1: ")
    assert "No space left" in one[6]
    assert one[7].startswith("CheckpointError: rank 0: ")
    assert "No space left" in one[7], "what a leader could not remove after its commit is an error of all"
    assert one[8].startswith("InputError: ")
    assert "rank" not in one[8], "ranks that are closed exchange nothing"
    assert one[4:] == two[4:]
    assert len(closed) == 4, "each rank gives back the group of its chunks and that of its saves"


# --- reading into memory of any kind ---------------------------------------------------------------------------------


def test_any_range_of_any_tensor_is_filled_as_it_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its dtype or another, in the order of the dimensions or another."""
    for each in (module, saved_tensor, slices, slice_reader):
        monkeypatch.setattr(each, "SPAN_BYTES", 64)
    torch.manual_seed(0)
    plain = torch.randn(6, 20)
    save(tmp_path, {"weight/w": plain, "exp_avg/w": plain + 1}, world_size=3)
    dice = random.Random(0)
    for wanted in (None, (1, 0)):
        with open_checkpoint(tmp_path) as saved:
            states = module.CheckpointStates(saved, ["w"], {} if wanted is None else {"w": wanted})
            for number in range(30):
                kind = dice.choice(["weight", "exp_avg"])
                start, stop = sorted(dice.sample(range(121), 2))
                dtype = dice.choice([torch.float32, torch.float64, torch.bfloat16])
                out = torch.full((2 * (stop - start),), float("nan"), dtype=dtype)
                target = out[::2] if number % 3 == 0 and stop > start + 1 else out[: stop - start]
                states.fill(kind, "w", start, target)
                saved.finish()
                expected = flattened(plain + (kind == "exp_avg"), wanted)[start:stop].to(dtype)
                assert torch.equal(target, expected), (kind, start, stop, dtype, wanted)
                assert out.isnan().sum() == stop - start, "nothing else is written"


def test_codes_are_read_as_they_are_or_as_values_and_whole_numbers_exactly(tmp_path: Path) -> None:
    codes, count = torch.randint(-127, 128, (300,), dtype=torch.int8), torch.arange(300) + 2**24
    tensors = {"exp_avg/w": codes, "exp_avg_scale/w": torch.rand(2), "count/w": count}
    save(tmp_path, tensors, blocks={"exp_avg/w": 256}, world_size=1)
    with open_checkpoint(tmp_path) as saved:
        states = module.CheckpointStates(saved, ["w"], {})
        for kind, expected in (
            ("exp_avg", codes), ("exp_avg", saved.read_float32("exp_avg/w")), ("count", count.double()),
        ):  # fmt: skip
            out = torch.zeros(590, dtype=expected.dtype)[::2]
            states.fill(kind, "w", 5, out)
            assert torch.equal(out, expected[5:])


def test_memory_is_taken_for_the_reordered_tensors_of_one_parameter_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def noted(tensor: torch.Tensor, order: Any) -> torch.Tensor:
        found = flattened(tensor, order)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(module, "flattened", noted)
    keys = ["weight/v", "exp_avg/v", "weight/v", "weight/w"]
    save(tmp_path, {key: torch.randn(2, 3) for key in keys})
    with open_checkpoint(tmp_path) as saved:
        states, kept = module.CheckpointStates(saved, ["v", "w"], {"v": (1, 0), "w": (1, 0)}), []
        for kind, name in (key.split("/") for key in keys):
            states.fill(kind, name, 0, torch.empty(6))
            kept.append(sum(each() is not None for each in made))
    assert (len(made), kept) == (3, [1, 2, 2, 1])
