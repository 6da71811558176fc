"""Folders of checkpoints: which of them holds a whole one, which is the newest, and which may go.

A checkpoint is committed by one rename of its index. One process of each file system calls `commit`, after all ranks
have written and synchronised their files. With several file systems, each has a separate index, and the renames happen
at different moments. So `commit` keeps the index before it as ``index.previous.json`` until `finish_commit` says which
of the two is the one that all of them have.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from elixir.checkpoint_format.index import INDEX_NAME, LARGEST_INDEX_BYTES, PREVIOUS_NAME, Index, parse_index
from elixir.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, FileError
from elixir.files import FILES, Files, PathLike

logger = logging.getLogger(__name__)

_OURS = re.compile(r"[0-9a-f]{8,32}-((rank|shard)-\d{5,}-of-\d{5,}|shared)\.safetensors")
_TEMPORARY = re.compile(r"\.index(\.previous)?\.json\.[0-9a-f]{12}|\.[0-9a-f]{8,32}-rank-\d{5,}")
_ABSENT = (errno.ENOENT, errno.ENOTDIR)
"""Error numbers of a file or folder that is missing."""
STEP_FOLDER = re.compile(r"step-(\d{8,})")
"""Name of the folder of a step; see `step_folder`."""
_BEGINNING = re.compile(
    rb'\{"artifact":"checkpoint","schema_version":%d,"id":"[0-9a-f]{8,32}","sequence":([1-9][0-9]{0,17}),'
    % Index.schema_version
)
_BEGINNING_BYTES = 256


def new_id() -> str:
    """Makes an id for a save; rank 0 sends it to the others."""
    return uuid.uuid4().hex[:16]


def rank_file(checkpoint_id: str, rank: int, world_size: int) -> str:
    """Name of the file that a rank writes."""
    return f"{checkpoint_id}-rank-{rank:05}-of-{world_size:05}.safetensors"


def shard_file(checkpoint_id: str, shard: int, shards: int) -> str:
    """Name of the file of a shard that several replicas have, which one of them writes."""
    return f"{checkpoint_id}-shard-{shard:05}-of-{shards:05}.safetensors"


def rank_mark(checkpoint_id: str, rank: int) -> str:
    """Name of the empty file by which a rank shows the others which folder it sees."""
    return f".{checkpoint_id}-rank-{rank:05}"


def shared_file(checkpoint_id: str) -> str:
    """Name of the file for what one rank of each folder writes for all: buffers, and tensors of the user's state."""
    return f"{checkpoint_id}-shared.safetensors"


def read_index(folder: PathLike, *, previous: bool = False, files: Files = FILES) -> Index:
    """Reads the index of the checkpoint in a folder, or of the one before it while a commit is under way.

    Raises:
        CheckpointNotFound: there is none.
        CheckpointCorrupt: it is damaged.
        CheckpointError: it cannot be read.
    """
    path = os.path.join(os.fspath(folder), PREVIOUS_NAME if previous else INDEX_NAME)
    try:
        raw = files.read_whole(path, limit_bytes=LARGEST_INDEX_BYTES)
    except FileError as error:
        if error.errno in _ABSENT:
            inside = sorted(Path(os.fspath(folder)).glob(f"*/{INDEX_NAME}"))
            several = f"; it is a folder of checkpoints, name one, such as {inside[-1].parent}" if inside else ""
            raise CheckpointNotFound(
                f"{os.fspath(folder)} holds no checkpoint: {os.path.basename(path)} is missing{several}"
            ) from None
        if error.errno in (errno.EINVAL, errno.EFBIG):
            raise CheckpointCorrupt(f"no index of a checkpoint: {error.strerror}", path=path) from None
        raise CheckpointError(str(error)) from error
    return parse_index(raw, path)


def commit(folder: PathLike, index: Index, *, files: Files = FILES) -> None:
    """Makes `index` the checkpoint of a folder. Killed at any moment, the folder holds the one before or this one.

    All files that it names and that are on this file system are written and synchronised. Afterwards the index before
    it is in ``index.previous.json``, until `finish_commit`.

    Raises:
        CheckpointError: an earlier commit was never settled.
        FileError: an operation failed; the checkpoint before is as it was, unless it was the very last synchronisation.
    """
    text = index.to_json().encode()
    current, previous = (os.path.join(os.fspath(folder), name) for name in (INDEX_NAME, PREVIOUS_NAME))
    if os.path.lexists(previous):
        raise CheckpointError(
            f"{previous} is left from a commit that was cut off; call finish_commit before the next one"
        )
    replacing = os.path.lexists(current)
    try:
        if replacing:
            files.link(current, previous)
        # The index must not name files whose names are not on the disk yet, nor replace the one before it too early.
        files.sync_folder(folder)
        files.write_whole(current, text)
        files.sync_folder(folder)
    except BaseException:
        # The save will be reported as failed, so later saves must not take this index for one that was committed.
        with contextlib.suppress(FileError):
            if os.path.lexists(previous):
                files.replace(previous, current)
                # A rename of one name of a file to another of its names does nothing.
                files.remove(previous, missing_ok=True)
            elif not replacing:
                files.remove(current, missing_ok=True)
        raise


def finish_commit(folder: PathLike, checkpoint_id: str, *, files: Files = FILES) -> Index:
    """Ends a commit: the checkpoint with this id, which all file systems have, becomes the only one of the folder.
    Returns its index.

    Called after all have committed; and before a save or after a load, because a commit may have been cut off.

    Raises:
        CheckpointError: neither index of the folder has this id.
    """
    current, previous = (os.path.join(os.fspath(folder), name) for name in (INDEX_NAME, PREVIOUS_NAME))
    index = _with_id(folder, checkpoint_id, False, files)
    if index is not None:
        files.remove(previous, missing_ok=True)
    else:
        index = _with_id(folder, checkpoint_id, True, files)
        if index is None:
            raise CheckpointError(f"{os.fspath(folder)} holds no checkpoint {checkpoint_id}")
        files.replace(previous, current)
    files.sync_folder(folder)  # even if nothing was to do: the process that committed may have been killed before
    return index


def _with_id(folder: PathLike, checkpoint_id: str, previous: bool, files: Files) -> Index | None:
    try:
        index = read_index(folder, previous=previous, files=files)
    except (CheckpointNotFound, CheckpointCorrupt):
        return None
    return index if index.id == checkpoint_id else None


def remove_stale(folder: PathLike, only: Index | None = None, *, files: Files = FILES) -> tuple[str, ...]:
    """Removes what cut-off saves and replaced checkpoints left in a folder, and only files of ours; returns their
    names.

    No save may be under way there.

    Args:
        folder: of the checkpoint.
        only: the index that `finish_commit` gave; None: read what is there.
        files: the operations it uses.

    Raises:
        CheckpointCorrupt: an index is damaged, so what it names is unknown; nothing is removed.
    """
    named: set[str] = set() if only is None else set(only.files)
    names = files.names(folder)
    for name, previous in ((INDEX_NAME, False), (PREVIOUS_NAME, True)) if only is None else ():
        if name in names:
            named |= set(read_index(folder, previous=previous, files=files).files)
    stale = [name for name in names if name not in named and (_OURS.fullmatch(name) or _TEMPORARY.fullmatch(name))]
    if stale:
        files.sync_folder(folder)  # an index that is still on the disk may name them until then
    for name in stale:
        files.remove(os.path.join(os.fspath(folder), name), missing_ok=True)
    return tuple(stale)


def abandon(folder: PathLike, checkpoint_id: str, *, files: Files = FILES) -> None:
    """Removes the files of a save that failed, unless an index names them all the same."""
    if any(_with_id(folder, checkpoint_id, previous, files) is not None for previous in (False, True)):
        return
    files.sync_folder(folder)  # where a commit was taken back, the disk may still have its index
    for name in files.names(folder):
        if _OURS.fullmatch(name) and name.startswith(f"{checkpoint_id}-"):
            files.remove(os.path.join(os.fspath(folder), name), missing_ok=True)


def remove_checkpoint(folder: PathLike, *, files: Files = FILES) -> bool:
    """Removes a checkpoint: the index first, so that no index ever names files that are gone. Foreign files stay.

    Returns whether the folder is gone as well.
    """
    for name in (PREVIOUS_NAME, INDEX_NAME):
        files.remove(os.path.join(os.fspath(folder), name), missing_ok=True)
    remove_stale(folder, files=files)
    if files.names(folder):
        return False
    files.remove_folder(folder)
    return True


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
        if error.errno in _ABSENT:
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
