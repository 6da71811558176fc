"""rCache: streamed chunks come into blocks before they are used and leave when others are needed more.

The cache walks the plan's order as the step reports its uses. At every position it brings in the window that
`elixir.schedule` says, evicting whom it says, so the loads are those the plan predicted. A use that the order does not
foresee is fetched on demand and counted.

With several ranks every gather needs all of them, so all must walk alike, whatever their data does. A rank that skips
entries of the order (an expert without tokens) loads what they say all the same when it goes on. The forward part of
the order is walked to its end when forward ends, the rest when backward ends. The order decides which chunk leaves. A
use that the order does not foresee must come on all ranks: they agree on it first, and a rank that is the only one
with it gets a `RankError`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

import torch

from elixir.access.autograd import backward_is_running
from elixir.chunk.chunk import Chunk, ChunkState
from elixir.chunk.gradients.gradient_flow import GradientFlow
from elixir.chunk.group import Group
from elixir.chunk.host_buffers import FILE_WINDOW, HostBuffers
from elixir.chunk.lanes import Lanes
from elixir.chunk.memory import BlockPool, Memory
from elixir.errors import InputError
from elixir.schedule import CacheView, Schedule

logger = logging.getLogger(__name__)

_LOOKAHEAD = 64
"""Number of further entries of streamed chunks in which a use is looked for before it counts as a deviation."""


class RCache:
    """The blocks, and which chunk is in which.

    Args:
        chunks: all chunks of the plan, by index.
        schedule: the plan's order without the resident chunks.
        pool: the blocks.
        lanes: fetch, network and disk are used.
        buffers: of the host, through which weights from files pass.
        group: over which chunks are sharded.
        gradients: with several ranks, use the network in the same order; the cache reports every position to them.
        backward_from: first position that is not forward.
        evict_always: evict whatever is not pinned after every use; for tests.
    """

    def __init__(  # noqa: PLR0913 - all that a load passes through
        self,
        chunks: Sequence[Chunk],
        schedule: Schedule,
        pool: BlockPool,
        lanes: Lanes,
        buffers: HostBuffers,
        group: Group,
        gradients: GradientFlow,
        *,
        backward_from: int,
        evict_always: bool = False,
    ) -> None:
        self._chunks = chunks
        self._schedule = schedule
        self._pool = pool
        self._lanes = lanes
        self._buffers = buffers
        self._group = group
        self._gradients = gradients
        self._evict_always = evict_always
        self._known = frozenset(chunk for chunks in schedule.policy.required for chunk in chunks)
        self._required = [frozenset(chunks) for chunks in schedule.policy.required]
        self._streaming = [position for position, chunks in enumerate(self._required) if chunks]
        self._backward_from = backward_from
        self._together = group.size > 1
        self._position = -1
        self._view = CacheView(schedule.policy)
        self._fresh: set[int] = set()  # loaded, and not required since
        self._in_backward = False  # of several ranks
        self._in_forward = False
        self._call_end: int | None = None
        self._disturbed = False
        self._filled: dict[int, Chunk] = {}  # by index, those whose blocks are filled, the first one first
        for chunk in chunks:
            if not chunk.plan.resident and chunk.block is None:
                chunk.block = pool.block(chunk.plan.numel, chunk.dtype)
        self._lock = threading.RLock()  # forward and the engine's threads take turns, and reports may come any time
        self._counts = lanes.counts

    def begin(self, *, announce: bool = True) -> None:
        """Begins a forward: the order is walked from its beginning, with whatever is in the blocks.

        Args:
            announce: False where it is only made ready for one.
        """
        with self._lock:
            if self._disturbed:
                self._disturbed = False
                self._agree("the first forward after an error")
            if self._together and self._known and announce:
                self._announce("forward")
            self._in_forward, self._call_end = announce, None
            self._begin_at(-1)

    def begin_call(self, chunks: frozenset[int]) -> None:
        """Begins a call of the model, or of a part of it, outside of a forward: in generation, or of one of several
        models under one plan.

        The order goes on with the next use of `chunks` in forward. If there is none, it begins anew with their first.

        Args:
            chunks: all streamed chunks of what is called.
        """
        with self._lock:
            if self._in_forward or self._in_backward or self._call_end is not None or not chunks:
                return
            self._counts.calls += 1
            if self._disturbed:
                self._disturbed = False
                self._agree("the first call after an error")
            uses = [position for position in self._streaming if not chunks.isdisjoint(self._required[position])]
            uses = uses[: bisect_left(uses, self._backward_from)]
            if not uses:
                return
            if self._together:
                self._announce("a call")
            start = next((position for position in uses if position > self._position), None)
            if start is None:
                start, first = uses[0], self.begins_with(chunks)
                self._counts.begun_anew += first
                self._begin_at(-1 if first else start - 1)
                self._walk_to(start)
            elif start > next(position for position in self._streaming if position > self._position):
                self._jump(start - 1)  # calls of other models are left out
                self._walk_to(start)
            self._call_end = self._end_of_call(start, chunks)

    def _end_of_call(self, start: int, chunks: frozenset[int]) -> int:
        """The last position of a call of `chunks` that begins at `start`: another call of them may follow at once."""
        end, left = start, False
        while end + 1 < self._backward_from and self._required[end + 1] <= chunks:
            required = self._required[end + 1]
            if required:
                if left and required == self._required[start]:
                    break
                left = left or required != self._required[start]
            end += 1
        return end

    def begins_with(self, chunks: frozenset[int]) -> bool:
        """Whether a call of `chunks` is the first of the order."""
        return bool(self._streaming) and not chunks.isdisjoint(self._required[self._streaming[0]])

    def end_call(self) -> None:
        """Ends a call: what this rank's data skipped is left out on one rank, and loaded on several."""
        with self._lock:
            end, self._call_end = self._call_end, None
            if end is None or end <= self._position:
                return
            if self._together:
                self._walk_to(end)
            else:
                self._jump(end)

    def _begin_at(self, position: int) -> None:
        self._in_backward = False
        self._fresh.clear()
        self._jump(position)

    def end_forward(self) -> None:
        """Ends forward: with several ranks, loads what the order says and this rank's data skipped."""
        with self._lock:
            self._in_forward = False
            if self._together and not self._in_backward:
                self._walk_to(self._backward_from - 1)

    def enter_backward(self) -> None:
        """Enters backward; may be called any number of times."""
        with self._lock:
            if not self._together or self._in_backward:
                return
            self.end_forward()
            self._announce("backward")
            self._in_backward = True
            if self._position >= self._backward_from:
                self._jump(self._backward_from - 1)  # another backward over the same forward
            self._gradients.begin()

    def end_backward(self) -> None:
        """Ends backward, and with it the order."""
        with self._lock:
            if self._in_backward:
                self._walk_to(len(self._required) - 1)
                self._in_backward = False

    def disturbed(self) -> None:
        """Notes that an exception left a forward or backward; with several ranks, it must have been on all of them."""
        self._in_forward = self._in_backward = False
        self._call_end = None
        self._disturbed = self._together

    @property
    def is_disturbed(self) -> bool:
        """Whether a forward or backward has raised on this rank since ranks last agreed on where they are."""
        return self._disturbed

    @property
    def held(self) -> tuple[int, ...]:
        """Chunks that lie in blocks, in order of index."""
        return tuple(sorted(self._filled))

    def acquire(self, indices: Sequence[int], *, outside: bool = False) -> None:
        """Lets compute read these chunks from here on. Each gets one pin; `unpin` gives it back.

        Args:
            indices: of the chunks.
            outside: the use is in no step, and so none of the order's.
        """
        with self._lock:
            if not outside:
                self._advance(indices)
            self._pin(indices, 1)  # before the next is fetched: no fetch may evict another of the same use
            try:
                for index in indices:
                    self._ready(self._chunks[index])
            except BaseException:
                self._pin(indices, -1)  # the caller does not get the pins, so nobody would give them back
                raise

    @contextlib.contextmanager
    def memory_of(self, chunk: Chunk) -> Iterator[torch.Tensor]:
        """Gives the memory in which a chunk's gathered weights lie, to make views of it; it is marked if it comes and
        goes. Nothing may be in the blocks."""
        if chunk.weights is not None:
            yield chunk.weights
            return
        assert chunk.block is not None
        self._pool.fill(chunk.block)
        try:
            yield chunk.block.marked
        finally:
            self._pool.empty(chunk.block)

    def empty(self) -> None:
        """Takes the memory of all blocks, which nothing uses any more: views that are alive show no weights."""
        for chunk in self._filled.values():
            assert chunk.block is not None
            self._pool.empty(chunk.block)
        self._filled.clear()

    def _pin(self, indices: Iterable[int], count: int) -> None:
        for index in indices:
            self._chunks[index].pins += count

    def has_room_for(self, indices: set[int]) -> bool:
        """Whether all of these chunks can be in blocks, next to those that are pinned."""
        pinned = {index for index, chunk in self._filled.items() if chunk.pins}
        return len(indices | pinned) <= self._pool.count

    def unpin(self, indices: Iterable[int]) -> None:
        """Gives back one pin of each."""
        with self._lock:
            self._pin(indices, -1)
            if self._evict_always and not self._together:
                for chunk in list(self._filled.values()):
                    if not chunk.pins:
                        self._evict(chunk)

    def invalidate(self, *, pinned: bool = True) -> None:
        """Empties the blocks, since the weights have changed at home; with `pinned`, none may be in use."""
        with self._lock:
            for chunk in list(self._filled.values()):
                if pinned or not chunk.pins:
                    self._evict(chunk)
            self.begin(announce=False)

    def _advance(self, used: Sequence[int]) -> None:
        """Walks the order up to the entry that uses `used`, loading each window on the way."""
        wanted = frozenset(used)
        # In a pass of several micro-batches, layers run again between two calls of autograd.
        backward = self._together and (self._in_backward or backward_is_running())
        if backward:
            self.enter_backward()
        near = not self._together or all(self._chunks[index].state is not ChunkState.HOME for index in used)
        # With several ranks, a second backward begins at a position that nobody has walked to: it requires nothing.
        if near and self._position >= 0 and wanted <= self._required[self._position]:
            return
        # With several ranks, uses in forward never walk into the backward part, which other ranks have yet to enter.
        end = self._backward_from if self._together and not backward else len(self._required)
        position = self._next_with(wanted, self._position + 1, end, _LOOKAHEAD if near else None)
        if position is not None:
            # If several positions together load what is wanted, later ones must not evict what earlier ones load.
            joined = () if wanted <= self._required[position] else wanted
            self._pin(joined, 1)
            try:
                self._walk_to(position)
            finally:
                self._pin(joined, -1)
            return
        self._counts.deviations += 1
        missing = [index for index in used if self._chunks[index].state is ChunkState.HOME]
        if self._together and missing:
            self._agree(f"a use of chunks {missing} that is not in the order after its entry {self._position}")
            start = self._backward_from if backward else 0
            position = self._next_with(wanted, start, self._position)
            if position is not None:
                self._jump(position - 1)
                self._walk_to(position)

    def _next_with(self, wanted: frozenset[int], start: int, end: int, most: int | None = None) -> int | None:
        """The first position from `start` to `end` that requires `wanted`, among the first `most` that require any; or
        the last of successive positions that together require `wanted` and nothing else, such as those of a layer that
        was compiled after it was planned."""
        first = bisect_left(self._streaming, start)
        # The chunks before belong to it as well: what ends one layer may begin the next.
        met = wanted & self._required[start - 1] if start else frozenset()
        for position in islice(self._streaming, first, None if most is None else first + most):
            required = self._required[position]
            if position >= end:
                return None
            met = met | required if required <= wanted else frozenset()
            if wanted <= required or met == wanted:
                return position
        return None

    def _walk_to(self, last: int) -> None:
        """Goes on through the order, one position after the other."""
        for position in range(self._position + 1, last + 1):
            if self._position >= 0:
                self._view.passed(self._position)
            if self._in_backward and self._schedule.windows[position]:
                self._gradients.leave(position)
            if self._evict_always and self._together:
                for chunk in [each for each in self._filled.values() if each.index not in self._required[position]]:
                    if not chunk.pins:
                        self._evict(chunk)
            self._position = position
            self._load_window(self._schedule.windows[position])
            for index in self._schedule.policy.required[position]:
                if index in self._fresh:
                    self._fresh.remove(index)
                else:
                    self._counts.hits += 1
            if self._in_backward:
                self._gradients.enter(position)

    def _jump(self, position: int) -> None:
        """Moves to `position` without a walk, with whatever is in the blocks."""
        self._position = position
        self._view = CacheView(self._schedule.policy)
        for passed in range(position):
            self._view.passed(passed)
        for index in self._filled:
            if index in self._known:
                self._view.admit(index)

    def _announce(self, phase: str) -> None:
        """Lets the network compare what the ranks do before it goes on; compute does not wait for that.

        A rank that runs one forward more than the others is found out here, before its gathers meet their reductions.
        """
        self._lanes.network.submit(lambda: self._group.exchange(phase, None))

    def _agree(self, what: str) -> None:
        """Makes sure that all ranks are here, having sent the same so far."""
        # This thread waits: the gather that it submits next must be the same on all ranks, otherwise a block gets
        # another chunk's weights.
        self._lanes.network.ask(lambda: self._group.exchange(what, None))

    def _load_window(self, window: Sequence[int]) -> None:
        for index in window:
            chunk = self._chunks[index]
            if chunk.state is ChunkState.HOME and self._make_room(optional=True):
                self._load(chunk)

    def _ready(self, chunk: Chunk) -> None:
        if chunk.state is ChunkState.HOME:
            self._counts.demand_loads += 1
            self._make_room(optional=False)
            self._load(chunk)
        if chunk.state is ChunkState.FETCHING:
            # compute reads the block next, which has other weights, or half of these, until then
            chunk.whole.wait()
            assert chunk.block is not None
            chunk.to(ChunkState.CACHED, chunk.block.marked)

    def _make_room(self, *, optional: bool) -> bool:
        """Frees a block if none is free; returns whether one is."""
        if self._pool.free:
            return True
        residents = list(self._filled)
        strangers = [index for index in residents if index not in self._known and not self._chunks[index].pins]
        if self._together and not strangers:
            # Which chunks are pinned follows from this rank's data. While the order is followed, no pin blocks an
            # eviction; elsewhere all ranks must agree.
            first = self._view.victim()
            if first is not None and self._chunks[first].pins:
                self._agree(f"chunk {first}, which stays in its block though the order needs it")
        victim = strangers[0] if strangers else self._view.victim(i for i in residents if self._chunks[i].pins)
        if victim is not None:
            self._evict(self._chunks[victim])
            return True
        if optional:
            return False
        raise InputError(
            f"all {self._pool.count} rCache blocks are in use at once; this step uses more chunks together than the "
            "traced one: plan again with this step, or with more device memory; hooks that read weights belong on the "
            "model before it is planned and wrapped"
        )

    def _evict(self, chunk: Chunk) -> None:
        if chunk.state is ChunkState.FETCHING:
            chunk.whole.settle()  # its transfer must not arrive in a block that has another owner
        chunk.to(ChunkState.HOME)
        del self._filled[chunk.index]
        if chunk.index in self._view.residents:
            self._view.evict(chunk.index)
        self._fresh.discard(chunk.index)
        assert chunk.block is not None
        self._pool.empty(chunk.block)

    def _load(self, chunk: Chunk) -> None:
        """Starts filling its block while compute goes on."""
        assert chunk.block is not None
        self._pool.fill(chunk.block)
        chunk.whole = Memory()
        self._filled[chunk.index] = chunk
        if chunk.index in self._known:
            self._view.admit(chunk.index)
        chunk.to(ChunkState.FETCHING)
        try:
            self._fill(chunk)
        except BaseException:
            chunk.whole = Memory()  # nothing is on its way: what is in the block is not the chunk
            self._evict(chunk)
            raise

    def _fill(self, chunk: Chunk) -> None:
        whole, (shard, home) = chunk.filled, self._home_of(chunk)
        self._counts.loads += 1
        self._fresh.add(chunk.index)
        source = shard
        host_bytes = 0 if chunk.plan.home.weights_on_device else shard.nbytes
        self._counts.host_to_device_bytes += host_bytes
        if host_bytes or self._group.size == 1:
            source = part = whole[chunk.mine]
            # Overlaps with compute on the chunks that are in blocks already. The lane itself waits for compute that was
            # submitted so far, which may still read the block's old weights.
            copy = partial(part.copy_, shard, non_blocking=True)
            self._lanes.fetch.submit(copy, reads=[home], writes=[chunk.whole], nbytes=host_bytes)
            home = chunk.whole
        if self._group.size == 1:
            return
        network_bytes = whole.nbytes - shard.nbytes
        self._counts.network_bytes += network_bytes
        # Overlaps with compute, too. Other ranks get what this rank's part of the block holds, so the fetch must have
        # filled it.
        gather = partial(self._group.gather, whole, source, f"chunk {chunk.index}")
        self._lanes.network.submit(gather, reads=[home], writes=[chunk.whole], nbytes=network_bytes)

    def _home_of(self, chunk: Chunk) -> tuple[torch.Tensor, Memory]:
        """This rank's weights of a chunk at their home, or on their way from files; and the memory where they are."""
        if chunk.filed is None:
            return chunk.shard_weights, chunk.at_home
        filed = chunk.filed
        buffer = self._buffers.take(FILE_WINDOW, filed.nbytes)
        memory = buffer.view(filed.numel, filed.dtype)
        self._counts.disk_read_bytes += filed.read_bytes
        # Overlaps with the copy from the other buffer, and with compute.
        self._lanes.disk.submit(partial(filed.read_into, memory), writes=[buffer], nbytes=filed.read_bytes)
        return memory, buffer
