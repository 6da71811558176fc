"""`StepCounts`: the counts of one rank while a step runs, for the report that compares them with the plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepCounts:
    """Loads, bytes over the links, and updates, since a step began; all that moves anything adds to it."""

    loads: int = 0
    hits: int = 0
    """Requirements of the order that were met by what was there: neither loaded for it, nor fetched ahead for it."""
    demand_loads: int = 0
    """Loads that nothing had foreseen: the use had to wait for all of the transfer."""
    deviations: int = 0
    calls: int = 0
    """Calls of the model, or of parts, outside of a forward that `RCache.begin` has announced."""
    begun_anew: int = 0
    """Calls among them with which the order began anew, from its beginning."""
    backwards: int = 0
    host_to_device_bytes: int = 0
    refreshed_bytes: int = 0
    """The part of them that are new weights of the host's Adam."""
    device_to_host_bytes: int = 0
    network_bytes: int = 0
    """Received from other ranks of the replica."""
    replicas_bytes: int = 0
    """Received from other replicas."""
    disk_read_bytes: int = 0
    """States on a disk, and weights in files."""
    disk_written_bytes: int = 0
    early_chunks: int = 0
    """Chunks that were updated early."""
    kept_chunks: int = 0
    """The number of them whose new states were kept."""

    def reset(self) -> None:
        """Begins to count anew."""
        vars(self).update(vars(StepCounts()))
