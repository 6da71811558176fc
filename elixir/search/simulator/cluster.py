"""`Cluster`: how long gathers and reductions take among ranks that nobody has measured, by latency and bandwidth.

An all-gather of a buffer leaves it whole on every rank, each of which brought one part; a reduce-scatter is the same
read backwards, so one formula serves both (the cost of adding up is left out). With p ranks on H hosts,
G per host, n bytes of the whole buffer, a latency per step within a host and between hosts, and bandwidths B, in a
ring every rank passes on what it got last, p - 1 steps. A part crosses H - 1 host borders and p - H links within
hosts, and every link carries (p - 1)/p of n, so the slowest one sets the pace.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", Int. J.
of High Performance Computing Applications 19(1), 2005, section 4.1; NCCL's own estimate, src/graph/tuning.cc
(latencies per step, and that NCCL gathers and reduce-scatters in rings).
"""

from __future__ import annotations

from dataclasses import dataclass

# NCCL, src/graph/tuning.cc (commit 01afd20), protocol "Simple", algorithm ring.
NCCL_CALL_S = 8.4e-6
"""Once per collective: `baseLat`."""
NVLINK_STEP_S = 3.4e-6
"""Per step within a host: `hwLat` for NVLink. Over PCIe it is 5.7e-6."""
NETWORK_STEP_S = 9.6e-6
"""Per step between hosts: `hwLat` for the network."""


@dataclass(frozen=True)
class Cluster:
    """The ranks of a collective and what lies between them."""

    ranks: int
    ranks_per_host: int
    """Most ranks of a host; the last host may have fewer."""
    host_bytes_per_s: float
    """Bandwidth within a host, per rank and direction."""
    network_bytes_per_s: float
    """Bandwidth between hosts, per host and direction, all its network cards together."""
    call_s: float = 0.0
    """Latency of a call, once per collective."""
    host_step_s: float = 0.0
    """Latency of a step within a host."""
    network_step_s: float = 0.0
    """Latency of a step between hosts."""

    @property
    def hosts(self) -> int:
        """Number of machines."""
        return -(-self.ranks // self.ranks_per_host)


def gather_s(nbytes: float, cluster: Cluster) -> float:
    """Seconds of an all-gather, or a reduce-scatter, of a buffer of `nbytes` in total.

    >>> round(gather_s(8e9, Cluster(8, ranks_per_host=8, host_bytes_per_s=1e9, network_bytes_per_s=1e9)), 6)
    7.0
    """
    if cluster.ranks == 1 or not nbytes:
        return 0.0
    ranks, hosts = cluster.ranks, cluster.hosts
    bytes_per_s = cluster.host_bytes_per_s
    if hosts > 1:
        slowest = cluster.network_bytes_per_s
        # With one rank per host no link within a host is on the way.
        bytes_per_s = min(bytes_per_s, slowest) if cluster.ranks_per_host > 1 else slowest
    latency = (ranks - hosts) * cluster.host_step_s + (hosts - 1) * cluster.network_step_s
    return cluster.call_s + (latency + (ranks - 1) / ranks * nbytes / bytes_per_s)


def all_reduce_s(nbytes: float, cluster: Cluster) -> float:
    """Seconds of an all-reduce of a buffer of `nbytes` in a ring: a reduce-scatter and an all-gather in one call.

    >>> round(all_reduce_s(8e9, Cluster(8, ranks_per_host=8, host_bytes_per_s=1e9, network_bytes_per_s=1e9)), 6)
    14.0
    """
    return 2 * gather_s(nbytes, cluster) - (cluster.call_s if cluster.ranks > 1 and nbytes else 0.0)
