"""`Memory`: a piece of memory that knows the work that uses it; and tickets of work.

Work that is submitted to a lane says which memory it reads and which it writes (`Lane.submit`), and that is all its
order. What reads comes after the last work that writes, and fails if that has failed. What writes comes after all users
before it, whether or not they have failed. Memory that is changed in place is read and written.

`Memory.wait` and `Memory.synchronize` are for compute and for threads, which use memory, too.

`Arena` makes and counts memory, of pages that `pinned_zeros` and `host_zeros` make; `BlockPool` has that of the rCache.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, Protocol, TypeAlias

import torch

from elixir.access.placeholders import marked
from elixir.errors import NoMemoryError, StateError, readable_bytes
from elixir.hardware.process_memory import HEAP
from elixir.plan.chunk_plan import MemoryHome
from elixir.torch_private import MEMORY_MOVES, move_memory

# --- pages -----------------------------------------------------------------------------------------------------------
# Host memory that the runtime keeps for itself: exact sizes, pinned where a device copies from it, never shared by
# `fork`.


HUGE_PAGE_BYTES = 2 << 20
"""A huge page on x86-64, and on arm64 with pages of 4 KiB; smaller buffers cannot hold one."""
PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every CUDA context of the process, not only that of one device."""


def pinned_zeros(nbytes: int, device: torch.device | None = None) -> torch.Tensor:
    """A flat buffer of bytes, all zero, whose pinning ends with the last tensor that lies in it.

    PyTorch's own allocator of pinned memory rounds up to powers of two; registering memory with the driver does not.
    The pages are those of `host_zeros`.

    Args:
        nbytes: at least 1.
        device: a CUDA device, whose context pins; None: the calling thread's current one.

    Raises:
        StateError: the driver does not pin so much.
    """
    memory, buffer = _touched(nbytes)
    memory.pin(buffer.data_ptr(), device)
    return buffer


def host_zeros(numel: int, dtype: torch.dtype = torch.uint8, *, forked: bool = False) -> torch.Tensor:
    """A flat buffer, all zero, in pages that are present and that no child process gets, unless it is `forked`.

    A child that `fork` makes, such as a worker of a DataLoader, has nothing at these addresses: should it read a tensor
    that lies there, the operating system ends it. Otherwise either the kernel would copy every pinned page inside
    `fork`, or each page would be copied when it is next written to while the child lives.

    The calling thread and its OpenMP threads touch the pages first, so they lie on the NUMA node of these threads.

    Args:
        numel: its elements; of none it is an ordinary tensor.
        dtype: of each.
        forked: child processes get it.
    """
    if not numel:
        return torch.zeros(0, dtype=dtype, device="cpu")
    return _touched(numel * dtype.itemsize, forked=forked)[1].view(dtype)


def separate_copy(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in host memory. A large one has separate pages, which are gone when it is freed: the C library would keep
    them, or leave gaps between what it has freed before."""
    nbytes = source.numel() * dtype.itemsize
    if nbytes < HUGE_PAGE_BYTES or os.name != "posix" or not source.is_contiguous():
        return source.to("cpu", dtype, copy=True)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(source.shape).copy_(source)


def _touched(nbytes: int, *, forked: bool = False) -> tuple[_Pages, torch.Tensor]:
    memory = _Pages(nbytes, forked=forked)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    buffer.zero_()  # by all threads: the driver would bring the pages in one after the other
    return memory, buffer


class _Pages(mmap.mmap):
    """Memory in separate pages: two registered ranges must not share a page.

    Freeing memory that is still registered makes the driver refuse the same addresses to the next one. So what pins
    it is what owns it.
    """

    _address = 0
    _pinned_by = 0

    def __new__(cls, nbytes: int, *, forked: bool = False) -> _Pages:
        if os.name != "posix":
            return super().__new__(cls, -1, nbytes)
        pages = super().__new__(cls, -1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if not forked:
            pages._advise("MADV_DONTFORK")
        if nbytes >= HUGE_PAGE_BYTES:
            pages._advise("MADV_HUGEPAGE")  # before the first touch, which then brings in 512 small pages at once
        return pages

    def _advise(self, name: str) -> None:
        """Tells the kernel, where it has such an advice at all; none of them changes what a buffer holds."""
        advice = getattr(mmap, name, None)
        if advice is not None:
            with contextlib.suppress(OSError):  # a kernel that was built without huge pages
                self.madvise(advice)

    def pin(self, address: int, device: torch.device | None) -> None:
        with torch.cuda.device(device):  # else the driver makes a context on device 0, whatever device is used
            status = torch.cuda.cudart().cudaHostRegister(address, len(self), PORTABLE)
            if int(status) != 0:
                _forget_last_error()
                raise StateError(
                    f"pinning {len(self)} bytes of host memory failed with CUDA error {int(status)}: is so much free, "
                    "and may this process lock it (ulimit -l)?"
                )
        self._address, self._pinned_by = address, os.getpid()

    def __del__(self) -> None:
        # Called before the pages are given back, on whichever thread lets go last; the driver waits for what is under
        # way. A child that `fork` made has a copy of this object, and neither the pages nor a driver.
        if self._address and self._pinned_by == os.getpid() and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self._address)


def _forget_last_error() -> None:
    """The runtime keeps a call's error until somebody asks for it: the next kernel launch would, and raise in its
    place."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


# --- memory and its users --------------------------------------------------------------------------------------------


class Ticket(Protocol):
    """A handle of work that was submitted."""

    error: BaseException | None
    """The error of the work, once that is over."""
    drained: int
    """`Fate.drained` when it was submitted."""

    def wait(self) -> None:
        """Lets compute that is submitted from here on wait for the work. Raises what the work raised."""

    def synchronize(self) -> None:
        """Blocks this thread until the work is done. Raises what the work raised."""

    def join(self) -> None:
        """Blocks this thread until the work is over, whether or not it has failed."""

    def done(self) -> bool:
        """Whether the work is done."""


class Fate:
    """The first error of the work of some lanes: it ends the training that needs them."""

    error: BaseException | None = None
    drained = 0
    """How often `Lanes.drain` has waited for all work and reported its errors. Errors of work that was submitted before
    the last time are not raised again. Memory that such work should have written counts as written: it has old values,
    or old and new ones."""

    def meet(self, error: BaseException | None) -> None:
        """Notes the error of some work, if it has one."""
        if error is not None:
            vars(error).setdefault("elixir_raised_at", error.__traceback__)
        if self.error is None:
            self.error = error

    def check(self, ticket: Ticket) -> None:
        """Raises the error of work that is over, unless `Lanes.drain` has reported it."""
        if ticket.error is not None and ticket.drained == self.drained:
            raise as_first(ticket.error)


def as_first(error: BaseException) -> BaseException:
    """An error of some work with the traceback with which it left that: all who hand it on would add frames."""
    return error.with_traceback(vars(error).get("elixir_raised_at"))


class _Thread(threading.local):
    is_lane = False
    """Whether this thread is a lane's: what it waits for keeps no compute waiting."""


THREAD = _Thread()
"""The kind of the thread that runs."""


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
Count = Callable[[int, MemoryHome, str], None]
"""Counts so many more bytes in use, or fewer, as `elixir.chunk.memory.Arena.count`."""


class Memory:
    """A piece of memory: its tensor, where it is counted and as what, its last writer, and its last reader in each lane
    since. A lane works in order, so of its readers the last is enough.

    Args:
        tensor: lies there; none in memory of which others have the tensors, such as states that a class has made.
        count: counts its bytes; None if others do, or nobody.
        home: where it is counted.
        kind: as what.
    """

    __slots__ = ("_count", "_home", "_kind", "_whole", "readers", "tensor", "writer")

    def __init__(
        self, tensor: torch.Tensor = _NOTHING, count: Count | None = None, home: MemoryHome = "host", kind: str = ""
    ) -> None:
        self.tensor = tensor
        self._home, self._kind = home, kind
        self.writer: Ticket | None = None
        self.readers: dict[object, Ticket] = {}  # by lane
        self._whole: Memory | None = None
        self.count_by(count)

    # --- what it is ------------------------------------------------------------------------------------------------

    def count_by(self, count: Count | None, kind: str | None = None) -> None:
        """Counts it elsewhere from here on, as under another plan, and as something else if a `kind` is given."""
        self._count, self._kind = count, kind or self._kind
        if count is not None and self.tensor.nbytes:
            count(self.tensor.nbytes, self._home, self._kind)

    def free(self) -> None:
        """Gives up the tensor, which nothing uses any more."""
        if self._count is not None and self.tensor.nbytes:
            self._count(-self.tensor.nbytes, self._home, self._kind)
        self.tensor = _NOTHING

    def view(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `numel` elements of memory that was made as bytes."""
        return self.tensor[: numel * dtype.itemsize].view(dtype)

    def part(self, first: int, nbytes: int) -> Memory:
        """A part of it, with a separate writer and readers: work that writes there also waits for the users of other
        parts, which may have had the same bytes before."""
        found = Memory(self.tensor[first : first + nbytes])
        found._whole = self
        return found

    # --- the work that uses it -------------------------------------------------------------------------------------

    @property
    def users(self) -> list[Ticket]:
        """The last work that writes, and the last that reads in each lane."""
        own = [] if self.writer is None else [self.writer]
        return [*own, *self.readers.values(), *(() if self._whole is None else self._whole.users)]

    def used(self, lane: object, ticket: Ticket, *, writes: bool) -> None:
        """Enters work that reads or `writes` in a lane; for `Lane.submit`."""
        if self._whole is not None:
            self._whole.readers[lane] = ticket
        if writes:
            self.writer, self.readers = ticket, {}
        else:
            self.readers[lane] = ticket

    def wait(self, *, taking: bool = False) -> None:
        """Lets compute that reads it wait for its writer; or, `taking` it, for all users: compute, or what comes after
        compute, is the next. Raises what they raised."""
        # Compute reads what the work writes, or writes what it uses.
        self._follow(lambda ticket: ticket.wait(), taking=taking)

    def synchronize(self, *, taking: bool = False) -> None:
        """Blocks this thread until it may read; or, `taking` the memory, until nothing uses it. Raises what was
        raised."""
        # This thread does the same as compute above.
        self._follow(lambda ticket: ticket.synchronize(), taking=taking)

    def _follow(self, follow: Callable[[Ticket], None], *, taking: bool) -> None:
        # Those that read have waited for the one that writes.
        for ticket in [*(self.readers.values() if taking else ())] or written(self):
            follow(ticket)
        if taking:
            self.writer, self.readers = None, {}

    def settle(self) -> None:
        """Blocks this thread until nothing uses it any more, whether or not the work has failed."""
        for ticket in self.users:
            ticket.join()
        self.writer, self.readers = None, {}


def order(reads: Iterable[Memory], writes: Iterable[Memory]) -> tuple[list[Ticket], list[Ticket]]:
    """The work after which work comes that reads and writes some memory.

    Returns:
        Work that fills what is read, whose errors it shares; and other users of what is written, of which only the end
        matters.
    """
    filling = written(*reads)
    return filling, list(dict.fromkeys(each for memory in writes for each in memory.users if each not in filling))


def written(*memories: Memory) -> list[Ticket]:
    """The last work that writes each."""
    return list(dict.fromkeys(memory.writer for memory in memories if memory.writer is not None))


# --- arena -----------------------------------------------------------------------------------------------------------
# `Arena`: makes the memory that chunks live in, and counts it.
#
# Every buffer of the runtime is made by an `Arena`, so what was taken can be compared with what the plan predicted.


Kept: TypeAlias = "MemoryHome | Literal['disk']"
"""Places where bytes are counted: memory, and files."""


class Arena:
    """Makes buffers on the device and on the host, and counts their bytes by what they are for.

    Args:
        device: where compute runs. With ``cpu``, both homes are host memory, and "device bytes" are what is counted
            for the device here.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._live: dict[Kept, Counter[str]] = {"device": Counter(), "host": Counter(), "disk": Counter()}
        self.peak_bytes: dict[Kept, int] = {"device": 0, "host": 0, "disk": 0}
        self.most_bytes: Counter[str] = Counter()
        """The most bytes of each kind on the host."""
        self.given_bytes: Counter[str] = Counter()
        """Bytes of the largest state dicts that callers got, which are theirs, by what they are of."""
        self._lock = threading.Lock()  # the lane of the host's Adam counts states while backward counts gradients

    def make(
        self,
        numel: int,
        dtype: torch.dtype,
        home: MemoryHome,
        kind: str,
        *,
        pin: bool = True,
        paged: bool = False,
        passing: bool = False,
    ) -> Memory:
        """Makes a flat zeroed buffer of exactly `numel` elements.

        Host memory next to a CUDA device is in pages that no child process gets. It is pinned, unless `pin` says that
        nothing is copied between it and the device. With `paged` host memory begins at a page, whatever the device. So
        do large buffers on a CPU, unless they are `passing`, so freed in each step: the C library leaves gaps between.

        Raises:
            NoMemoryError: host memory ran out. On a CUDA device, torch's own error is raised.
        """
        HEAP.trim_if_over(numel * dtype.itemsize)
        try:
            buffer = self._made(numel, dtype, home, pin=pin, paged=paged, passing=passing)
        except torch.OutOfMemoryError:
            raise  # programs that look for the largest batch know the one of CUDA
        except (RuntimeError, MemoryError, OverflowError, OSError, TypeError, ValueError) as error:  # of any allocator
            raise NoMemoryError(
                f"there is no room for {readable_bytes(numel * dtype.itemsize, up=True)} of {kind.replace('_', ' ')} "
                f"in {home} memory ({error}); plan for less with {home}_memory=, or free some"
            ) from error
        return Memory(buffer, self.count, home, kind)

    def _made(
        self, numel: int, dtype: torch.dtype, home: MemoryHome, *, pin: bool, paged: bool, passing: bool
    ) -> torch.Tensor:
        if home == "host" and self.device.type == "cuda" and numel:
            memory: Callable[[int], torch.Tensor] = partial(pinned_zeros, device=self.device) if pin else host_zeros
            return memory(numel * dtype.itemsize).view(dtype)
        if home == "host" and paged:
            return host_zeros(numel, dtype)
        if self.device.type == "cpu" and not passing and numel * dtype.itemsize >= HUGE_PAGE_BYTES:
            return host_zeros(numel, dtype, forked=True)
        return torch.zeros(numel, dtype=dtype, device=self.device if home == "device" else "cpu")

    def count(self, nbytes: int, home: Kept, kind: str) -> None:
        """Counts `nbytes` more bytes in use; fewer if it is negative."""
        with self._lock:
            live = self._live[home]
            live[kind] += nbytes
            if live[kind] < 0:
                raise StateError(f"{kind} on the {home}: {-live[kind]} bytes more were freed than were ever taken")
            self.peak_bytes[home] = max(self.peak_bytes[home], sum(live.values()))
            if home == "host":
                self.most_bytes[kind] = max(self.most_bytes[kind], live[kind])

    def live_bytes(self, home: Kept) -> int:
        """Bytes in use now."""
        with self._lock:
            return sum(self._live[home].values())

    def parts(self, home: Kept) -> dict[str, int]:
        """Bytes in use now, by kind."""
        with self._lock:
            return {kind: nbytes for kind, nbytes in sorted(self._live[home].items()) if nbytes}


# --- block pool ------------------------------------------------------------------------------------------------------
# The rCache's memory: every streamed chunk has a storage, into which a block's memory moves while weights are there.
#
# Views refer to the storage, so they show the weights whenever these are there, however long the views live. An
# operator that reads one while the storage is empty meets the mark (`elixir.access.placeholders`).


class ChunkStorage:
    """The gathered weights of one streamed chunk, whose memory comes and goes.

    Args:
        numel: elements of the chunk.
        dtype: of the weights.
        memory: of a block, flat; the caller takes it back.
    """

    def __init__(self, numel: int, dtype: torch.dtype, memory: torch.Tensor) -> None:
        self.storage = torch.empty(0, dtype=torch.uint8, device=memory.device).untyped_storage()
        move_memory(memory.untyped_storage(), self.storage)
        self.flat = torch.empty(0, dtype=dtype, device=memory.device).set_(self.storage, 0, (numel,), (1,))
        """All elements, flat. Writes through it do not count as writes to the weights."""
        self.marked = marked(self.flat)
        """The same, marked: what parameters, and views of them, lie in."""

    @property
    def is_filled(self) -> bool:
        """Whether it has memory."""
        return bool(self.storage.nbytes())


class BlockPool:
    """The memory of `count` blocks of one size.

    Args:
        arena: makes it.
        count: number of blocks.
        block_bytes: size of one.
        poison: fill what leaves a block with NaN, so that a stale use cannot go unnoticed; for tests.
    """

    def __init__(self, arena: Arena, count: int, block_bytes: int, *, poison: bool = False) -> None:
        self.count, self.block_bytes, self._poison = count, block_bytes, poison
        passing = not MEMORY_MOVES
        made = [arena.make(block_bytes, torch.uint8, "device", "rcache", passing=passing) for _ in range(count)]
        self._free = [memory.tensor for memory in made]
        self._taken: list[torch.Tensor] = []  # whose memory is in chunks' storages, in any order

    @property
    def free(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    def block(self, numel: int, dtype: torch.dtype) -> ChunkStorage:
        """Makes an empty block for a chunk."""
        made = ChunkStorage(numel, dtype, self._free[-1])
        move_memory(made.storage, self._free[-1].untyped_storage())
        return made

    def fill(self, block: ChunkStorage) -> None:
        """Gives a block memory, whose contents are not defined."""
        if not self._free:
            raise StateError(f"all {self.count} rCache blocks are taken")
        self._taken.append(self._free.pop())
        move_memory(self._taken[-1].untyped_storage(), block.storage)

    def empty(self, block: ChunkStorage) -> None:
        """Takes the memory, whose contents nobody needs."""
        if self._poison:
            block.flat.view(torch.uint8).fill_(0xFF)  # NaN in every dtype
        self._free.append(self._taken.pop())
        move_memory(block.storage, self._free[-1].untyped_storage())
