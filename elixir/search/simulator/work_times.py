"""Seconds of every piece of work of a packing, and what happens where in the trace's compute under a placement."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter, itemgetter
from weakref import WeakKeyDictionary

import numpy as np

from elixir.optimizer_states import DIRECTION_BYTES
from elixir.plan.matrices import owned_numel, slowest
from elixir.schedule import EvictionPolicy, Schedule, ScheduleResult
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.placement import RESIDENT, STATES, Floats, Ints, Placement
from elixir.search.simulator.rates import AVERAGE_TRAFFIC_BYTES, Rates, average_share, out_of_place_share
from elixir.step_trace import StepTrace

LOAD, USE, OPEN, SEND, BACKWARD, ENTRY, MOVE, MOVED = range(8)
"""Kinds of events when compute comes to a place: the cache loads a chunk; a chunk is used for the first time since; its
first gradient arrives; its last has; forward is over; an entry of the order begins (it stands for the chunk then);
activations begin to move, or are waited for (the number of `ActivationMoves.together` stands for the chunk then)."""
_PLACES = 16
"""Places within one access of the trace, in order: see `_AT`."""
_AT = {"forward over": 0, "backward": 1, "entry": 2, "load": 3, "use": 4, "transfer": 5, "gradient": 6}
_alike = attrgetter("direction", "begins", "begins_after", "ends", "ends_after", "planned")


class ActivationMoves:
    """Copies of one step on one machine, whatever its packing. Copies that begin and end together are one.

    Args:
        trace: the step.
        rates: of the machine.
        accesses_s: compute seconds of every access of the trace.
    """

    def __init__(self, trace: StepTrace, rates: Rates, accesses_s: Floats) -> None:
        runs = [list(run) for _, run in groupby(trace.transfers, _alike)]
        firsts = [run[0] for run in runs]
        self.outgoing = [each.direction == "device_to_host" for each in firsts]
        """Whether each goes to the host."""
        nbytes = np.array([each.nbytes for each in trace.transfers], dtype=np.int64)
        run_of = np.repeat(np.arange(len(runs)), list(map(len, runs)))
        seconds = np.where(np.array(self.outgoing, dtype=bool)[run_of], rates.offload(nbytes), rates.fetch(nbytes))
        self.seconds: list[float] = np.bincount(run_of, weights=seconds).tolist()
        ends = [(each.begins, each.begins_after, number, False) for number, each in enumerate(firsts)]
        ends += [(each.ends, each.ends_after, number, True) for number, each in enumerate(firsts)]
        at_once = [(key, [each[2] for each in run]) for key, run in groupby(sorted(ends), itemgetter(0, 1, 3))]
        self.together = [numbers for _, numbers in at_once]
        """Copies that begin, or are waited for, at the same moment, one after the other."""
        self.accesses: Ints = np.array([access for (access, _, _), _ in at_once], dtype=np.int64)
        """The access with the moment of each of `together`."""
        self.awaited = np.array([ends for (_, _, ends), _ in at_once], dtype=bool)
        """Whether they are waited for then, and do not begin."""
        shares = np.array(list(_shares(trace, rates, [key[:2] for key, _ in at_once])))
        before_s = np.concatenate(([0.0], np.cumsum(accesses_s)))
        self.at_s: Floats = before_s[self.accesses] + shares * accesses_s[self.accesses]
        """Seconds of the trace's own compute before that moment: a share of its access."""


def _shares(trace: StepTrace, rates: Rates, moments: list[tuple[int, int]]) -> Iterator[float]:
    """The part of its access that comes before each moment: an access, and how many of its operators are over."""
    each_s = rates.operations_s(trace) if moments else np.zeros(0)
    for access, run in groupby(moments, itemgetter(0)):
        seconds = np.cumsum(each_s[list(trace.accesses[access].operations)]).tolist()
        for _, after in run:
            yield seconds[after - 1] / seconds[-1] if 0 < after <= len(seconds) and seconds[-1] else 0.0


@dataclass(frozen=True)
class Events:
    """Events of forward and backward, in order."""

    kinds: list[int]
    chunks: list[int]
    compute_s: list[float]
    """The trace's own compute before each, waits not counted."""
    total_s: float


class WorkTimes:
    """One packing of one trace on one machine; made once, for any number of placements.

    Args:
        model: the packing and its bytes.
        rates: of the machine.
        accesses_s: compute seconds of every access of the trace.
        moves: of activations.
    """

    def __init__(self, model: MemoryModel, rates: Rates, accesses_s: Floats, moves: ActivationMoves) -> None:
        self.model, self.work = model, model.work
        self.disk_bytes: list[int] = model.disk_shard_bytes.tolist()
        self._walks: WeakKeyDictionary[EvictionPolicy, Ints] = WeakKeyDictionary()
        self._index_order()
        self._index_gradients()
        self.measure(rates, accesses_s, moves)

    def at(self, rates: Rates, accesses_s: Floats, moves: ActivationMoves) -> WorkTimes:
        """Times of the same packing of the same trace at other rates."""
        other = copy.copy(self)
        for cached in ("disk_read_s", "disk_write_s", "file_read_s"):
            other.__dict__.pop(cached, None)
        other.measure(rates, accesses_s, moves)
        return other

    def measure(self, rates: Rates, accesses_s: Floats, moves: ActivationMoves) -> None:
        """Takes the seconds at these rates."""
        self.rates, self.shards, self.moves, work = rates, rates.shards, moves, self.work
        size = np.array([chunk.bytes for chunk in work.chunks], dtype=np.int64)
        numel = np.array([chunk.numel for chunk in work.chunks], dtype=np.int64) // self.shards
        shard = size // self.shards
        self.bytes: list[int] = size.tolist()
        self.rounded = [chunk.low_precision for chunk in work.chunks]
        """Whether new weights are rounded by the host where they live on the device."""
        self.pooled = [not chunk.outsized for chunk in work.chunks]
        """Whether its gradient takes a block."""
        self.fetch_s: list[float] = rates.fetch(shard).tolist()
        self.device_copy_s: list[float] = rates.device_copy(size).tolist()
        self.gather_s: list[float] = rates.gather(size).tolist()
        self.reduce_s: list[float] = rates.reduce(size).tolist()
        self.sum_replicas_s: list[float] = rates.sum_replicas(shard).tolist()
        self.offload_s: list[float] = rates.offload(shard).tolist()
        self.deliver_on_device_s: list[float] = rates.device_copy(shard).tolist()
        self.add_on_host_s: list[float] = rates.host_add(shard).tolist()
        self.add_on_device_s: list[float] = rates.device_memory(shard).tolist()
        self.norm_s: list[float] = rates.device_memory(shard).tolist()
        """One reading of the gradients, for the norm that clipping needs."""
        # New weights return, or weights are fetched again, while the host steps other chunks.
        share = average_share(self.model.setting)
        self.host_adam_s: list[float] = (rates.host_step(numel, shard) * share).tolist()
        early_s = rates.host_step(numel, 2 * shard) * share * out_of_place_share(self.model.setting)
        self.host_adam_early_s: list[float] = early_s.tolist()
        """The same seconds while gradients of other chunks come down as well, and the old states are kept."""
        self.turned_s = [0.0] * len(work.chunks)
        """Seconds that these take from compute on the device, whichever stream they are on, by chunk."""
        self._average_bytes = AVERAGE_TRAFFIC_BYTES * self.model.setting.averages
        averaging_s = rates.device_memory(self._average_bytes * numel)
        self.device_adam_s: list[float] = (rates.device_step(numel, self.rounded) + averaging_s).tolist()
        for c, chunk in enumerate(work.chunks):
            if chunk.matrices:
                self._measure_matrices(rates, c, chunk.matrices)
        self._before_s = np.concatenate(([0.0], np.cumsum(accesses_s)))

    def _measure_matrices(self, rates: Rates, c: int, matrices: Sequence[tuple[int, int]]) -> None:
        """Takes the seconds of a chunk that is stepped as whole matrices: with states on the host each passes through
        the device, while the host works on the next."""
        ranks, shard_numel = self.shards, self.work.chunks[c].numel // self.shards
        numel = np.array([rows * columns for rows, columns in matrices] if ranks == 1 else [shard_numel])
        device_s = rates.orthogonal_s(slowest(matrices, ranks))
        self.turned_s[c] = device_s if rates.ahead else 0.0
        if ranks > 1:  # as a gather in which one rank receives so much, there and back
            most = DIRECTION_BYTES * owned_numel([(matrices, shard_numel)], ranks)
            device_s += 2 * float(rates.gather([most * ranks // (ranks - 1)]).sum())
        rounding_s = float(rates.device_memory(6 * numel).sum()) if self.rounded[c] else 0.0
        more_bytes = self._average_bytes
        self.device_adam_s[c] = float(rates.matrix_step(numel, more_bytes, on_host=False).sum()) + device_s + rounding_s
        host_s = float(rates.matrix_step(numel, more_bytes, on_host=True).sum())
        turned = DIRECTION_BYTES * numel
        turning_s = float((rates.fetch(turned) + rates.offload(turned)).sum()) + device_s
        parts, one_by_one = (host_s, turning_s), not rates.ahead or ranks > 1
        both_s = sum(parts) if one_by_one else max(parts) + min(parts) / len(matrices)
        self.host_adam_s[c] = both_s

    def _index_order(self) -> None:
        work = self.work
        self.phases = [phase for phase, _, _ in work.entries]
        self.entry_chunks = [chunks for _, chunks, _ in work.entries]
        _, first = np.unique(np.array(work.entry_of), return_index=True)
        # One access after the last, for what happens at the end.
        self._access_of = np.append(work.facts.reading[first], len(work.facts.trace.accesses))
        entries = len(work.entries)
        several = len(work.chunks)
        self._lone_chunk = np.array(
            [chunks[0] if len(chunks) == 1 else several for chunks in self.entry_chunks], dtype=np.int64
        )
        used = [(chunk, entry) for entry, chunks in enumerate(self.entry_chunks) for chunk in chunks]
        self._stride, self._behind = entries + 1, 2 * (entries + 1)
        self._use_keys: Ints = np.array(sorted(chunk * self._stride + entry for chunk, entry in used), dtype=np.int64)
        first_use: dict[int, int] = {}
        for chunk, entry in used:
            first_use.setdefault(chunk, entry)
        self.first_use = [first_use.get(chunk, entries) for chunk in range(several)]
        """The entry of the first use, by chunk; the number of entries if it has none."""
        with_gradient = [index for index, chunk in enumerate(work.chunks) if chunk.grad_bytes]
        self.update_order = sorted(with_gradient, key=lambda index: (self.first_use[index], index))
        """Chunks that the optimizer steps, in the order in which the next forward asks for them."""

    def _index_gradients(self) -> None:
        """Moments of first and last gradients. Within one access, chunks are in falling order, as they are sent."""
        found: list[tuple[int, int, int, int]] = []
        for index in self.update_order:
            first, last = self.work.arrivals[index] or (0, 0)
            entry = self.work.grad_entry(index) or 0
            found += [(first, -index, OPEN, entry), (last, -index, SEND, entry)]
        rows = np.array(sorted(found), dtype=np.int64).reshape(-1, 4)
        self._grad_entry: Ints = rows[:, 3]
        self._grad_access, self._grad_chunk, self._grad_kind = rows[:, 0], -rows[:, 1], rows[:, 2]

    @cached_property
    def disk_read_s(self) -> list[float]:
        """Seconds of its states, by chunk; `InputError` if the profile does not know the disk."""
        found: list[float] = self.rates.disk_read(self.disk_bytes).tolist()
        return found

    @cached_property
    def disk_write_s(self) -> list[float]:
        """The same for writes."""
        found: list[float] = self.rates.disk_write(self.disk_bytes).tolist()
        return found

    @cached_property
    def file_read_s(self) -> list[float]:
        """Seconds to read its weights from their files, by chunk."""
        found: list[float] = self.rates.disk_read(self.model.file_bytes).tolist()
        return found

    @property
    def total_s(self) -> float:
        """The trace's own compute."""
        return float(self._before_s[-1])

    @property
    def before_backward_s(self) -> float:
        """Seconds of the trace's own compute before backward."""
        return float(self._before_s[self._access_of[self.work.first_backward]])

    @property
    def before_first_use_s(self) -> Floats:
        """Seconds of the trace's own compute before the first use of each chunk; all if it has none."""
        found: Floats = self._before_s[self._access_of[self.first_use]]
        return found

    @property
    def sent(self) -> tuple[Ints, Floats]:
        """Place of each chunk in the order in which last gradients come, and the trace's own compute after that."""
        sent = self._grad_kind == SEND
        chunks = self._grad_chunk[sent]
        place, after_s = np.full(len(self.bytes), -1, dtype=np.int64), np.zeros(len(self.bytes))
        place[chunks] = np.arange(len(chunks))
        after_s[chunks] = self.total_s - self._before_s[self._grad_access[sent] + 1]
        return place, after_s

    def events(
        self,
        placement: Placement,
        schedule: Schedule,
        walk: ScheduleResult,
        *,
        updated: bool,
        record: bool = False,
    ) -> Events:
        """Events of forward and backward of one batch.

        Args:
            placement: homes of the chunks.
            schedule: the order without the resident chunks.
            walk: of that order, with the loads.
            updated: a step came before, so resident chunks may have to wait for their weights.
            record: entries as well.
        """
        reached = self._reached(placement.resident, schedule)
        positions, chunks = np.array(walk.positions, dtype=np.int64), np.array(walk.chunks, dtype=np.int64)
        entries = reached[positions]
        access = self._access_of[entries]
        place = np.full(len(chunks), _AT["load"])
        if self.shards > 1:
            # What forward did not come to is loaded when it is over.
            backward = self.work.first_backward
            place[(positions < backward) & (entries >= backward)] = _AT["forward over"]
        parts = [(self._key(access, place, 2 * positions), np.full(len(chunks), LOAD), chunks)]
        parts.append(self._uses(placement, entries, chunks, updated=updated))
        parts.append(self._gradients(placement, schedule, reached))
        backward_access = self._access_of[self.work.first_backward]
        parts.append(_rows(self._key(np.atleast_1d(backward_access), _AT["backward"]), BACKWARD, [0]))
        moves = self.moves
        if moves.together:
            kinds = np.where(moves.awaited, MOVED, MOVE)
            parts.append((self._key(moves.accesses, _AT["transfer"]), kinds, np.arange(len(kinds))))
        if record:
            numbers = np.arange(len(self.entry_chunks))
            parts.append(_rows(self._key(self._access_of[:-1], _AT["entry"]), ENTRY, numbers))
        keys, kinds, chunks = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        order = np.argsort(keys, kind="stable")
        access, place = np.divmod(keys[order] // self._behind, _PLACES)
        # A gradient comes at the end of its access, everything else before.
        compute_s = self._before_s[access + (place == _AT["gradient"])]
        compute_s[place == _AT["transfer"]] = moves.at_s
        return Events(
            kinds[order].tolist(), chunks[order].tolist(), compute_s.tolist(), total_s=float(self._before_s[-1])
        )

    def _key(self, access: Ints, place: Ints | int, behind: Ints | int = 0) -> Ints:
        """Sorts keys of events: the access, the place in it, and there, twice the position of the order."""
        return (access * _PLACES + place) * self._behind + behind

    def _uses(self, placement: Placement, entries: Ints, chunks: Ints, *, updated: bool) -> tuple[Ints, Ints, Ints]:
        """The first use of every loaded chunk, and of every resident one whose weights are being updated."""
        wanted = chunks * self._stride + entries
        at = np.searchsorted(self._use_keys, wanted)
        found = self._use_keys[np.minimum(at, len(self._use_keys) - 1)]
        good = (at < len(self._use_keys)) & (found // self._stride == chunks)
        used, entry = chunks[good], found[good] % self._stride
        if updated:
            waiting = [
                chunk
                for chunk in self.update_order
                if placement.resident[chunk]
                and self.first_use[chunk] < len(self.entry_chunks)
                and (self.shards > 1 or not placement.state_on_device[chunk])
            ]
            used = np.append(used, np.array(waiting, dtype=np.int64))
            entry = np.append(entry, np.array([self.first_use[chunk] for chunk in waiting], dtype=np.int64))
        return self._key(self._access_of[entry], _AT["use"]), np.full(len(used), USE), used

    def _gradients(self, placement: Placement, schedule: Schedule, reached: Ints) -> tuple[Ints, Ints, Ints]:
        """Gradients that go through blocks: all but those of one rank that stay next to resident weights."""
        gathers = (self.shards > 1) | ~(RESIDENT & STATES)[placement.codes]
        kept = gathers[self._grad_chunk]
        access, chunks, kinds = self._grad_access[kept], self._grad_chunk[kept], self._grad_kind[kept]
        keys = self._key(access, _AT["gradient"])
        if self.shards > 1:
            keys = self._in_order(keys, kinds, self._grad_entry[kept], schedule, reached)
        return keys, kinds, chunks

    def _in_order(self, keys: Ints, kinds: Ints, entries: Ints, schedule: Schedule, reached: Ints) -> Ints:
        """Reductions come after the last loads before the last gradient (`ElixirModule._gradient_flow`)."""
        sent = kinds == SEND
        loading = np.array(schedule.loading, dtype=np.int64)
        before = np.searchsorted(loading, entries[sent], side="right") - 1
        behind = loading[before[before >= 0]]
        loaded = np.zeros(len(before), dtype=np.int64)
        loaded[before >= 0] = self._key(self._access_of[reached[behind]], _AT["load"], 2 * behind + 1)
        ordered = keys.copy()
        ordered[sent] = np.maximum.accumulate(np.maximum(keys[sent], loaded))
        return ordered

    def _reached(self, resident: Sequence[bool], schedule: Schedule) -> Ints:
        """Per position of the order, the entry at which the cache walks there (`RCache._advance`).

        Positions are left out as long as what is used lies in blocks for the position before; entries that use only
        resident chunks do not walk. The number of entries stands for: never.
        """
        # The same at any depth of prefetch, so schedules of one policy share it.
        known = self._walks.get(schedule.policy)
        if known is not None:
            return known
        required, backward = schedule.policy.required, self.work.first_backward
        lone = self._lone_chunk
        streamed = ~np.append(np.array(resident, dtype=bool), False)[lone]  # those of several chunks are looked at
        positions: list[int] = []
        entries: list[int] = []
        here, in_forward = -1, self.shards > 1
        current: tuple[int, ...] = ()
        for entry in np.flatnonzero(streamed).tolist():
            if in_forward and entry >= backward:
                in_forward = False
                if here < backward - 1:  # the end of forward walks to its end
                    here, current = backward - 1, required[backward - 1]
                    positions.append(here)
                    entries.append(backward)
            chunks = self.entry_chunks[entry]
            if len(chunks) > 1:
                chunks = tuple(chunk for chunk in chunks if not resident[chunk])
                if not chunks:
                    continue
            first = chunks[0]
            if first in current and (len(chunks) == 1 or set(chunks) <= set(current)):
                continue
            here += 1
            while first not in required[here] or (len(chunks) > 1 and not set(chunks) <= set(required[here])):
                here += 1
            current = required[here]
            positions.append(here)
            entries.append(entry)
        walks = np.searchsorted(np.array(positions, dtype=np.int64), np.arange(len(required)))
        found = self._walks[schedule.policy] = np.append(np.array(entries, dtype=np.int64), len(required))[walks]
        return found


def _rows(keys: Ints, kind: int, chunks: Ints | list[int]) -> tuple[Ints, Ints, Ints]:
    return keys, np.full(len(keys), kind), np.asarray(chunks)


@dataclass(frozen=True)
class Case:
    """The case of a replay: a placement with its schedule, and the work of a packing."""

    times: WorkTimes
    """Seconds of every piece of work."""
    placement: Placement
    schedule: Schedule
    result: ScheduleResult
    """The walk of the first batch."""
    grad_blocks: int
    """Gradient blocks of the plan."""
    clipped: bool = False
    """Whether gradients turn out to be clipped, so that states made early are discarded and made again."""

    def batches(self, count: int, *, updated: bool, record: bool = False) -> list[Events]:
        """Events of each batch of a step.

        The blocks are empty before the first only, since weights change between steps. Batches that find the same
        chunks in the blocks have the same walk, and so the same events.

        Args:
            count: batches.
            updated, record: those of `WorkTimes.events`, the former for the first batch.
        """
        found: list[Events] = []
        walk, before = self.result, None
        for batch in range(count):
            if batch:
                walk = self.schedule.simulate(self.result.blocks, walk.left)
            after_step = updated and not batch
            if walk is before:
                found.append(found[-1])
            else:
                found.append(self.times.events(self.placement, self.schedule, walk, updated=after_step, record=record))
            before = None if after_step else walk
        return found
