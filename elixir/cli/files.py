"""Files the command line reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from elixir.artifact import Artifact, check_writable, read_json
from elixir.errors import ArtifactError, InputError
from elixir.hardware.profile import HardwareProfile
from elixir.plan.plan import Plan
from elixir.show.style import picture_format
from elixir.step_trace import StepTrace

_KINDS: dict[str, type[Artifact]] = {kind.artifact: kind for kind in (StepTrace, HardwareProfile, Plan)}


def check_outputs(*, pictures: Sequence[str | None] = (), data: Sequence[str | None] = ()) -> None:
    """Makes sure that all these can be written, before any work is done; None stands for "not asked for".

    Raises:
        InputError: a folder is missing or closed, a picture's ending is no format, or two outputs are one file.
    """

    seen: list[Path] = []
    for picture in pictures:
        if picture is not None:
            picture_format(picture)
    for path in (*pictures, *data):
        if path is None:
            continue
        target = check_writable(path).resolve()
        if target in seen:
            raise InputError(f"{path} is named for two outputs; give each a separate file")
        seen.append(target)


def load(path: str) -> Artifact:
    """A saved artifact of whichever kind; `ArtifactError` where it cannot be read or is none of ours."""
    data = read_json(path)
    kind = data.get("artifact") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ArtifactError(
            f"{path}: no plan, trace or hardware profile that Elixir saved "
            f"(field 'artifact' must be one of {', '.join(sorted(_KINDS))}, found {kind!r})"
        )
    return _KINDS[kind].from_dict(data, source=path)


def trace_in(text: str) -> StepTrace | None:
    """The trace in the file `text`; None where `text` is no file, or one of another kind (such as config.json).

    Raises:
        ArtifactError: the file is a plan or a hardware profile, or a trace that cannot be read back.
    """
    path = Path(text)
    if path.suffix != ".json" or not path.is_file():
        return None
    data = read_json(text)
    if not isinstance(data, dict) or "artifact" not in data:
        return None
    if data["artifact"] != StepTrace.artifact:
        raise ArtifactError(f"{text}: expected a model or a trace, found a {data['artifact']}")
    return StepTrace.from_dict(data, source=text)


def refuse_artifact(text: str) -> None:
    """Says what to do with a file of ours that is given where a model is wanted.

    Raises:
        InputError: `text` is the path of such a file.
    """
    path = Path(text)
    if path.suffix != ".json" or not path.is_file():
        return
    data = read_json(text)
    kind = data.get("artifact") if isinstance(data, dict) else None
    if isinstance(kind, str) and kind in _KINDS:
        raise InputError(
            f"{text}: expected a model, found a {kind.replace('_', ' ')}, which `elixir show {text}` prints"
        )


def find_hardware(text: str) -> HardwareProfile:
    """A preset by name, or a profile from a file.

    Raises:
        InputError: the name is unknown; the message has the nearest names.
        ArtifactError: the file is no hardware profile.
    """
    from elixir.hardware.profile import load_hardware

    return load_hardware(text)


def find_timed_hardware(text: str) -> HardwareProfile:
    """`find_hardware`, for predictions of time: rates that are not to be relied on are warned of."""
    from elixir.hardware.profile import warn_if_doubtful

    profile = find_hardware(text)
    warn_if_doubtful(profile)
    return profile
