"""`Checkpoints`: a folder of checkpoints that keeps the newest and loads the newest that is whole."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from elixir.checkpoint.loading import load_checkpoint
from elixir.checkpoint.saving import Loaded, SaveOptions, Saves, Saving
from elixir.checkpoint.user_state import UserState
from elixir.checkpoint_format.folders import STEP_FOLDER, newest_checkpoints, sequences, step_folder, unfinished
from elixir.checkpoint_format.index import INDEX_NAME
from elixir.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, FileError, InputError, InputTypeError
from elixir.files import FILES, Files, PathLike

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run, each in a folder named after its step.

    Args:
        folder: for all of them. Nobody else saves into it meanwhile.
        keep: how many stay; None for all. The oldest go after a newer one is whole, never before. Other folders in
            there, such as ``best``, and links do not count, and stay.
        wait: let `save` return only when the checkpoint is whole.
        frozen: see `save_checkpoint`.
        files: the file operations it uses.

    Raises:
        InputError: `keep` is below 1.

    Example:
        >>> with Checkpoints("run", keep=2) as checkpoints:
        ...     loaded = checkpoints.load(state)
        ...     for step in range(loaded.step + 1 if loaded else 0, 10_000):
        ...         train(step)
        ...         if step % 500 == 0:
        ...             checkpoints.save(step, state)
    """

    def __init__(
        self, folder: PathLike, *, keep: int | None = 2, wait: bool = False, frozen: bool = True, files: Files = FILES
    ) -> None:
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool)):
            raise InputTypeError(f"keep must be a whole number, or None for all, found {keep!r}")
        if keep is not None and keep < 1:
            raise InputError(f"keep must be 1 or more, or None for all, found {keep}")
        self.folder = Path(os.fspath(folder))
        self._keep, self._wait, self._frozen, self._files = keep, wait, frozen, files
        self._saving: Saving | None = None

    def save(self, step: int, state: Mapping[str, Any]) -> Saving:
        """Saves a step; see `save_checkpoint`. Older ones go when it is whole.

        Raises:
            InputError: `step` is below 0; or see `save_checkpoint`.
            CheckpointError: see there.
        """
        if step < 0:
            raise InputError(f"step must be 0 or more, found {step}")
        user = UserState.of(state)
        options = SaveOptions(
            self.folder / step_folder(step), step, self._frozen, self._files, keep=self._keep, retains=True
        )
        self._saving = Saves.of(user.states).start(user, options)
        if self._wait:
            self._saving.wait()  # the caller asked for a checkpoint that is whole
        return self._saving

    def load(self, state: MutableMapping[str, Any], step: int | None = None, *, strict: bool = True) -> Loaded | None:
        """Loads the newest checkpoint that is whole, or that of `step`; see `load_checkpoint`. All ranks call this.

        A damaged one is left out with a warning, for the one before it.

        Returns:
            None without a checkpoint.

        Raises:
            InputError: the folder is itself a checkpoint.
            CheckpointNotFound: there is none of `step`.
            CheckpointCorrupt: all are damaged, or the one of `step` is.
            CheckpointMismatch: it is of something else.
        """
        if step is not None:
            return load_checkpoint(self.folder / step_folder(step), state, strict=strict, files=self._files)
        states = UserState.of(state).states
        saves = Saves.of(states)
        saves.settle()
        with saves.together("checkpoints", (CheckpointError, FileError, InputError)) as ranks:
            ranks.mine, damaged = sequences(self.folder, files=self._files)
            for error in damaged:
                logger.warning("left out: %s", error)
            if os.path.lexists(self.folder / INDEX_NAME):
                raise InputError(
                    f"{self.folder} is one checkpoint: give Checkpoints the folder around it, or call load_checkpoint"
                )
        known: dict[str, int] = {}
        for theirs in ranks.answers:
            for name, sequence in theirs.items():
                known[name] = max(sequence, known.get(name, 0))
        first: CheckpointError | None = None
        for name in sorted(known, key=lambda name: (-known[name], name)):
            try:
                return load_checkpoint(self.folder / name, state, strict=strict, files=self._files)
            except (CheckpointCorrupt, CheckpointNotFound) as error:
                logger.warning("%s is left out, for the one before it: %s", self.folder / name, error)
                first = first or error
        if first is not None:
            raise first
        cut_off = unfinished(self.folder, self._files) if states.group.rank == 0 and self.folder.is_dir() else []
        if cut_off:
            logger.warning("%s: all saves were cut off, so nothing is loaded: %s", self.folder, ", ".join(cut_off))
        return None

    def latest(self) -> Path | None:
        """Folder of the newest checkpoint that has a readable index; None without one."""
        return next(newest_checkpoints(self.folder, [], files=self._files), None)

    def steps(self) -> list[int]:
        """Lists the saved steps in order; reads only the beginning of each index."""
        known, _ = sequences(self.folder, files=self._files)
        return sorted(int(match[1]) for name in known if (match := STEP_FOLDER.fullmatch(name)))

    def close(self) -> None:
        """Waits until the last save has ended.

        Raises:
            CheckpointError: it could not be saved, which was not reported yet.
        """
        error = self._ended()
        if error is not None:
            raise error

    def _ended(self) -> CheckpointError | None:
        return None if self._saving is None else self._saving.end()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
            return
        error = self._ended()
        if error is not None:  # the exception that is on its way says more
            logger.error("the last checkpoint was not saved: %s", error)
