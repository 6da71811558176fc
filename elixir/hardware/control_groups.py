"""The control groups above this process, which limit what it may use of a machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def control_groups(controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP) -> Iterator[tuple[Path, bool]]:
    """(folder, whether it is of version 2) of every group above this process that `controller` may limit.

    Both hierarchies are read; a container often sees its own group at the root, so groups that are not there are
    skipped and the root is always read.

    Args:
        controller: such as ``memory`` or ``cpu``.
        root: where the hierarchies are mounted.
        membership: file that says which groups this process is in.
    """
    for controllers, group in _memberships(membership):
        bases = [root / controller, root / controllers] if controller in controllers.split(",") else []
        if not controllers:
            bases = [root, root / "unified"]
        for base in dict.fromkeys(bases):
            own = base / group.strip("/")
            for folder in (own, *own.parents):
                if folder.is_relative_to(base):
                    yield folder, controllers == ""


def own_group(controller: str, membership: Path = MEMBERSHIP) -> str:
    """The names of the groups that `controller` may limit, in one text; processes of one group have the same."""
    return " ".join(group for names, group in _memberships(membership) if not names or controller in names.split(","))


def _memberships(membership: Path) -> Iterator[tuple[str, str]]:
    """(controllers, group) of this process in each hierarchy; version 2 names no controllers."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        controllers, _, group = line.partition(":")[2].partition(":")
        yield controllers, group
