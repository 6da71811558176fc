"""Seconds that a placement cannot beat: a look that costs a hundredth of a simulation, so that few are simulated.

Only for comparing candidates within a search; `lower_bound` has the bound for all plans at once.
docs/appendix/proofs.md has the proof of each term. A disk is left out: states there only make updates later, so what
holds without them holds.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from elixir.search.problem.packing import Ints
from elixir.search.problem.placement import RESIDENT, STATES, WEIGHTS, Bools, Codes, Floats
from elixir.search.simulator.floors import loads_s
from elixir.search.simulator.work_times import WorkTimes


class LowerBound:
    """The least seconds of steps of one packing on one machine.

    Args:
        times: seconds of every piece of work.
        early: the host may make new states before forward begins, which then need not wait for that.
        clipping, accumulates, ahead: as in `Replay`.
    """

    def __init__(
        self,
        times: WorkTimes,
        early: bool = False,
        *,
        clipping: bool = False,
        accumulates: bool = False,
        ahead: bool = False,
    ) -> None:
        self._several = times.shards > 1
        work, before_backward_s = times.work, times.before_backward_s
        count = len(times.bytes)
        facts = work.chunks
        self._trained = np.array([chunk.grad_bytes > 0 for chunk in facts], dtype=bool)
        forward, backward = (
            np.isin(np.arange(count), list(chain.from_iterable(chunks)))
            for chunks in (times.entry_chunks[: work.first_backward], times.entry_chunks[work.first_backward :])
        )
        self._forward, self._backward = forward, backward
        before = [early and work.can_update_early(chunk) for chunk in range(count)]
        self._updated_behind = np.array([not can for can in before], dtype=bool)
        # Between the last first use and the first gradient the host has nothing to update, so the rest of a step must
        # do.
        self._early, self._idle_s = any(before), times.without_updates_s
        self._before_backward_s, self._after_s = before_backward_s, times.total_s - before_backward_s
        # Updates come in this order; from a chunk's first use on, that much of forward is left.
        self._place: Ints = np.full(count, count, dtype=np.int64)
        self._place[times.update_order] = np.arange(len(times.update_order))
        self._before_s = times.before_first_use_s
        self._left_s = np.where(forward, np.maximum(before_backward_s - self._before_s, 0.0), -np.inf)
        self._fetch_s, self._offload_s = np.array(times.fetch_s), np.array(times.offload_s)
        self._host_adam_s, self._device_adam_s = np.array(times.host_adam_s), np.array(times.device_adam_s)
        self._turned_s = np.array(times.turned_s)
        self._copy_s, self._deliver_s = np.array(times.device_copy_s), np.array(times.deliver_on_device_s)
        self._gather_s, self._reduce_s = np.array(times.gather_s), np.array(times.reduce_s)
        self._norm_s = np.array(times.norm_s) * clipping
        self._number_s = times.rates.number_s * clipping
        # Who wrote it last sums what leaves for the host: compute, the network's lane, or on a CPU the offload lane.
        summed_s = self._norm_s * (not accumulates)
        self._summed_by_compute_s = summed_s * (ahead and not self._several)
        self._reduce_to_host_s = self._reduce_s + summed_s * self._several
        self._offload_s = self._offload_s + summed_s * (not ahead and not self._several)
        # Loads come in the order of first uses, gradients leave in the order of the last of each chunk.
        self._used_place: Ints = np.argsort(np.argsort(self._before_s, kind="stable"), kind="stable")
        self._sent_place, self._after_sent_s = times.sent

    def seconds(self, chunks: Ints, codes: Codes, blocks: Ints, *, prefetch: bool = True) -> Floats:
        """The least a step with these homes, and no more than so many blocks, can take.

        Args:
            chunks: those that the columns of `codes` stand for; what others do only comes on top.
            codes: [placement, chunk], numbers of homes.
            blocks: by placement.
            prefetch: chunks may be fetched ahead of their use; otherwise compute waits for each load.
        """
        resident, weight, state = RESIDENT[codes], WEIGHTS[codes], STATES[codes]
        trained, forward, backward = self._trained[chunks], self._forward[chunks], self._backward[chunks]
        fetch_s, gather_s = self._fetch_s[chunks], self._gather_s[chunks]
        on_host, on_device, away = trained & ~state, trained & state, ~weight
        done_s = self._updated_s(chunks, on_host & self._updated_behind[chunks], weight)
        if prefetch:
            loading_s = self._loading_s(chunks, forward & ~resident, weight)
        else:
            loading_s = self._one_by_one_s(chunks, forward & ~resident, weight, np.zeros_like(blocks))
        walked_s = self._before_backward_s + loading_s
        stepped_s = on_device @ self._device_adam_s[chunks] + on_host @ self._turned_s[chunks]
        forward_s: Floats = np.maximum(stepped_s + walked_s, done_s)
        through = trained & ~(resident & state) if not self._several else np.broadcast_to(trained, resident.shape)
        backward_s: Floats = self._after_s + self._sending_s(chunks, through, state)
        backward_s = np.maximum(backward_s, loads_s(away & backward, fetch_s, blocks))
        if not prefetch:
            waits_s = self._one_by_one_s(chunks, backward & ~resident, weight, blocks)
            backward_s = np.maximum(backward_s, self._after_s + waits_s)
        if self._several:
            gathered_s = (trained | ~resident) @ np.where(forward, gather_s, 0.0)
            reduced_s = on_device @ self._reduce_s[chunks] + on_host @ self._reduce_to_host_s[chunks]
            network_s = loads_s(~resident & backward, gather_s, blocks) + reduced_s
            forward_s, backward_s = np.maximum(forward_s, gathered_s), np.maximum(backward_s, network_s)
        norm_s = on_device @ self._norm_s[chunks] + on_host.any(axis=1) * self._number_s
        found: Floats = norm_s + forward_s + backward_s
        if self._early:
            due = on_host & forward
            busy_s = np.maximum(due @ self._host_adam_s[chunks], (due & weight) @ fetch_s)
            found = np.maximum(found, busy_s + self._idle_s)
        return found

    def _loading_s(self, chunks: Ints, loaded: Bools, weight: Bools) -> Floats:
        """How long forward waits for loads, one after the other: none begins before the device has made its updates, or
        before compute has come to the first chunk that needs one."""
        order = np.argsort(self._used_place[chunks], kind="stable")
        some, loaded, weight = chunks[order], loaded[:, order], weight[:, order]
        on_device_s = 0.0 if self._several else self._copy_s[some]
        here_s = np.cumsum(np.where(loaded, np.where(weight, on_device_s, self._fetch_s[some]), 0.0), axis=1)
        if self._several:
            here_s = here_s + self._gather_s[some]
        if len(chunks) == len(self._before_s):  # otherwise that may be another
            here_s = here_s + np.where(loaded, self._before_s[some], np.inf).min(axis=1, initial=np.inf)[:, None]
        waits_s: Floats = np.where(loaded, here_s - self._before_s[some], 0.0).max(axis=1, initial=0.0)
        return waits_s

    def _one_by_one_s(self, chunks: Ints, loaded: Bools, weight: Bools, blocks: Ints) -> Floats:
        """How long compute waits for loads of which none is made ahead, but for as many as blocks may have kept."""
        copied_s = np.zeros(len(chunks)) if self._several else self._copy_s[chunks]
        waits_s = loads_s(loaded, np.where(weight, copied_s, self._fetch_s[chunks]), blocks)
        return np.maximum(waits_s, loads_s(loaded, self._gather_s[chunks], blocks)) if self._several else waits_s

    def _sending_s(self, chunks: Ints, through: Bools, state: Bools) -> Floats:
        """Copies of gradients into blocks, and how long after compute's end the last of them are where they belong."""
        order = np.argsort(-self._sent_place[chunks], kind="stable")
        some, through, state = chunks[order], through[:, order], state[:, order]
        copied_s = np.where(through, self._copy_s[some] + ~state * self._summed_by_compute_s[some], 0.0)
        still_s = np.cumsum(copied_s, axis=1)
        gone_s = np.where(through, np.where(state, self._deliver_s[some], self._offload_s[some]), 0.0)
        late_s = np.cumsum(gone_s, axis=1) - (still_s - copied_s) - self._after_sent_s[some]
        if self._several:
            late_s = late_s + np.where(state, self._reduce_s[some], self._reduce_to_host_s[some])
        waits_s = np.where(through, late_s, 0.0).max(axis=1, initial=0.0)
        found: Floats = copied_s.sum(axis=1) + waits_s
        return found

    def _updated_s(self, chunks: Ints, on_host: Bools, weight: Bools) -> Floats:
        """The end of forward, if only updates on the host hold it up: one after the other, each before its first use.

        New weights return to the device one after the other too, each after its update.
        """
        order = np.argsort(self._place[chunks], kind="stable")
        ordered, late = chunks[order], on_host[:, order]
        stepped_s = np.cumsum(late * self._host_adam_s[ordered], axis=1)
        returns = late & weight[:, order]
        returns_s = returns * self._fetch_s[ordered]
        returned_s = np.maximum(stepped_s + returns_s, np.cumsum(returns_s, axis=1))
        done_s = np.where(late, np.where(returns, returned_s, stepped_s) + self._left_s[ordered], 0.0)
        last_s: Floats = done_s.max(axis=1, initial=0.0)
        return last_s
