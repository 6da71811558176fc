"""Elixir plans and runs the training of large models on few GPUs.

What a step needs is a `StepTrace`, what a machine can do a `HardwareProfile`, what goes where and when a `Plan`.
Names are loaded on first use, so that ``import elixir`` costs next to nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from elixir.garbage import garbage_collection_paused

if TYPE_CHECKING:  # "as" makes a name public to type checkers, to which the computed `__all__` says nothing
    from elixir.api import wrap as wrap
    from elixir.checkpoint import Checkpoints as Checkpoints
    from elixir.checkpoint import Loaded as Loaded
    from elixir.checkpoint import PerRank as PerRank
    from elixir.checkpoint import Saving as Saving
    from elixir.checkpoint import load_checkpoint as load_checkpoint
    from elixir.checkpoint import save_checkpoint as save_checkpoint
    from elixir.checkpoint_format.export import export_hf as export_hf
    from elixir.checkpoint_format.slice_reader import open_checkpoint as open_checkpoint
    from elixir.errors import ArtifactError as ArtifactError
    from elixir.errors import ElixirError as ElixirError
    from elixir.errors import InputError as InputError
    from elixir.errors import InputTypeError as InputTypeError
    from elixir.errors import PlanError as PlanError
    from elixir.errors import StateError as StateError
    from elixir.errors import TraceError as TraceError
    from elixir.estimates import estimate as estimate
    from elixir.estimates import guard as guard
    from elixir.hardware.profile import HardwareProfile as HardwareProfile
    from elixir.kernels import HybridAdam as HybridAdam
    from elixir.models.together import together as together
    from elixir.plan.chunk_plan import ChunkPlan as ChunkPlan
    from elixir.plan.plan import Plan as Plan
    from elixir.search import minimum_waste_search as minimum_waste_search
    from elixir.search import optimal_search as optimal_search
    from elixir.search import simple_search as simple_search
    from elixir.step_trace import StepTrace as StepTrace
    from elixir.wrapper import ElixirModule as ElixirModule
    from elixir.wrapper import ElixirOptimizer as ElixirOptimizer

__version__ = "0.1.0"

_NAMES = {
    "elixir.api": "wrap",
    "elixir.checkpoint": "Checkpoints Loaded PerRank Saving load_checkpoint save_checkpoint",
    "elixir.checkpoint_format.export": "export_hf",
    "elixir.checkpoint_format.slice_reader": "open_checkpoint",
    "elixir.estimates": "estimate guard",
    "elixir.errors": "ArtifactError ElixirError InputError InputTypeError PlanError StateError TraceError",
    "elixir.hardware.profile": "HardwareProfile",
    "elixir.kernels": "HybridAdam",
    "elixir.models.together": "together",
    "elixir.plan.chunk_plan": "ChunkPlan",
    "elixir.plan.plan": "Plan",
    "elixir.search": "minimum_waste_search optimal_search simple_search",
    "elixir.step_trace": "StepTrace",
    "elixir.wrapper": "ElixirModule ElixirOptimizer",
}
"""Module -> the public names that it holds."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_HOMES]

_SUMMARY = "A memory planner and offloading runtime for PyTorch"
"""The summary in pyproject.toml, by which an old installation of this package, named `elixir`, is known."""


def _warn_of_namesake() -> None:
    """Warns if the unrelated distribution `elixir` is installed, whose files go to the same folder as this package's.

    Names of files are enough to find it: `importlib.metadata` would make every command slower by a tenth.
    """
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            if not (name.lower().startswith("elixir-") and name.endswith((".dist-info", ".egg-info"))):
                continue
            from importlib.metadata import PathDistribution
            from pathlib import Path

            found = PathDistribution(Path(folder, name)).metadata
            if found["Summary"] != _SUMMARY:
                import warnings

                warnings.warn(
                    f"the unrelated distribution 'elixir' {found['Version']} is installed in {folder}, and its files "
                    "have our names: pip uninstall elixir torch-elixir, then `pip install .` in a clone of this one",
                    stacklevel=2,
                )


_warn_of_namesake()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'elixir' has no attribute {name!r}")
    with garbage_collection_paused():  # it would look at all of torch several times, a third of the seconds of `wrap`
        value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
