"""A checkpoint of any number of ranks is loaded by any other, into other chunks and homes, with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elixir.checkpoint import load_checkpoint, save_checkpoint
from elixir.checkpoint_format.saved_checkpoint import open_checkpoint
from tests.common.ddp import PLANS, batch_of, plan_for
from tests.common.file_faults import UnsyncedFiles
from tests.common.parity import Case, hf_loss
from tests.common.resuming import Run, two_groups
from tests.common.spawn import run_ranks
from tests.common.tiny_models import tiny

FILES = UnsyncedFiles()
RANKS = (1, 2, 4)
CUTS = 6
"""Chunks in which a model is cut where it is saved, about; where it is loaded, as many, three times and half as many."""


def made(rank: int, world_size: int, home: str, options: dict[str, Any], cuts: int = CUTS) -> Run:
    torch.manual_seed(0)
    model = tiny("opt", layers=1)
    inp = batch_of(model, rank, world_size)
    return Run(Case(model, inp, hf_loss), plan_for(model, inp, home, split_number=cuts, **options), two_groups())


def wrong(run: Run, folder: Path) -> list[str]:
    """Names of weights, states and counts of this rank that are not, bit for bit, those of a checkpoint."""
    found, bits, compared = [], run.bits(), 0
    with open_checkpoint(folder, files=FILES) as saved:
        weights = saved.weights()
        for name, value in bits.items():
            kind, _, rest = name.partition(".")
            if kind == "model":
                same = torch.equal(value, weights[rest])
            elif kind == "small":
                same = value["step"] == saved.index.steps[rest]
            elif isinstance(value, torch.Tensor):
                key, _, start = rest.rpartition(".")
                same = torch.equal(value, saved.read(f"{kind}/{key}", int(start), int(start) + len(value)))
            else:
                continue
            compared += 1
            found += [] if same else [name]
    assert compared > 3
    return found


def _save(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> None:
    for home in PLANS:
        with made(rank, world_size, home, options) as run:
            run.train(2)
            place = Path(folder, f"{world_size}-{home}")
            save_checkpoint(place, run.state(), wait=True, files=FILES)
            assert wrong(run, place) == []


def _load(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> int:
    loads = 0
    for home in PLANS:
        for cuts in (CUTS,) if home == "resident" else (3 * CUTS, CUTS, CUTS // 2):
            with made(rank, world_size, home, options, cuts) as run:
                run.train(1)  # states that are to be replaced
                for place in sorted(Path(folder).iterdir()):
                    loaded = load_checkpoint(place, run.state(), files=FILES)
                    assert [note for note in loaded.notes if "random number" not in note] == []
                    assert wrong(run, place) == [], (place.name, home, cuts)
                    loads += 1
                run.train(1)
    return loads


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"moments": "8bit"}]
    + [{"unified_dtype": "bfloat16", "moments": moments} for moments in ("float32", "bfloat16", "8bit")],
    ids=lambda options: "-".join(options.values()) or "float32",
)
def test_any_ranks_chunks_and_homes_load_the_same_bits(tmp_path: Path, options: dict[str, Any]) -> None:
    for ranks in RANKS:
        run_ranks(ranks, _save, str(tmp_path), options, wait_s=600.0)
    for ranks in RANKS:
        assert set(run_ranks(ranks, _load, str(tmp_path), options, wait_s=600.0)) == {10 * len(RANKS) * len(PLANS)}
