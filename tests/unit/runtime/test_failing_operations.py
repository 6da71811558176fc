"""Whatever fails in wrapping, moving, saving and closing, nothing is lost (`tests.common.failing` says what is left)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.common.failing import (
    IN_CHECKPOINT,
    IN_MEMORY,
    ON_DISK,
    closing,
    open_files,
    rehoming,
    rehoming_for_good,
    saving,
    wrapping,
)

DTYPES = (None, "bfloat16")
MOVES = (("memory", "disk"), ("disk", "memory"), ("both", "disk"), ("memory", "both"))


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*ON_DISK, *IN_MEMORY])
def test_a_model_that_cannot_be_wrapped_is_as_it_came(kind: str, dtype: str | None, tmp_path: Path) -> None:
    failed = wrapping(tmp_path, 0, 1, kind, dtype)
    assert failed or kind in ("read", "close")


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("homes", MOVES, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*ON_DISK, *IN_MEMORY])
def test_chunks_that_cannot_move_stay_and_train(
    kind: str, dtype: str | None, homes: tuple[str, str], tmp_path: Path
) -> None:
    rehoming(tmp_path, 0, 1, kind, dtype, homes)


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("homes", MOVES, ids="-".join)
@pytest.mark.parametrize("kind", [*ON_DISK, *IN_MEMORY])
def test_weights_outlive_a_move_that_can_go_neither_way(kind: str, homes: tuple[str, str], tmp_path: Path) -> None:
    rehoming_for_good(tmp_path, 0, 1, kind, homes)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*ON_DISK, *IN_MEMORY])
def test_a_model_that_is_closed_has_its_weights(kind: str, dtype: str | None, tmp_path: Path) -> None:
    closing(tmp_path, 0, 1, kind, dtype)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*IN_CHECKPOINT, *IN_MEMORY])
def test_a_checkpoint_that_cannot_be_saved_leaves_the_last_one(kind: str, dtype: str | None, tmp_path: Path) -> None:
    saving(tmp_path, 0, 1, kind, dtype)


def test_the_open_files_of_a_folder_are_found(tmp_path: Path) -> None:
    handle = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    assert open_files(tmp_path) == [str(tmp_path / "file")]
    os.close(handle)
    assert open_files(tmp_path) == []
