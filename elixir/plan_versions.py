"""Plans of older schema versions as those of now: what came later has the value that it had, or was taken to have, then."""

from __future__ import annotations

from typing import Any

from elixir.errors import ArtifactError

DISK_LINKS = ("disk_read", "disk_write")


def upgraded(data: dict[str, Any], version: int, source: str) -> dict[str, Any]:
    """A plan's fields and head as of now; as they are where the version is none of the older ones that can be read.

    Args:
        data: of a plan file.
        version: its schema version.
        source: where it comes from, for errors.

    Raises:
        ArtifactError: a field that is read here is of another type.
    """
    if version == 2:
        data, version = _with_disk(data), 3
    if version == 3:
        data, version = _with_moments(data, source), 4
    if version == 4:
        data, version = _with_steps_in_backward(data), 5
    return _with_permission(data) if version == 5 else data


def _with_permission(data: dict[str, Any]) -> dict[str, Any]:
    """A plan of schema 5 as one of schema 6; as it is, and so refused, where it says whether chunks may step in backward.

    One that lets none was planned again, and explained, as if that were not permitted.
    """
    chunks = data.get("chunks")
    known = isinstance(chunks, list) and all(isinstance(chunk, dict) for chunk in chunks)
    if data.get("schema_version") != 5 or not known or "may_step_in_backward" in data:
        return data
    steps = any(chunk.get("steps_in_backward") is True for chunk in chunks or ())
    return data | {"schema_version": 6, "may_step_in_backward": steps}


def _with_steps_in_backward(data: dict[str, Any]) -> dict[str, Any]:
    """A plan of schema 4 whose chunks step when they are told to; as it is, and so refused, where one says more."""
    chunks = data.get("chunks")
    known = isinstance(chunks, list) and all(isinstance(chunk, dict) for chunk in chunks)
    if data.get("schema_version") != 4 or not known or any("steps_in_backward" in chunk for chunk in chunks or ()):
        return data
    return data | {"schema_version": 5, "chunks": [chunk | {"steps_in_backward": False} for chunk in chunks or ()]}


def _with_moments(data: dict[str, Any], source: str) -> dict[str, Any]:
    """A plan of schema 3 with what came after; as it is, and so refused, where it has any of that already."""
    size = data.get("state_bytes_per_numel")
    if data.get("schema_version") != 3 or size is None or "state_size" in data or "moments" in data:
        return data
    if type(size) is not int:
        raise ArtifactError(f"{source}: field 'state_bytes_per_numel' must be int, found {size!r:.60}")
    kept = {key: value for key, value in data.items() if key != "state_bytes_per_numel"}
    states = {"block_bytes": size, "block_numel": 1}
    return kept | {"schema_version": 4, "state_size": states, "moments": "float32"}


def _with_disk(data: dict[str, Any]) -> dict[str, Any]:
    """A plan of schema 2 as one of schema 3; as it is, and so refused, where it has any of what came then."""
    later: dict[str, Any] = {"disk_budget_bytes": 0, "schema_version": 3}
    predicted = data.get("predicted")
    if isinstance(predicted, dict):
        moved = predicted.get("moved_bytes")
        if "disk_peak_bytes" in predicted or (isinstance(moved, dict) and any(link in moved for link in DISK_LINKS)):
            return data
        later["predicted"] = predicted | {"disk_peak_bytes": 0}
        if isinstance(moved, dict):
            later["predicted"]["moved_bytes"] = moved | dict.fromkeys(DISK_LINKS, 0)
    return data if "disk_budget_bytes" in data else data | later
