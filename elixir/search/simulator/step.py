"""How long a step takes under a plan: the runtime's schedule, replayed with the speeds of a machine.

`simulate_step` answers for one plan, with everything worth drawing; `SimulatedCost` answers thousands of times for the
search. Both walk the same events (`work_times`) on the same resources (`replay`). `docs/design/simulator.md` says what
is modelled and what is not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np

from elixir.errors import InputTypeError
from elixir.hardware.profile import HardwareProfile
from elixir.plan.plan import HasPlan, Plan, plan_of
from elixir.schedule import ScheduleResult
from elixir.search.problem.from_plan import placement_of, setting_of, workload_of
from elixir.search.problem.memory import MemoryModel
from elixir.search.problem.packed_step import Workload
from elixir.search.problem.packing import Ints
from elixir.search.problem.placement import Codes, Floats, Placement, Setting
from elixir.search.request import check_count
from elixir.search.simulator.case import Case
from elixir.search.simulator.collectives import Algorithm, check_positive
from elixir.search.simulator.early_updates import (
    can_step,
    out_of_place_share,
    within,
    worth_stepping,
    worth_stepping_within,
)
from elixir.search.simulator.events import Events, WorkTimes
from elixir.search.simulator.fast_bounds import Floor
from elixir.search.simulator.rates import Rates, main_dtype, say_if_network_unknown
from elixir.search.simulator.replay import COMPUTE, RESOURCES, Machine, Span
from elixir.search.simulator.shared_cores import machine_of
from elixir.step_trace import StepTrace

__all__ = ["RESOURCES", "SimulatedCost", "Simulation", "Span", "simulate_step"]

STEADY_BATCH = 2
"""The index of the batch of an optimizer step that all later ones but the last are like: the first finds its cache
empty, the second is the first that adds gradients."""


@dataclass(frozen=True)
class Simulation:
    """One steady step: it begins when the optimizer has every gradient of the step before, and ends when it has those
    of this one. So the host's updates of the step before, which reach into this forward, are in it as a whole."""

    step_s: float
    phases_s: dict[str, float]
    """``forward`` and ``backward`` (of all batches), and ``optimizer``: waiting for gradients and for the disk, and
    what the device steps; sums to `step_s`."""
    busy_s: dict[str, float]
    """How long each of `RESOURCES` works."""
    waited_s: dict[str, float]
    """How long compute stands still for each lane; with what compute is busy it sums to `step_s`."""
    critical_s: dict[str, float]
    """The longest chain of work that had to come one after the other, by resource; sums to `step_s`."""
    loads: int
    """Chunks brought into blocks."""
    moved_bytes: dict[str, int]
    """Per rank, over each link."""
    extra_grad_blocks: int
    """Gradient blocks that the runtime would make beyond the plan's."""
    timeline: tuple[Span, ...]
    """In order of start."""

    @property
    def utilisation(self) -> dict[str, float]:
        """Share of the step in which each resource works."""
        return {name: busy / self.step_s if self.step_s else 0.0 for name, busy in self.busy_s.items()}

    @property
    def bound_by(self) -> str:
        """The resource with most seconds on the critical path."""
        return max(RESOURCES, key=lambda name: self.critical_s[name])


def simulate_step(  # noqa: PLR0913 - what a user may assume otherwise, one by one
    plan: Plan | HasPlan,
    trace: StepTrace,
    hardware: HardwareProfile,
    *,
    accumulation: int | None = None,
    ranks_per_host: int | None = None,
    steps: int | None = None,
    compute_scale: float = 1.0,
    network_bytes_per_s: float | None = None,
    network_latency_s: float | None = None,
    algorithm: Algorithm = "ring",
    clipped: bool = False,
) -> Simulation:
    """The last of `steps` training steps of `plan`, on one rank of many alike.

    Args:
        plan: made from `trace`, or from a trace with the same order of use.
        trace: what one batch of one rank computes.
        hardware: the machine; its fits are used where it has any.
        accumulation: batches per optimizer step; None: as the plan was searched for.
        ranks_per_host: ranks that share a machine; as many as it has devices by default.
        steps: 1 for the first step, which has no updates to wait for; from 2 on all are the same (from 3 where some
            states live on a disk and other chunks are updated early), so that None is for that one.
        compute_scale: measured over predicted seconds of compute, from one run without transfers.
        network_bytes_per_s: between machines, per machine and direction; the profile's by default.
        network_latency_s: of one step of a collective between machines; likewise.
        algorithm: of collectives that the profile has not measured at this world size.
        clipped: gradients are clipped, so that states which were made early are discarded and made again.

    Raises:
        InputError, InputTypeError: the plan is not of this trace, or an argument makes no sense.
    """
    plan = plan_of(plan)
    for name, value, kind in (("trace", trace, StepTrace), ("hardware", hardware, HardwareProfile)):
        if not isinstance(value, kind):
            raise InputTypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    if accumulation is None:
        accumulation = plan.accumulation
    check_count("accumulation", accumulation)
    if steps is not None:
        check_count("steps", steps)
    if ranks_per_host is None:
        ranks_per_host = hardware.ranks_per_host(plan.world_size)
    check_count("ranks_per_host", ranks_per_host)
    if network_bytes_per_s is None:
        say_if_network_unknown(hardware, plan.world_size, ranks_per_host)
    rates = Rates(
        hardware,
        main_dtype(trace),
        plan.world_size,
        min(ranks_per_host, plan.world_size),
        network_bytes_per_s=network_bytes_per_s,
        network_latency_s=network_latency_s,
        algorithm=algorithm,
        moments=plan.moments,
    )
    check_positive("compute_scale", compute_scale)
    work, placement = workload_of(plan, trace), placement_of(plan)
    setting = replace(setting_of(plan, ranks_per_host), accumulation=accumulation)
    schedule = plan.schedule()
    case = Case(
        WorkTimes(
            work,
            rates,
            rates.accesses_s(trace) * compute_scale,
            plan.block_bytes,
            MemoryModel(work, setting).disk_shard_bytes.tolist(),
        ),
        placement,
        schedule,
        schedule.simulate(plan.block_count),
        plan.grad_block_count,
        plan.overlap,
        hardware.device_kind == "cuda",
        early_share=out_of_place_share(setting),
        clipping=plan.clipping,
        accumulates=accumulation > 1,
        clipped=clipped,
    )
    return _replay(case, accumulation, 1 + _steps_before(case) if steps is None else steps)


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
        )
        self._setting = setting
        self._early_share = out_of_place_share(setting)
        self._latest: tuple[Case, Machine, Events] | None = None
        self._ahead = hardware.device_kind == "cuda"
        self._accesses_s = self._rates.accesses_s(trace) * compute_scale
        self._known: WeakKeyDictionary[Workload, Known] = WeakKeyDictionary()

    def estimate(
        self,
        work: Workload,
        placement: Placement,
        schedule: ScheduleResult,
        *,
        overlap: bool,
    ) -> Mapping[str, float]:
        """Seconds by phase (``forward``, ``backward``, ``optimizer``), busy seconds by resource, and ``total``.

        Without `overlap` a gradient that no block holds is waited for; otherwise the runtime's lanes always run while
        compute does, and without prefetch there is little for them to do ahead of it.
        """
        case = self._case(work, placement, schedule, overlap=overlap)
        if not placement.early:
            return self._seconds(case, machine_of(case), case.events(case.result, updated=True))
        machine, later = self._begun(case)
        machine.restart()
        return self._seconds(case, machine, later)

    def early_choices(
        self,
        work: Workload,
        placement: Placement,
        schedule: ScheduleResult,
        *,
        overlap: bool,
        left_bytes: int,
    ) -> list[Placement]:
        """`placement` with those chunks updated early with which the step is likely to be shortest, for each way to
        choose them; empty if none can be, or no memory is left.

        Args:
            work, placement, schedule: a candidate, all of whose chunks are updated after the norm.
            overlap: see `estimate`.
            left_bytes: host memory of one machine that is left for second sets of states.
        """
        able = can_step(work, placement) - placement.state_on_disk
        needed = (self.known(work).model.second_set_bytes * self._setting.ranks_per_host).tolist()
        if not able or left_bytes < min(needed[chunk] for chunk in able):
            return []
        case = self._case(work, placement, schedule, overlap=overlap)
        (machine, _), times = self._begun(case), case.times
        homes = {chunk: at_s for chunk, at_s in machine.home_s.items() if chunk in able}
        update_s = [seconds * case.early_share for seconds in times.host_adam_early_s]
        gradients = homes, machine.now_s, update_s, times.update_order
        chosen = worth_stepping(*gradients)
        all_bytes = sum(needed[chunk] for chunk in chosen)
        # Fewer may be better where gradients that are added to others wait on the same lane.
        parts = (1, 2, 4) if case.accumulates else (1,)
        orders = times.update_order, sorted(homes, key=lambda chunk: homes[chunk])
        found = []
        for room in (min(left_bytes, all_bytes // part) for part in parts):
            found += [*within(chosen, orders, needed, room), worth_stepping_within(*gradients, needed, room)]
        return [placement.updated_early(chunks) for chunks in dict.fromkeys(found) if chunks]

    def _begun(self, case: Case) -> tuple[Machine, Events]:
        """A machine that comes to its first optimizer step, and the events of the first batch after that.

        Updates that begin early change nothing before, unless they take the lane that adds gradients, or cores of
        compute. So placements that differ in them share a machine, of which each gets a copy.
        """
        alone = case.accumulates or case.times.rates.contention
        shared = case if alone else replace(case, placement=case.placement.updated_early(()))
        if self._latest is None or self._latest[0] != shared:
            machine = machine_of(shared)
            batches = shared.batches(self._batches_simulated(shared))
            for batch, events in enumerate(batches):
                machine.in_last_batch = batch == len(batches) - 1
                machine.batch(events)
            machine.settle()
            self._latest = shared, machine, shared.events(shared.result, updated=True)
        machine, later = self._latest[1].fork(), self._latest[2]
        machine.begin_early(case.placement)
        return machine, later

    def _batches_simulated(self, case: Case) -> int:
        """The last batch is simulated next to the steady one where early updates make it another."""
        return min(self._setting.accumulation, STEADY_BATCH + (2 if case.placement.early else 1))

    def _seconds(self, case: Case, machine: Machine, first: Events) -> dict[str, float]:
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

    def floor_s(
        self,
        work: Workload,
        chunks: Ints,
        codes: Codes,
        blocks: Ints,
        *,
        early: bool = False,
        prefetch: bool = True,
    ) -> Floats:
        """Seconds that no step with these homes, and no more than so many blocks, can beat; see `Floor.seconds`.

        With `early`, whatever chunks are updated early.
        """
        known = self.known(work)
        floor = known.early_floor if early else known.floor
        # Batches after the first have their compute at least.
        more_s = (self._setting.accumulation - 1) * known.times.total_s
        return floor.seconds(chunks, codes, blocks, prefetch=prefetch) + more_s

    def floor_of(
        self, work: Workload, placement: Placement, blocks: int, depth: int = 1, *, early: bool = False
    ) -> float:
        """`floor_s` of one placement, with chunks fetched `depth` ahead."""
        chunks, codes = np.arange(len(placement.codes)), placement.codes[None]
        return float(self.floor_s(work, chunks, codes, np.array([blocks]), early=early, prefetch=depth > 0)[0])

    def _case(self, work: Workload, placement: Placement, result: ScheduleResult, *, overlap: bool) -> Case:
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

    def known(self, work: Workload) -> Known:
        """Values that are worked out once for a packing."""
        found = self._known.get(work)
        if found is None:
            like = None if self._like is None else self._like.known(work)
            model = MemoryModel(work, self._setting) if like is None else like.model
            found = self._known[work] = Known(model, self._rates, self._accesses_s, self._ahead, like)
        return found


class Known:
    """Values that `SimulatedCost` works out once per packing.

    Args:
        model: memory of the packing.
        rates, accesses_s: of the machine, as `WorkTimes` takes them.
        ahead: as in `Machine`.
        like: those of another machine, whose index of the order is shared.
    """

    def __init__(
        self, model: MemoryModel, rates: Rates, accesses_s: Floats, ahead: bool, like: Known | None = None
    ) -> None:
        self.model, self._rates, self._accesses_s, self._ahead, self._like = model, rates, accesses_s, ahead, like

    @cached_property
    def times(self) -> WorkTimes:
        """Seconds of every piece of work."""
        if self._like is not None:
            return self._like.times.at(self._rates, self._accesses_s)
        work, disk_bytes = self.model.work, self.model.disk_shard_bytes.tolist()
        return WorkTimes(work, self._rates, self._accesses_s, work.packing.block_bytes, disk_bytes)

    @cached_property
    def floor(self) -> Floor:
        return self._floor(False)

    @cached_property
    def early_floor(self) -> Floor:
        """For steps some of whose chunks are updated early."""
        return self._floor(True)

    def _floor(self, early: bool) -> Floor:
        setting = self.model.setting
        return Floor(
            self.times,
            early,
            clipping=setting.clipping,
            accumulates=setting.accumulation > 1,
            ahead=self._ahead,
        )


def _replay(case: Case, accumulation: int, steps: int) -> Simulation:
    walks = case.walks(accumulation)
    machine, updated_s = machine_of(case, record=True), 0.0
    for step in range(steps):
        phases = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
        if step:
            machine.restart()
            machine.update()
            updated_s = machine.now_s
        began_s = updated_s
        for batch in range(accumulation):
            machine.in_last_batch = batch == accumulation - 1
            machine.batch(case.events(walks[batch], updated=bool(step) and batch == 0, record=True))
            phases["forward"] += machine.backward_from_s - began_s
            phases["backward"] += machine.now_s - machine.backward_from_s
            began_s = machine.now_s
        machine.settle()
        machine.drain()
        phases["optimizer"] = updated_s + machine.now_s - began_s
    order = lambda span: (span.start_s, RESOURCES.index(span.resource), span.end_s)  # noqa: E731
    spans, end_s = sorted(machine.spans, key=order), machine.now_s
    if not case.placement.early:  # all that a step begins is over with it: nothing leads back into the one before
        spans = [span for span in spans if span.end_s > 0]
    # What reaches over the end is what reached over the beginning, a step later.
    shown = (span._replace(start_s=max(span.start_s, 0.0), end_s=min(span.end_s, end_s)) for span in spans)
    return Simulation(
        step_s=machine.now_s,
        phases_s=phases,
        busy_s=machine.busy_s,
        waited_s=machine.waited_s,
        critical_s=_critical(spans, machine.now_s),
        loads=machine.loads,
        moved_bytes=machine.moved_bytes,
        extra_grad_blocks=machine.extra_grad_blocks,
        timeline=tuple(sorted((span for span in shown if span.end_s > span.start_s), key=order)),
    )


def _critical(spans: Sequence[Span], end_s: float) -> dict[str, float]:
    """Seconds by resource on the way back from the end, always to what ended when the later one began.

    Where several did, the one on the same resource counts. Moments are equal to the last bit, as each is the latest of
    some others. A way that leads into what the step before began is followed to the compute after which that came, and
    counted from there on for as long as a step takes: all steps go round in it.
    """
    lanes = {name: {span.end_s: span for span in spans if span.resource == name} for name in RESOURCES[1:]}
    compute = [span for span in spans if span.resource == COMPUTE]
    ends = [span.end_s for span in compute]

    def before(at_s: float, resource: str) -> Span | None:
        for name in dict.fromkeys((resource, *RESOURCES)):
            if name != COMPUTE:
                found = lanes[name].get(at_s)
            else:
                index = bisect_left(ends, at_s)
                found = compute[index] if index < len(compute) and compute[index].start_s < at_s else None
            if found is not None:
                return found
        return None

    way: list[tuple[str, float, float]] = []
    at_s, span = end_s, before(end_s, COMPUTE)
    while span is not None:
        way.append((span.resource, span.start_s, at_s))
        at_s = span.start_s
        span = before(at_s, span.resource)
        if at_s <= 0 and span is not None and span.resource == COMPUTE:
            break
    critical = dict.fromkeys(RESOURCES, 0.0)
    for resource, from_s, until_s in way:
        critical[resource] += max(0.0, min(until_s, end_s + at_s) - from_s)
    return critical


def _steps_before(case: Case) -> int:
    """Steps after which all are the same.

    The first has no updates to wait for. Where states live on a disk it does not wait for that at its end either, which
    would give new states in backward more time.
    """
    return 2 if case.placement.early and case.placement.state_on_disk else 1


def _apart(whole_s: float, part_s: float) -> float:
    """The rest of a time without its parts; 0 if rounding makes their sum the larger, as in steps that take nothing."""
    return max(0.0, whole_s - part_s)
