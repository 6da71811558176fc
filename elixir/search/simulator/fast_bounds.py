"""Seconds that a placement cannot beat: a look that costs a hundredth of a simulation, so that few are simulated.

Only for comparing candidates within a search; `lower_bound` has the bound for all plans at once.
docs/appendix/proofs.md has the proof of each term. A disk is left out: states there only make updates later, so what
holds without them holds.
"""

from __future__ import annotations

import numpy as np

from elixir.search.problem import Bools, Floats, Ints
from elixir.search.simulator.events import WorkTimes


class Floor:
    """For one packing on one machine.

    Args:
        times: seconds of every piece of work.
        step_in_backward: the host may update what it can before forward begins, which then need not wait for that.
    """

    def __init__(self, times: WorkTimes, step_in_backward: bool = False) -> None:
        self._times = times
        self._several = times.world_size > 1
        work, before_backward_s = times.work, times.before_backward_s
        count = len(times.bytes)
        facts = work.chunks
        self._trained = np.array([chunk.grad_bytes > 0 for chunk in facts], dtype=bool)
        forward, backward = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
        for entry, chunks in enumerate(times.entry_chunks):
            (forward if entry < work.first_backward else backward)[list(chunks)] = True
        self._forward, self._backward = forward, backward
        early = [step_in_backward and work.can_step_in_backward(chunk) for chunk in range(count)]
        self._updated_behind = np.array([not can for can in early], dtype=bool)
        # Between the last first use and the first gradient the host has nothing to update, so the rest of a step must
        # do.
        self._early, self._idle_s = any(early), times.without_updates_s
        self._before_backward_s, self._after_s = before_backward_s, times.total_s - before_backward_s
        # Updates come in this order; from a chunk's first use on, that much of forward is left.
        self._place: Ints = np.full(count, count, dtype=np.int64)
        self._place[times.update_order] = np.arange(len(times.update_order))
        left = [max(0.0, before_backward_s - times.before_first_use_s(chunk)) for chunk in range(count)]
        self._left_s = np.where(forward, np.array(left, dtype=np.float64), -np.inf)
        self._fetch_s, self._offload_s = np.array(times.fetch_s), np.array(times.offload_s)
        self._host_adam_s, self._device_adam_s = np.array(times.host_adam_s), np.array(times.device_adam_s)
        self._copy_s, self._deliver_s = np.array(times.device_copy_s), np.array(times.deliver_on_device_s)
        self._gather_s, self._reduce_s = np.array(times.gather_s), np.array(times.reduce_s)

    def seconds(self, chunks: Ints, resident: Bools, weight: Bools, state: Bools, blocks: Ints) -> Floats:
        """The least a step with these homes, and no more than so many blocks, can take.

        Args:
            chunks: those that the columns of the next three stand for; what others do only comes on top.
            resident, weight, state: [placement, chunk], as in `Placement`.
            blocks: by placement.
        """
        trained, forward, backward = self._trained[chunks], self._forward[chunks], self._backward[chunks]
        fetch_s, gather_s = self._fetch_s[chunks], self._gather_s[chunks]
        on_host, on_device, away = trained & ~state, trained & state, ~weight
        done_s = self._updated_s(chunks, on_host & self._updated_behind[chunks], weight)
        forward_s: Floats = np.maximum(on_device @ self._device_adam_s[chunks] + self._before_backward_s, done_s)
        forward_s = np.maximum(forward_s, away @ np.where(forward, fetch_s, 0.0))
        through = trained & ~(resident & state) if not self._several else np.broadcast_to(trained, resident.shape)
        left_s: Floats = on_host @ self._offload_s[chunks] + (on_device & through) @ self._deliver_s[chunks]
        backward_s: Floats = np.maximum(self._after_s + through @ self._copy_s[chunks], left_s)
        backward_s = np.maximum(backward_s, _loads_s(away & backward, fetch_s, blocks))
        if self._several:
            gathered_s = (trained | ~resident) @ np.where(forward, gather_s, 0.0)
            network_s = _loads_s(~resident & backward, gather_s, blocks) + float(self._reduce_s[chunks][trained].sum())
            forward_s, backward_s = np.maximum(forward_s, gathered_s), np.maximum(backward_s, network_s)
        found: Floats = forward_s + backward_s
        if self._early:
            due = on_host & forward
            busy_s = np.maximum(due @ self._host_adam_s[chunks], (due & weight) @ fetch_s)
            found = np.maximum(found, busy_s + self._idle_s)
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


def _loads_s(loaded: Bools, seconds: Floats, blocks: Ints) -> Floats:
    """In backward all that is used comes in, but for as many chunks as blocks may have kept."""
    needed: Floats = np.sort(np.where(loaded, seconds, 0.0), axis=1)
    sums = np.concatenate((np.zeros((len(needed), 1)), np.cumsum(needed, axis=1)), axis=1)
    kept = np.minimum(blocks, needed.shape[1])
    found: Floats = np.take_along_axis(sums, (needed.shape[1] - kept)[:, None], axis=1)[:, 0]
    return found
