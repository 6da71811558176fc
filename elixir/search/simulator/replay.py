"""One training step on seven resources, in the order in which the runtime submits work to them.

Compute walks the plan's order. Next to it six lanes, one per resource, each take one item at a time in the order of
submission; an item starts when its lane is free, what it builds on is done, and compute has come to where it was
submitted. Which item follows which is fixed by the plan and never by time. So every moment is the latest of some others
plus a duration: nothing that gets faster can make a step slower.

On a CPU as the device, lanes take cores, caches and memory from compute, which loses `Rates.contention` of every second
of a lane, the disk's left out. It loses that where work is submitted, all at once: when the lane comes to it nobody
knows before. Where compute waits for lanes later, it waits that much less.

`Replay` does what `elixir.chunk` and `elixir.wrapper` do; its docstrings name the places.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from elixir.plan.plan import FILE_BUFFERS, PASSAGE_BUFFERS, STAGING_BUFFERS, WINDOW_CHUNKS
from elixir.search.simulator.work_times import BACKWARD, ENTRY, LOAD, MOVE, MOVED, OPEN, SEND, USE, Case, Events

RESOURCES = ("compute", "host_to_device", "device_to_host", "network", "host_adam", "refresh", "disk")
"""After compute the runtime's lanes `fetch`, `offload`, `network`, `host_adam`, `refresh` and `disk`. Reads and writes
are one lane, as they share the drive."""
COMPUTE, FETCH, OFFLOAD, NETWORK, HOST_ADAM, REFRESH, DISK = RESOURCES
EARLY_UPDATE = "early update"
"""Name of the spans of early updates."""
STEADY_BATCH = 2
"""The index of the batch of an optimizer step that all later ones but the last are like: the first finds its cache
empty, the second is the first that adds gradients."""

Handler = Callable[[Any, int, float], float]
"""Takes a machine, a chunk and the time at which compute comes there; gives the time at which it goes on."""


class WorkSpan(NamedTuple):
    """One piece of work of one resource; seconds count from the start of the simulated step."""

    resource: str
    name: str
    start_s: float
    end_s: float
    chunk: int | None


class Replay:
    """Lanes, gradient blocks and the clock of one rank during steps.

    Args:
        case: the work, and where it is done.
        record: keep spans.
    """

    def __init__(self, case: Case, *, record: bool = False) -> None:
        times, placement, setting = case.times, case.placement, case.times.model.setting
        chunks = range(len(times.bytes))
        self._case, self._times, self._placement, self._recording = case, times, placement, record
        self._ahead, self._setting = times.rates.ahead, setting
        self._in_last_batch = True  # before, gradients are not whole
        # With several batches the pass that adds gradients sums what leaves for the host.
        self._sums_early = setting.clipping and setting.accumulation == 1
        self._together = times.shards > 1
        copied = [0.0] * len(chunks) if self._together else times.device_copy_s
        # Looked up hundreds of thousands of times, and the same for all updates.
        self._weight_on_device, self._state_on_device = placement.weight_on_device, placement.state_on_device
        self._resident, self._in_files = placement.resident, placement.in_files
        self._replicated, self._contention = times.rates.replicas > 1, times.rates.contention
        self._lost_s = 0.0  # what lanes were given since compute last lost anything to them
        self._fetch_s = [copied[c] if self._weight_on_device[c] else times.fetch_s[c] for c in chunks]
        self._slowdown = {
            lane: (other, factor, 1 - 1 / factor)
            for lane, other, factor in (
                (FETCH, OFFLOAD, times.rates.fetch_slowdown),
                (OFFLOAD, FETCH, times.rates.offload_slowdown),
            )
            if factor > 1
        }
        self._free_s = dict.fromkeys(RESOURCES, 0.0)
        self._ready_s = [0.0] * len(chunks)  # when a chunk is where it is used: in its block, or resident and updated
        self._updated_s = [0.0] * len(chunks)  # when the host has stepped its shard
        # When the last staged weights are on the device.
        self._staged: deque[float] = deque(maxlen=STAGING_BUFFERS)
        # When what was read from a file is on the device, by buffer.
        self._read: deque[float] = deque(maxlen=FILE_BUFFERS)
        # When what lies in a passage buffer has been added.
        self._passed: deque[float] = deque(maxlen=PASSAGE_BUFFERS)
        self._unwritten: deque[tuple[int, float]] = deque()  # chunks in the window, and when they were stepped
        self._free_blocks = case.grad_blocks
        self._leaving: deque[tuple[float, bool]] = deque()  # gradients: when they are gone, and whether from a block
        self._holds = [False] * len(chunks)  # whether a gradient waits at home, to which the next is added
        self._moved_s = [0.0] * len(times.moves.seconds)  # when activations are where they go
        self._early_runs: list[tuple[float, float]] = []  # begin and end of the early updates of this step
        self._added_s = 0.0  # when the last gradient that passed has been added
        self._returned_s: dict[int, float] = {}  # seconds of the link for new weights that no fetch has lost yet
        self._owed_s = 0.0  # seconds of the link for fetches that no return has lost yet
        self.now_s = 0.0
        self.spans: list[WorkSpan] = []
        self._forget()

    def restart(self) -> None:
        """Sets the clock to 0 and forgets counts, but not the work of lanes, nor the spans of the step before.

        Those begin below 0. Moments that were equal still are: the same is taken from all.
        """
        passed = self.now_s
        before = [
            span._replace(start_s=span.start_s - passed, end_s=span.end_s - passed)
            for span in self.spans
            if span.end_s > 0
        ]
        self._free_s = {name: max(0.0, at - passed) for name, at in self._free_s.items()}
        for moments in (self._ready_s, self._updated_s, self._staged, self._read, self._passed):
            for index, at_s in enumerate(moments):
                moments[index] = max(0.0, at_s - passed)
        self._added_s = max(0.0, self._added_s - passed)
        self._early_runs = [(start - passed, end - passed) for start, end in self._early_runs]
        self._returned_s, self._owed_s = {}, 0.0
        self.now_s = 0.0
        self._forget()
        self.spans = before

    def _forget(self) -> None:
        self.busy_s = dict.fromkeys(RESOURCES, 0.0)
        self.waited_s = dict.fromkeys(RESOURCES[1:], 0.0)
        self.extra_grad_blocks = 0
        self.device_adam_s = self.backward_from_s = 0.0
        self.forward_s = self.backward_s = 0.0  # of all batches
        self.home_s: dict[int, float] = {}  # when gradients are on the host, in the order in which they were sent
        self._since_s, self._doing = 0.0, ""  # what compute is busy with
        self._doing_chunk: int | None = None

    def fork(self) -> Replay:
        """Copies the state of this moment; the copy goes on by itself."""
        other = copy.copy(self)
        mutable = {key: value for key, value in vars(self).items() if isinstance(value, list | dict | deque)}
        vars(other).update({key: copy.copy(value) for key, value in mutable.items()})
        return other

    def begin_early(self, case: Case) -> None:
        """Goes on under `case`, in which more chunks are updated early, in the batch before, too: nothing in a backward
        waits for an early update that begins in it. In all else it may differ in what becomes of these updates.

        Not if gradients are added up, which wait on the same lane.
        """
        begun, self._placement, self._case = self._placement.early, case.placement, case
        for c, home_s in self.home_s.items():
            if c in case.placement.early and c not in begun:
                self._update_early(c, home_s)

    # --- a step ------------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Replays `ElixirOptimizer.step`: the device updates at once, the host meanwhile.

        New states that backward has made are kept; a batch must have gone before.
        """
        times, placement = self._times, self._placement
        self._since_s = self.now_s
        if self._setting.clipping:
            self._read_norm()
        if self._case.clipped:
            self._give_up()
        self._early_runs.clear()
        began_s = self.now_s
        for lane in (FETCH, REFRESH):  # the link has had no new weights before
            self._free_s[lane] = max(self._free_s[lane], began_s)
        for c in times.update_order:
            if placement.state_on_device[c]:
                self._step_on_device(c, times.device_adam_s[c])
                done_s = 0.0
            elif c in placement.early and not self._case.clipped:
                done_s = self._keep(c, began_s if self._ahead else self.now_s)
            else:
                done_s = self._update_and_return(c, began_s if self._ahead else self.now_s, self.now_s)
                if times.turned_s[c]:  # lost where it is submitted, as nobody knows before when the lane comes to it
                    self._step_on_device(c, times.turned_s[c])
            if self._ahead and not self._weight_on_device[c]:  # forward fetches it before it uses the next
                self._owed_s += times.fetch_s[c]
            if not placement.resident[c]:
                continue
            if self._together:
                done_s = self._run(NETWORK, "gather", c, max(self.now_s, done_s), times.gather_s[c])
            self._ready_s[c] = done_s
        while self._unwritten:
            self._write_back()
        self.busy_s[COMPUTE] += self.device_adam_s

    def _step_on_device(self, c: int, seconds: float) -> None:
        self._doing, self._doing_chunk = "optimizer", c
        self.now_s += seconds
        self.device_adam_s += seconds
        self._computed(self.now_s)

    def _read_norm(self) -> None:
        """Replays the norm: compute reads gradients that stay on the device; the host waits for one number.

        What has left for the host was summed before: see `_send`.
        """
        times, on_device = self._times, self._state_on_device
        self._doing, self._doing_chunk = "norm", None
        seconds = sum(times.norm_s[c] for c in times.update_order if on_device[c])
        if not all(on_device[c] for c in times.update_order):
            seconds += times.rates.number_s
        self.now_s += seconds
        self.busy_s[COMPUTE] += seconds
        self._computed(self.now_s)

    def _update_and_return(self, c: int, submitted_s: float, behind_s: float) -> float:
        """Adam of one shard on the host; when new weights are where they live, to which they return after
        `behind_s`."""
        times, returns = self._times, self._weight_on_device[c]
        staged = returns and times.rounded[c]
        # A buffer is written to when what was in it has left.
        free_s = self._staged[0] if staged and len(self._staged) == STAGING_BUFFERS else 0.0
        done_s = self._update_on_host(c, submitted_s, free_s)
        if returns:  # new weights return during the update of the next chunk
            done_s = self._return_weights(c, max(behind_s, done_s))
        if staged:
            self._staged.append(done_s)
        self._updated_s[c] = done_s
        return done_s

    def _update_early(self, c: int, home_s: float) -> None:
        """Makes new states of one shard on the host, next to the old ones.

        The optimizer's step makes them those of the chunk, and then weights return to where they live.
        """
        seconds = self._times.host_adam_early_s[c]
        done_s = self._updated_s[c] = self._run(HOST_ADAM, EARLY_UPDATE, c, home_s, seconds)
        self._early_runs.append((done_s - seconds, done_s))

    def _give_up(self) -> None:
        """Replays `EarlyUpdates.discard`: the host ends the early update that it has begun, and begins no other one."""
        begun = (end_s for start_s, end_s in self._early_runs if start_s <= self.now_s)
        self._free_s[HOST_ADAM] = min(self._free_s[HOST_ADAM], max((self.now_s, *begun)))
        self.busy_s[HOST_ADAM] -= sum(end_s - start_s for start_s, end_s in self._early_runs if start_s > self.now_s)
        self.spans = [span for span in self.spans if span.name != EARLY_UPDATE or span.start_s <= self.now_s]

    def _keep(self, c: int, submitted_s: float) -> float:
        """New states become those of the chunk; when its new weights are where they live."""
        done_s = self._updated_s[c]
        if self._weight_on_device[c]:
            done_s = self._updated_s[c] = self._return_weights(c, max(submitted_s, done_s))
        return done_s

    def _return_weights(self, c: int, submitted_s: float) -> float:
        """New weights of one shard go to the device, by a lane next to that of the fetches and over the same link."""
        seconds, owed_s = self._times.fetch_s[c], self._owed_s
        self._owed_s = 0.0
        if self._ahead:  # on a CPU both are copies by other cores
            self._returned_s[c] = seconds
        return self._run(REFRESH, "refresh", c, submitted_s, seconds, owed_s)

    def _returned_before(self, c: int) -> float:
        """Seconds of the link for new weights of chunks that forward uses before this one, which no fetch has lost.

        The link carries new weights and fetches in the order of first uses: each loses the time that those before it
        took, if the link had no time without. What happens first decides nothing, so nothing that gets faster makes a
        step slower.
        """
        returned_s, first_use, seconds = self._returned_s, self._times.first_use, 0.0
        while returned_s and first_use[first := next(iter(returned_s))] < first_use[c]:
            seconds += returned_s.pop(first)
        return seconds

    def _update_on_host(self, c: int, submitted_s: float, free_s: float) -> float:
        """Adam of one shard; with states on the disk after their reading, and before they are written back.

        As `elixir.chunk.state_window`: the disk reads as far ahead as there are buffers, so during Adam of one chunk it
        reads the next. Its order is read 0, read 1, read 2, write 0, read 3, write 1, and so on; a buffer is read into
        after its write.
        """
        times = self._times
        seconds = times.host_adam_s[c]
        if c not in self._placement.state_on_disk:
            return self._run(HOST_ADAM, "update", c, max(submitted_s, free_s), seconds)
        while len(self._unwritten) >= WINDOW_CHUNKS:
            self._write_back()
        read_s = self._run(DISK, "read", c, submitted_s, times.disk_read_s[c])
        done_s = self._run(HOST_ADAM, "update", c, max(submitted_s, free_s, read_s), seconds)
        self._unwritten.append((c, done_s))
        return done_s

    def _write_back(self) -> None:
        """Begins to write back the states that have been in the window for longest."""
        c, done_s = self._unwritten.popleft()
        self._run(DISK, "write", c, done_s, self._times.disk_write_s[c])

    def run(self, batches: Sequence[Events], repeated: int = 0) -> float:
        """Replays the batches of a step; `settle` comes after.

        Args:
            batches: their events.
            repeated: more batches like that at `STEADY_BATCH`, which are counted and not replayed.

        Returns:
            Seconds of the repeated batches, which the clock leaves out.
        """
        forward_s, step_s, busy_s = 0.0, 0.0, dict[str, float]()  # of the repeated ones
        for batch, events in enumerate(batches):
            began_s, before_s = self.now_s, self.busy_s.copy()
            self._in_last_batch = batch == len(batches) - 1
            self._batch(events)
            self.forward_s += self.backward_from_s - began_s
            self.backward_s += self.now_s - self.backward_from_s
            if batch == STEADY_BATCH:
                forward_s, step_s = repeated * (self.backward_from_s - began_s), repeated * (self.now_s - began_s)
                busy_s = {name: repeated * (amount - before_s[name]) for name, amount in self.busy_s.items()}
        self.forward_s += forward_s
        for name, amount in busy_s.items():
            self.busy_s[name] += amount
        return step_s

    def _batch(self, events: Events) -> None:
        """Forward and backward of one batch."""
        base_s, base_compute_s, handlers = self.now_s, 0.0, self.HANDLERS
        self._since_s = base_s
        for kind, chunk, compute_s in zip(events.kinds, events.chunks, events.compute_s, strict=True):
            # Measured from the last stop and not added up, so that recording does not change the last bits.
            now_s = base_s + (compute_s - base_compute_s)
            # Entries are only for the record, without which seconds must be the same.
            here_s = self._after_loss(now_s) if self._lost_s and kind != ENTRY else now_s
            then_s = handlers[kind](self, chunk, here_s)
            if then_s != now_s:
                base_s, base_compute_s = then_s, compute_s
        self.now_s = base_s + (events.total_s - base_compute_s)
        self.busy_s[COMPUTE] += events.total_s
        self._computed(self.now_s)
        self.now_s = self._after_loss(self.now_s)
        self._computed(self.now_s)

    def _after_loss(self, now_s: float) -> float:
        """The time at which compute comes there, having lost what lanes were given since the last question."""
        lost_s, self._lost_s = self._lost_s, 0.0
        self.busy_s[COMPUTE] += lost_s
        return now_s + lost_s

    def settle(self) -> None:
        """Waits until no gradient is on its way, as `GradientFlow.settle`."""
        self.now_s = self._wait(self.now_s, self._free_s[OFFLOAD], OFFLOAD)
        self.now_s = self._wait(self.now_s, self._added_s, HOST_ADAM)
        self._leaving.clear()
        self._free_blocks = self._case.grad_blocks
        self._holds = [False] * len(self._holds)

    @property
    def disk_idle_s(self) -> float:
        """The time at which the disk has done all that it was given."""
        return self._free_s[DISK]

    def drain(self) -> None:
        """Waits until states are back on the disk, so that the next step finds all lanes idle.

        A steady step is no longer for it: the disk's work of a step is one chain, and a step that ended before the
        chain would be made up for by the next.
        """
        self.now_s = self._wait(self.now_s, self.disk_idle_s, DISK)

    # --- where compute arrives: what happens at `now_s`, and when it goes on -----------------------------------------

    def _load(self, c: int, now_s: float) -> float:
        """`RCache._load`: host to device, from files a reading before, then, with several ranks, a gather."""
        times = self._times
        start_s = self._updated_s[c]  # no fetch before the chunk's own update
        if start_s < now_s:
            start_s = now_s
        if not self._weight_on_device[c]:
            in_file = c in self._in_files
            if in_file:
                free_s = self._read[0] if len(self._read) == FILE_BUFFERS else 0.0  # its data were used
                start_s = self._run(DISK, "read", c, max(now_s, free_s), times.file_read_s[c])
            start_s = self._run(FETCH, "fetch", c, start_s, self._fetch_s[c], self._returned_before(c))
            if in_file:
                self._read.append(start_s)
        elif not self._together:
            start_s = self._run(FETCH, "copy", c, start_s, self._fetch_s[c])
        if self._together:
            start_s = self._run(NETWORK, "gather", c, start_s, times.gather_s[c])
        self._ready_s[c] = start_s
        return now_s

    def _use(self, c: int, now_s: float) -> float:
        """Waits until a chunk is where it is used: in its block, or resident and updated."""
        if self._ready_s[c] <= now_s:
            return now_s
        resident = self._resident[c]
        return self._wait(now_s, self._ready_s[c], NETWORK if self._together else REFRESH if resident else FETCH)

    def _open(self, c: int, now_s: float) -> float:
        """Opens a gradient: backward waits while all blocks are leaving, or another gradient that has none."""
        pooled = self._times.pooled[c]
        while self._leaving and (not self._free_blocks if pooled else not all(block for _, block in self._leaving)):
            gone_s, block = self._leaving.popleft()
            now_s = self._wait(now_s, gone_s, OFFLOAD)
            self._free_blocks += block
        if not pooled:
            return now_s
        if self._free_blocks:
            self._free_blocks -= 1
        else:
            self.extra_grad_blocks += 1
        return now_s

    def _reduce_s(self, c: int, *, sums: bool) -> float:
        """Seconds of a reduction, and of the sum over replicas if it `sums`."""
        times = self._times
        if not sums:
            return times.reduce_s[c]
        joins = self._holds[c] and not self._state_on_device[c]
        return times.reduce_s[c] + times.sum_replicas_s[c] + joins * times.fetch_s[c]

    def _send(self, c: int, now_s: float) -> float:
        """Sends a gradient: into the block, over the network, to the home of the states."""
        times, on_device = self._times, self._state_on_device[c]
        # Who wrote it last sums it for the norm: compute, which has it in a block, or the network's lane; on a CPU the
        # next one.
        norm_s = times.norm_s[c] if self._sums_early and not on_device else 0.0
        by_compute = self._ahead and not self._together
        compute_s = times.device_copy_s[c] + norm_s if by_compute else times.device_copy_s[c]
        self.busy_s[COMPUTE] += compute_s
        now_s += compute_s
        # What was added up before comes back in the last batch and is summed over the replicas along with this.
        sums = self._in_last_batch and self._replicated
        adds = self._holds[c] and not sums
        start_s = now_s
        if self._together:
            start_s = self._run(NETWORK, "reduce", c, start_s, self._reduce_s(c, sums=sums) + norm_s)
        # The update of the step before may still read what is written now.
        if self._updated_s[c] > start_s:
            start_s = self._updated_s[c]
        if on_device:
            seconds = times.deliver_on_device_s[c]
        else:
            seconds = times.offload_s[c] if by_compute or self._together else times.offload_s[c] + norm_s
        passes = adds and not on_device and self._ahead
        if passes:  # on through a buffer, which is written again when what was in it has been added
            if len(self._passed) == PASSAGE_BUFFERS:
                start_s = max(start_s, self._passed[0])
        elif adds:
            seconds += times.add_on_device_s[c] if on_device else times.add_on_host_s[c]
        self._holds[c] = True
        gone_s = self._run(OFFLOAD, "deliver" if on_device else "offload", c, start_s, seconds)
        if passes:
            self._added_s = self._run(HOST_ADAM, "add", c, gone_s, times.add_on_host_s[c])
            self._passed.append(self._added_s)
        if not on_device:
            self.home_s[c] = gone_s
        if self._in_last_batch and c in self._placement.early:
            self._update_early(c, self._added_s if passes else gone_s)
        if not times.pooled[c] and not self._setting.overlap and not self._together:
            # It left as autograd made it, for which the plan has no memory twice.
            return self._wait(now_s, gone_s, OFFLOAD)
        self._leaving.append((gone_s, times.pooled[c]))
        return now_s

    def _move(self, group: int, now_s: float) -> float:
        """Begins copies of activations, after what their direction of the link has been given so far."""
        moves = self._times.moves
        for number in moves.together[group]:
            lane = OFFLOAD if moves.outgoing[number] else FETCH
            self._moved_s[number] = self._run(lane, "activations", None, now_s, moves.seconds[number])
        return now_s

    def _moved(self, group: int, now_s: float) -> float:
        """Waits until activations are where they go: the device may then free, or use, them."""
        moves = self._times.moves
        for number in moves.together[group]:
            if self._moved_s[number] > now_s:
                now_s = self._wait(now_s, self._moved_s[number], OFFLOAD if moves.outgoing[number] else FETCH)
        return now_s

    def _backward(self, _: int, now_s: float) -> float:
        self._computed(now_s)
        self.backward_from_s = now_s
        return now_s

    def _entry(self, entry: int, now_s: float) -> float:
        """Notes, for the record, that compute begins with another entry of the order."""
        self._computed(now_s)
        self._doing = self._times.phases[entry]
        self._doing_chunk = self._times.entry_chunks[entry][0]
        return now_s

    # Of the class: a machine that held methods bound to itself would be a cycle, which only a collection frees.
    HANDLERS: ClassVar[Mapping[int, Handler]] = {
        LOAD: _load, USE: _use, OPEN: _open, SEND: _send, BACKWARD: _backward, ENTRY: _entry, MOVE: _move,
        MOVED: _moved,
    }  # fmt: skip
    """Kind of event -> its handler."""

    # --- clocks ------------------------------------------------------------------------------------------------------

    def _run(
        self, lane: str, name: str, c: int | None, submitted_s: float, seconds: float, owed_s: float = 0.0
    ) -> float:
        """One item of a lane; when it is done. The lane loses what it owes another one, unless it was idle for that."""
        if self._contention and lane != DISK:
            self._lost_s += self._contention * seconds
        start_s = self._free_s[lane]
        if submitted_s > start_s:
            start_s = submitted_s
        if owed_s:
            lost_s = self._free_s[lane] + owed_s - start_s
            if lost_s > 0:
                seconds += lost_s
        if lane in self._slowdown:
            # Of two transfers in opposite directions the later one is slowed for as long as the earlier one lasts.
            other, factor, lost_share = self._slowdown[lane]
            overlap_s = self._free_s[other] - start_s
            if overlap_s > 0:
                slowed_s = seconds * factor
                seconds += (overlap_s if overlap_s < slowed_s else slowed_s) * lost_share
        end_s = self._free_s[lane] = start_s + seconds
        self.busy_s[lane] += seconds
        if self._recording:
            self.spans.append(WorkSpan(lane, name, start_s, end_s, c))
        return end_s

    def _wait(self, now_s: float, until_s: float, lane: str) -> float:
        """Lets compute stand still; gives the time at which it goes on."""
        if until_s <= now_s:
            return now_s
        self._computed(now_s)
        self.waited_s[lane] += until_s - now_s
        self._since_s = until_s
        return until_s

    def _computed(self, now_s: float) -> None:
        if self._recording:
            self.spans.append(WorkSpan(COMPUTE, self._doing, self._since_s, now_s, self._doing_chunk))
        self._since_s = now_s
