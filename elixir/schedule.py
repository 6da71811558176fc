"""`Schedule`: which chunk leaves the rCache, and when chunks come in; a pure policy over chunk ids.

The simulator and the runtime use the same `EvictionPolicy`, so that the prediction is what happens. It is Belady's rule
("A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal, 1966): the resident chunk
whose next use lies furthest away leaves. With blocks of one size and clean evictions this is optimal, even if several
chunks are required at once (which equals two rounds of single requests).

A *position* is an index into the recorded order. `required[t]` are the chunks that lie in blocks while `t` runs:
those used at `t` and those still pinned.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate

from elixir.errors import InputError


@dataclass(frozen=True)
class ScheduleResult:
    """The loads of one walk of the order with a number of blocks."""

    blocks: int
    prefetch_depth: int
    hits: int
    """Requirements of chunks that were in a block already, neither loaded nor prefetched for it."""
    positions: tuple[int, ...]
    """The position of every load, in order; for a prefetch, the position during which it runs."""
    chunks: tuple[int, ...]
    """The chunk of every load."""
    left: tuple[int, ...] = ()
    """The chunks in blocks at the end, in order of id."""

    @property
    def loads(self) -> int:
        """The number of loads."""
        return len(self.chunks)


@dataclass(frozen=True)
class StepLoads:
    """The loads over all micro-batches of one optimizer step."""

    hits: int
    by_chunk: Mapping[int, int]
    """Loads per chunk."""

    @property
    def loads(self) -> int:
        """The number of loads of all chunks."""
        return sum(self.by_chunk.values())


class EvictionPolicy:
    """The order of uses, by which the chunk whose next use lies furthest away leaves first; see `CacheView`.

    The order is a row of *requests*, one per chunk and position, numbered through all positions. A chunk that is never
    used again has a request after the end; of several, the highest id leaves first. Requests are unique, so there are
    no ties: chunks required at the same position leave in falling order of id.

    Args:
        required: chunk ids (not negative) per position; repetitions within a position are ignored.

    Raises:
        InputError: a chunk id is negative.
    """

    def __init__(self, required: Sequence[Sequence[int]]) -> None:
        self.required: tuple[tuple[int, ...], ...] = tuple(
            tuple(chunks) if len(chunks) < 2 else tuple(sorted(set(chunks))) for chunks in required
        )
        self.requested: list[int] = [chunk for chunks in self.required for chunk in chunks]
        if min(self.requested, default=0) < 0:
            raise InputError("chunk ids must be 0 or larger")
        self.end = len(self.requested)
        self.starts: list[int] = [0, *accumulate(map(len, self.required))]
        """By position, its first request; then the end."""
        self.next_request: list[int] = [0] * self.end
        """By request, the next one of the same chunk."""
        self.previous_request: list[int] = [-1] * self.end
        """By request, the one before of the same chunk; -1 for the first."""
        self.first_request: dict[int, int] = {}
        """By chunk, its first request."""
        for request in range(self.end - 1, -1, -1):
            chunk = self.requested[request]
            following = self.next_request[request] = self.first_request.get(chunk, self.end + chunk)
            if following < self.end:
                self.previous_request[following] = request
            self.first_request[chunk] = request
        self.requested.extend(range(max(self.requested, default=-1) + 1))

    @cached_property
    def widths(self) -> dict[int, int]:
        """By number of chunks at a position, how many distinct chunks are requested from the first such position on."""
        last = [request for request in range(self.end) if self.next_request[request] >= self.end]
        found: dict[int, int] = {}
        for position, chunks in enumerate(self.required):
            if len(chunks) not in found:
                found[len(chunks)] = len(last) - bisect_left(last, self.starts[position])
        return found


class CacheView:
    """The chunks in blocks during a walk of the order; names a victim in constant time.

    Residents are bits of an integer at the requests of their next uses, so that the furthest is the highest bit. It
    takes only chunks that the order knows.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._next = dict(policy.first_request)
        self._mask = 0
        self.residents: set[int] = set()

    def admit(self, chunk: int) -> None:
        """Adds a chunk that has come into a block."""
        self.residents.add(chunk)
        self._mask |= 1 << self._next[chunk]

    def evict(self, chunk: int) -> None:
        """Removes a chunk that has left its block."""
        self.residents.remove(chunk)
        self._mask ^= 1 << self._next[chunk]

    def victim(self, pinned: Iterable[int] = ()) -> int | None:
        """The resident to evict now, or None if all are pinned."""
        mask = self._mask
        for chunk in pinned:
            if chunk in self.residents:
                mask ^= 1 << self._next[chunk]
        return self._policy.requested[mask.bit_length() - 1] if mask else None

    def passed(self, position: int) -> None:
        """Moves on from `position`: its chunks are next used later."""
        policy = self._policy
        for request in range(policy.starts[position], policy.starts[position + 1]):
            chunk, following = policy.requested[request], policy.next_request[request]
            if chunk in self.residents:
                self._mask ^= (1 << self._next[chunk]) | (1 << following)
            self._next[chunk] = following


class Schedule:
    """A recorded order that can be simulated with any number of blocks.

    >>> Schedule([[0], [1, 2], [3], [3], [1, 2], [0]]).simulate(blocks=2).loads
    6

    While `t` runs, its *window* lies in blocks: `required[t]` and the next `prefetch_depth` distinct chunks. A window
    that fits can always be loaded, so prefetch cannot deadlock.

    Args:
        required: the chunk ids per position, or the policy of another schedule of the same order.
        prefetch_depth: the number of chunks fetched ahead.

    Raises:
        InputError: `prefetch_depth` is negative.
    """

    def __init__(self, required: Sequence[Sequence[int]] | EvictionPolicy, prefetch_depth: int = 0) -> None:
        if prefetch_depth < 0:
            raise InputError(f"prefetch depth must be 0 or larger, got {prefetch_depth}")
        self.policy = required if isinstance(required, EvictionPolicy) else EvictionPolicy(required)
        self.prefetch_depth = prefetch_depth
        self.min_blocks = max(
            (min(width + prefetch_depth, chunks) for width, chunks in self.policy.widths.items()), default=0
        )
        """The least number of blocks with which every window fits."""
        self._results: dict[tuple[int, tuple[int, ...]], ScheduleResult] = {}

    @cached_property
    def windows(self) -> tuple[tuple[int, ...], ...]:
        """By position, the chunks in blocks while it runs, in order of need."""
        required, depth = self.policy.required, self.prefetch_depth
        if depth == 0:
            return required
        most = depth + max(map(len, required), default=0)
        windows: list[tuple[int, ...]] = []
        ahead: tuple[int, ...] = ()  # distinct chunks of later positions, the next first
        between: tuple[int, ...] = ()  # the window of a position that requires nothing
        for here in reversed(required):
            if not here:
                windows.append(between)
                continue
            width = len(here)
            if ahead[:width] != here:
                ahead = (*here, *[chunk for chunk in ahead if chunk not in here])[:most]
                between = ahead[:depth]
            windows.append(ahead[: width + depth])
        return tuple(reversed(windows))

    @cached_property
    def loading(self) -> tuple[int, ...]:
        """The positions whose window is not empty."""
        if self.prefetch_depth:
            return tuple(range(bisect_left(self.policy.starts, self.policy.end)))
        return tuple(position for position, here in enumerate(self.policy.required) if here)

    def simulate(self, blocks: int, held: tuple[int, ...] = ()) -> ScheduleResult:
        """Walks the order once with `blocks` blocks; results are cached.

        Args:
            blocks: the number of blocks.
            held: the chunks in blocks when the walk begins.

        Raises:
            InputError: some window does not fit.
        """
        if blocks < self.min_blocks:
            position = next(i for i, window in enumerate(self.windows) if len(window) == self.min_blocks)
            ahead = f", {self.prefetch_depth} to prefetch included" if self.prefetch_depth else ""
            raise InputError(
                f"position {position} of the order needs {self.min_blocks} rCache blocks at once{ahead}, there are "
                f"{blocks}; give it more blocks, smaller chunks or a smaller prefetch depth"
            )
        key = (blocks, held)
        if key not in self._results:
            self._results[key] = self._walk(blocks, held)
        return self._results[key]

    def step(self, blocks: int, micro_batches: int, held: tuple[int, ...] = ()) -> StepLoads:
        """Walks the order for all micro-batches of an optimizer step; each walk starts with the blocks of the last.

        Args:
            blocks: the number of blocks.
            micro_batches: the number of walks.
            held: the chunks in blocks when the first walk begins; none after weights have changed.

        Raises:
            InputError: some window does not fit.
        """
        walks: list[ScheduleResult] = []
        begun: dict[tuple[int, ...], int] = {}
        while len(walks) < micro_batches and held not in begun:
            begun[held] = len(walks)
            walks.append(self.simulate(blocks, held))
            held = walks[-1].left
        # A walk that begins like an earlier one continues like it, so the rest repeats in a cycle.
        first = begun.get(held, 0)
        by_chunk, hits = dict[int, int](), 0
        for index, walk in enumerate(walks):
            times = 1 if index < first else (micro_batches - index - 1) // (len(walks) - first) + 1
            hits += times * walk.hits
            for chunk, loads in Counter(walk.chunks).items():
                by_chunk[chunk] = by_chunk.get(chunk, 0) + times * loads
        return StepLoads(hits, dict(sorted(by_chunk.items())))

    def _walk(self, blocks: int, held: Sequence[int]) -> ScheduleResult:
        """Does what `CacheView` does, in one loop over requests, since a search takes hundreds of walks.

        A window begins at the first request of its position and ends before the request `ahead`, which only grows: if a
        window ends earlier than the last one, all its chunks are loaded. Pins are not needed: the window's own chunks
        have the nearest next uses, so none of them can be the victim.
        """
        policy, depth = self.policy, self.prefetch_depth
        requested, previous, following, end = policy.requested, policy.previous_request, policy.next_request, policy.end
        inside = set(held)
        # Requests of next uses, the furthest first. Passed requests stay in the heap, since they never come first.
        uses = [-policy.first_request[chunk] for chunk in held]
        heapify(uses)
        loaded_for: dict[int, int] = {}
        positions: list[int] = []
        chunks: list[int] = []
        unused = ahead = request = 0
        window = 0  # the number of chunks in it
        for position, stop in enumerate(policy.starts[1:]):
            wanted = stop - request + depth
            while window < wanted and ahead < end:
                window += previous[ahead] < request
                chunk = requested[ahead]
                if chunk not in inside:
                    if len(inside) == blocks:
                        furthest = -heappop(uses)
                        victim = requested[furthest]
                        inside.remove(victim)
                        unused += loaded_for.get(victim) == furthest
                    inside.add(chunk)
                    loaded_for[chunk] = ahead
                    heappush(uses, -ahead)
                    positions.append(position)
                    chunks.append(chunk)
                ahead += 1
            while request < stop:
                heappush(uses, -following[request])
                window -= following[request] >= ahead
                request += 1
        hits = end - len(chunks) + unused
        return ScheduleResult(blocks, depth, hits, tuple(positions), tuple(chunks), tuple(sorted(inside)))


def required_chunks(
    uses: Iterable[tuple[Sequence[int], int]], residents: frozenset[int] = frozenset()
) -> tuple[tuple[int, ...], ...]:
    """By position, the chunks in blocks while it runs: used by it or still pinned.

    Args:
        uses: by position, the chunks used there and the last position through which they stay pinned.
        residents: the chunks that need no block.
    """
    order = [(tuple(chunks), pin_until) for chunks, pin_until in uses]
    required = [chunks for chunks, _ in order]
    for position, (chunks, pin_until) in enumerate(order):
        for later in range(position + 1, pin_until + 1):
            if required[later] != chunks:
                required[later] = tuple(sorted({*required[later], *chunks}))
    if residents:
        required = [tuple(chunk for chunk in chunks if chunk not in residents) for chunks in required]
    return tuple(required)
