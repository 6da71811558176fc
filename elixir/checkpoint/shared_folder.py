"""`SharedFolder`: the folder of a checkpoint, the ranks that share it, and commits that end alike on all file systems.

With node-local disks every machine has a folder of the checkpoint's name. The first of the ranks that see the same
folder is its leader: it commits, cleans up and removes there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elixir.checkpoint_format.folders import (
    abandon,
    commit,
    finish_commit,
    is_step_folder,
    newest_checkpoints,
    next_sequence,
    rank_mark,
    read_index,
    remove_checkpoint,
    remove_stale,
    surplus,
    unfinished,
)
from elixir.checkpoint_format.index import INDEX_NAME, PREVIOUS_NAME, Index
from elixir.checkpoint_format.slices import WrittenFile
from elixir.chunk.group import Group
from elixir.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, ElixirError, FileError, RankError
from elixir.files import Files
from elixir.units import format_bytes

LONGEST_PERIOD_S = 10.0
"""Longest time after which a rank that writes reports that it is alive, and learns whether others have failed."""
_HEARTBEATS_PER_TIMEOUT = 8


def known_indexes(folder: Path, files: Files) -> list[Index]:
    """Reads the indexes of a folder: the newest, and the one before it if a commit was cut off; leaves out damaged
    ones."""
    found = []
    for previous in (False, True):
        with contextlib.suppress(CheckpointNotFound, CheckpointCorrupt):
            found.append(read_index(folder, previous=previous, files=files))
    return found


def newest_of_all(answers: Iterable[Sequence[str]]) -> str | None:
    """Returns the newest id that every file system has."""
    lists = list(answers)
    return next((each for each in lists[0] if all(each in others for others in lists)), None) if lists else None


class HeartbeatGroup:
    """Exchanges between the saving threads of all ranks, made of rounds of `Group.exchange`.

    A rank that waits in `exchange` starts a round at once, and again after each in which somebody was not ready. A rank
    that is still writing joins by `heartbeat` between two pieces of work. So a rank may write for longer than the
    timeout of the group, and a rank that is gone is still noticed within it.

    Args:
        group: used by these rounds only.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        timeout_s = group.timeout_s
        self._every_s = (
            LONGEST_PERIOD_S if timeout_s is None else min(LONGEST_PERIOD_S, timeout_s / _HEARTBEATS_PER_TIMEOUT)
        )
        self._last = time.monotonic()
        self._ended = group.size == 1

    def heartbeat(self) -> None:
        """Joins a round if one is due; called between two pieces of work. Raises what `exchange` raises."""
        if not self._ended and time.monotonic() - self._last >= self._every_s:
            self._round(False, None, None)

    def exchange(self, value: Any = None) -> list[Any]:
        """Returns every rank's value, in order of rank, once all have come here.

        Raises:
            CheckpointError: another rank has failed, or is gone.
        """
        if self._group.size == 1:
            return [value]
        while True:
            answers = self._round(True, value, None)
            if all(ready for ready, _, _ in answers):
                return [theirs for _, theirs, _ in answers]

    def fail(self, error: BaseException) -> CheckpointError:
        """Tells the others that this rank has failed, unless they know it; returns the error that all ranks raise."""
        if not self._ended:
            try:
                self._round(True, None, _in_words(error))
            except CheckpointError as together:
                return together
        if isinstance(error, CheckpointError):
            return error
        return CheckpointError(_in_words(error))

    def _round(self, ready: bool, value: Any, problem: str | None) -> list[Any]:
        try:
            answers = self._group.exchange("checkpoint", (ready, value, problem))
        except RankError as error:
            self._ended = True
            raise CheckpointError(
                f"the checkpoint was given up, because the ranks have lost each other: {error}"
            ) from error
        self._last = time.monotonic()
        for rank, (_, _, theirs) in enumerate(answers):
            if theirs is not None:
                self._ended = True
                raise CheckpointError(f"rank {rank}: {theirs}")
        return answers


def _in_words(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, (ElixirError, OSError)) else f"{type(error).__name__}: {text}"


@dataclass(frozen=True)
class SharedFolder:
    """The folder of a checkpoint as one rank sees it, and the part of this rank in commits.

    Args:
        folder: of the checkpoint.
        rank: this rank.
        ranks: that see this folder, in order.
        group: exchanges between all ranks, also those that do not see it.
        count: how many file systems have such a folder.
        files: the operations it uses.
    """

    folder: Path
    rank: int
    ranks: Sequence[int]
    group: HeartbeatGroup
    count: int
    files: Files

    @property
    def leader(self) -> int:
        """The first rank that sees this folder."""
        return self.ranks[0]

    @property
    def leads(self) -> bool:
        """Whether this rank acts for those that share the folder."""
        return self.rank == self.leader

    @staticmethod
    def found(folder: Path, checkpoint_id: str, rank: int, group: HeartbeatGroup, files: Files) -> SharedFolder:
        """Makes the folder and finds out who shares it: each rank leaves a file there and looks whose it sees."""
        files.make_folder(folder)
        numbers = group.exchange(rank)
        if len(numbers) == 1:
            return SharedFolder(folder, rank, numbers, group, 1, files)
        mine = folder / rank_mark(checkpoint_id, rank)
        files.create(mine).close()
        try:
            group.exchange()
            seen = tuple(r for r in numbers if os.path.lexists(folder / rank_mark(checkpoint_id, r)))
            views = group.exchange(seen)
        finally:
            with contextlib.suppress(FileError):
                files.remove(mine, missing_ok=True)
        return SharedFolder(folder, rank, seen, group, len(set(views)), files)

    def clean_up(self) -> str | None:
        """Ends commits that were cut off and removes what they left, before a save.

        Returns the id of the checkpoint there, or None.
        """
        mine = [each.id for each in known_indexes(self.folder, self.files)] if self.leads else None
        common = newest_of_all(each for each in self.group.exchange(mine) if each is not None)
        if self.leads:
            if mine:
                finish_commit(self.folder, common or mine[0], files=self.files)
            else:
                self.files.remove(self.folder / PREVIOUS_NAME, missing_ok=True)
            with contextlib.suppress(CheckpointCorrupt):  # what it names is unknown; it goes when it is replaced
                remove_stale(self.folder, files=self.files)
        self.group.exchange()  # nobody creates files before others stop removing
        return common

    def check_space(self, nbytes: int) -> None:
        """Refuses a save for which a file system has no room, before a byte is written."""
        parts = self.group.exchange((self.leader, nbytes))
        if self.leads:
            needed = sum(amount for leader, amount in parts if leader == self.leader)
            free = self.files.free_bytes(self.folder)
            if needed > free:
                raise CheckpointError(
                    f"the checkpoint takes {format_bytes(needed)} in {self.folder}, where {format_bytes(free)} are "
                    "free: remove old checkpoints, or save elsewhere"
                )

    def check_written(self, written: Iterable[WrittenFile]) -> None:
        """Checks before a commit that the written files are there: an index must not name files that are gone.

        Args:
            written: by this rank.

        Raises:
            CheckpointError: another save into this folder has taken them for the files of a save that was cut off, and
                has removed them.
        """
        for each in written:
            if not os.path.lexists(self.folder / each.name):
                raise CheckpointError(
                    f"{self.folder / each.name} is gone: another save into the same folder was under way; one run, and "
                    "one model of it, saves into a folder"
                )

    def next_sequence(self) -> int:
        """Returns a number above those of all checkpoints next to this one, on all file systems."""
        mine = next_sequence(self.folder, files=self.files) if self.leads else 1
        return max(int(each) for each in self.group.exchange(mine))

    def commit(self, index: Index, before: str | None) -> None:
        """Makes the checkpoint the one of the folder on all file systems, or on none.

        Args:
            index: of the new one.
            before: id of the one that is replaced.
        """
        problem: BaseException | None = None
        if self.leads:
            try:
                commit(self.folder, index, files=self.files)
            except (CheckpointError, FileError) as error:
                problem = error
        problems = self.group.exchange(None if problem is None else str(problem))
        failed = next(((rank, text) for rank, text in enumerate(problems) if text is not None), None)
        if failed is not None:
            if self.leads and problem is None:
                self._take_back(index.id, before)
            raise CheckpointError(f"rank {failed[0]}: {failed[1]}") from problem
        if self.leads:
            committed = finish_commit(self.folder, index.id, files=self.files)
            remove_stale(self.folder, committed, files=self.files)

    def _take_back(self, checkpoint_id: str, before: str | None) -> None:
        """Restores the checkpoint before, since another file system could not commit."""
        with contextlib.suppress(FileError, CheckpointError):
            if before is not None:
                finish_commit(self.folder, before, files=self.files)
            else:
                self.files.remove(self.folder / INDEX_NAME, missing_ok=True)
                self.files.sync_folder(self.folder)
            abandon(self.folder, checkpoint_id, files=self.files)

    def abandon(self, checkpoint_id: str) -> None:
        """Removes what a save that failed has written, as far as that is possible."""
        if self.leads:
            with contextlib.suppress(FileError, CheckpointError):
                abandon(self.folder, checkpoint_id, files=self.files)

    def retain(self, keep: int | None) -> None:
        """Keeps the latest steps of the folder around this one; others, and saves that were cut off, go on all file
        systems. Folders that are no steps, and links, are neither counted nor removed."""
        names: list[str] | None = None
        if self.rank == 0:
            found = newest_checkpoints(self.folder.parent, [], files=self.files)
            names = [each.name for each in surplus(found, keep)]
            names += unfinished(self.folder.parent, self.files)
        for name in self.group.exchange(names)[0]:
            if self.leads and is_step_folder(self.folder.parent / name):
                remove_checkpoint(self.folder.parent / name, files=self.files)
        self.group.exchange()
