"""How many threads the host's Adam has, and on which cores: the one rule, for the runtime and for the time model.

`torchrun` gives every rank a single OpenMP thread unless the user sets the number. That is right for operators between
kernels of a device and wrong for Adam over gigabytes of host memory, which then crawls on one core. So the worker
thread that updates on the host has a separate number: this rank's part of the cores, less the threads of compute, less
those for the threads that submit work. On a measured machine, no more than reach nearly all that memory gives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from elixir.errors import InputError, unknown_name
from elixir.hardware.memory import MEMBERSHIP, ROOT, control_groups, own_group
from elixir.units import number_ranges

logger = logging.getLogger(__name__)

BIND_VARIABLE = "ELIXIR_BIND"
"""``1`` (default) binds the host's Adam where several ranks share a machine, ``0`` does not."""
FEW_CORES = 2
"""On so few cores, none is left for the data loader: it would be half of them."""
MANY_CORES = 8
"""On so many cores or more, two are left: forward and autograd's engine submit from a thread each, and others issue
transfers.
Adam's threads wait for each other several times a chunk, so all of them wait for one that has to share its core."""
ENOUGH_SHARE = 0.95
"""Share of the best rate that is enough: memory is busy long before all threads work, and more only take cores."""
_OPENMP_BINDS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables that tell OpenMP where its threads run; they count if they are set."""
_TOPOLOGY = Path("/sys/devices/system/cpu")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def adam_threads(cores: int, ranks: int = 1, compute_threads: int = 0) -> int:
    """Threads of one rank's Adam on the host.

    Each rank has as many cores as every other. Threads of compute on the CPU are subtracted, since they run while Adam
    does. With more than two cores one is left for the data loader and for Python, and from eight on another.

    >>> adam_threads(64, ranks=8)
    6
    >>> adam_threads(2, compute_threads=1)
    1

    Args:
        cores: that the ranks of one machine may use together.
        ranks: of that machine.
        compute_threads: of one rank, where compute is on the CPU.
    """
    mine = cores // ranks
    return max(1, mine - compute_threads - (mine > FEW_CORES) - (mine >= MANY_CORES))


def enough_threads(per_s: Callable[[int], float], most: int) -> int:
    """The fewest threads that reach `ENOUGH_SHARE` of what any number up to `most` does.

    >>> enough_threads(lambda threads: min(threads, 6.0), most=14)
    6

    Args:
        per_s: what a number of threads does a second.
        most: of `adam_threads`.
    """
    rates = [per_s(threads) for threads in range(1, most + 1)]
    return next(index + 1 for index, rate in enumerate(rates) if rate >= ENOUGH_SHARE * max(rates))


@dataclass(frozen=True)
class HostView:
    """The machine as one rank sees it."""

    host: str
    """A name that all ranks of a machine share, and no other machine has."""
    cores: tuple[int, ...]
    """Numbers of those that it may use; hyperthreads of one core are neighbours."""
    quota_cores: float
    """How many the control groups above it allow at a time."""
    memory_group: str = ""
    """Its control group of memory, as the operating system names it."""


@dataclass(frozen=True)
class HostShare:
    """One rank's part of its machine."""

    cores: tuple[int, ...]
    """Its own."""
    all_cores: int
    """Number of cores that it shares with `ranks`, itself included, as far as control groups allow."""
    ranks: int
    on_machine: int = field(default=1, compare=False)
    """Ranks of the group on its machine, whichever cores they have."""
    memory_ranks: tuple[int, ...] = field(default=(0,), compare=False)
    """Ranks of the group on its machine and in its control group of memory, itself included."""


def host_view(topology: Path = _TOPOLOGY) -> HostView:
    """This rank's; reads what the operating system tells and takes the rest as unlimited."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = _BOOT.read_text().strip()
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = tuple(sorted(allowed, key=lambda core: _place(core, topology)))
    return HostView(f"{socket.gethostname()} {boot}", cores, quota_cores(), own_group("memory"))


def quota_cores(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float:
    """How many cores' time the control groups above this process allow; infinity where none limits it."""
    least = float("inf")
    for folder, second in control_groups("cpu", root, membership):
        try:
            names = ("cpu.max",) if second else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = " ".join((folder / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue
        if quota.isdigit() and int(period):  # "max" and -1 stand for no limit
            least = min(least, int(quota) / int(period))
    return least


def host_share(views: Sequence[HostView], rank: int, environment: Mapping[str, str] = os.environ) -> HostShare:
    """The part of its machine that `rank` has, from what all ranks of its group report.

    Ranks that may use the same cores divide them among themselves; a launcher that has bound each rank to separate
    cores has divided them already. `torchrun` says how many ranks there are where not all of them are in the group.

    Args:
        views: of the group's ranks, in order.
        rank: this one.
        environment: for ``LOCAL_WORLD_SIZE`` and ``LOCAL_RANK``.
    """
    mine = views[rank]
    here = [other for other, view in enumerate(views) if view.host == mine.host]
    alike = [other for other in here if views[other].cores == mine.cores]
    sharing, place, ranks = len(alike), alike.index(rank), len(here)
    local = _numbers(environment, "LOCAL_WORLD_SIZE", "LOCAL_RANK")
    if local is not None and local[0] > ranks:
        ranks = local[0]
        if len(alike) == len(here):
            sharing, place = local
    count = len(mine.cores)
    first = place * count // sharing
    cores = mine.cores[first : max((place + 1) * count // sharing, first + 1)]
    # A quota is what all ranks of the machine have together, however their cores are divided.
    allowed = max(1, int(min(count, mine.quota_cores * sharing / ranks)))
    memory_ranks = tuple(other for other in here if views[other].memory_group == mine.memory_group)
    return HostShare(cores, allowed, sharing, len(here), memory_ranks)


def check_host_threads(value: object) -> int | None:
    """`value` as ``host_threads``: a whole number from 1 on, or None for the rule.

    Raises:
        InputError: it is neither.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(
            "host_threads must be a whole number, 1 or larger, or None for this rank's part of the cores; got "
            f"{value!r}"
        )
    return value


def binds(share: HostShare, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the host's Adam is bound to this rank's own cores: if ranks share them and the user sets nothing else.

    Raises:
        InputError: ``ELIXIR_BIND`` has another value than 0 and 1.
    """
    value = environment.get(BIND_VARIABLE, "1").strip() or "1"
    if value not in ("0", "1"):
        raise unknown_name(f"value of {BIND_VARIABLE}", value, ("0", "1"))
    elsewhere = any(environment.get(name) for name in _OPENMP_BINDS)
    return value == "1" and share.ranks > 1 and not elsewhere and hasattr(os, "sched_setaffinity")


def rank_threads(
    share: HostShare,
    compute_threads: int,
    asked: int | None = None,
    environment: Mapping[str, str] = os.environ,
    *,
    enough: int | None = None,
) -> tuple[int, tuple[int, ...] | None]:
    """How many threads of one rank step on the host, and the cores they are bound to; None where they are not.

    Args:
        share: what the rank has of its machine.
        compute_threads: as of `adam_threads`.
        asked: this number instead of the rule's.
        environment: as of `binds`, which also says what is raised.
        enough: no more than this of the rule's; of `enough_threads`.
    """
    rule = adam_threads(share.all_cores, share.ranks, compute_threads)
    threads = asked or min(rule, enough or rule)
    # On fewer cores than threads, threads would wait for each other's time slices after every operator.
    return threads, share.cores if binds(share, environment) and threads <= len(share.cores) else None


def core_list(cores: Sequence[int]) -> str:
    """Writes numbers of cores as Linux does.

    >>> core_list((0, 1, 2, 8, 10, 11))
    '0-2,8,10-11'
    """
    ranges = number_ranges(sorted(cores))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _place(core: int, topology: Path) -> tuple[int, int, int]:
    """Sorts cores by socket, then by physical core, so that hyperthreads of one go to one rank."""
    folder = topology / f"cpu{core}" / "topology"
    try:
        socket_number = int((folder / "physical_package_id").read_text())
        first = int(re.split(r"[,-]", (folder / "thread_siblings_list").read_text().strip())[0])
    except (OSError, ValueError):
        return 0, core, core
    return socket_number, first, core


def _numbers(environment: Mapping[str, str], size: str, rank: str) -> tuple[int, int] | None:
    """A launcher's number of ranks and which this is; None where it does not say, or says nonsense."""
    try:
        found = int(environment[size]), int(environment[rank])
    except (KeyError, ValueError):
        return None
    return found if 0 <= found[1] < found[0] else None


def use_threads(count: int, cores: Sequence[int] | None = None) -> None:
    """The calling thread's operators run on `count` threads from here on; those of other threads as before.

    ``torch.set_num_threads`` sets OpenMP's number for the thread that calls it, and also a default, which each
    other thread takes over with its first operator: compute must not, nor threads that the user starts later. So the
    default is put back, which only another thread can do without losing the number set here. A thread that begins its
    first operator within these microseconds takes over `count`.

    Args:
        count: of threads, the calling one included.
        cores: those that it and the threads it starts may use; None leaves them. OpenMP threads that run
            already stay where they are, so call this first.
    """
    if cores is not None:
        try:
            os.sched_setaffinity(0, cores)  # 0 is the calling thread, not the process
        except OSError as error:  # such as a core that was taken offline
            logger.warning("the host's Adam runs on any core: binding it to cores %s failed: %s", list(cores), error)
    torch.get_num_threads()  # now it takes over the default, and not later, instead of the number set here
    default = _on_another_thread(torch.get_num_threads)
    torch.set_num_threads(count)
    _on_another_thread(partial(torch.set_num_threads, default))


def _on_another_thread(work: Callable[[], int | None]) -> int:
    with ThreadPoolExecutor(1, "elixir threads") as other:
        return other.submit(work).result() or 0
