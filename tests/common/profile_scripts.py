"""The frame of the scripts in ``profile/``, a folder that is no package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

PROFILE = Path(__file__).parents[2] / "profile"


def _loaded() -> Any:
    spec = importlib.util.spec_from_file_location("frame", PROFILE / "frame.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


frame = _loaded()
"""The module ``profile/frame.py``."""
