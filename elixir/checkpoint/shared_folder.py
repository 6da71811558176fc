"""`SharedFolder`: the folder of a checkpoint, the ranks that share it, and commits on all file systems.

With node-local disks every machine has a folder of the checkpoint's name. The first of the ranks that see the same
folder is its leader: it renames and removes there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from elixir.checkpoint.heartbeat_group import HeartbeatGroup
from elixir.checkpoint_format.folder import (
    commit,
    is_step_folder,
    known_checkpoints,
    located,
    name_of,
    newest_checkpoints,
    next_sequence,
    part_folder,
    rank_mark,
    remove_checkpoint,
    remove_old,
    surplus,
    tidy,
    unfinished,
)
from elixir.checkpoint_format.index import Index
from elixir.errors import CheckpointError, FileError
from elixir.files import Files
from elixir.units import format_bytes


def newest_of_all(answers: Iterable[Sequence[str]]) -> str | None:
    """Returns the newest id that every file system has."""
    lists = list(answers)
    return next((each for each in lists[0] if all(each in others for others in lists)), None) if lists else None


@dataclass(frozen=True)
class SharedFolder:
    """The folder of a checkpoint as one rank sees it, and the part of this rank in commits.

    Args:
        folder: of the checkpoint.
        part: the folder that is written, and renamed by `commit`.
        rank: this rank.
        ranks: that see this folder, in order.
        count: how many file systems have such a folder.
        files: the operations it uses.
    """

    folder: Path
    part: Path
    rank: int
    ranks: Sequence[int]
    count: int
    files: Files

    @property
    def leads(self) -> bool:
        """Whether this rank acts for those that share the folder: it is the first of them."""
        return self.rank == self.ranks[0]

    @staticmethod
    def made(folder: Path, checkpoint_id: str, rank: int, ranks: HeartbeatGroup, files: Files) -> SharedFolder:
        """Makes the folder that is written, and finds out who shares it: each rank leaves a file there and looks whose
        it sees."""
        folder = Path(os.path.realpath(folder))  # a link stays one
        if os.path.lexists(folder):
            files.names(folder)  # raises if it is a file, which a commit would put aside
        part = part_folder(folder, checkpoint_id)
        mine = part / rank_mark(checkpoint_id, rank)
        try:
            files.make_folder(part)
            files.create(mine).close()
            numbers = ranks.exchange(rank)
            seen = tuple(number for number in numbers if os.path.lexists(part / rank_mark(checkpoint_id, number)))
            views = ranks.exchange(seen)
            files.remove(mine)
        except BaseException:
            with contextlib.suppress(FileError):
                files.remove(mine, missing_ok=True)
                files.remove_folder(part)  # by the last rank
            raise
        return SharedFolder(folder, part, rank, seen, len(set(views)), files)

    def tidy(self, ranks: HeartbeatGroup) -> int:
        """Removes what saves that were cut off have left of this name; returns the `sequence` of the new checkpoint.

        The newest checkpoint that all file systems have stays until the new one is committed.
        """
        mine = None
        if self.leads:
            known = [index.id for _, index in known_checkpoints(self.folder, files=self.files)]
            mine = known, next_sequence(self.folder, files=self.files)
        answers = [each for each in ranks.exchange(mine) if each is not None]
        if self.leads:
            tidy(self.folder, newest_of_all(ids for ids, _ in answers), own=self.part, files=self.files)
        return max(int(sequence) for _, sequence in answers)

    def check_space(self, nbytes: int, ranks: HeartbeatGroup) -> None:
        """Refuses a save for which a file system has no room, before a byte is written."""
        parts = ranks.exchange(nbytes)
        if self.leads:
            needed, free = sum(parts[rank] for rank in self.ranks), self.files.free_bytes(self.part)
            if needed > free:
                raise CheckpointError(
                    f"the checkpoint takes {format_bytes(needed)} in {self.folder}, where {format_bytes(free)} are "
                    "free: remove old checkpoints, or save elsewhere"
                )

    def commit(self, index: Index, ranks: HeartbeatGroup) -> None:
        """Makes the checkpoint the one of the folder on all file systems.

        If that fails on one, the checkpoint before is still on all: loads take the newest that all have.
        """
        if self.leads:
            commit(self.part, self.folder, index, files=self.files)
        ranks.exchange()
        if self.leads:
            remove_old(self.folder, files=self.files)

    def abandon(self) -> None:
        """Removes what a save that failed has written, as far as that is possible."""
        if self.leads and os.path.lexists(self.part):
            with contextlib.suppress(FileError, CheckpointError):
                remove_checkpoint(self.part, files=self.files)

    def retain(self, keep: int | None, ranks: HeartbeatGroup) -> None:
        """Keeps the latest steps of the folder around this one; others, and saves that were cut off, go on all file
        systems. Folders that are no steps, and links, are neither counted nor removed."""
        root = self.folder.parent
        newest = surplus(newest_checkpoints(root, [], files=self.files), keep) if self.rank == 0 else []
        names = ranks.exchange([name_of(each) for each in newest])[0]
        if self.leads:
            gone = [located(root / name) for name in names]
            for each in [*filter(is_step_folder, gone), *unfinished(root, self.files)]:
                remove_checkpoint(each, files=self.files)
