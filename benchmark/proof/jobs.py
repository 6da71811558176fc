"""The jobs: a `Job` is one process, one row."""

from __future__ import annotations

import dataclasses
from typing import Any

PARTS = ("links", "memory", "resident", "offload", "capacity")
"""Jobs in the order in which they run: measured links serve the plans of later jobs."""

SHARES = {"links": 3.0, "memory": 2.5, "resident": 2.0, "offload": 4.5, "capacity": 5.0}
"""Shares of the time that is left when a part begins, among it and those after it: so that each gives an answer within
nine minutes if jobs take as long as they are expected to."""

AT_ONCE = {"memory": 4, "side by side": 3}
"""Jobs of a part that run side by side. What one of them allocates does not depend on the others as long as all find
memory; one that did not is run again alone. What is timed has the machine to itself. ``side by side`` are the probes of
`benchmark.proof.quarter` that need no core for long."""

PRELOAD = (
    "torch.distributed.fsdp",
    "transformers.models.opt.modeling_opt",
    "transformers.models.gpt2.modeling_gpt2",
)
"""Libraries of the timed parts, which a worker loads before it has a job."""

Row = dict[str, Any]


class NotRun(Exception):
    """A job that makes no sense on this machine; the message says why, with numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One process and what it is to do. Plain data, since it travels to that process as JSON."""

    part: str
    case: str
    """Settings that several contenders have in common."""
    contender: str
    """The contender that does it, and its setting."""
    work: str
    """The function of `benchmark.proof.worker.WORK` that does it."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    expected_s: float = 30.0
    """It is not started with less time left. A guess until it has been measured on the machine at hand."""
    limit_s: float = 120.0
    """It is ended after this long, so that one that hangs does not take the run with it."""
    unless: tuple[str, ...] = ()
    """Ids of jobs that make this one needless: it is run only if all of them had too little memory, or failed."""

    @property
    def id(self) -> str:
        """Names its row."""
        return f"{self.part}/{self.case}/{self.contender}"

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Job:
        """The inverse of `to_dict`."""
        return cls(**{**values, "unless": tuple(values["unless"])})
