"""A checkpoint of any number of ranks is loaded on any other: every master, moment and count has the same bits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elixir.checkpoint import load_checkpoint, save_checkpoint
from elixir.checkpoint_format.export import export_hf
from elixir.checkpoint_format.slice_reader import SavedCheckpoint, open_checkpoint
from elixir.wrapper.training_states import TrainingStates
from tests.common.ddp import batch_of, plan_for
from tests.common.file_faults import UnsyncedFiles
from tests.common.parity import Case, hf_loss
from tests.common.resuming import Run, two_groups
from tests.common.spawn import run_ranks
from tests.common.tiny_models import tiny

FILES = UnsyncedFiles()
SPLIT = 6
"""Chunks of the plan under which checkpoints are saved, about."""
LOADED_UNDER = (("mixed", 3 * SPLIT), ("host", SPLIT), ("device", SPLIT // 2), ("resident", SPLIT))
"""Homes and chunks of the plans under which they are loaded: a third of the size, the same, twice, the same."""
KEPT: tuple[dict[str, Any], ...] = (
    {"moments": "8bit"},
    {},
    {"unified_dtype": "bfloat16"},
    {"unified_dtype": "bfloat16", "moments": "bfloat16"},
    {"unified_dtype": "bfloat16", "moments": "8bit"},
)


def made(rank: int, world_size: int, kind: str, options: dict[str, Any], split_number: int = SPLIT) -> Run:
    model = tiny("opt", layers=1)
    inp = batch_of(model, rank, world_size)
    plan = plan_for(model, inp, kind, split_number=split_number, **options)
    return Run(Case(model, inp, hf_loss), plan, two_groups())


def compare(run: Run, folder: str | Path) -> Counter[str]:
    """Elements of each tensor of a checkpoint that this rank has, all of which have the bits of the file."""
    run.module.settle()
    found: Counter[str] = Counter()
    small = {}
    with open_checkpoint(folder, files=FILES) as saved:
        for chunk in TrainingStates(run.module, {"optimizer": run.optimizer}).chunks():
            small |= chunk.small()
            for each in chunk.tensors():
                key, numel = f"{each.kind}/{each.name}", each.tensor.numel()
                mine = each.values(0, numel)
                assert torch.equal(mine, saved.read(key, each.first, each.first + numel)), key
                found[key] += numel
        assert {name: each.step for name, each in small.items()}.items() <= saved.index.steps.items()
    return found


def assert_whole(parts: list[Counter[str]], saved: SavedCheckpoint) -> None:
    """All ranks together have each element once."""
    expected = {
        key: tensor.numel for key, tensor in saved.index.tensors.items() if not key.startswith(("value/", "buffer/"))
    }
    assert dict(sum(parts, Counter())) == {key: numel for key, numel in expected.items() if numel}


def _save(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> Counter[str]:
    with made(rank, world_size, "mixed", options) as run:
        run.train(2)
        save_checkpoint(folder, run.state(), wait=True, files=FILES)
        return compare(run, folder)


def _load(rank: int, world_size: int, folder: str, saved_by: int, options: dict[str, Any]) -> list[Counter[str]]:
    found = []
    for kind, split_number in LOADED_UNDER:
        with made(rank, world_size, kind, options, split_number) as run:
            run.train(1)  # what it has is replaced
            loaded = load_checkpoint(folder, run.state(), files=FILES)
            assert [note for note in loaded.notes if "random number" not in note] == []
            assert loaded.exact is (saved_by == world_size)
            found.append(compare(run, folder))
            run.train(1)
    return found


@pytest.mark.parametrize("options", KEPT, ids=lambda options: "-".join(options.values()) or "float32")
@pytest.mark.parametrize("saved_by", [2, 1, 4])
@pytest.mark.parametrize("loaded_by", [1, 2, 4])
def test_every_bit_is_there_on_other_ranks_under_other_plans(
    tmp_path: Path, saved_by: int, loaded_by: int, options: dict[str, Any]
) -> None:
    folder = str(tmp_path / "run")
    parts = run_ranks(saved_by, _save, folder, options)
    answers = run_ranks(loaded_by, _load, folder, saved_by, options)
    with open_checkpoint(folder) as saved:
        assert_whole(parts, saved)
        for under in zip(*answers, strict=True):
            assert_whole(list(under), saved)


def _export(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    with made(rank, world_size, "mixed", options) as run:
        run.train(2)
        save_checkpoint(folder, run.state(), wait=True, files=FILES)
        if rank == 0:
            run.case.model.config.save_pretrained(folder + "-config")
        dist.barrier()
        return {name: value.float().numpy() for name, value in run.module.state_dict().items()}


@pytest.mark.parametrize("options", [{"unified_dtype": "bfloat16"}, {}], ids=["bfloat16", "float32"])
def test_transformers_reads_what_two_ranks_saved(tmp_path: Path, options: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "run"
    states = run_ranks(2, _export, str(folder), options)
    config = f"{folder}-config"
    for dtype in {None: 0, options.get("unified_dtype"): 0}:
        out = export_hf(folder, tmp_path / f"out-{dtype}", dtype=dtype, config=config)
        found = AutoModelForCausalLM.from_pretrained(out).state_dict()
        assert found.keys() == states[0].keys()
        for name, value in found.items():
            assert value.dtype is (torch.float32 if dtype is None else torch.bfloat16)
            for state in states:  # as `state_dict()` gives them: masters, if it has any
                assert torch.equal(value, torch.from_numpy(state[name]).to(value.dtype)), name
