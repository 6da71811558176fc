"""Seconds that a step cannot beat, for thousands of placements and several machines at once.

A search ranks by them, and simulates the best few. A floor forgets which event waits for which. It keeps that each
resource does one thing at a time, and what has to come before forward, before the first use of a chunk, and before the
step is over. A property test holds floors below simulations.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from elixir.search.problem.placement import DISK, IN_FILES, RESIDENT, STATES, WEIGHTS, Bools, Codes, Floats, Ints
from elixir.search.simulator.work_times import WorkTimes

MOST_AHEAD = 4
"""Chunks fetched ahead at most: each takes a block, and what is fetched earlier than that waits there."""


class _Homes(NamedTuple):
    """Flags by placement and chunk."""

    resident: Bools
    weights: Bools
    """Weights on the device."""
    on_device: Bools
    """Stepped by the device."""
    on_host: Bools
    """Stepped by the host."""
    early: Bools
    """Part of `on_host` that may be stepped early."""


class Floors:
    """Floors of all placements of one packing, on machines that differ in all but compute.

    Seconds by chunk have the shape [machine, chunk].

    Args:
        machines: seconds of every piece of work, by machine.
    """

    def __init__(self, machines: Sequence[WorkTimes]) -> None:
        self._machines = machines
        times = self._times = machines[0]
        self._setting = times.model.setting
        work, count = times.work, len(times.bytes)
        self._shares_link = times.rates.ahead  # on a CPU other cores copy
        self._several, self._replicated = times.shards > 1, times.rates.replicas > 1
        self._trained: Bools = np.array([chunk.grad_bytes > 0 for chunk in work.chunks], dtype=bool)
        self._outsized: Bools = np.array([chunk.outsized for chunk in work.chunks], dtype=bool)
        self._able: Bools = np.array(work.early_able, dtype=bool)
        self._in_forward, self._in_backward = (
            np.isin(np.arange(count), list(chain.from_iterable(chunks)))
            for chunks in (times.entry_chunks[: work.first_backward], times.entry_chunks[work.first_backward :])
        )
        self._forward_s, self._backward_s = times.before_backward_s, times.total_s - times.before_backward_s
        self._before_s = times.before_first_use_s
        self._index_seconds()
        self._index_orders()

    def _index_seconds(self) -> None:
        setting, ahead = self._setting, self._times.rates.ahead
        self._fetch_s, self._host_adam_s = self._by_chunk("fetch_s"), self._by_chunk("host_adam_s")
        self._device_adam_s, self._turned_s = self._by_chunk("device_adam_s"), self._by_chunk("turned_s")
        self._copy_s, self._gather_s = self._by_chunk("device_copy_s"), self._by_chunk("gather_s")
        self._norm_s = self._by_chunk("norm_s") * setting.clipping
        self._number_s = np.array([[each.rates.number_s] for each in self._machines]) * setting.clipping
        # The last to write what leaves for the host sums it: compute, the network's lane, or on a CPU the next.
        summed_s = self._norm_s * (setting.accumulation == 1)
        self._summed_s = summed_s * (ahead and not self._several)
        self._reduce_s = self._by_chunk("reduce_s") + self._by_chunk("sum_replicas_s") * self._replicated
        self._reduce_to_host_s = self._reduce_s + summed_s * self._several
        self._deliver_s = self._by_chunk("deliver_on_device_s")
        self._offload_s = self._by_chunk("offload_s") + summed_s * (not ahead and not self._several)

    def _by_chunk(self, name: str) -> Floats:
        """Seconds of one kind of work."""
        return np.array([getattr(times, name) for times in self._machines], dtype=np.float64)

    def _index_orders(self) -> None:
        times, setting = self._times, self._setting
        count = len(times.bytes)
        place: Ints = np.full(count, count, dtype=np.int64)
        place[times.update_order] = np.arange(len(times.update_order))
        self._updates = _in_order(place)
        """Chunks in the order of their updates, which is that of first uses."""
        self._uses = _in_order(self._before_s)
        sent_place, self._after_sent_s = times.sent
        sends = np.argsort(-sent_place, kind="stable")
        self._sends: Ints = sends[sent_place[sends] >= 0]
        """Chunks with a gradient. The one that is sent last comes first."""
        # Forward's compute from a chunk's first use on.
        left_s = np.where(self._in_forward, np.maximum(self._forward_s - self._before_s, 0.0), -np.inf)
        self._left_s: Floats = left_s[self._updates]
        # The earliest that a chunk's gradient is on the host, from the beginning of forward on.
        home_s = times.total_s - self._after_sent_s + self._copy_s + self._offload_s
        self._home_s: Floats = np.where(self._trained, home_s + self._several * self._reduce_to_host_s, np.inf)
        second = np.maximum(times.model.second_set_bytes * setting.ranks_per_host, 1)
        per_byte_s = np.where(self._able, self._host_adam_s / second, 0.0)
        self._per_byte_s: Floats = per_byte_s.max(axis=1, initial=0.0, keepdims=True)
        """The most seconds of Adam that a byte of a second set saves."""

    def seconds(
        self, codes: Codes, blocks: Ints, *, early: bool = False, prefetch: bool = True, room_bytes: Ints | None = None
    ) -> Floats:
        """The least that a step with these homes, and no more than so many blocks, can take.

        Args:
            codes: [placement, chunk], numbers of homes.
            blocks: by placement.
            early: the host may make new states in backward, of whichever chunks.
            prefetch: chunks may be fetched ahead of their use; otherwise compute waits for each load.
            room_bytes: by placement, host memory of one machine for second sets; None: enough for all.

        Returns:
            Seconds by machine and placement.
        """
        on_host = self._trained & ~STATES[codes]
        able = on_host & self._able & ~DISK[codes] & early
        homes = _Homes(RESIDENT[codes], WEIGHTS[codes], self._trained & STATES[codes], on_host, able)
        forward_s = np.maximum(self._walked_s(homes, prefetch=prefetch), self._updated_s(homes, room_bytes))
        backward_s = self._sending_s(homes)
        loaded = ~homes.weights & self._in_backward
        backward_s = np.maximum(backward_s, loads_s(loaded, self._fetch_s[:, None], blocks))
        if not prefetch:
            waits_s = self._one_by_one_s(homes, self._in_backward & ~homes.resident, blocks)
            backward_s = np.maximum(backward_s, self._backward_s + waits_s)
        if self._several:
            gathered_s = _sums(self._trained | ~homes.resident, np.where(self._in_forward, self._gather_s, 0.0))
            forward_s = np.maximum(forward_s, gathered_s)
            backward_s = np.maximum(backward_s, self._network_s(homes, blocks))
        norm_s = _sums(homes.on_device, self._norm_s) + on_host.any(axis=1) * self._number_s
        found: Floats = norm_s + forward_s + backward_s
        if early:
            found = np.maximum(found, self._between_updates_s(homes))
        if self._setting.accumulation > 1:
            stalled_s: Floats = np.zeros((1, 1))
            if self._setting.overlap:  # otherwise a gradient may begin before the last one has left its block
                stalled_s = self._stalled_s(homes, self._times.model.grad_blocks(codes)[0])
            later_s = self._later_s(homes, blocks, stalled_s, prefetch=prefetch)
            found = np.maximum(found + later_s, self._lanes_s(homes, blocks))
        return np.maximum(found, self._disk_s(codes))

    def _later_s(self, homes: _Homes, blocks: Ints, stalled_s: Floats, *, prefetch: bool) -> Floats:
        """Batches after the first, whose backward has `_stalled_s`. A forward or a backward finds as many of its chunks
        as there are blocks."""
        copied_s = _sums(self._through(homes), self._copy_s)
        found: Floats = np.zeros_like(copied_s)
        for used, compute_s, least_s in (
            (self._in_forward, self._forward_s, 0.0),
            (self._in_backward, self._backward_s + copied_s, stalled_s),
        ):
            waits_s = loads_s(~homes.weights & used, self._fetch_s[:, None], blocks)
            if self._several:
                waits_s = np.maximum(waits_s, loads_s(~homes.resident & used, self._gather_s[:, None], blocks))
            taken_s = np.maximum(compute_s, waits_s) if prefetch else compute_s + waits_s
            found = found + np.maximum(taken_s, least_s)
        return (self._setting.accumulation - 1) * found

    def _stalled_s(self, homes: _Homes, grad_blocks: Ints) -> Floats:
        """Backward of one batch, if only gradients hold it up that leave one after the other: when one is sent, no more
        are on their way than there are other gradient blocks."""
        order = self._sends[::-1]
        through, on_device = self._through(homes)[:, order], homes.on_device[:, order]
        copied_s = np.where(through, self._copy_s[:, None, order], 0.0)
        since_s = np.cumsum(copied_s, axis=-1)
        sent_s = self._backward_s - self._after_sent_s[order] + since_s
        left_s = self._after_sent_s[order] + since_s[..., -1:] - since_s + copied_s
        leaves_s = np.where(on_device, self._deliver_s[:, None, order], self._offload_s[:, None, order])
        leaves_s = np.where(through, leaves_s, 0.0)
        passed_s = np.cumsum(leaves_s, axis=-1)
        # The lane begins with one of them once that is sent, and goes on with all that follow.
        begun_s = np.maximum.accumulate(np.where(through, sent_s - passed_s + leaves_s, -np.inf), axis=-1)
        gone_s = begun_s + passed_s
        in_block = through & ~self._outsized[order]
        columns = np.argsort(~in_block, axis=1, kind="stable")  # those in blocks, in order
        number = np.arange(len(order))
        before = number - grad_blocks[:, None]
        rows = np.arange(len(columns))[:, None]
        counts = (number < in_block.sum(axis=1)[:, None]) & (before >= 0)
        gone_s = gone_s[:, rows, columns[rows, np.maximum(before, 0)]]
        ends_s = np.where(counts, gone_s + left_s[:, rows, columns], 0.0)
        found: Floats = ends_s.max(axis=-1, initial=0.0)
        return found

    def _lanes_s(self, homes: _Homes, blocks: Ints) -> Floats:
        """The work of the busiest lane in all batches, but for fetches."""
        count = self._setting.accumulation
        adds = count - 1 - self._replicated  # replicas sum what the last has as well
        on_host, on_device = homes.on_host, homes.on_device & self._through(homes)
        added_s = adds * _sums(on_host, self._by_chunk("add_on_host_s"))
        offload_s = count * (_sums(on_device, self._deliver_s) + _sums(on_host, self._by_chunk("offload_s")))
        offload_s = offload_s + adds * _sums(on_device, self._by_chunk("add_on_device_s"))
        host_s = _sums(on_host & ~homes.early, self._host_adam_s)
        if self._shares_link:  # the host adds what has passed, in the lane of its updates
            host_s = host_s + added_s
        else:
            offload_s = offload_s + added_s
        found = np.maximum(offload_s, host_s)
        if self._several:
            gathers_s = loads_s(~homes.resident & self._in_forward, self._gather_s[:, None], blocks)
            gathers_s = gathers_s + loads_s(~homes.resident & self._in_backward, self._gather_s[:, None], blocks)
            reduces_s = _sums(self._trained[None], self._by_chunk("reduce_s"))
            found = np.maximum(found, count * (gathers_s + reduces_s))
        return found

    def _through(self, homes: _Homes) -> Bools:
        """Chunks whose gradients go through blocks."""
        stays = homes.resident & homes.on_device & (not self._several)
        return (homes.on_device | homes.on_host) & ~stays

    def _walked_s(self, homes: _Homes, *, prefetch: bool) -> Floats:
        """Updates on the device, forward's compute, and how long that waits for loads."""
        loaded = self._in_forward & ~homes.resident
        if prefetch:
            loading_s = self._loading_s(homes, loaded)
        else:
            loading_s = self._one_by_one_s(homes, loaded, np.zeros(len(loaded), dtype=np.int64))
        stepped_s = _sums(homes.on_device, self._device_adam_s) + _sums(homes.on_host, self._turned_s)
        return stepped_s + self._forward_s + loading_s

    def _loading_s(self, homes: _Homes, loaded: Bools) -> Floats:
        """How long forward waits for loads, one after the other: none begins before the device has made its updates, or
        before compute has come to the first chunk that needs one."""
        order = self._uses
        loaded, weights, before_s = loaded[:, order], homes.weights[:, order], self._before_s[order]
        copied_s = 0.0 if self._several else self._copy_s[:, None, order]
        fetched_s = np.where(weights, copied_s, self._fetch_s[:, None, order])
        here_s = np.cumsum(np.where(loaded, fetched_s, 0.0), axis=-1)
        if self._shares_link:
            here_s = here_s + self._returned_before_s(homes, loaded)
        if self._several:  # fetches and gathers, each in a lane
            gather_s = self._gather_s[:, None, order]
            here_s = np.maximum(here_s + gather_s, np.cumsum(loaded * gather_s, axis=-1))
        here_s = here_s + np.where(loaded, before_s, np.inf).min(axis=1, initial=np.inf)[:, None]
        waits_s: Floats = np.where(loaded, here_s - before_s, 0.0).max(axis=-1, initial=0.0)
        return waits_s

    def _returned_before_s(self, homes: _Homes, loaded: Bools) -> Floats:
        """Seconds of the link for new weights, which the fetch of each chunk comes after: those of chunks used before,
        but after the first fetch, before which the link may have had time."""
        order, fetched = self._uses, loaded & ~homes.weights[:, self._uses]
        returns = homes.on_host[:, order] & homes.weights[:, order] & np.logical_or.accumulate(fetched, axis=1)
        returned_s = np.cumsum(returns * self._fetch_s[:, None, order], axis=-1)
        found: Floats = np.maximum.accumulate(np.where(fetched, returned_s, 0.0), axis=-1)
        return found

    def _one_by_one_s(self, homes: _Homes, loaded: Bools, blocks: Ints) -> Floats:
        """How long compute waits for loads of which none is made ahead, but for as many as blocks may have kept."""
        copied_s = 0.0 if self._several else self._copy_s[:, None]
        waits_s = loads_s(loaded, np.where(homes.weights, copied_s, self._fetch_s[:, None]), blocks)
        return np.maximum(waits_s, loads_s(loaded, self._gather_s[:, None], blocks)) if self._several else waits_s

    def _updated_s(self, homes: _Homes, room_bytes: Ints | None) -> Floats:
        """The end of forward, if updates of the host alone hold it up: each comes before the first use of its chunk.

        New weights come over the link after the norm, one after the other, whenever they were made: they
        return to a device that has the old ones, and forward fetches the others.
        """
        order = self._updates
        hosted, late = homes.on_host[:, order], (homes.on_host & ~homes.early)[:, order]
        adam_s = self._host_adam_s[:, None, order]
        comes = hosted if self._shares_link else hosted & homes.weights[:, order]
        comes_s = comes * self._fetch_s[:, None, order]
        come_s = np.where(comes, np.cumsum(comes_s, axis=-1), 0.0)
        done_s = np.maximum(come_s, np.where(late, np.cumsum(late * adam_s, axis=-1) + comes_s, 0.0))
        found: Floats = np.where(hosted, done_s + self._left_s, 0.0).max(axis=-1, initial=0.0)
        if room_bytes is not None and homes.early.any():  # what memory has no second set for is updated after the norm
            all_s = np.where(hosted, np.cumsum(hosted * adam_s, axis=-1) + self._left_s, 0.0)
            most_s = all_s.max(axis=-1, initial=0.0) - np.maximum(room_bytes, 0) * self._per_byte_s
            found = np.maximum(found, most_s)
        return found

    def _between_updates_s(self, homes: _Homes) -> Floats:
        """Seconds of updates, up to any chunk that forward uses, and from that use to the first of their gradients.

        The host begins none of these updates before that gradient is there, and ends the last before that use. So a
        step has both, one after the other.
        """
        order = self._updates
        hosted = homes.on_host[:, order]
        busy_s = np.cumsum(hosted * self._host_adam_s[:, None, order], axis=-1)
        first_s = np.minimum.accumulate(np.where(hosted, self._home_s[:, None, order], np.inf), axis=-1)
        due = hosted & self._in_forward[order]
        between_s = np.where(due, busy_s + first_s - self._before_s[order], 0.0)
        found: Floats = between_s.max(axis=-1, initial=0.0)
        return found

    def _sending_s(self, homes: _Homes) -> Floats:
        """Backward's compute, copies of gradients into blocks, and how long after it the last are where they belong."""
        order = self._sends
        on_device = homes.on_device[:, order]
        through = self._through(homes)[:, order]
        copied_s = np.where(through, self._copy_s[:, None, order] + ~on_device * self._summed_s[:, None, order], 0.0)
        still_s = np.cumsum(copied_s, axis=-1)
        gone_s = np.where(on_device, self._deliver_s[:, None, order], self._offload_s[:, None, order])
        gone_s = np.where(through, gone_s, 0.0)
        since_s = still_s - copied_s + self._after_sent_s[order]
        late_s = np.cumsum(gone_s, axis=-1) - since_s
        if self._several:
            reduced_s = np.where(on_device, self._reduce_s[:, None, order], self._reduce_to_host_s[:, None, order])
            late_s = np.maximum(late_s + reduced_s, np.cumsum(reduced_s, axis=-1) + gone_s[..., :1] - since_s)
        waits_s = np.where(through, late_s, 0.0).max(axis=-1, initial=0.0)
        found: Floats = self._backward_s + copied_s.sum(axis=-1) + waits_s
        return found

    def _network_s(self, homes: _Homes, blocks: Ints) -> Floats:
        """Gathers of backward, but for as many chunks as blocks may have kept, and reductions, in one lane."""
        reduced_s = _sums(homes.on_device, self._reduce_s) + _sums(homes.on_host, self._reduce_to_host_s)
        if len(self._sends):  # the last reduction is the last of the lane; then its gradient leaves
            last = self._sends[0]
            leaves_s = self._deliver_s[:, last, None], self._offload_s[:, last, None]
            reduced_s = reduced_s + np.where(homes.on_device[:, last], *leaves_s)
        return loads_s(~homes.resident & self._in_backward, self._gather_s[:, None], blocks) + reduced_s

    def _disk_s(self, codes: Codes) -> Floats:
        """Reads and writes of the disk, which is idle when a step begins."""
        found: Floats = np.zeros((len(self._machines), len(codes)))
        if DISK[codes].any():
            found = found + _sums(DISK[codes], self._by_chunk("disk_read_s") + self._by_chunk("disk_write_s"))
        if IN_FILES[codes].any():
            found = found + _sums(IN_FILES[codes] & self._in_forward, self._by_chunk("file_read_s"))
        return found


def _in_order(keys: Ints | Floats) -> Ints | slice:
    """Indices that sort some keys; if these are in order, all, as a view is taken sooner than a copy."""
    return np.argsort(keys, kind="stable") if (keys[1:] < keys[:-1]).any() else slice(None)


def loads_s(loaded: Bools, seconds: Floats, blocks: Ints) -> Floats:
    """In backward all that is used comes in, but for as many chunks as blocks may have kept.

    Args:
        loaded: [placement, chunk].
        seconds: of the loads; broadcast to [..., placement, chunk].
        blocks: by placement.
    """
    sums = np.cumsum(np.sort(np.where(loaded, seconds, 0.0), axis=-1), axis=-1)
    left = loaded.shape[1] - np.minimum(blocks, loaded.shape[1])
    found: Floats = np.zeros(sums.shape[:-1])
    if loaded.shape[1]:
        found = np.where(left > 0, sums[..., np.arange(len(loaded)), left - 1], 0.0)
    return found


def _sums(flags: Bools, seconds: Floats) -> Floats:
    """Seconds of the chunks with a flag, by machine and placement."""
    return seconds @ flags.T
