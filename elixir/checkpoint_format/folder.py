"""The folders of checkpoints: a new one is written next to its name, and gets the name by a rename when it is whole.

``NAME.<id>.part`` is being written. When all ranks have written, a checkpoint that has the name goes to
``NAME.<id>.old``, the new folder gets the name, and the old one is removed. Between the two renames only the old one is
there, so all readers take that if the name has none. One process of each file system renames and removes.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from elixir.checkpoint_format.index import INDEX_NAME, LARGEST_INDEX_BYTES, Index, parse_index
from elixir.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, FileError
from elixir.files import FILES, Files, PathLike

logger = logging.getLogger(__name__)

STEP_FOLDER = re.compile(r"step-(\d{8,})")
"""Name of the folder of a step; see `step_folder`."""
_ASIDE = re.compile(r"(.+)\.[0-9a-f]{8,32}\.(part|old)")
"""Name of a folder that is being written, or replaced."""
_PREVIOUS = "index.previous.json"
"""A second index, in folders of earlier versions whose commit on several file systems was cut off."""
_OURS = re.compile(
    r"[0-9a-f]{8,32}-((rank|shard)-\d{5,}-of-\d{5,}|shared)\.safetensors"
    r"|index(\.previous)?\.json|\.index(\.previous)?\.json\.[0-9a-f]{12}|\.[0-9a-f]{8,32}-rank-\d{5,}"
)
_BEGINNING = re.compile(
    rb'\{"artifact":"checkpoint","schema_version":%d,"id":"[0-9a-f]{8,32}","sequence":([1-9][0-9]{0,17}),'
    % Index.schema_version
)
_BEGINNING_BYTES = 256
_ABSENT = (errno.ENOENT, errno.ENOTDIR)


# --- names -----------------------------------------------------------------------------------------------------------


def new_id() -> str:
    """Makes an id for a save; rank 0 sends it to the others."""
    return uuid.uuid4().hex[:16]


def rank_file(checkpoint_id: str, rank: int, world_size: int) -> str:
    """Name of the file that a rank writes."""
    return f"{checkpoint_id}-rank-{rank:05}-of-{world_size:05}.safetensors"


def shard_file(checkpoint_id: str, shard: int, shards: int) -> str:
    """Name of the file of a shard that several replicas have, which one of them writes."""
    return f"{checkpoint_id}-shard-{shard:05}-of-{shards:05}.safetensors"


def shared_file(checkpoint_id: str) -> str:
    """Name of the file for what rank 0 writes for all: buffers, and tensors of the user's state."""
    return f"{checkpoint_id}-shared.safetensors"


def rank_mark(checkpoint_id: str, rank: int) -> str:
    """Name of the empty file by which a rank shows the others which folder it sees."""
    return f".{checkpoint_id}-rank-{rank:05}"


def step_folder(step: int) -> str:
    """Name of the folder of a step, among others of one run."""
    return f"step-{step:08}"


def part_folder(folder: Path, checkpoint_id: str) -> Path:
    """The folder that is written, and gets the name of `folder` when it is whole."""
    return Path(f"{folder}.{checkpoint_id}.part")


def old_folder(folder: Path, checkpoint_id: str) -> Path:
    """The folder of the checkpoint that is being replaced by one with this id."""
    return Path(f"{folder}.{checkpoint_id}.old")


def name_of(folder: Path) -> str:
    """Name under which a checkpoint is known, also while it is being written or replaced."""
    match = _ASIDE.fullmatch(folder.name)
    return match[1] if match else folder.name


def is_step_folder(folder: Path) -> bool:
    """Whether a folder is that of a step, replaced or not: it has no other name, such as ``best``, and is no link."""
    return STEP_FOLDER.fullmatch(name_of(folder)) is not None and folder.is_dir() and not folder.is_symlink()


def _aside(folder: Path, suffix: str, files: Files) -> list[Path]:
    """Folders of a checkpoint that are being written, or replaced."""
    own = re.compile(re.escape(folder.name) + r"\.[0-9a-f]{8,32}\." + suffix)
    # Where nobody may list the folder around it, no save has put anything aside.
    names = _names(folder.parent, files, (*_ABSENT, errno.EACCES, errno.EPERM))
    beside = [folder.parent / name for name in names if own.fullmatch(name)]
    return [each for each in beside if each.is_dir() and not each.is_symlink()]


def _names(root: PathLike, files: Files, none: tuple[int, ...] = _ABSENT) -> list[str]:
    """Names in a folder; none if it cannot be listed for such a reason, such as that it is missing."""
    try:
        return files.names(root)
    except FileError as error:
        if error.errno in none:
            return []
        raise


# --- one checkpoint --------------------------------------------------------------------------------------------------


def located(folder: PathLike, *, files: Files = FILES) -> Path:
    """Finds the checkpoint of a name: in the folder, or put aside if a save was cut off between two renames."""
    path = Path(os.path.realpath(folder))
    if os.path.lexists(path / INDEX_NAME):
        return Path(folder)
    old = (each for each in _aside(path, "old", files) if os.path.lexists(each / INDEX_NAME))
    return next(old, Path(folder))


def read_index(folder: PathLike, *, name: str = INDEX_NAME, files: Files = FILES) -> Index:
    """Reads the index in a folder.

    Raises:
        CheckpointNotFound: there is none.
        CheckpointCorrupt: it is damaged.
        CheckpointError: it cannot be read.
    """
    path = os.path.join(os.fspath(folder), name)
    try:
        raw = files.read_whole(path, limit_bytes=LARGEST_INDEX_BYTES)
    except FileError as error:
        if error.errno in _ABSENT:
            inside = sorted(Path(os.fspath(folder)).glob(f"*/{INDEX_NAME}"))
            several = f"; it is a folder of checkpoints, name one, such as {inside[-1].parent}" if inside else ""
            raise CheckpointNotFound(f"{os.fspath(folder)} holds no checkpoint: {name} is missing{several}") from None
        if error.errno in (errno.EINVAL, errno.EFBIG):
            raise CheckpointCorrupt(f"no index of a checkpoint: {error.strerror}", path=path) from None
        raise CheckpointError(str(error)) from error
    return parse_index(raw, path)


def known_checkpoints(folder: PathLike, *, files: Files = FILES) -> list[tuple[Path, Index]]:
    """The checkpoints of a name that have a readable index, with their folders: the newest, then one it replaces."""
    found = []
    for where in (Path(folder), *_aside(Path(os.path.realpath(folder)), "old", files)):
        for name in (INDEX_NAME, _PREVIOUS):
            try:
                found.append((where, read_index(where, name=name, files=files)))
            except (CheckpointNotFound, CheckpointCorrupt):
                continue
    return found


def commit(part: Path, folder: Path, index: Index, *, files: Files = FILES) -> None:
    """Makes the folder `part`, whose files are written and synchronised, the checkpoint `folder`.

    Killed at any moment, there is the checkpoint before or this one. The one before is put aside until `remove_old`: on
    another file system the commit may fail.
    """
    with files.create(part / INDEX_NAME) as file:
        file.write(index.to_json().encode(), 0)
        file.sync()
    files.sync_folder(part)
    if os.path.lexists(folder):
        files.replace(folder, old_folder(folder, index.id))
    files.replace(part, folder)
    files.sync_folder(folder.parent)  # before the one it replaces is removed


def tidy(folder: Path, keep: str | None = None, *, own: Path | None = None, files: Files = FILES) -> list[Path]:
    """Removes what saves that were cut off have left of a name, but for one checkpoint; returns the folders.

    No other save may be under way there.

    Args:
        folder: of the checkpoint.
        keep: id of the checkpoint that stays, which all file systems have. None: the newest here.
        own: the part folder of the save that asks.
        files: the operations it uses.
    """
    folder = Path(os.path.realpath(folder))  # paths are compared
    known = known_checkpoints(folder, files=files)
    kept = next((where for where, index in known if index.id == keep), known[0][0] if known else folder)
    gone = [part for part in _aside(folder, "part", files) if part != own]
    for part in gone:
        _clear(part, None, files)
    if os.path.lexists(kept):
        others = [each for each in (folder, *_aside(folder, "old", files)) if each != kept and os.path.lexists(each)]
        for each in others:
            _clear(each, kept, files)
        gone += others
    return gone


def remove_old(folder: Path, *, files: Files = FILES) -> None:
    """Removes the checkpoint that `commit` has replaced, once all file systems have the new one."""
    for old in _aside(folder, "old", files):
        _clear(old, folder, files)


def remove_checkpoint(folder: PathLike, *, files: Files = FILES) -> bool:
    """Removes a checkpoint, and one that it replaces. Foreign files stay. Returns whether the folder is gone as well.

    An index goes before the files that it names. No save may be under way there.
    """
    remove_old(Path(os.path.abspath(folder)), files=files)
    return _clear(Path(folder), None, files)


def _clear(folder: Path, heir: Path | None, files: Files) -> bool:
    """Removes a folder with our files in it. Others stay, or go to the folder `heir`, unless it has one of the name."""
    ours = [name for name in files.names(folder) if _OURS.fullmatch(name)]
    indexes = [name for name in (_PREVIOUS, INDEX_NAME) if name in ours]
    for name in indexes:
        files.remove(folder / name, missing_ok=True)
    if indexes:
        files.sync_folder(folder)  # an index that is still on the disk would name files that are gone
    for name in ours:
        if name not in indexes:
            files.remove(folder / name, missing_ok=True)
    for name in files.names(folder):
        if heir is None:
            return False
        if not os.path.lexists(heir / name):
            files.replace(folder / name, heir / name)
    files.remove_folder(folder)
    return True


# --- the checkpoints of a run ----------------------------------------------------------------------------------------


def unfinished(root: Path, files: Files) -> list[Path]:
    """Folders of steps in `root` that were never committed. No save may be under way there."""
    steps = [root / name for name in files.names(root) if is_step_folder(root / name)]
    return [each for each in steps if each.name.endswith(".part") or not _has_index(each, files)]


def _has_index(folder: Path, files: Files) -> bool:
    return os.path.lexists(located(folder, files=files) / INDEX_NAME)


def surplus(found: Iterable[Path], keep: int | None) -> list[Path]:
    """Folders of steps beyond the first `keep`, None for all; folders that are no steps neither count nor go."""
    return [] if keep is None else [*islice(filter(is_step_folder, found), keep, None)]


def one_checkpoint(folder: PathLike, *, files: Files = FILES) -> Path:
    """The folder itself, or the newest checkpoint in it if it is a folder of checkpoints.

    Raises:
        CheckpointError: none of the checkpoints in it can be read.
    """
    path, damaged = located(folder, files=files), list[CheckpointError]()
    if os.path.lexists(path / INDEX_NAME):
        return path
    found = next(newest_checkpoints(path, damaged, files=files), None)
    if found is None and damaged:
        raise damaged[0]
    for error in damaged:
        logger.warning("left out: %s", error)
    return found or path


def newest_checkpoints(root: PathLike, damaged: list[CheckpointError], *, files: Files = FILES) -> Iterator[Path]:
    """Yields the folders in `root` that hold checkpoints, the latest first, before older ones are read.

    The latest is the one with the largest `sequence`, not the one with the largest step or the newest file.

    Args:
        root: the folder around them.
        damaged: takes why one cannot be read.
        files: the operations it uses.
    """
    known, problems = sequences(root, files=files)
    damaged += problems
    for name in sorted(known, key=lambda name: (-known[name], name)):
        path = located(Path(root) / name, files=files)
        try:
            read_index(path, files=files)
        except CheckpointNotFound:
            continue  # removed meanwhile
        except CheckpointError as error:
            damaged.append(error)
            continue
        yield path


def sequences(root: PathLike, *, files: Files = FILES) -> tuple[dict[str, int], tuple[CheckpointError, ...]]:
    """Name of each folder in `root` that has a checkpoint -> the `sequence` in its index, and why others have none.

    Only the beginning of each index is read, and no checksum: reading a thousand in full would take seconds at every
    save.
    """
    found: dict[str, int] = {}
    damaged: list[CheckpointError] = []
    names = _names(root, files)
    olds = {name_of(Path(name)): name for name in names if _ASIDE.fullmatch(name) and name.endswith(".old")}
    for name in dict.fromkeys([*(name for name in names if not _ASIDE.fullmatch(name)), *olds]):
        path = Path(root) / name
        if name in olds and not os.path.lexists(path / INDEX_NAME):
            path = Path(root) / olds[name]
        try:
            beginning = _BEGINNING.match(files.read_first(path / INDEX_NAME, _BEGINNING_BYTES))
        except FileError:
            beginning = None  # `read_index` says why it cannot be read
        try:
            found[name] = int(beginning[1]) if beginning else read_index(path, files=files).sequence
        except CheckpointNotFound:
            continue  # another folder, a file, or a save of an earlier version that was cut off
        except CheckpointError as error:
            damaged.append(error)
    return found, tuple(damaged)


def next_sequence(folder: PathLike, *, files: Files = FILES) -> int:
    """The `sequence` of a new checkpoint in `folder`: above its present one, and above those in the folders next to
    it."""
    known, _ = sequences(Path(os.path.abspath(folder)).parent, files=files)
    return 1 + max(known.values(), default=0)
