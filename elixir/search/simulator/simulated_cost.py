"""`SimulatedCost`: the time model of a search, which answers thousands of times.

It walks the same work (`work_times`) on the same resources (`replay`) as `simulate_step`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from weakref import WeakKeyDictionary

from elixir.hardware.profile import HardwareProfile
from elixir.schedule import ScheduleResult
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.packed_step import PackedStep
from elixir.search.problem.placement import Floats, Placement, Setting
from elixir.search.simulator.activation_moves import ActivationMoves
from elixir.search.simulator.case import Case
from elixir.search.simulator.cluster import check_positive
from elixir.search.simulator.early_updates import (
    gradients_home_s,
    out_of_place_share,
    within,
    worth_stepping,
    worth_stepping_within,
)
from elixir.search.simulator.floors import Floors
from elixir.search.simulator.rates import Rates, main_dtype
from elixir.search.simulator.replay import COMPUTE, Replay
from elixir.search.simulator.shared_cores import machine_of
from elixir.search.simulator.work_times import Events, WorkTimes
from elixir.step_trace import StepTrace

STEADY_BATCH = 2
"""The index of the batch of an optimizer step that all later ones but the last are like: the first finds its cache
empty, the second is the first that adds gradients."""


class SimulatedCost:
    """The time model of a search, by simulation.

    Args:
        trace: the step.
        hardware: the machine.
        setting: world size, ranks per machine, overlap (which decides how many gradient blocks there are).
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
        check_positive("compute_scale", compute_scale)
        self.clipped = clipped
        self._like = like
        self._rates = Rates(
            hardware,
            main_dtype(trace),
            setting.world_size,
            setting.ranks_per_host,
            moments=setting.moments,
            replicas=setting.replicas,
        )
        self._setting = setting
        self._early_share = out_of_place_share(setting)
        self._latest: list[tuple[Case, Replay, Events]] = []  # at most one, which a copy that is clipped shares
        self._ahead = hardware.device_kind == "cuda"
        self._accesses_s = self._rates.accesses_s(trace) * compute_scale
        self._moves = ActivationMoves(trace, self._rates, self._accesses_s)
        self._known: WeakKeyDictionary[PackedStep, Known] = WeakKeyDictionary()

    def estimate(
        self,
        work: PackedStep,
        placement: Placement,
        schedule: ScheduleResult,
        *,
        overlap: bool,
    ) -> Mapping[str, float]:
        """Seconds by phase (``forward``, ``backward``, ``optimizer``), busy seconds by resource, and ``total``.

        Without `overlap` a gradient that no block holds is waited for; otherwise the runtime's lanes always run while
        compute does, and without prefetch there is little for them to do ahead of it.
        """
        # Without blocks all depths of prefetch are the same. Clipping discards nothing but early states.
        depth, clipped = schedule.blocks and schedule.prefetch_depth, self.clipped and bool(placement.early)
        known, key = self.known(work).seconds, (placement, schedule.blocks, depth, overlap, clipped)
        if key not in known:
            known[key] = self._simulated(work, placement, schedule, overlap=overlap)
        return known[key]

    def _simulated(
        self, work: PackedStep, placement: Placement, schedule: ScheduleResult, *, overlap: bool
    ) -> dict[str, float]:
        case = self._case(work, placement, schedule, overlap=overlap)
        if not placement.early:
            return self._seconds(case, machine_of(case), case.events(case.result, updated=True))
        machine, later = self._begun(case)
        machine.restart()
        return self._seconds(case, machine, later)

    def early_chunks(
        self, work: PackedStep, placement: Placement, *, speed: float, left_bytes: int, rule: int
    ) -> frozenset[int]:
        """Chunks of `placement` that a host of this speed, idle until gradients come home, takes in backward; as many
        as memory has second sets for.

        Args:
            work, placement: a candidate, all of whose chunks are updated after the norm.
            speed: of the host, over that of the machine.
            left_bytes: host memory of one machine for second sets.
            rule: see `elixir.search.propose.family.Shape`.
        """
        known = self.known(work)
        times, needed = known.times, (known.model.second_set_bytes * self._setting.ranks_per_host).tolist()
        home_s, until_s = gradients_home_s(times, placement)
        home_s = {chunk: at_s for chunk, at_s in home_s.items() if needed[chunk] <= left_bytes}
        if not home_s or left_bytes <= 0:
            return frozenset()
        update_s = [seconds * self._early_share / speed for seconds in times.host_adam_early_s]
        if not rule:
            return worth_stepping_within(home_s, until_s, update_s, times.update_order, needed, left_bytes)
        order = (times.update_order, sorted(home_s, key=lambda chunk: home_s[chunk]))[rule - 1]
        chosen = worth_stepping(home_s, until_s, update_s, times.update_order)
        return next(iter(within(chosen, [order], needed, left_bytes)), frozenset())

    def _begun(self, case: Case) -> tuple[Replay, Events]:
        """A machine that comes to its first optimizer step, and the events of the first batch after that.

        Updates that begin early change nothing before, unless they take the lane that adds gradients, or cores of
        compute. So placements that differ in them share a machine, of which each gets a copy. So do steps that are
        clipped and steps that are not.
        """
        alone = case.accumulates or case.times.rates.contention
        shared = replace(case, clipped=False)
        if not alone:
            shared = replace(shared, placement=case.placement.updated_early(()))
        if not self._latest or self._latest[0][0] != shared:
            machine = machine_of(shared)
            batches = shared.batches(self._batches_simulated(shared))
            for batch, events in enumerate(batches):
                machine.in_last_batch = batch == len(batches) - 1
                machine.batch(events)
            machine.settle()
            self._latest[:] = [(shared, machine, shared.events(shared.result, updated=True))]
        _, begun, later = self._latest[0]
        machine = begun.fork()
        machine.begin_early(case)
        return machine, later

    def _batches_simulated(self, case: Case) -> int:
        """The last batch is simulated next to the steady one where early updates make it another."""
        return min(self._setting.accumulation, STEADY_BATCH + (2 if case.placement.early else 1))

    def _seconds(self, case: Case, machine: Replay, first: Events) -> dict[str, float]:
        """Seconds of the optimizer step that `machine` begins with; `first` are the events of its first batch."""
        machine.update()
        optimizer_s = machine.now_s
        forward_s, began_s = 0.0, optimizer_s
        steady_s, steady_forward_s, steady_busy_s = 0.0, 0.0, dict.fromkeys(machine.busy_s, 0.0)
        simulated = self._batches_simulated(case)
        for batch, events in enumerate(case.batches(simulated, first)):
            before_s = machine.busy_s.copy()
            machine.in_last_batch = batch == simulated - 1
            machine.batch(events)
            batch_forward_s = machine.backward_from_s - began_s
            forward_s += batch_forward_s
            if batch == STEADY_BATCH:
                steady_s, steady_forward_s = machine.now_s - began_s, batch_forward_s
                steady_busy_s = {name: amount - before_s[name] for name, amount in machine.busy_s.items()}
            began_s = machine.now_s
        more = self._setting.accumulation - simulated
        ended_s = machine.now_s
        machine.settle()
        total_s = max(machine.now_s + more * steady_s, machine.disk_idle_s)
        busy_s = {name: amount + more * steady_busy_s[name] for name, amount in machine.busy_s.items()}
        forward_s += more * steady_forward_s
        settled_s = _apart(total_s, more * steady_s + ended_s)
        return {
            "forward": forward_s,
            "backward": _apart(total_s, optimizer_s + forward_s + settled_s),
            "optimizer": optimizer_s + settled_s,
            **busy_s,
            COMPUTE: _apart(busy_s[COMPUTE], machine.device_adam_s),
            "device_adam": machine.device_adam_s,
            "total": total_s,
        }

    def _case(self, work: PackedStep, placement: Placement, result: ScheduleResult, *, overlap: bool) -> Case:
        known = self.known(work)
        schedule = work.schedule(placement.residents, result.prefetch_depth)
        grad_blocks = int(known.model.grad_blocks(placement.codes[None])[0][0])
        return Case(
            known.times,
            placement,
            schedule,
            result,
            grad_blocks,
            overlap,
            self._ahead,
            early_share=self._early_share,
            clipping=self._setting.clipping,
            accumulates=self._setting.accumulation > 1,
            clipped=self.clipped,
        )

    def known(self, work: PackedStep) -> Known:
        """Values that are worked out once for a packing."""
        found = self._known.get(work)
        if found is None:
            like = None if self._like is None else self._like.known(work)
            model = MemoryModel(work, self._setting) if like is None else like.model
            found = self._known[work] = Known(model, self._rates, self._accesses_s, self._moves, self._ahead, like)
        return found


class Known:
    """Values that `SimulatedCost` works out once per packing.

    Args:
        model: memory of the packing.
        rates, accesses_s, moves: of the machine, as `WorkTimes` takes them.
        ahead: as in `Replay`.
        like: those of another machine, whose index of the order is shared.
    """

    def __init__(
        self,
        model: MemoryModel,
        rates: Rates,
        accesses_s: Floats,
        moves: ActivationMoves,
        ahead: bool,
        like: Known | None = None,
    ) -> None:
        self.model, self._ahead, self._like = model, ahead, like
        self._seconds = rates, accesses_s, moves
        self.seconds: dict[tuple[Placement, int, int, bool, bool], dict[str, float]] = {}
        """Seconds of steps by placement, blocks, depth of prefetch, overlap, and whether early states are discarded."""

    @cached_property
    def times(self) -> WorkTimes:
        """Seconds of every piece of work."""
        if self._like is not None:
            return self._like.times.at(*self._seconds)
        model, work = self.model, self.model.work
        of_disk = model.disk_shard_bytes.tolist(), model.file_bytes
        return WorkTimes(work, *self._seconds, work.packing.block_bytes, *of_disk)

    @cached_property
    def floors(self) -> Floors:
        """Floors of all placements."""
        return Floors([self.times], self.model, ahead=self._ahead)


def _apart(whole_s: float, part_s: float) -> float:
    """The rest of a time without its parts; 0 if rounding makes their sum the larger, as in steps that take nothing."""
    return max(0.0, whole_s - part_s)
