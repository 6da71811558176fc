"""Names of the folders of one run's checkpoints, and which of them may go."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from elixir.checkpoint_format.commit import FoundCheckpoint
from elixir.checkpoint_format.index import INDEX_NAME
from elixir.files import Files

STEP_FOLDER = re.compile(r"step-(\d{8,})")
"""Name of the folder of a step; see `step_folder`."""


def step_folder(step: int) -> str:
    """Name of the folder of a step, among others of one run."""
    return f"step-{step:08}"


def is_step_folder(folder: Path) -> bool:
    """Whether it is the folder of a step: none that somebody has named, such as ``best``, and no link to one."""
    return STEP_FOLDER.fullmatch(folder.name) is not None and folder.is_dir() and not folder.is_symlink()


def surplus(found: Iterable[FoundCheckpoint], keep: int | None) -> list[Path]:
    """Folders of steps beyond the first `keep`, None for all; folders that are no steps neither count nor go."""
    if keep is None:
        return []
    return [each.folder for each in islice((each for each in found if is_step_folder(each.folder)), keep, None)]


def unfinished(root: Path, files: Files) -> list[str]:
    """Names of folders of steps in `root` that were never committed. No save may be under way there."""
    return [
        name
        for name in files.names(root)
        if is_step_folder(root / name) and not os.path.lexists(root / name / INDEX_NAME)
    ]
