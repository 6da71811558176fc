"""`SimulatedCost`: the time model of a search, which answers thousands of times, and its choice of early updates.

It walks the same work (`work_times`) on the same resources (`replay`) as `simulate_step`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile
from elixir.schedule import ScheduleResult
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.packed_step import PackedStep
from elixir.search.problem.placement import Floats, Placement, Setting
from elixir.search.simulator.rates import Rates, main_dtype
from elixir.search.simulator.replay import COMPUTE, STEADY_BATCH, Replay
from elixir.search.simulator.work_times import ActivationMoves, Case, Events, WorkTimes
from elixir.step_trace import StepTrace

_LATEST = 8
"""Machines that are kept as they come to an optimizer step; a search tries updates of few placements in turn."""
_LEAST_SLOWER = 1.01
"""A host that is slowed until memory holds what it makes is slowed by so much at least, each time."""


class SimulatedCost:
    """The time model of a search, by simulation.

    Args:
        trace: the step.
        hardware: the machine.
        setting: that of every packing that it is asked for.
        compute_scale, clipped: those of `simulate_step`.
        like: of the same trace and setting on a machine that computes as fast, whose view of each packing is shared.

    Raises:
        InputError: the profile has no FLOP/s for the step's dtype, or an argument makes no sense.
    """

    def __init__(
        self,
        trace: StepTrace,
        hardware: HardwareProfile,
        setting: Setting,
        *,
        compute_scale: float = 1.0,
        like: SimulatedCost | None = None,
        clipped: bool = False,
    ) -> None:
        if not 0 < compute_scale < math.inf:
            raise InputError(f"compute_scale must be a finite number above 0, got {compute_scale!r}")
        self.clipped, self._like = clipped, like
        self.dtype: str = main_dtype(trace) if like is None else like.dtype
        ranks = setting.world_size, setting.ranks_per_host
        self.rates = Rates(hardware, self.dtype, *ranks, moments=setting.moments, replicas=setting.replicas)
        self.unscaled_s: Floats = self.rates.accesses_s(trace) if like is None else like.unscaled_s
        """Seconds of each access of the trace, without the scale."""
        accesses_s = self.unscaled_s * compute_scale
        self._of_trace = self.rates, accesses_s, ActivationMoves(trace, self.rates, accesses_s)
        self.compute_s = setting.accumulation * float(accesses_s.sum())
        """Seconds of compute in a step, wherever chunks are, without those of the optimizer."""
        # A copy that is clipped shares all of these.
        self._times: dict[MemoryModel, WorkTimes] = {}
        self._known: dict[tuple[MemoryModel, Placement, int, int, bool], dict[str, float]] = {}
        self._homes: dict[tuple[MemoryModel, Placement], tuple[dict[int, float], float]] = {}
        self._latest: dict[tuple[MemoryModel, Placement, int, int, int], tuple[Replay, list[Events]]] = {}

    def times(self, model: MemoryModel) -> WorkTimes:
        """Seconds of every piece of work of a packing."""
        if model not in self._times:
            given, like = self._of_trace, self._like
            self._times[model] = WorkTimes(model, *given) if like is None else like.times(model).at(*given)
        return self._times[model]

    def estimate(self, model: MemoryModel, placement: Placement, schedule: ScheduleResult) -> Mapping[str, float]:
        """Seconds by phase (``forward``, ``backward``, ``optimizer``), busy seconds by resource, and ``total``.

        Without overlap a gradient that no block holds is waited for; otherwise the runtime's lanes always run while
        compute does, and without prefetch there is little for them to do ahead of it.
        """
        # Without blocks all depths of prefetch are the same. Clipping discards nothing but early states.
        depth, clipped = schedule.blocks and schedule.prefetch_depth, self.clipped and bool(placement.early)
        key = model, placement, schedule.blocks, depth, clipped
        if key not in self._known:
            self._known[key] = self._simulated(self.case(model, placement, schedule))
        return self._known[key]

    def case(self, model: MemoryModel, placement: Placement, result: ScheduleResult) -> Case:
        """Gathers what a replay takes; `result` is the walk of a first batch."""
        schedule = model.work.schedule(placement.residents, result.prefetch_depth)
        grad_blocks = int(model.grad_blocks(placement.codes[None])[0][0])
        return Case(self.times(model), placement, schedule, result, grad_blocks, self.clipped)

    def early_chunks(
        self, model: MemoryModel, placement: Placement, *, speed: float, left_bytes: int, rule: int
    ) -> frozenset[int]:
        """Chunks of `placement` that a host of this speed, idle until gradients come home, takes in backward; as many
        as memory has second sets for.

        Args:
            model, placement: a candidate, all of whose chunks are updated after the norm.
            speed: of the host, over that of the machine.
            left_bytes: host memory of one machine for second sets.
            rule: see `elixir.search.propose.family.Shape`.
        """
        times, needed = self.times(model), (model.second_set_bytes * model.setting.ranks_per_host).tolist()
        if (model, placement) not in self._homes:
            self._homes[model, placement] = gradients_home_s(times, placement)
        home_s, until_s = self._homes[model, placement]
        home_s = {chunk: at_s for chunk, at_s in home_s.items() if needed[chunk] <= left_bytes}
        if not home_s or left_bytes <= 0:
            return frozenset()
        update_s = [seconds / speed for seconds in times.host_adam_early_s]
        if not rule:
            return worth_stepping_within(home_s, until_s, update_s, times.update_order, needed, left_bytes)
        order = (times.update_order, sorted(home_s, key=lambda chunk: home_s[chunk]))[rule - 1]
        chosen = worth_stepping(home_s, until_s, update_s, times.update_order)
        return within((chunk for chunk in order if chunk in chosen), needed, left_bytes)

    def _begun(self, case: Case, count: int) -> tuple[Replay, list[Events]]:
        """A machine that comes to its first optimizer step, and the events of `count` batches after that.

        Updates that begin early change nothing before, unless they take the lane that adds gradients, or cores of
        compute. So placements that differ in them share a machine, of which each gets a copy. So do steps that are
        clipped and steps that are not.
        """
        shared = replace(case, clipped=False)
        if case.times.model.setting.accumulation == 1 and not case.times.rates.contention:
            shared = replace(shared, placement=case.placement.updated_early(()))
        key = case.times.model, shared.placement, case.result.blocks, case.result.prefetch_depth, case.grad_blocks
        if key not in self._latest:
            machine = Replay(shared)  # two of its batches are enough: one that adds gradients, after one that does not
            machine.run(shared.batches(min(count, 2), updated=False))
            machine.settle()
            if len(self._latest) == _LATEST:
                del self._latest[next(iter(self._latest))]
            self._latest[key] = machine, shared.batches(count, updated=True)
        begun, batches = self._latest[key]
        machine = begun.fork()
        machine.begin_early(case)
        machine.restart()
        return machine, batches

    def _simulated(self, case: Case) -> dict[str, float]:
        """Seconds of the optimizer step that begins with the updates of the one before."""
        # The last batch is simulated next to the steady one where early updates or sums over replicas make it another.
        early, accumulation = bool(case.placement.early), case.times.model.setting.accumulation
        count = min(accumulation, STEADY_BATCH + 1 + (early or self.rates.replicas > 1))
        machine, batches = self._begun(case, count) if early else (Replay(case), case.batches(count, updated=True))
        machine.update()
        optimizer_s = machine.now_s
        repeated_s = machine.run(batches, accumulation - count)
        ended_s = machine.now_s
        machine.settle()
        # No step is shorter than what one lane does in it, even if that still grows after the steady batch.
        total_s = max(machine.now_s + repeated_s, machine.disk_idle_s, *machine.busy_s.values())
        settled_s = _apart(total_s, repeated_s + ended_s)
        return {
            "forward": machine.forward_s,
            "backward": _apart(total_s, optimizer_s + machine.forward_s + settled_s),
            "optimizer": optimizer_s + settled_s,
            **machine.busy_s,
            COMPUTE: _apart(machine.busy_s[COMPUTE], machine.device_adam_s),
            "device_adam": machine.device_adam_s,
            "total": total_s,
        }


def _apart(whole_s: float, part_s: float) -> float:
    """The rest of a time without its parts; 0 if rounding makes their sum the larger, as in steps that take nothing."""
    return max(0.0, whole_s - part_s)


def can_step(work: PackedStep, placement: Placement) -> frozenset[int]:
    """Chunks that the host can update as soon as their gradients are there."""
    return frozenset(c for c, able in enumerate(work.early_able) if able and not placement.state_on_device[c])


def gradients_home_s(times: WorkTimes, placement: Placement) -> tuple[dict[int, float], float]:
    """Tells when gradients of chunks that the host can update early are home, without a simulation, and when the last
    has gone.

    Compute comes to the last gradient of each chunk, which then goes through the network's lane and that to the host.
    """
    place, after_s = times.sent
    several, on_device = times.shards > 1, placement.state_on_device
    able = can_step(times.work, placement) - placement.state_on_disk
    copied_s = network_s = gone_s = 0.0
    home_s: dict[int, float] = {}
    for c in np.argsort(place, kind="stable")[int(np.sum(place < 0)) :].tolist():
        if not several and on_device[c] and placement.resident[c]:
            continue  # it stays where autograd has made it
        copied_s += times.device_copy_s[c]
        at_s = times.total_s - float(after_s[c]) + copied_s
        if several:
            network_s = at_s = max(network_s, at_s) + times.reduce_s[c]
        gone_s = max(gone_s, at_s) + (times.deliver_on_device_s[c] if on_device[c] else times.offload_s[c])
        if c in able:
            home_s[c] = gone_s
    return home_s, max(times.total_s + copied_s, gone_s)


def within(order: Iterable[int], needed: Sequence[int], left_bytes: int) -> frozenset[int]:
    """Takes chunks in this order, all that still fit into the memory that is left.

    Args:
        order: chunks.
        needed: bytes by chunk.
        left_bytes: for all.
    """
    kept = set()
    for chunk in order:
        if needed[chunk] <= left_bytes:
            kept.add(chunk)
            left_bytes -= needed[chunk]
    return frozenset(kept)


def worth_stepping(
    home_s: Mapping[int, float], until_s: float, update_s: Sequence[float], update_order: Sequence[int]
) -> frozenset[int]:
    """Picks the chunks to update early: an idle CPU Adam takes the chunk with gradients that forward needs first.

    In backward gradients come in the reverse of the order in which the next forward asks for the weights: if CPU Adam
    took each as it comes, and were too slow, what forward needs first would come last. The others wait until it is idle
    again, or for the optimizer's step, which updates in the order of forward. docs/design/search.md has the rule.

    Args:
        home_s: by chunk that can be stepped, when its gradients are home.
        until_s: when the optimizer's step begins.
        update_s: by chunk, seconds of its update.
        update_order: chunks in the order in which forward asks for them.
    """
    place = {chunk: index for index, chunk in enumerate(update_order)}
    coming = sorted((at_s, chunk) for chunk, at_s in home_s.items())
    there: list[tuple[int, int]] = []
    chosen: set[int] = set()
    now_s, next_one = 0.0, 0
    while now_s < until_s:
        while next_one < len(coming) and coming[next_one][0] <= now_s:
            heapq.heappush(there, (place[coming[next_one][1]], coming[next_one][1]))
            next_one += 1
        if there:
            _, chunk = heapq.heappop(there)
            chosen.add(chunk)
            now_s += update_s[chunk]
        elif next_one < len(coming):
            now_s = coming[next_one][0]
        else:
            break
    return frozenset(chosen)


def worth_stepping_within(
    home_s: Mapping[int, float],
    until_s: float,
    update_s: Sequence[float],
    update_order: Sequence[int],
    needed: Sequence[int],
    left_bytes: int,
) -> frozenset[int]:
    """Picks as `worth_stepping`, for a host just slow enough that memory holds its new states.

    It works all the time then, so that its chunks lie among others that are updated later, everywhere in the order in
    which forward asks for them: no part of forward has to wait for many updates at once.
    """
    possible = {chunk: at_s for chunk, at_s in home_s.items() if needed[chunk] <= left_bytes}
    slower = 1.0
    while True:
        chosen = worth_stepping(possible, until_s, [slower * seconds for seconds in update_s], update_order)
        wanted = sum(needed[chunk] for chunk in chosen)
        if wanted <= left_bytes:
            return chosen
        slower *= max(wanted / left_bytes, _LEAST_SLOWER)
