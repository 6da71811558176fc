"""How long a step takes under a plan: the runtime's schedule, replayed with the speeds of a machine.

`simulate_step` answers for one plan, with everything worth drawing; `SimulatedCost` answers thousands of times for the
search. Both walk the same events (`work_times`) on the same resources (`replay`). `docs/design/search.md` says what
is modelled and what is not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elixir.errors import InputTypeError
from elixir.hardware.profile import HardwareProfile
from elixir.plan.plan import HasPlan, Plan, plan_of
from elixir.search.problem.from_plan import packed_step_of, placement_of, setting_of, trace_under
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.request import check_count
from elixir.search.simulator.rates import say_if_network_unknown
from elixir.search.simulator.replay import COMPUTE, RESOURCES, Replay, WorkSpan
from elixir.search.simulator.simulated_cost import SimulatedCost
from elixir.search.simulator.work_times import Case
from elixir.step_trace import StepTrace


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
    """Per rank, over each link, in a steady step."""
    extra_grad_blocks: int
    """Gradient blocks that the runtime would make beyond the plan's."""
    timeline: tuple[WorkSpan, ...]
    """In order of start."""

    @property
    def utilisation(self) -> dict[str, float]:
        """Share of the step in which each resource works."""
        return {name: busy / self.step_s if self.step_s else 0.0 for name, busy in self.busy_s.items()}

    @property
    def bound_by(self) -> str:
        """The resource with most seconds on the critical path."""
        return max(RESOURCES, key=lambda name: self.critical_s[name])


def simulate_step(
    plan: Plan | HasPlan,
    trace: StepTrace,
    hardware: HardwareProfile,
    *,
    accumulation: int | None = None,
    ranks_per_host: int | None = None,
    steps: int | None = None,
    compute_scale: float = 1.0,
    clipped: bool = False,
) -> Simulation:
    """The last of `steps` training steps of `plan`, on one rank of many alike.

    Args:
        plan: made from `trace`, or from a trace with the same order of use.
        trace: what one batch of one rank computes.
        hardware: the machine; its fits are used where it has any.
        accumulation: batches per optimizer step, or passes of several; None: as the plan was searched for.
        ranks_per_host: ranks that share a machine; as many as it has devices by default.
        steps: 1 for the first step, which has no updates to wait for; from 2 on all are the same (from 3 where some
            states live on a disk and other chunks are updated early), so that None is for that one.
        compute_scale: measured over predicted seconds of compute, from one run without transfers.
        clipped: gradients are clipped, so that states which were made early are discarded and made again.

    Raises:
        InputError, InputTypeError: the plan is not of this trace, or an argument makes no sense.
    """
    plan = plan_of(plan)
    for name, value, kind in (("trace", trace, StepTrace), ("hardware", hardware, HardwareProfile)):
        if not isinstance(value, kind):
            raise InputTypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    if accumulation is None:
        accumulation = plan.passes
    check_count("accumulation", accumulation)
    if steps is not None:
        check_count("steps", steps)
    if ranks_per_host is None:
        ranks_per_host = hardware.ranks_per_host(plan.world_size)
    check_count("ranks_per_host", ranks_per_host)
    say_if_network_unknown(hardware, plan.world_size, ranks_per_host)
    trace = trace_under(plan, trace)
    ranks_per_host = min(ranks_per_host, plan.world_size)
    setting = replace(setting_of(plan, ranks_per_host, hardware.device_kind), accumulation=accumulation)
    cost = SimulatedCost(trace, hardware, setting, compute_scale=compute_scale, clipped=clipped)
    model, placement = MemoryModel(packed_step_of(plan, trace), setting), placement_of(plan)
    walk = plan.schedule().simulate(plan.block_count)
    case = replace(cost.case(model, placement, walk), grad_blocks=plan.grad_block_count)
    return _replay(case, 1 + _steps_before(case) if steps is None else steps)


def _replay(case: Case, steps: int) -> Simulation:
    model = case.times.model
    machine, updated_s, accumulation = Replay(case, record=True), 0.0, model.setting.accumulation
    moved = model.traffic(case.placement, case.schedule, case.result.blocks)
    for step in range(steps):
        if step:
            machine.restart()
            machine.update()
            updated_s = machine.now_s
        machine.run(case.batches(accumulation, updated=bool(step), record=True))
        ended_s = machine.now_s
        machine.settle()
        machine.drain()
    phases_s = {"forward": machine.forward_s, "backward": machine.backward_s}
    order = lambda span: (span.start_s, RESOURCES.index(span.resource), span.end_s)  # noqa: E731
    spans, end_s = sorted((span for span in machine.spans if span.end_s > span.start_s), key=order), machine.now_s
    if not case.placement.early:  # all that a step begins is over with it: nothing leads back into the one before
        spans = [span for span in spans if span.end_s > 0]
    # What reaches over the end is what reached over the beginning, a step later.
    shown = (span._replace(start_s=max(span.start_s, 0.0), end_s=min(span.end_s, end_s)) for span in spans)
    return Simulation(
        step_s=machine.now_s,
        phases_s=phases_s | {"optimizer": updated_s + machine.now_s - ended_s},
        busy_s=machine.busy_s,
        waited_s=machine.waited_s,
        critical_s=_critical(spans, machine.now_s),
        loads=moved.loads,
        moved_bytes=moved.by_link,
        extra_grad_blocks=machine.extra_grad_blocks,
        timeline=tuple(sorted((span for span in shown if span.end_s > span.start_s), key=order)),
    )


def _critical(spans: Sequence[WorkSpan], end_s: float) -> dict[str, float]:
    """Seconds by resource on the way back from the end, always to what ended when the later one began.

    Where several did, the one on the same resource counts. Moments are equal to the last bit, as each is the latest of
    some others. A way that leads into what the step before began is followed to the compute after which that came, and
    counted from there on for as long as a step takes: all steps go round in it.
    """
    lanes = {name: {span.end_s: span for span in spans if span.resource == name} for name in RESOURCES[1:]}
    compute = [span for span in spans if span.resource == COMPUTE]
    ends = [span.end_s for span in compute]

    def before(at_s: float, resource: str) -> WorkSpan | None:
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
