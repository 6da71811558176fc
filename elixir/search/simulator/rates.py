"""Seconds for an amount of work on one machine: the only place where the simulator asks a `HardwareProfile`."""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from elixir.hardware.host_share import adam_threads, enough_threads
from elixir.hardware.profile import HardwareProfile
from elixir.hardware.rate_fit import PRODUCTS, plainer_keys
from elixir.optimizer_states import MASTER_BYTES, MomentKind, matrix_flops
from elixir.search.problem.placement import Floats, Setting
from elixir.step_trace import Operation, StepTrace

logger = logging.getLogger(__name__)

_HOST_ADAM = re.compile(r"host_adam\.(\d+)(|\.all_ranks)")
ADAM_TRAFFIC_BYTES: dict[MomentKind, int] = {
    # Per element with bfloat16 weights: the gradient read (2), the master read and written (8), weights read as their
    # cache line comes, and written (4); and the moments read and written.
    "float32": 14 + 16,
    "bfloat16": 14 + 8,
    # The first of its two passes, which finds the scales, reads the gradient and the codes once more.
    "8bit": 14 + 4 + 4,
}
_IN_PLACE_BYTES = 14
"""Bytes of `ADAM_TRAFFIC_BYTES` without states."""
AVERAGE_TRAFFIC_BYTES = 12
"""Bytes per element of an average of the weights: it is read and written, and the new master read once more."""
MATRIX_TRAFFIC_BYTES = 46
"""Bytes per element of a step over a matrix with float32 masters, without the products: the momentum is moved to the
gradient (12), the direction made (12) and rounded (6), the weights decayed (8) and changed (10), less 2 with gradients
in bfloat16. Counted in `elixir.kernels.muon`."""
DEVICE_ROUNDING_BYTES = 20
"""Bytes of device memory, per element of a chunk in low precision with float32 moments, in addition to what
``device_adam`` counts: its gradient is read (2) and written in float32 (4), multiplied in place by the factor of
clipping or of the loss scale (4 + 4), and the new master is read (4) and written as a weight (2)."""
MEASURED_BFLOAT16_TRAFFIC_BYTES = 14
"""Bytes an element in the fits of ``host_adam.bfloat16`` and ``device_adam.bfloat16``: weights, gradient and moments in
bfloat16."""
ARITHMETIC_NUMEL_PER_S: dict[MomentKind, float] = {"bfloat16": 0.64e9, "8bit": 0.205e9}
"""Elements that a thread of the host computes a second if memory does not limit it, random bits for rounding included.

Measured: benchmark/results/adam_speed.csv, compiled, half of what two cores of an EPYC of family 26 with AVX512 did."""
UNALIGNED_SHARE = 0.16
"""Rate of products whose rows do not start at multiples of 16 bytes over that of others, in 16 bits on a Hopper GPU.

Measured on an H200: logits of 16,384 tokens over 50,257 classes and their two slopes in bfloat16, of size 1,024 and
3,072, at 119 and 123 TFLOP/s, where other products of the same steps reached 720 to 790. Not measured on other GPUs."""
HOPPER = 9
"""The major number of its compute capability."""
HALVES = ("bfloat16", "float16")

# NCCL, src/graph/tuning.cc (commit 01afd20), protocol "Simple", algorithm ring.
NCCL_CALL_S = 8.4e-6
"""Once per collective: `baseLat`."""
NVLINK_STEP_S = 3.4e-6
"""Per step within a host: `hwLat` for NVLink. Over PCIe it is 5.7e-6."""
NETWORK_STEP_S = 9.6e-6
"""Per step between hosts: `hwLat` for the network."""


def adam_share(moments: MomentKind) -> float:
    """How many times faster than with float32 moments Adam steps, as far as memory limits it."""
    return ADAM_TRAFFIC_BYTES["float32"] / ADAM_TRAFFIC_BYTES[moments]


def average_share(setting: Setting) -> float:
    """Seconds of a step on the host with an average of the weights over one without, by the bytes that they move."""
    return 1.0 + AVERAGE_TRAFFIC_BYTES * setting.averages / ADAM_TRAFFIC_BYTES[setting.moments]


def out_of_place_share(setting: Setting) -> float:
    """Seconds of a step that keeps the old states over one in place, by the bytes that cross the memory bus.

    Adam's has a kernel (`elixir.kernels.adam.step`) for moments in float32 and bfloat16. It streams what it
    writes, moves 28 and 20 bytes an element where a step in place moves 30 and 22, and is taken to be as fast. Other
    optimizers, torch's Adams without ``fused=True``, and 8 bits have states copied first: each byte is read, and
    written to a line that is read before.
    """
    if not setting.copied and setting.moments != "8bit":
        return 1.0
    kept = setting.states.least_per_numel()
    # The first of two passes with 8 bits reads the gradient and the codes once more; an average reads the master.
    in_place = _IN_PLACE_BYTES + 2 * kept + 4 * ((setting.moments == "8bit") + setting.averages)
    return 1.0 + 3 * (MASTER_BYTES + kept) / in_place


@dataclass(frozen=True)
class Line:
    """``latency_s + amount / per_s``, and nothing for nothing."""

    latency_s: float
    per_s: float

    def __call__(self, amounts: npt.ArrayLike) -> Floats:
        """Seconds, element by element."""
        values = np.asarray(amounts, dtype=np.float64)
        return np.where(values > 0, self.latency_s + values / self.per_s, 0.0)

    def shared(self, users: int) -> Line:
        """The rate that one of `users` gets if they work at the same time."""
        return replace(self, per_s=self.per_s / users)

    def faster(self, factor: float) -> Line:
        """The line whose rate is so many times as high."""
        return replace(self, per_s=factor * self.per_s)

    def at_most(self, per_s: float) -> Line:
        """No faster than `per_s`."""
        return replace(self, per_s=min(self.per_s, per_s))


@dataclass(frozen=True)
class Cluster:
    """The ranks of a collective and what lies between them: how long it takes if nobody has measured it.

    An all-gather of a buffer leaves it whole on every rank, each of which brought one part; a reduce-scatter is the
    same read backwards, so one formula serves both (the cost of adding up is left out). With p ranks on H hosts, G per
    host, n bytes of the whole buffer, a latency per step within a host and between hosts, and bandwidths B, in a ring
    every rank passes on what it got last, p - 1 steps. A part crosses H - 1 host borders and p - H links within hosts,
    and every link carries (p - 1)/p of n, so the slowest one sets the pace.

    Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", Int.
    J. of High Performance Computing Applications 19(1), 2005, section 4.1; NCCL's own estimate, src/graph/tuning.cc
    (latencies per step, and that NCCL gathers and reduce-scatters in rings).
    """

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


class Rates:
    """Rates of the simulator's resources, for one rank while all ranks work.

    Fits of the profile are taken if it has them, otherwise its plain rates. Ranks of one machine share the host's Adam
    and its memory's bandwidth, unless the profile has measured all of them at once; its disk they share in any case.
    Host memory carries both directions of a link, and Adam, together.

    Args:
        hardware: the machine.
        dtype: of most parameters, in which matrices are multiplied.
        world_size: number of ranks.
        ranks_per_host: how many of them share a machine.
        replicas: of the model, each sharded over as many neighbouring ranks.
        moments: how Adam's are kept. A profile has measured float32, and perhaps bfloat16; other rates follow by the
            bytes that a step moves, and on the host, where the number of threads is known, from what a thread computes.

    Raises:
        InputError: no FLOP/s for the dtype.
    """

    def __init__(
        self,
        hardware: HardwareProfile,
        dtype: str,
        world_size: int,
        ranks_per_host: int,
        *,
        moments: MomentKind = "float32",
        replicas: int = 1,
    ) -> None:
        self._moments = moments
        self._dtype = dtype
        self.shards, self.replicas = world_size // replicas, replicas
        self._hardware = hardware
        self.ahead = hardware.device_kind == "cuda"
        """Whether the thread that submits does not wait for compute: updates on the host begin during those of the
        device, and copies take no cores. Otherwise the device is the CPU itself."""
        self._ranks = ranks_per_host
        self._on_hopper = (hardware.compute_capability or (0, 0))[0] == HOPPER
        host_memory = hardware.host_memory_bytes_per_s / ranks_per_host
        self.host_threads: int | None = None
        """Threads of one rank's Adam, if the profile tells how many are enough."""
        self.fetch = self._link("host_to_device").at_most(host_memory)
        self.offload = self._link("device_to_host").at_most(host_memory)
        wanted_per_s = self.fetch.per_s + self.offload.per_s
        self.fetch_slowdown = self._both("host_to_device", wanted_per_s / host_memory)
        self.offload_slowdown = self._both("device_to_host", wanted_per_s / host_memory)
        self.host_adam = self._host_adam()
        self.device_adam = self._adam("device_adam{}")
        self._line(f"matmul.{dtype}.square")  # refuses a dtype without FLOP/s before any work
        self.device_memory = self._line(f"elementwise.{dtype}")
        self.host_memory = Line(0.0, host_memory)
        self.contention = hardware.contention or 0.0
        """Seconds that compute loses for each that a lane works next to it."""
        self._cluster = self._made()
        self._across = self._made_across()

    def device_step(self, numel: npt.ArrayLike, low_precision: npt.ArrayLike) -> Floats:
        """Adam on the device, by elements of a chunk and whether its weights have fewer bits than its masters."""
        counts = np.asarray(numel)
        rounded = np.where(np.asarray(low_precision, dtype=bool) & (self._moments == "float32"), counts, 0)
        return self.device_adam(counts) + self.device_memory(DEVICE_ROUNDING_BYTES * rounded)

    def host_step(self, numel: npt.ArrayLike, moved_bytes: npt.ArrayLike) -> Floats:
        """Adam on the host, by elements of a chunk, while as many bytes as `moved_bytes` go to or from the device.

        Host memory carries both. The device's copy engine does not wait, so Adam gets the bandwidth that is left: of
        what both share, if that was measured. Otherwise memory is taken to be at least as fast as the same profile says
        that Adam alone uses it.
        """
        counts = np.asarray(numel, dtype=np.float64)
        traffic, shared = ADAM_TRAFFIC_BYTES[self._moments], self._hardware.host_shared_bytes_per_s
        per_s = max(self.host_memory.per_s, traffic * self.host_adam.per_s)
        if shared is not None:
            per_s = shared / self._ranks
        carried = np.where(counts > 0, (traffic * counts + np.asarray(moved_bytes)) / per_s, 0.0)
        return np.maximum(self.host_adam(counts), carried)

    def orthogonal_s(self, matrices: Sequence[tuple[int, int]]) -> float:
        """Seconds in which the device makes matrices orthogonal, in bfloat16."""
        known = "bfloat16" in self._hardware.flops_per_s or "matmul.bfloat16.square" in self._hardware.fits
        line = self._sustained(f"matmul.{'bfloat16' if known else self._dtype}.square")
        return float(line([matrix_flops(*shape) for shape in matrices]).sum())

    def matrix_step(self, numel: npt.ArrayLike, more_bytes: int = 0, *, on_host: bool) -> Floats:
        """Seconds of the elementwise part of a step over matrices, by their elements, with so many more bytes each."""
        traffic = MATRIX_TRAFFIC_BYTES + more_bytes
        if on_host:
            return np.asarray(self.host_step(numel, 0) * traffic / ADAM_TRAFFIC_BYTES["float32"])
        return self.device_memory(traffic * np.asarray(numel))

    @property
    def number_s(self) -> float:
        """Seconds until the host has a number that the device has worked out."""
        return self.offload.latency_s if self.ahead else 0.0

    @property
    def disk_read(self) -> Line:
        """Reading from the disk of a machine, which its ranks share; `InputError` if the profile does not know it."""
        return self._line("disk_read").shared(self._ranks)

    @property
    def disk_write(self) -> Line:
        """Writing to the disk of a machine, which its ranks share; raises as `disk_read`."""
        return self._line("disk_write").shared(self._ranks)

    def operations_s(self, trace: StepTrace) -> Floats:
        """Seconds of every operation, without the time that its call takes."""
        return np.array([self._operation_s(operation) for operation in trace.operations], dtype=np.float64)

    def accesses_s(self, trace: StepTrace) -> Floats:
        """Seconds of every access: the sum over its operators, with the time that their calls take."""
        seconds = self.operations_s(trace)
        parts = [event.parts or (len(event.operations),) for event in trace.accesses]
        counts = np.array(list(itertools.chain.from_iterable(parts)), dtype=np.int64)
        run = np.fromiter(itertools.chain.from_iterable(event.operations for event in trace.accesses), dtype=np.int64)
        access = np.repeat(np.arange(len(counts)), counts)
        kernels = np.bincount(access, weights=seconds[run], minlength=len(counts))
        calls = (self._hardware.launch_s or 0.0) * counts
        # A CPU runs its operators itself, so their calls come on top.
        busy = np.maximum(kernels, calls) if self.ahead else kernels + calls
        of = np.repeat(np.arange(len(parts)), list(map(len, parts)))
        return np.bincount(of, weights=busy).astype(np.float64)

    def _operation_s(self, operation: Operation) -> float:
        """Seconds of one operator: its FLOPs or its bytes in device memory, whichever takes longer."""
        kind, hardware = operation.kind, self._hardware
        known = operation.dtype in hardware.flops_per_s or f"matmul.{operation.dtype}.square" in hardware.fits
        dtype = operation.dtype if known else self._dtype  # integers, and what is too rare to be measured
        memory = kind if kind in ("activation", "reduction") else "elementwise"
        seconds = float(self._sustained(f"{memory}.{dtype}")(operation.moved_bytes))
        if operation.flops:
            key = f"{kind}.{dtype}" if kind in PRODUCTS else f"matmul.{dtype}.{kind}"
            seconds = max(seconds, float(self._sustained(key)(operation.flops)))
        return seconds

    def _sustained(self, key: str) -> Line:
        """The rate that was measured for `key`; otherwise the plain one, as far as a training step reaches it."""
        hardware = self._hardware
        family, dtype, *_ = key.split(".")
        if key.endswith(".unaligned") and key not in hardware.fits and dtype in HALVES and self._on_hopper:
            aligned = self._sustained(f"{family}.{dtype}.square")
            return aligned.faster(UNALIGNED_SHARE)
        if any(name in hardware.fits for name in (key, *plainer_keys(key))):
            return self._line(key)
        if family in PRODUCTS:
            share = hardware.sustained_attention_share if family != "matmul" else None
            share = hardware.sustained_flops_share if share is None else share
            return self._line(key) if share is None else Line(0.0, share * hardware.flops_per_s[dtype])
        share = hardware.sustained_memory_share
        return Line(0.0, (1.0 if share is None else share) * hardware.device_memory_bytes_per_s)

    def device_copy(self, nbytes: npt.ArrayLike) -> Floats:
        """Seconds of a copy within the device's memory: every byte is read and written."""
        return self.device_memory(2 * np.asarray(nbytes))

    def host_add(self, nbytes: npt.ArrayLike) -> Floats:
        """Seconds of adding into host memory: two reads and a write."""
        return self.host_memory(3 * np.asarray(nbytes))

    def gather(self, nbytes: npt.ArrayLike) -> Floats:
        """Seconds of all-gathers, by bytes of the whole buffer."""
        return self._collective("all_gather", nbytes)

    def reduce(self, nbytes: npt.ArrayLike) -> Floats:
        """Seconds of reduce-scatters, by bytes of the whole buffer."""
        return self._collective("reduce_scatter", nbytes)

    def sum_replicas(self, nbytes: npt.ArrayLike) -> Floats:
        """Seconds of sums over the replicas, by bytes of a shard; nothing for one replica."""
        return _each(lambda amount: all_reduce_s(amount, self._across), nbytes)

    def _collective(self, name: str, nbytes: npt.ArrayLike) -> Floats:
        fit = self._hardware.fits.get(f"{name}.{self.shards}")
        if fit is not None:
            return Line(fit.latency_s, fit.per_s)(nbytes)
        return _each(lambda amount: gather_s(amount, self._cluster), nbytes)

    def _made(self) -> Cluster:
        """The ranks; an unknown network is as fast as the devices of one machine (`say_if_network_unknown`)."""
        hardware = self._hardware
        between_s = hardware.network_latency_s
        return Cluster(
            ranks=self.shards,
            ranks_per_host=min(self._ranks, self.shards),
            host_bytes_per_s=hardware.device_to_device_bytes_per_s,
            network_bytes_per_s=hardware.network_bytes_per_s or hardware.device_to_device_bytes_per_s,
            call_s=NCCL_CALL_S if self.ahead else 0.0,
            host_step_s=NVLINK_STEP_S if self.ahead else 0.0,
            network_step_s=NETWORK_STEP_S if between_s is None else between_s,
        )

    def _made_across(self) -> Cluster:
        """The ranks that hold the same shard. All that share a machine sum at once, so they share its network."""
        of_host = max(1, self._ranks // self.shards)
        together = min(self._ranks, self.shards)
        return replace(
            self._cluster,
            ranks=self.replicas,
            ranks_per_host=min(of_host, self.replicas),
            network_bytes_per_s=self._cluster.network_bytes_per_s / together,
        )

    def _line(self, key: str) -> Line:
        fit = self._hardware.rate(key)
        return Line(fit.latency_s, fit.per_s)

    def _link(self, key: str) -> Line:
        return self._among_ranks(key, self._line(key), self._line(key))

    def _among_ranks(self, key: str, alone: Line, otherwise: Line, share: float = 1.0) -> Line:
        """One of the ranks of a machine while all of them work, by `alone` and the fit of all that it has devices for;
        `otherwise` without such a fit.

        In between, the ranks of a machine together follow a straight line.
        """
        fit, most = self._hardware.fits.get(f"{key}.all_ranks"), self._hardware.devices_per_host
        if self._ranks == 1 or fit is None:
            return alone if self._ranks == 1 else otherwise
        part = (self._ranks - 1) / max(most - 1, self._ranks - 1)
        together_per_s = alone.per_s + part * (max(most, self._ranks) * fit.per_s * share - alone.per_s)
        return Line(fit.latency_s, together_per_s / self._ranks)

    def _both(self, key: str, of_host_memory: float) -> float:
        """How many times longer a transfer takes while another goes the other way, as measured with as many ranks.

        Otherwise as far as host memory cannot carry both: `of_host_memory` is what they want over what it has.
        """
        fits, ending = self._hardware.fits, ".all_ranks" if self._ranks > 1 else ""
        alone, both = fits.get(f"{key}{ending}"), fits.get(f"{key}.both{ending}")
        if alone is not None and both is not None:
            return max(1.0, alone.per_s / both.per_s)
        alone, both = fits.get(key), fits.get(f"{key}.both")
        measured = 1.0 if alone is None or both is None else alone.per_s / both.per_s
        return max(1.0, measured, of_host_memory)

    def _adam(self, key: str) -> Line:
        """Adam with moments of this kind: as measured, otherwise made of the rate for float32.

        Args:
            key: of the fits, with a place for the dtype of the moments, such as ``device_adam{}``.
        """
        kind, fits = self._moments, self._hardware.fits
        if kind == "bfloat16" and key.format(".bfloat16") in fits:
            share = MEASURED_BFLOAT16_TRAFFIC_BYTES / ADAM_TRAFFIC_BYTES[kind]
            return self._line(key.format(".bfloat16")).faster(share)
        return self._line(key.format("")).faster(adam_share(kind))

    def _host_adam(self) -> Line:
        """The rate at the number of threads that the runtime gives it (`elixir.hardware.host_share`), if known."""
        alone, together = self._host_adam_lines(""), self._host_adam_lines(".all_ranks") if self._ranks > 1 else {}
        cores = max(alone, default=0)  # all that the machine's ranks may use
        threads = adam_threads(cores, self._ranks, 0 if self.ahead else cores // self._ranks)
        if not alone and not together:
            share = adam_share(self._moments)
            plain = self._line("host_adam").faster(share)
            return self._among_ranks("host_adam", plain, plain.shared(self._ranks), share)
        # What all cores together get out of memory is what ranks share, whatever each could do alone.
        most_per_s = max((fit.per_s for fit in alone.values()), default=math.inf) / self._ranks

        def line(count: int) -> Line:
            return _by_threads(together, count) if together else _by_threads(alone, count).at_most(most_per_s)

        if self.ahead and alone:  # on a CPU compute has most of the cores, by a number that only the run knows
            threads = self.host_threads = enough_threads(lambda count: line(count).per_s, threads)
        return line(threads)

    def _host_adam_lines(self, ending: str) -> dict[int, Line]:
        """Rates by number of threads."""
        per_thread = ARITHMETIC_NUMEL_PER_S.get(self._moments, math.inf)
        matches = [_HOST_ADAM.fullmatch(key) for key in sorted(self._hardware.fits)]
        threads = [int(match[1]) for match in matches if match is not None and match[2] == ending]
        return {count: self._adam(f"host_adam.{count}{{}}{ending}").at_most(count * per_thread) for count in threads}


def _each(seconds: Callable[[float], float], amounts: npt.ArrayLike) -> Floats:
    """Seconds of each amount; many are equal."""
    different, place = np.unique(np.asarray(amounts, dtype=np.float64), return_inverse=True)
    return np.array(list(map(seconds, different.tolist())), dtype=np.float64)[place]


def _by_threads(fits: Mapping[int, Line], threads: int) -> Line:
    """The fit of so many threads; between two that were measured on a straight line, never beyond them."""
    known = sorted(fits)
    per_s, latency_s = (
        float(np.interp(threads, known, [getattr(fits[count], name) for count in known]))
        for name in ("per_s", "latency_s")
    )
    return Line(latency_s, per_s)


def say_if_network_unknown(hardware: HardwareProfile, world_size: int, ranks_per_host: int) -> bool:
    """Log that a rate had to be supposed, where ranks span machines and the profile has none; True if it did."""
    if world_size <= ranks_per_host or hardware.network_bytes_per_s is not None:
        return False
    logger.warning(
        "%d ranks span several machines, and hardware %r does not say how fast the network between them is: taken as "
        "fast as between devices of one machine; give network_bytes_per_s (--network), or devices_per_host "
        "(--devices-per-host) if one machine has as many",
        world_size,
        hardware.name,
    )
    return True


def main_dtype(trace: StepTrace) -> str:
    """The floating dtype of most parameter elements; quantised weights, unpacked when they are read, do not count."""
    numel: dict[str, int] = {}
    for param in trace.parameters:
        if param.dtype.startswith(("float", "bfloat")) and not param.dtype.startswith(("float8", "float4")):
            numel[param.dtype] = numel.get(param.dtype, 0) + param.numel
    return max(sorted(numel), key=lambda name: numel[name], default="float32")
