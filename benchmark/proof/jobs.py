"""What is run: a `Job` is one process, one row."""

from __future__ import annotations

import dataclasses
from typing import Any

PARTS = ("links", "memory", "resident", "offload", "capacity")
"""In the order in which they run: what is measured of the links serves the plans of those after."""

SHARES = {"links": 3.0, "memory": 3.0, "resident": 2.0, "offload": 6.0, "capacity": 3.0}
"""Of the time that is left when a part begins, among it and those after it."""

Row = dict[str, Any]


class NotRun(Exception):
    """A job that makes no sense on this machine; the message says why, with numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One process and what it is to do. Plain data, since it travels to that process as JSON."""

    part: str
    case: str
    """What several contenders do alike."""
    contender: str
    """Who does it, and in which setting."""
    work: str
    """Which function of `benchmark.proof.worker.WORK` does it."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    expected_s: float = 30.0
    """It is not started with less time left. A guess until it has been measured on the machine at hand."""
    limit_s: float = 120.0
    """It is ended after this long."""
    unless: tuple[str, ...] = ()
    """Ids of jobs of which one that succeeded makes this one needless, such as the same with a larger micro-batch."""

    @property
    def id(self) -> str:
        """Names its row."""
        return f"{self.part}/{self.case}/{self.contender}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Job:
        """The inverse of `to_dict`."""
        return cls(**{**values, "unless": tuple(values["unless"])})
