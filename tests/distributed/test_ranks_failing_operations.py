"""An operation fails on one of two ranks: both raise, and both have what must be left (`tests.common.failing`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.common import failing
from tests.common.failing import IN_CHECKPOINT, IN_MEMORY, ON_DISK
from tests.common.spawn import run_ranks

DTYPES = (None, "bfloat16")
DISK_OR_MEMORY = (*ON_DISK, *IN_MEMORY)
MOVES = (("memory", "disk"), ("disk", "memory"), ("both", "disk"), ("memory", "both"))


def on_ranks(rank: int, world_size: int, contract: Callable[..., int], folder: Path, args: list[Any]) -> int:
    mine = folder / str(rank)
    mine.mkdir()
    # Of a checkpoint all ranks have the same folder.
    return contract(folder if contract is failing.saving else mine, rank, world_size, *args)


def run(contract: Callable[..., int], folder: Path, *args: Any) -> list[int]:
    """How often the contract's operation has failed, by rank."""
    return run_ranks(2, on_ranks, contract, folder, list(args))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["allocate", *(kind for kind in DISK_OR_MEMORY if kind != "allocate")])
def test_a_model_that_cannot_be_wrapped_is_as_it_was_or_said_to_be_lost(
    kind: str, dtype: str | None, tmp_path: Path
) -> None:
    here, there = run(failing.wrapping, tmp_path, kind, dtype)
    assert here == there
    assert here or kind in ("read", "close")


@pytest.mark.parametrize("homes", MOVES, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["zeros", *ON_DISK, "pages"])
def test_chunks_that_cannot_move_stay_and_train(
    kind: str, dtype: str | None, homes: tuple[str, str], tmp_path: Path
) -> None:
    here, there = run(failing.rehoming, tmp_path, kind, dtype, homes)
    assert here == there or kind == "close"


@pytest.mark.parametrize("homes", MOVES, ids="-".join)
@pytest.mark.parametrize("kind", ["write", *(kind for kind in DISK_OR_MEMORY if kind != "write")])
def test_weights_outlive_a_move_that_can_go_neither_way(kind: str, homes: tuple[str, str], tmp_path: Path) -> None:
    run(failing.rehoming_for_good, tmp_path, kind, homes)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", None])
@pytest.mark.parametrize("kind", ["read", *(kind for kind in DISK_OR_MEMORY if kind != "read")])
def test_a_model_that_is_closed_has_its_weights(kind: str, dtype: str | None, tmp_path: Path) -> None:
    run(failing.closing, tmp_path, kind, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["write", *(kind for kind in (*IN_CHECKPOINT, *IN_MEMORY) if kind != "write")])
def test_a_checkpoint_that_cannot_be_saved_leaves_the_last_one(kind: str, dtype: str | None, tmp_path: Path) -> None:
    run(failing.saving, tmp_path, kind, dtype)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_no_loss_is_of_weights_of_two_steps(kind: str, tmp_path: Path) -> None:
    here, there = run(failing.computing, tmp_path, kind)
    assert here == there
    assert here
