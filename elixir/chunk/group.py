"""The ranks that train a model: collectives over flat buffers, or nothing at all for one rank.

They form one replica of the model, or several of as many ranks each. The ranks of a replica hold its shards: weights
are gathered and gradients reduced among them. The ranks that hold the same shard, one in each replica, sum its
gradients.

All ranks must issue the same collectives in the same order, or what arrives is another chunk's. Every rank keeps a
digest of what it has issued; whenever values are exchanged, and at least once before every optimizer step, the digests
are compared, so that ranks that went different ways stop with an error instead of training on.

Ranks that went different ways may also wait for each other: one in a gather, the other in an exchange. So a rank that
has been blocked on the host for a second writes what it has issued since the last exchange to the store of the group,
and reads what other blocked ranks wrote. If two ranks have issued different collectives at the same place, they have
parted, however long they would wait. A rank that is only slow has issued the same as the others, or nothing yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import pickle
import secrets
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from elixir.errors import InputError, RankError
from elixir.torch_private import process_groups

# torch 2.13 has new names for these and warns of the old ones.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor

_made_alone: MutableMapping[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""By the default group, how many groups some ranks have made alone."""
_FIRST_ALONE = 1 << 32
"""More groups than all ranks of a program make together."""

GivenGroup: TypeAlias = "dist.ProcessGroup | DeviceMesh | None"

_PIECE_BYTES = 2**28
"""Sent at once from rank 0, so that no backend has to take a whole embedding table in one message."""

_LOOK_S = 1.0
"""How long a rank is blocked before it looks where the others are, and between two looks."""
_RANKS_PER_LOOK = 64
"""Larger groups look less often in proportion: all ranks together ask one store."""
_PARTED = "parted"


MESH_DIMENSIONS = ("replicate", "shard")
"""Dimensions of a device mesh that says which ranks form a replica."""


class Group:
    """A process group, seen by chunks.

    Its collectives run while compute goes on, so they have separate groups: on the caller's group they would come
    between the caller's own collectives, in an order that differs from rank to rank. Chunks travel in groups that are
    like the caller's; small values on the host in another one, over gloo, of all ranks. All have the timeout of the
    caller's.

    Args:
        process_group: None means the default group where one is initialised, else a single rank. A mesh has the
            dimensions `MESH_DIMENSIONS`; its ranks must rise from each to the next.
        data: whether chunks can travel in it at once, in one replica; without, `divide` comes first, and there are
            `exchange` and `note` until then.

    Raises:
        InputError: a mesh with other dimensions, or ranks in another order.
    """

    def __init__(self, process_group: GivenGroup = None, *, data: bool = True) -> None:
        self.of_mesh: int | None = None
        """Replicas of the mesh that was given; None without one."""
        if isinstance(process_group, DeviceMesh):
            process_group, self.of_mesh = _of_mesh(process_group)
        elif process_group is None and dist.is_available() and dist.is_initialized():
            process_group = dist.group.WORLD
        self._given = process_group
        self.size: int = 1 if process_group is None else dist.get_world_size(process_group)
        """Ranks of all replicas."""
        self.rank: int = 0 if process_group is None else dist.get_rank(process_group)
        """Number of this rank among them."""
        self.replicas = 1
        self._data: dist.ProcessGroup | None = None
        self._across: dist.ProcessGroup | None = None  # the ranks with the same shard
        self._control: dist.ProcessGroup | None = None
        self.timeout_s: float | None = None
        """Seconds after which a collective fails; None for the backend's default."""
        self._issued = 0
        self._digest = 0
        self._since: list[str] = []  # issued since all ranks last had the same digest
        self._broken: RankError | None = None
        self._parted: str | None = None
        self._store: Any = None  # of c10d; torch exports no type of it
        if process_group is not None and self.size > 1:
            ranks = dist.get_process_group_ranks(process_group)
            # The ranks outside of a smaller group do not get here, so those inside agree among themselves.
            local = len(ranks) < dist.get_world_size()
            timeout = _timeout(process_group)
            self.timeout_s = None if timeout is None else timeout.total_seconds()
            if data:
                self.divide(1)
            control = new_group(ranks, timeout=timeout, backend="gloo", alone=local)
            self._control = control
            self._store = _private_store(control, ranks[0])

    @property
    def shards(self) -> int:
        """Ranks of one replica."""
        return self.size // self.replicas

    @property
    def shard(self) -> int:
        """Number of this rank within its replica, and of its shard."""
        return self.rank % self.shards

    def divide(self, replicas: int) -> None:
        """Makes the groups in which chunks travel; neighbouring ranks form a replica. All ranks call this, once."""
        self.replicas = replicas
        if self._given is None or self.size == 1:
            return
        ranks, shards = dist.get_process_group_ranks(self._given), self.shards
        timeout, backend = _timeout(self._given), _backend(self._given)  # otherwise those of the default group
        local = len(ranks) < dist.get_world_size()

        def made(all_parts: list[list[int]], number: int) -> dist.ProcessGroup | None:
            # Ranks outside of the given group do not get here, so those inside of each part agree among themselves.
            # Otherwise all make all parts: a group that its ranks alone make has the name of an earlier one of theirs
            # that is gone, and torch would connect them to where that one listened.
            found: dist.ProcessGroup | None = None
            for part in [all_parts[number]] if local else all_parts:
                group = new_group(part, timeout=timeout, backend=backend, alone=local)
                found = group if part is all_parts[number] else found
            return found

        replicas_of = [ranks[first : first + shards] for first in range(0, self.size, shards)]
        self._data = made(replicas_of, self.rank // shards)
        self._across = made([ranks[shard::shards] for shard in range(shards)], self.shard) if replicas > 1 else None

    def for_values(self) -> Group:
        """Makes a second group of the same ranks, for values of a thread that does not keep this group's order.

        All ranks call this.
        """
        return Group(self._given, data=False)

    def close(self) -> None:
        """Gives the groups back."""
        for group in (self._data, self._across, self._control):
            if group is not None:
                dist.destroy_process_group(group)
        self._data = self._across = self._control = None

    def gather(self, whole: torch.Tensor, shard: torch.Tensor, what: str = "weights") -> None:
        """Fills `whole` with the `shard` of every rank of this replica, which may be this rank's part of it.

        Raises:
            RankError: another rank is gone, or does something else.
        """
        if self.size > 1:
            with self._issuing(f"gather {what}"):
                self._wait(_all_gather(whole, shard, group=self._data, async_op=_on_host(whole)))
        elif whole.data_ptr() != shard.data_ptr():
            whole.copy_(shard, non_blocking=True)

    def reduce_mean(self, shard: torch.Tensor, whole: torch.Tensor, what: str = "gradients") -> None:
        """Fills `shard` with this rank's part of the mean of every rank's `whole`, which is overwritten.

        With several replicas it is this replica's part of that mean, to be added up by `sum_replicas`.

        Raises:
            RankError: another rank is gone, or does something else.
        """
        if self.size > 1:
            with self._issuing(f"reduce {what}"):
                whole.div_(self.size)
                self._wait(_reduce_scatter(shard, whole, group=self._data, async_op=_on_host(whole)))
        elif whole.data_ptr() != shard.data_ptr():
            shard.copy_(whole, non_blocking=True)

    def swap(
        self, sent: Sequence[tuple[torch.Tensor, int]], received: Sequence[tuple[torch.Tensor, int]], what: str
    ) -> None:
        """Sends tensors to ranks of this replica, and fills others with what they send, in one order between any two.

        Args:
            sent: contiguous tensors, each with the number of the shard whose rank gets it.
            received: the same, each with the number of the shard whose rank it comes from.
            what: the same on all ranks, also on those that send and receive nothing.

        Raises:
            RankError: another rank is gone, or does something else.
        """
        with self._issuing(f"swap {what}"):
            operations = [
                dist.P2POp(operation, tensor.view(torch.uint8), self._global_rank(rank), self._data)
                for operation, tensors in ((dist.isend, sent), (dist.irecv, received))
                for tensor, rank in tensors
            ]
            for work in dist.batch_isend_irecv(operations) if operations else ():
                # The work that follows reads what came, and fills what was sent. Not `_wait`: gloo gives up a transfer
                # between two ranks that is looked at too early.
                work.wait()

    def _global_rank(self, shard: int) -> int:
        return shard if self._data is None else dist.get_global_rank(self._data, shard)

    def sum_replicas(self, shard: torch.Tensor, what: str = "gradients") -> None:
        """Replaces `shard` by the sum of all replicas' `shard`, the same bits on all of them.

        Raises:
            RankError: another rank is gone, or does something else.
        """
        with self._issuing(f"sum {what} over replicas"):
            self._wait(dist.all_reduce(shard, group=self._across, async_op=_on_host(shard)))

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Exchanges a `value`, which can be pickled, in order of rank. Blocks until all ranks are here.

        Args:
            what: for which purpose; the same on all ranks.

        Raises:
            RankError: another rank is gone, is here for another purpose, or has issued other collectives than this one.
        """
        if self.size == 1:
            return [value]
        mine = (what, self._issued, self._digest)
        with self._issuing(what):
            gathered = self._gather_objects((mine, value))
            for rank, (theirs, _) in enumerate(gathered):
                if theirs != mine:
                    raise RankError(
                        f"rank {self.rank} is at {what!r} after {mine[1]} collectives, rank {rank} at {theirs[0]!r} "
                        f"after {theirs[1]}{' others' if theirs[1] == mine[1] else ''}: {_ADVICE}"
                    )
            self._since.clear()
        return [value for _, value in gathered]

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Raises on all ranks if one raises in here, so that none goes on by itself; no collective may be issued in
        here.

        Args:
            what: is done, the same on all ranks.

        Raises:
            RankError: another rank has raised. A rank that has raised itself raises its own error.
        """
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            problem = error
        try:
            answers = self.exchange(what, None if problem is None else str(problem) or type(problem).__name__)
            if problem is not None:
                raise problem
        finally:
            problem = None  # otherwise its traceback and this frame would keep each other, and much memory, alive
        failed = next((rank for rank, answer in enumerate(answers) if answer is not None), None)
        if failed is not None:
            raise RankError(f"rank {failed} could not {what}: {answers[failed]}")

    @property
    def is_broken(self) -> bool:
        """Whether another rank is gone or has left the common sequence, so that collectives would hang."""
        return self._broken is not None

    def note(self, what: str) -> None:
        """Records something that all ranks must do at this point, to be compared with the next exchange."""
        with self._issuing(what):
            pass

    def send_from_rank_0(self, value: torch.Tensor) -> None:
        """Gives every rank rank 0's `value`, a contiguous one, in place and in pieces.

        Raises:
            RankError: another rank is gone, or does something else.
        """
        # On a device from one replica to the others, and from there within each. One rank has no groups.
        over = [self._across] * (not self.shard) + [self._data]
        groups = [self._control] if value.device.type == "cpu" else over
        with self._issuing("send from rank 0"):
            # As bytes: what a backend can send does not depend on the dtype then.
            for group in filter(None, groups):
                source = dist.get_global_rank(group, 0)
                for piece in value.view(-1).view(torch.uint8).split(_PIECE_BYTES):
                    self._wait(dist.broadcast(piece, source, group=group, async_op=_on_host(piece)))

    @contextlib.contextmanager
    def _issuing(self, what: str) -> Iterator[None]:
        if self._broken is not None:
            raise self._broken.with_traceback(None)  # the others are gone: no second timeout
        self._issued += 1
        self._digest = zlib.crc32(what.encode(), self._digest)
        if self.size > 1:
            self._since.append(what)
        try:
            yield
        except RankError as error:
            self._broken = error
            raise
        except RuntimeError as error:
            self._broken = RankError(
                f"rank {self.rank}: {what} (collective {self._issued}) failed, because another rank has died, has "
                f"raised an error, or does something else; see the messages of the others. From torch: {error}"
            )
            raise self._broken from error

    def _gather_objects(self, mine: Any) -> list[Any]:
        """Gathers every rank's object, by rank, as `all_gather_object` does, which cannot be waited for with
        `_wait`."""
        sent = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        sizes = torch.empty(self.size, dtype=torch.int64, device="cpu")
        self._wait(_all_gather(sizes, torch.tensor([len(sent)], device="cpu"), group=self._control, async_op=True))
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device="cpu")
        padded[: len(sent)] = sent
        received = torch.empty(self.size, len(padded), dtype=torch.uint8, device="cpu")
        self._wait(_all_gather(received.view(-1), padded, group=self._control, async_op=True))
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(received, sizes.tolist(), strict=True)]

    def _wait(self, work: dist.Work | None) -> None:
        """Blocks until `work` on the host has ended, and looks where the others are if that takes long.

        None is work on a stream of the device, for which the host does not wait.

        Raises:
            RankError: the ranks have parted, so it will never be over.
        """
        look: threading.Thread | None = None
        period = timedelta(seconds=_LOOK_S * max(1.0, self.size / _RANKS_PER_LOOK))
        while work is not None:
            failed: RuntimeError | None = None
            began = time.monotonic()
            try:
                work.wait(timeout=period)  # other ranks still fill the buffers of the collective, or read them
                return
            except RuntimeError as error:
                # Not `is_completed`: gloo's reductions never say so. What has failed raises again at once.
                if time.monotonic() - began < period.total_seconds() / 2:
                    failed = error
            # A store may hang with the host that keeps it. The timeout of the group must hold all the same.
            if look is None or not look.is_alive():
                first = self._issued - len(self._since)
                look = threading.Thread(target=self._look, args=(first, list(self._since)), daemon=True)
                look.start()
                look.join(_LOOK_S)
            if self._parted is not None:
                self._abandon()
                raise RankError(self._parted)
            if failed is not None:
                raise failed

    def _look(self, first: int, mine: Sequence[str]) -> None:
        """Publishes that this rank has issued `mine` after `first` others; compares it with what others published."""
        store = self._store
        if store is None:
            return
        with contextlib.suppress(RuntimeError):  # the store is gone: the group's timeout must do
            store.set(str(self.rank), json.dumps([first, mine]))
            if store.check([_PARTED]):
                self._parted = store.get(_PARTED).decode()
                return
            for step in range(1, self.size):
                rank = (self.rank + step) % self.size
                if not store.check([str(rank)]):
                    continue
                others_first, others = json.loads(store.get(str(rank)))
                # All ranks did the same up to the last exchange of either.
                begin, end = max(first, others_first), min(first + len(mine), others_first + len(others))
                for number in range(begin, end):
                    here, there = mine[number - first], others[number - others_first]
                    if here != there:
                        self._parted = (
                            f"rank {self.rank} went on with {here!r} after {number} collectives, rank {rank} with "
                            f"{there!r}: {_ADVICE}"
                        )
                        store.set(_PARTED, self._parted)
                        return
                if end == first + len(mine):
                    return  # that rank has come as far as this one, and compares itself with those after it

    def _abandon(self) -> None:
        """Keeps the groups for good: gloo cannot abort, so to free a group with pending work waits for its timeout."""
        for group in (self._data, self._across, self._control):
            if group is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def new_group(ranks: Sequence[int], *, alone: bool, **options: Any) -> dist.ProcessGroup:
    """`torch.distributed.new_group`; `alone` means that only its ranks make it.

    PyTorch 2.14 counts those on their ranks alone, and names every group after that number: a group that all ranks make
    later would have several names, under which its ranks never meet. So they have separate numbers here. No other
    thread may make a group meanwhile.
    """
    known, world = process_groups(), dist.group.WORLD
    count = getattr(known, "group_count", None)
    if not alone or count is None or world is None:
        return dist.new_group(ranks, use_local_synchronization=alone, **options)  # type: ignore[no-any-return]
    made, key = _made_alone.setdefault(world, Counter()), tuple(sorted(ranks))
    made[key] += 1
    known.group_count = _FIRST_ALONE + made[key]
    try:
        return dist.new_group(ranks, use_local_synchronization=True, **options)  # type: ignore[no-any-return]
    finally:
        known.group_count = count


_ADVICE = (
    "the ranks no longer do the same; every rank must call forward, backward and step equally often, and use what the "
    "plan does not foresee on all ranks alike or inside `model.gathered()`"
)


def _private_store(control: dist.ProcessGroup, source: int) -> Any:
    """Opens the store of the control group under a name of rank 0's.

    Torch gives a group the name of an earlier one, where the default group was made anew or ranks share a part of it;
    what was published there counts no more.
    """
    if not hasattr(control, "get_group_store"):
        return None
    name = torch.tensor([secrets.randbits(62)], device="cpu")
    dist.broadcast(name, source, group=control)
    return dist.PrefixStore(f"elixir-{name.item()}", control.get_group_store())  # type: ignore[attr-defined]


def _of_mesh(mesh: DeviceMesh) -> tuple[dist.ProcessGroup | None, int]:
    """Returns a group of all ranks of a mesh, and its number of replicas."""
    names, ranks = mesh.mesh_dim_names, mesh.mesh.flatten().tolist()
    if names != MESH_DIMENSIONS or ranks != sorted(ranks):
        raise InputError(
            f"a device mesh must have the dimensions {MESH_DIMENSIONS} with rising ranks, found {names} of ranks "
            f"{ranks}; make it by init_device_mesh(device, (replicas, ranks of each), mesh_dim_names="
            f"{MESH_DIMENSIONS})"
        )
    whole = len(ranks) == dist.get_world_size()
    group = dist.group.WORLD if whole else new_group(ranks, alone=True)
    return group, int(mesh.mesh.shape[0])


def _on_host(tensor: torch.Tensor) -> bool:
    """Whether the host waits for collectives of this tensor. Those of a device wait in its stream instead."""
    return tensor.device.type == "cpu"


def _backend(group: dist.ProcessGroup) -> str:
    """Returns the backend of a group: one name if all devices have the same.

    Given by device, torch does not know a default among them once any plugin of a backend is registered, as importing
    FSDP does, and warns of that when the group goes.
    """
    by_device = dist.get_backend_config(group)
    names = {part.partition(":")[2] for part in by_device.split(",")}
    return names.pop() if len(names) == 1 else by_device


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Returns the timeout of a group, which new groups do not take over by themselves; None for the backend's
    default."""
    for device in ("cuda", "cpu"):
        with contextlib.suppress(RuntimeError, AttributeError):
            found = group._get_backend(torch.device(device)).options._timeout
            if isinstance(found, timedelta):
                return found
    return None
