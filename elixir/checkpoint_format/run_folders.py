"""Names of the folders of one run's checkpoints, and those among them that were never committed."""

from __future__ import annotations

import os
import re
from pathlib import Path

from elixir.checkpoint_format.index import INDEX_NAME
from elixir.files import Files

STEP_FOLDER = re.compile(r"step-(\d{8,})")
"""Name of the folder of a step; see `step_folder`."""


def step_folder(step: int) -> str:
    """Name of the folder of a step, among others of one run."""
    return f"step-{step:08}"


def unfinished(root: Path, files: Files) -> list[str]:
    """Names of folders of steps in `root` that were never committed. No save may be under way there."""
    return [
        name
        for name in files.names(root)
        if STEP_FOLDER.fullmatch(name) and (root / name).is_dir() and not os.path.lexists(root / name / INDEX_NAME)
    ]
