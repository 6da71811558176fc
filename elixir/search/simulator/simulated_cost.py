"""`SimulatedCost`: the time model of a search, which answers thousands of times.

It walks the same work (`work_times`) on the same resources (`replay`) as `simulate_step`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile
from elixir.schedule import ScheduleResult
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.placement import Placement, Setting
from elixir.search.simulator.activation_moves import ActivationMoves
from elixir.search.simulator.case import Case
from elixir.search.simulator.early_updates import gradients_home_s, within, worth_stepping, worth_stepping_within
from elixir.search.simulator.rates import Rates, main_dtype
from elixir.search.simulator.replay import COMPUTE, STEADY_BATCH, Replay
from elixir.search.simulator.work_times import Events, WorkTimes
from elixir.step_trace import StepTrace


class SimulatedCost:
    """The time model of a search, by simulation.

    Args:
        trace: the step.
        hardware: the machine.
        setting: that of every packing that it is asked for.
        compute_scale, clipped: those of `simulate_step`.
        like: of the same trace and setting on another machine, whose view of each packing is shared.

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
        self.rates = Rates(
            hardware,
            main_dtype(trace),
            setting.world_size,
            setting.ranks_per_host,
            moments=setting.moments,
            replicas=setting.replicas,
        )
        accesses_s = self.rates.accesses_s(trace) * compute_scale
        self._of_trace = self.rates, accesses_s, ActivationMoves(trace, self.rates, accesses_s)
        self.compute_s = setting.accumulation * float(accesses_s.sum())
        """Seconds of compute in a step, wherever chunks are, without those of the optimizer."""
        # A copy that is clipped shares all of these.
        self._times: dict[MemoryModel, WorkTimes] = {}
        self._known: dict[tuple[MemoryModel, Placement, int, int, bool], dict[str, float]] = {}
        self._latest: list[tuple[Case, Replay, list[Events]]] = []  # at most one

    def times(self, model: MemoryModel) -> WorkTimes:
        """Seconds of every piece of work of a packing."""
        if model not in self._times:
            given = self._of_trace
            like = self._like
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
        home_s, until_s = gradients_home_s(times, placement)
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
        if not self._latest or self._latest[0][0] != shared:
            machine = Replay(shared)  # two of its batches are enough: one that adds gradients, after one that does not
            machine.run(shared.batches(min(count, 2), updated=False))
            machine.settle()
            self._latest[:] = [(shared, machine, shared.batches(count, updated=True))]
        _, begun, batches = self._latest[0]
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
