"""The folders of one run's checkpoints: their names, which is the newest, and which of them may go."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from elixir.checkpoint_format.commit import ABSENT, read_index
from elixir.checkpoint_format.index import INDEX_NAME, Index
from elixir.errors import CheckpointError, CheckpointNotFound, FileError
from elixir.files import FILES, Files, PathLike

logger = logging.getLogger(__name__)

STEP_FOLDER = re.compile(r"step-(\d{8,})")
"""Name of the folder of a step; see `step_folder`."""
_BEGINNING = re.compile(
    rb'\{"artifact":"checkpoint","schema_version":%d,"id":"[0-9a-f]{8,32}","sequence":([1-9][0-9]{0,17}),'
    % Index.schema_version
)
_BEGINNING_BYTES = 256


def step_folder(step: int) -> str:
    """Name of the folder of a step, among others of one run."""
    return f"step-{step:08}"


def is_step_folder(folder: Path) -> bool:
    """Whether a folder is that of a step: it has no other name, such as ``best``, and is no link."""
    return STEP_FOLDER.fullmatch(folder.name) is not None and folder.is_dir() and not folder.is_symlink()


def surplus(found: Iterable[Path], keep: int | None) -> list[Path]:
    """Folders of steps beyond the first `keep`, None for all; folders that are no steps neither count nor go."""
    return [] if keep is None else [*islice(filter(is_step_folder, found), keep, None)]


def unfinished(root: Path, files: Files) -> list[str]:
    """Names of folders of steps in `root` that were never committed. No save may be under way there."""
    return [
        name
        for name in files.names(root)
        if is_step_folder(root / name) and not os.path.lexists(root / name / INDEX_NAME)
    ]


def one_checkpoint(folder: PathLike, *, files: Files = FILES) -> Path:
    """The folder itself, or the newest checkpoint in it if it is a folder of checkpoints.

    Raises:
        CheckpointError: none of the checkpoints in it can be read.
    """
    path, damaged = Path(folder), list[CheckpointError]()
    if os.path.lexists(path / INDEX_NAME):
        return path
    found = next(newest_checkpoints(path, damaged, files=files), None)
    if found is None and damaged:
        raise damaged[0]
    for error in damaged:
        logger.warning("left out: %s", error)
    return found or path


def find_checkpoints(root: PathLike) -> tuple[tuple[Path, ...], tuple[CheckpointError, ...]]:
    """The folders in `root` that hold checkpoints, the latest first, and why others cannot be read.

    The latest is the one with the largest `sequence`, not the one with the largest step or the newest file.
    """
    damaged: list[CheckpointError] = []
    return tuple(newest_checkpoints(root, damaged)), tuple(damaged)


def newest_checkpoints(root: PathLike, damaged: list[CheckpointError], *, files: Files = FILES) -> Iterator[Path]:
    """Yields what `find_checkpoints` returns, one at a time: the latest is there before older ones are read.

    Args:
        root: the folder around them.
        damaged: takes why one cannot be read.
        files: the operations it uses.
    """
    known, problems = sequences(root, files=files)
    damaged += problems
    for name in sorted(known, key=lambda name: (-known[name], name)):
        try:
            read_index(Path(root) / name, files=files)
        except CheckpointNotFound:
            continue  # removed meanwhile
        except CheckpointError as error:
            damaged.append(error)
            continue
        yield Path(root) / name


def sequences(root: PathLike, *, files: Files = FILES) -> tuple[dict[str, int], tuple[CheckpointError, ...]]:
    """Name of each folder in `root` that has a checkpoint -> the `sequence` in its index, and why others have none.

    Only the beginning of each index is read, and no checksum: reading a thousand in full would take seconds at every
    save.
    """
    found: dict[str, int] = {}
    damaged: list[CheckpointError] = []
    try:
        names = files.names(root)
    except FileError as error:
        if error.errno in ABSENT:
            return {}, ()
        raise
    for name in names:
        try:
            found[name] = _sequence(Path(root) / name, files)
        except CheckpointNotFound:
            continue  # another folder, a file, or a save that was cut off
        except CheckpointError as error:
            damaged.append(error)
    return found, tuple(damaged)


def _sequence(folder: Path, files: Files) -> int:
    with contextlib.suppress(FileError):  # `read_index` says why it cannot be read
        beginning = _BEGINNING.match(files.read_first(folder / INDEX_NAME, _BEGINNING_BYTES))
        if beginning is not None:
            return int(beginning[1])
    return read_index(folder, files=files).sequence


def next_sequence(folder: PathLike, *, files: Files = FILES) -> int:
    """The `sequence` of a new checkpoint in `folder`: above its present one, and above those in the folders next to
    it."""
    known, _ = sequences(Path(os.path.abspath(folder)).parent, files=files)
    return 1 + max(known.values(), default=0)
