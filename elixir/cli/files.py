"""Files the command line reads and writes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from elixir.artifact import Artifact, check_writable, read_json
from elixir.errors import ArtifactError, InputError
from elixir.hardware.profile import HardwareProfile, load_hardware, warn_if_doubtful
from elixir.plan.plan import Plan
from elixir.show.style import is_page, picture_format
from elixir.step_trace import StepTrace

_KINDS: dict[str, type[Artifact]] = {kind.artifact: kind for kind in (StepTrace, HardwareProfile, Plan)}
Kind = TypeVar("Kind", bound=Artifact)
TRIAL = "trial"
"""The field ``artifact`` of what `elixir try` saves."""


def check_outputs(args: argparse.Namespace) -> None:
    """Makes sure that all files that a command is to make can be written, before any work is done.

    Raises:
        InputError: a folder is missing or closed, a picture's ending is no format, or two outputs are one file.
    """
    seen: list[Path] = []
    given = {name: path for name in ("plot", "out", "csv") if (path := getattr(args, name, None))}
    if "plot" in given:
        _check_plot(args.command, given["plot"])
    for path in given.values():
        target = check_writable(path).resolve()
        if target in seen:
            raise InputError(f"{path} is named for two outputs; give each a separate file")
        seen.append(target)


def _check_plot(command: str, path: str) -> None:
    if command in ("explain", "compare", "show", "try") and not is_page(path):
        raise InputError(f"{path!r}: `elixir {command}` draws a page; end it in .html")
    if command == "sweep" or not is_page(path):
        try:
            picture_format(path)
        except InputError as error:
            if command == "sweep":
                raise
            raise InputError(f"{error}, or in .html for a page") from None


def plotted(
    path: str | None,
    views: Callable[[], Sequence[dict[str, Any]]],
    picture: Callable[[str], object] | None = None,
    rows: Iterable[tuple[str, Any, Any]] = (),
) -> tuple[str | None, Callable[[str], object]]:
    """One output of `written`, for ``--plot``: the page with these views if the path ends in .html, otherwise the
    picture."""

    def page(path: str) -> None:
        from elixir.show.page import write_page

        write_page(path, *views(), rows=rows)

    return path, page if picture is None or is_page(path) else picture


def written(*outputs: tuple[str | None, Callable[[str], object]]) -> list[str]:
    """Writes each output whose path was given; the last thing that a command says, nothing without any."""
    given = [(path, write) for path, write in outputs if path]
    for path, write in given:
        write(path)
    return [f"written: {', '.join(path for path, _ in given)}"] if given else []


def load(path: str, expected: type[Kind]) -> Kind:
    """A saved artifact; `ArtifactError` where it cannot be read or is of another kind."""
    data = read_json(path)
    found = data.get("artifact") if isinstance(data, dict) else None
    if not isinstance(found, str) or found not in _KINDS:
        raise ArtifactError(
            f"{path}: no plan, trace or hardware profile that Elixir saved "
            f"(field 'artifact' must be one of {', '.join(sorted(_KINDS))}, found {found!r})"
        )
    artifact = _KINDS[found].from_dict(data, source=path)
    if not isinstance(artifact, expected):
        wanted = expected.artifact.removeprefix("step_")
        raise ArtifactError(f"{path}: expected a {wanted}, found a {found.replace('_', ' ')}")
    return artifact


def trial_in(text: str) -> dict[str, Any] | None:
    """The trial that `elixir try --out` has saved in the file `text`; None if it holds something else."""
    data = read_json(text)
    return data if isinstance(data, dict) and data.get("artifact") == TRIAL else None


def report_in(text: str) -> dict[str, Any] | None:
    """The numbers of a step's report in the file `text`, of a list or a trial the last; None if it holds none."""
    data = read_json(text)
    if isinstance(data, dict) and data.get("artifact") == TRIAL:
        data = data.get("steps")
    if isinstance(data, list) and data:
        data = data[-1]
    known = isinstance(data, dict) and "artifact" not in data and any(name.startswith("predicted_") for name in data)
    return data if known else None


def trace_in(text: str) -> StepTrace | None:
    """The trace in the file `text`; None where `text` is no file, or one of another kind (such as config.json).

    Raises:
        ArtifactError: the file is a plan or a hardware profile, or a trace that cannot be read back.
    """
    return load(text, StepTrace) if _is_ours(text) else None


def refuse_artifact(text: str) -> None:
    """Says what to do with a file of ours that is given where a model is wanted.

    Raises:
        InputError, ArtifactError: `text` is the path of such a file.
    """
    if _is_ours(text):
        kind = load(text, Artifact).artifact.replace("_", " ")
        raise InputError(f"{text}: expected a model, found a {kind}, which `elixir show {text}` prints")


def _is_ours(text: str) -> bool:
    """Whether `text` is a file that says which artifact it is."""
    path = Path(text)
    data = read_json(text) if path.suffix == ".json" and path.is_file() else None
    return isinstance(data, dict) and "artifact" in data


def find_timed_hardware(text: str) -> HardwareProfile:
    """A preset by name, or a profile from a file, for predictions of time: rates that are not to be relied on are
    warned of.

    Raises:
        InputError: the name is unknown; the message has the nearest names.
        ArtifactError: the file is no hardware profile.
    """
    profile = load_hardware(text)
    warn_if_doubtful(profile)
    return profile
