"""Models by name, config or function, on meta, with a default training step."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elixir.models.loading import build
    from elixir.models.step import default_input, default_step

_MODULES = {"build": "loading", "default_input": "step", "default_step": "step"}
"""Public name -> its module, which is loaded at first use: some of them take a second to import."""

__all__ = ["build", "default_input", "default_step"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
