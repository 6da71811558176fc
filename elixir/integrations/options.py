"""Options of an integration: arguments of `elixir.wrap`, read from where users keep them, and completed."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from elixir.api import option_names
from elixir.artifact import parse_json, read_json
from elixir.errors import InputError, InputTypeError
from elixir.search.request import check_options

Options = Mapping[str, Any] | str | os.PathLike[str] | None
"""Arguments of `elixir.wrap`: as a dict, as JSON, or as the path of a JSON file."""


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
