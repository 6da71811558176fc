"""`Run`: a model under a plan as a framework trains it: its options read, its states saved and loaded, and numbers for
its logger."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

import elixir
from elixir.api import option_names
from elixir.artifact import parse_json, read_json
from elixir.errors import InputError, InputTypeError
from elixir.models.together import Together
from elixir.plan.plan import Plan
from elixir.search.request import check_options
from elixir.wrapper import ElixirModule, ElixirOptimizer

logger = logging.getLogger(__name__)

STATES = "elixir"
"""Folder inside of a framework's checkpoint for optimizer states and master weights, which all ranks write."""
PLAN = "elixir_plan.json"
Options = Mapping[str, Any] | str | os.PathLike[str] | None
"""Arguments of `elixir.wrap`: as a dict, as JSON, or as the path of a JSON file."""


class Planned(Exception):
    """Raised to leave a framework once the plan is made."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(str(plan))
        self.plan = plan


def plan_made(prepare: Callable[[], object], what: str) -> Plan:
    """The plan with which `prepare`, a framework's `what`, was left."""
    try:
        prepare()
    except Planned as made:
        return made.plan
    raise InputError(f"{what} ended before it came to a plan")


class Run:
    """A wrapped model with its optimizers, as a framework trains it.

    Args:
        module: the model.
        optimizers: those of the model.
        is_main: whether this rank logs and writes what all share.
    """

    def __init__(self, module: ElixirModule, optimizers: Sequence[ElixirOptimizer], *, is_main: bool) -> None:
        self.module, self.optimizers, self.is_main = module, list(optimizers), is_main
        self._known: set[str] = set()
        """Names of numbers that have been other than 0 in some step."""
        if is_main:
            logger.info("%s", module.plan)

    @property
    def model(self) -> nn.Module:
        """The plain model; of several under the plan the first, which is trained."""
        inner = self.module.module
        return inner.first if isinstance(inner, Together) else inner

    def state_dict(
        self, *, rank0_only: bool = False, only: Callable[[str, nn.Parameter], bool] | None = None
    ) -> dict[str, Any]:
        """The state dict of `model`, as `ElixirModule.state_dict` makes it. All ranks call this."""
        inner = self.module.module
        if not isinstance(inner, Together):
            return self.module.state_dict(rank0_only=rank0_only, only=only)
        prefix = f"{next(name for name, _ in inner.models())}."

        def wanted(name: str, parameter: nn.Parameter) -> bool:
            return name.startswith(prefix) and (only is None or only(name.removeprefix(prefix), parameter))

        found = self.module.state_dict(rank0_only=rank0_only, only=wanted)
        return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}

    def save(self, folder: str | os.PathLike[str], *, frozen: bool = True) -> None:
        """Saves weights, states and the loss scale under `folder`, for any number of ranks. All ranks call this.

        Args:
            folder: the framework's checkpoint.
            frozen: whether to save parameters that are not trained.
        """
        elixir.save_checkpoint(Path(folder) / STATES, self._state(), wait=True, frozen=frozen)

    def load(self, folder: str | os.PathLike[str]) -> bool:
        """Loads what `save` wrote, and returns whether there was any. All ranks call this.

        The framework restores random numbers.
        """
        if not (Path(folder) / STATES).is_dir():
            return False
        elixir.load_checkpoint(Path(folder) / STATES, self._state(), rng=False)
        return True

    def save_plan(self, folder: str | os.PathLike[str]) -> None:
        """Writes the current plan into `folder`, on one rank."""
        if self.is_main:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.module.plan.save(Path(folder) / PLAN)

    def numbers(self) -> dict[str, float]:
        """The last step's report for a logger, each name under ``elixir/``; predictions are in the plan.

        Frameworks print what is logged, so a number that was 0 so far, such as a wait for a disk that the plan does not
        use, is left out.
        """
        report = self.module.last_report
        found = {} if report is None else report.to_dict()
        self._known |= {name for name, value in found.items() if value and not name.startswith(("predicted_", "busy_"))}
        return {f"elixir/{name}": value for name, value in found.items() if name in self._known}

    def _state(self) -> dict[str, Any]:
        several = len(self.optimizers) > 1
        named = {f"optimizer_{number}" if several else "optimizer": each for number, each in enumerate(self.optimizers)}
        return {"model": self.module, **named}


def read_options(given: Options, settled: Mapping[str, str], own: Collection[str] = ()) -> dict[str, Any]:
    """Arguments of `elixir.wrap` that a user has given to an integration.

    Args:
        given: see `Options`.
        settled: arguments that the framework settles, with the setting that does.
        own: options of the integration itself, which may stand next to them.

    Raises:
        InputTypeError: an option is unknown; the error names the nearest.
        InputError: the framework has a setting for an option.
        ArtifactError: the text is no JSON, or there is no such file.
    """
    if isinstance(given, (str, os.PathLike)):
        text = os.fspath(given)
        given = parse_json(text, "elixir") if text.lstrip().startswith("{") else read_json(text)
    found = {} if given is None else given
    if not isinstance(found, Mapping):
        raise InputTypeError(f"elixir must hold options by name, got {type(found).__name__}")
    for name in found:
        if name in settled:
            raise InputError(f"elixir must not say {name}, which comes from {settled[name]}; leave it out")
    check_options("option of elixir", found, (*option_names(), *own))
    return dict(found)


def refuse_all(found: Mapping[str, object]) -> None:
    """Raises `InputError` with the first sentence that is true of the framework's settings."""
    for sentence, is_true in found.items():
        if is_true:
            raise InputError(sentence)


def as_inp(batch: Any, step_fn: Callable[[Any, Any], Any]) -> tuple[dict[str, Any], Callable[[Any, Any], Any]]:
    """`inp` and `step_fn` for `elixir.wrap`, of a batch of any kind and a function of the model and such a batch."""
    return {"batch": batch}, lambda model, inp: step_fn(model, inp["batch"])
