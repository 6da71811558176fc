"""Book-keeping of memory in a trace: which storages are alive at each moment.

Storages are followed from the operator that makes them to the moment their last reference goes, as a real allocator
would see it. What a storage is for may be known only later (a gradient is an activation until autograd hands it
over), so the log keeps births and deaths, and `Ledger.curve` sorts them into kinds at the end.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from elixir.step_trace import Kind

KINDS: tuple[Kind, ...] = get_args(Kind)
KIND_INDEX = {kind: index for index, kind in enumerate(KINDS)}

HostMemory = Literal["plain", "pinned", "planned"]
"""Host memory of PyTorch's allocators, or buffers of a plan."""
_OF_PYTORCH = ("plain", "pinned")

Int64Array = npt.NDArray[np.int64]


class StorageRecord:
    """One allocation."""

    shadow: Any = None
    """Its values where they are known; see `elixir.tracer.values.shadows`."""
    node = -1
    """Sequence number of the autograd node that made it; -1 outside of backward."""
    on_host: HostMemory | None = None
    """The host memory in which it is; None on the device."""
    cpu_twin: torch.Tensor | None = None
    """A tensor on the CPU that it is on the real device, and so lives as long."""
    complete_at = 0
    """Length of the log at the beginning of the use in which the last part of a gradient arrived."""
    arrived_at = 0
    """Length of the log when a gradient is taken from autograd; 0 for all else."""

    def __init__(self, index: int, nbytes: int, kind: Kind, module: str, operator: Any) -> None:
        self.index = index
        self.nbytes = nbytes
        self.kind = kind
        self.module = module
        self.operator = operator


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("key", "record")
    key: int
    record: StorageRecord


@dataclass(frozen=True)
class Curve:
    """Live bytes after every log entry."""

    by_kind: Int64Array
    """(len(KINDS), entries)"""
    host: Int64Array
    """Bytes in host memory that the step has moved there, (entries,)."""

    @property
    def total(self) -> Int64Array:
        """Bytes over all kinds, (entries,)."""
        total: Int64Array = self.by_kind.sum(axis=0)
        return total

    def without(self, *kinds: Kind) -> Int64Array:
        """Bytes over all but some kinds, (entries,)."""
        rest: Int64Array = self.total - sum(self.by_kind[KIND_INDEX[kind]] for kind in kinds)
        return rest


class Ledger:
    """Live storages and the log of their births and deaths.

    Args:
        round_bytes: what the target's allocator makes of a requested size.
    """

    def __init__(self, round_bytes: Callable[[int], int]) -> None:
        self._round_bytes = round_bytes
        self._live: dict[int, _StorageRef] = {}
        self.records: list[StorageRecord] = []
        self._on_host: list[StorageRecord] = []
        self.log: list[int] = []  # index of the record that is born, or ~index of the one that dies
        self.starts: list[int] = []
        """Length of the log at which each operator begins: births and deaths from there on belong to it."""

    def __len__(self) -> int:
        return len(self.log)

    def find(self, tensor: torch.Tensor) -> StorageRecord | None:
        """The record of the tensor's storage, if it is followed."""
        return self.at(tensor.untyped_storage()._cdata)

    def at(self, storage: int) -> StorageRecord | None:
        """The record of the storage of this number (`elixir.access.placeholders.storage_of`), if it is followed."""
        ref = self._live.get(storage)
        return None if ref is None else ref.record

    def add(self, tensor: torch.Tensor, kind: Kind, module: str, operator: Any) -> StorageRecord:
        """Follows the tensor's storage from now on; a storage that is followed already stays what it is."""
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)
        if known is not None:
            return known.record
        return self._lives(storage, self._born(self._round_bytes(storage.nbytes()), kind, module, operator))

    def follow(self, tensor: torch.Tensor, nbytes: int, module: str, operator: Any, node: int) -> None:
        """Follows the storage of an activation that was just made, which takes `nbytes`, rounded already.

        As `add`, and quicker: nothing can be known of such a storage.
        """
        self._lives(tensor.untyped_storage(), self._born(nbytes, "activations", module, operator)).node = node

    def add_on_host(self, tensor: torch.Tensor, nbytes: int, sort: HostMemory, module: str) -> None:
        """Follows a tensor in host memory, which takes `nbytes` there; it is no part of what lies on the device."""
        record = self._lives(tensor.untyped_storage(), self._born(nbytes, "activations", module, None))
        record.on_host = sort
        self._on_host.append(record)

    def add_bytes(self, nbytes: int, kind: Kind, module: str, operator: Any) -> StorageRecord:
        """Bytes that no tensor of the trace stands for, such as an optimizer's states; they stay."""
        return self._born(self._round_bytes(nbytes), kind, module, operator)

    def set_aside(self, count: int, kind: Kind) -> list[StorageRecord]:
        """Records of so many allocations that may turn out to be there from here on; they stay, of no bytes yet."""
        return [self._born(0, kind, "", None) for _ in range(count)]

    def touch(self, nbytes: int, module: str, operator: Any) -> None:
        """Workspace that an operator holds only while it runs."""
        self.log.append(~self.add_bytes(nbytes, "workspace", module, operator).index)

    def stop(self) -> None:
        """Follows nothing any more; what dies from now on stays in the log as alive.

        Values that are known lead back here: without them, all of this goes when the last reference to it does.
        """
        live, self._live = self._live, {}
        for ref in live.values():
            ref.record.shadow = ref.record.cpu_twin = None

    def knows(self, storages: Iterable[int]) -> bool:
        """Whether the values of all these storages are known."""
        for storage in storages:
            ref = self._live.get(storage)
            if ref is None or ref.record.shadow is None:
                return False
        return True

    def curve(self) -> Curve:
        """Live bytes by kind after every entry of the log."""
        log = np.asarray(self.log, dtype=np.int64)
        births = log >= 0
        index = np.where(births, log, ~log)
        sizes = np.array([r.nbytes for r in self.records], dtype=np.int64)
        kinds = np.array([KIND_INDEX[r.kind] for r in self.records], dtype=np.int64)
        on_host = np.isin(index, [r.index for r in self._on_host])
        delta = np.where(births, sizes[index], -sizes[index])
        by_kind = np.zeros((len(KINDS), len(log)), dtype=np.int64)
        by_kind[kinds[index], np.arange(len(log))] = np.where(on_host, 0, delta)
        np.cumsum(by_kind, axis=1, out=by_kind)
        return Curve(by_kind, np.cumsum(np.where(on_host, delta, 0)))

    def host_peak_bytes(self) -> int:
        """The most that PyTorch's allocators take of the host. Pinned memory is never given back, and serves later
        requests of the same power of two alone (`CachingHostAllocator.h`), so each size has a separate peak."""
        records = {record.index: record for record in self._on_host if record.on_host in _OF_PYTORCH}
        live, peaks = Counter[int](), Counter[int]()  # by size of pinned memory; 0 for all other
        for entry in self.log if records else ():
            record = records.get(entry if entry >= 0 else ~entry)
            if record is not None:
                size = record.nbytes if record.on_host == "pinned" else 0
                live[size] += record.nbytes if entry >= 0 else -record.nbytes
                peaks[size] = max(peaks[size], live[size])
        return sum(peaks.values())

    def gradients(self) -> tuple[Int64Array, Int64Array]:
        """Bytes of gradients that autograd still adds to, and of those that are complete, or about to be, and with
        autograd, after every entry of the log."""
        born_at = np.flatnonzero(np.asarray(self.log) >= 0)
        found = [(each, int(born_at[each.index])) for each in self.records if each.arrived_at]
        incomplete = self._held((each, born, each.complete_at) for each, born in found)
        return incomplete, self._held((each, max(born, each.complete_at), each.arrived_at) for each, born in found)

    def _held(self, times: Iterable[tuple[StorageRecord, int, int]]) -> Int64Array:
        """Bytes of records that count from one length of the log to another, after every entry of the log."""
        change = np.zeros(len(self.log) + 1, dtype=np.int64)
        for record, begins, ends in times:
            change[begins] += record.nbytes
            change[max(begins, ends)] -= record.nbytes
        held: Int64Array = np.cumsum(change[:-1])
        return held

    def alive_at(self, position: int) -> list[StorageRecord]:
        """Records of any bytes that are alive just after log entry `position`."""
        alive: dict[int, None] = {}
        for entry in self.log[: position + 1]:
            if entry >= 0:
                alive[entry] = None
            else:
                alive.pop(~entry, None)
        records = map(self.records.__getitem__, alive)
        return [record for record in records if record.nbytes and record.on_host is None]

    def _born(self, nbytes: int, kind: Kind, module: str, operator: Any) -> StorageRecord:
        record = StorageRecord(len(self.records), nbytes, kind, module, operator)
        self.records.append(record)
        self.log.append(record.index)
        return record

    def _lives(self, storage: torch.UntypedStorage, record: StorageRecord) -> StorageRecord:
        ref = _StorageRef(storage, self._died)
        ref.key, ref.record = storage._cdata, record
        self._live[ref.key] = ref
        return record

    def _died(self, ref: Any) -> None:
        key, record = ref.key, ref.record
        if self._live.get(key) is ref:
            del self._live[key]
            self.log.append(~record.index)
            if record.shadow is not None or record.cpu_twin is not None:
                record.shadow = record.cpu_twin = None
