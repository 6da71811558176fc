"""Makes a plan from a trace: checks what was asked, searches, and writes the outcome down."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

from elixir.errors import InputError, InputTypeError, Lever, PlanError, few
from elixir.garbage import garbage_collection_paused
from elixir.hardware.profile import HardwareProfile
from elixir.hardware.scenario import Scenario, scenarios
from elixir.optimizer_states import (
    MASTER_BYTES,
    MomentKind,
    averages,
    check_kind,
    is_adam,
    is_copied,
    matrix_family,
    matrix_states,
    optimizer_name,
    state_size,
)
from elixir.plan.plan import Plan
from elixir.plan.process_need import must_be_free_bytes
from elixir.search.budgets import disk_budget, resolve_budgets
from elixir.search.problem.coarse_trace import pass_trace
from elixir.search.problem.memory_model import MemoryNeed
from elixir.search.problem.placement import Setting
from elixir.search.propose.candidate import Candidate, weigh
from elixir.search.propose.family import families
from elixir.search.propose.search import BRIEF_WORK, WORK, ShapeSearch, judge_updates
from elixir.search.propose.shortage import every_family, is_ruled_out, lacks_room, least_device, least_host, shortage
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.propose.variants import WORTHWHILE, fastest, variants, with_units_as_one
from elixir.search.propose.written_plan import to_plan
from elixir.search.question import Question
from elixir.search.request import SearchRequest, check_count
from elixir.search.simulator.rates import say_if_network_unknown
from elixir.step_trace import StepTrace
from elixir.units import LARGEST_BYTES, dtype_bytes, format_bytes

logger = logging.getLogger(__name__)

NO_LIMIT = Budgets(LARGEST_BYTES, LARGEST_BYTES)
PREFETCH_DEPTH = 1
"""Chunks fetched ahead with overlap: one lets a transfer run during the use before it, and each takes a block."""


def plan_or_shortage(question: Question, *, moves: bool = True) -> Plan:
    """Plans as `elixir.search.plan_from_trace` does, but an error says only what is missing. With `moves`, layers of a
    pass may have their inputs on the host."""
    return Planning(question, moves=moves).plan_or_shortage()


def planned(question: Question, *, briefly: bool = False) -> Plan | None:
    """The plan; None where nothing fits. `briefly`, the fastest one at the rates of the machine, without the sizes that
    are tried when nothing else fits."""
    return Planning(question.nominal if briefly else question, briefly=briefly).plan


class Planning:
    """A question that is looked at closer and closer: each look begins with what those before have found.

    Args:
        question: with activations that are chosen.
        moves: layers of a pass may have their inputs on the host.
        briefly: look no further than at the sizes that are tried first, with few simulations.
    """

    def __init__(self, question: Question, *, moves: bool = True, briefly: bool = False) -> None:
        if question.request.activations is not None:
            raise InputError("activations='auto' needs the model, of which a search for one step makes several traces")
        self.question, self._briefly, self._budgets = question, briefly, budgets_of(question)
        # A pass does not say what an embedding looks up, as the trace of a micro-batch does.
        matrices = setting_for(question).matrices
        self._asked = [
            (each.request, [space_of(way, matrices=matrices) for way in with_units_as_one(each)])
            for each in variants(question, moves=moves and not briefly)
        ]
        self._offered = (self._budgets, self._budgets.with_slack())[: 1 + bool(self._budgets.device_slack_bytes)]
        """The budgets, and those that are tried where nothing fits them."""
        self._made: dict[Budgets, list[list[_Way]]] = {}
        self._nearest: list[int] = []
        """Memory that must be free for plans that the machine has too little for."""

    def nominal_s(self) -> float:
        """Seconds of the fastest plan at the rates of the machine; infinite where nothing fits. Unlike `plan` it does
        not ask whether the machine has what must be free next to the plan."""
        found = (fastest(self._variants(budgets), _LOOKS[:-1]) for budgets in self._offered)
        return next((_chosen(best).nominal_s() for best in found if best is not None), math.inf)

    @cached_property
    @garbage_collection_paused()
    def plan(self) -> Plan | None:
        """The plan of the fastest variant. It may take memory that is kept back for the allocator, if none fits
        otherwise."""
        found = (_in_machine(self._within, each, self.question, self._nearest) for each in self._offered)
        return next((plan for plan in found if plan is not None), None)

    def plan_or_shortage(self) -> Plan:
        """The plan; what is worth knowing of it is logged.

        Raises:
            PlanError: nothing fits; says what is missing.
        """
        (trace, _, request), budgets, plan = self.question, self._budgets, self.plan
        _say(self.question, budgets)
        if plan is None and self._nearest:
            raise PlanError(
                f"{trace.model_name} at world size {request.world_size} does not fit the machine with all that must be "
                "free there",
                needed_bytes=min(self._nearest),
                available_bytes=budgets.given_host_bytes,
            )
        if plan is None:  # the first variant keeps least
            raise shortage(self._asked[0][1][-1], request, budgets)
        if plan.device_reserve_bytes != budgets.device_reserve_bytes:
            logger.warning(
                "the plan takes device memory that is kept back for what the allocator cannot use (%s): set "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which leaves fewer gaps",
                format_bytes(budgets.device_slack_bytes),
            )
        instead = _moments_instead(self.question, budgets) if plan.uses_disk else None
        if instead is not None:
            logger.warning(
                "states go to the disk, which slows steps and wears the drive: with moments=%r none would need to",
                instead,
            )
        return plan

    def _variants(self, budgets: Budgets) -> list[list[_Way]]:
        """Ways to fetch the units of each variant, the preferred one first; nothing is searched yet."""
        made = [[_Way(each, budgets, request, self._briefly) for each in spaces] for request, spaces in self._asked]
        return self._made.setdefault(budgets, made)

    def _within(self, budgets: Budgets) -> Plan | None:
        best = fastest(self._variants(budgets), _LOOKS)
        return None if best is None else _chosen(best).plan


def _say(question: Question, budgets: Budgets) -> None:
    """The log has what is not known of the network, and what is kept back."""
    ranks = question.request.world_size
    say_if_network_unknown(question.hardware, ranks, question.hardware.ranks_per_host(ranks))
    if budgets.device_reserve_bytes or budgets.host_reserve_bytes:
        logger.info(
            "%s of a device and %s of the host are kept back for what no plan counts (device_reserve=, host_reserve=)",
            format_bytes(budgets.device_reserve_bytes),
            format_bytes(budgets.host_reserve_bytes),
        )


def _in_machine(
    within: Callable[[Budgets], Plan | None], budgets: Budgets, question: Question, nearest: list[int]
) -> Plan | None:
    """The plan with which all that must be free is no more than the machine has; `nearest` gets what the others
    need."""
    while (plan := within(budgets)) is not None and budgets.machine_bytes is not None:
        needed_bytes, predicted = must_be_free_bytes(plan, question.hardware), plan.predicted
        over_bytes = needed_bytes - budgets.machine_bytes
        if over_bytes <= 0:
            return _with_rest(plan, -over_bytes, question.hardware)
        # On a CPU, whose heap and device are in the same memory, only the plan tells how much of it is the host's.
        nearest.append(needed_bytes - predicted.checkpoint_bytes)
        if over_bytes > predicted.host_peak_bytes:
            return None
        budgets = replace(budgets, host_bytes=predicted.host_peak_bytes - over_bytes)
    return plan


def _with_rest(plan: Plan, rest_bytes: int, hardware: HardwareProfile) -> Plan:
    """The plan whose budgets are what it takes and what a machine then has left, where its devices are CPUs."""
    if hardware.device_kind != "cpu":
        return plan
    device_bytes = plan.predicted.device_peak_bytes + rest_bytes // hardware.ranks_per_host(plan.world_size)
    return replace(
        plan,
        device_budget_bytes=min(plan.device_budget_bytes, device_bytes),
        host_budget_bytes=plan.predicted.host_peak_bytes + rest_bytes,
    )


def space_of(question: Question, **changes: Any) -> SearchSpace:
    """The question, ready to be searched; `changes` are fields of its `Setting`."""
    return SearchSpace(question.trace, question.hardware, replace(setting_for(question), **changes))


def least_bytes(question: Question, device_bytes: int | None, **changes: Any) -> int:
    """The least device memory of any candidate; with a size of device memory, the least host memory of those that fit
    it, and 0 where none does. `changes` are fields of the `Setting`."""
    space = space_of(variants(question, moves=False)[0], **changes)
    disk = space if "spill" in changes else space.with_disk(budgets_of(question))
    found = every_family(disk, question.request, device_bytes or 0)
    return least_device(found).device_bytes if device_bytes is None else least_host(found)


def least_host_bytes(question: Question) -> int:
    """Host memory of a machine for a plan with overlap and chunks of a sensible size; 0 where none is enough."""
    request = question.request
    if request.placement != "auto" or request.search != "optimal" or not request.overlap:
        return 0
    space, budgets = space_of(question), budgets_of(question)
    some = families(space, replace(budgets, host_bytes=LARGEST_BYTES), space.sizes(outsized=True))
    return least_host(some, PREFETCH_DEPTH)


def _moments_instead(question: Question, budgets: Budgets) -> MomentKind | None:
    """The kind of moments in fewer bits with which no disk is needed, that with most bits first; None if there is
    none."""
    kinds: tuple[MomentKind, ...] = get_args(MomentKind)
    for kind in kinds[kinds.index(question.request.moments) + 1 :]:
        try:
            fewer = question._replace(request=replace(question.request, moments=kind, disk_memory=None))
            if 0 < least_bytes(fewer, budgets.device_bytes) <= budgets.host_bytes:
                return kind
        except InputError:  # the optimizer is no Adam, or masters are wider than float32
            return None
    return None


def lacks_memory(question: Question) -> bool:
    """Whether weights and states exceed all memory together, whatever a batch takes."""
    budgets = budgets_of(question)
    return bool(lacks_room(question.trace, setting_for(question), budgets))


def packing_floors(question: Question, sizes: Sequence[int] = ()) -> list[tuple[float, int]]:
    """The least floor of all shapes of each packing of each variant at the rates of the machine, and its size of
    chunks; the least first, and none where no shape fits. A plan of few chunks whose homes are no shape may be faster.

    Args:
        question: of a step.
        sizes: of chunks; by default all that a search tries first.
    """
    budgets, found = budgets_of(question), list[tuple[float, int]]()
    for each in variants(question, moves=True):
        request, space = each.request, space_of(each)
        if not is_ruled_out(space.trace, space.setting, budgets):
            tried, there = sizes or space.tiers(request)[0](), space.with_disk(budgets)
            found += ShapeSearch(there, budgets, tried, (Scenario(),), request.placement).floors()
    return sorted(found)


def least_need(question: Question) -> MemoryNeed:
    """The need with everything on the host, chunks as small as is sensible and as few blocks as can be; with everything
    on the device where the request says so."""
    space = space_of(question)
    homes: Literal["cuda", "cpu"] = "cuda" if question.request.placement == "cuda" else "cpu"
    family = families(space, NO_LIMIT, space.sizes(outsized=False)[:1], homes)[0]
    return family.model.need(family.placement, family.fewest[min(PREFETCH_DEPTH, len(family.fewest) - 1)])


def budgets_of(question: Question) -> Budgets:
    """The budgets of a question, that of the disk included."""
    hardware, request = question.hardware, question.request
    return replace(resolve_budgets(hardware, request), disk_bytes=disk_budget(hardware, request.disk_memory))


@garbage_collection_paused()
def plan_in(space: SearchSpace, budgets: Budgets, request: SearchRequest) -> Plan | None:
    """The plan of a space, whose passes have one size; None where nothing fits."""
    return _Way(space, budgets, request).plan


@dataclass(eq=False)
class _Way:
    """One variant of a step, with its units fetched in one way. Seconds are infinite where nothing fits."""

    space: SearchSpace
    budgets: Budgets
    request: SearchRequest
    briefly: bool = False
    """Look no further than at the sizes that are tried first."""
    _made: dict[tuple[Setting, int], ShapeSearch] = field(default_factory=dict)

    def compute_s(self) -> float:
        """Seconds of compute in a step, wherever chunks are."""
        return self.space.cost.compute_s

    def floor_s(self) -> float:
        """The least floor of all shapes of the sizes that are tried first."""
        floors = (search.floors() for search in self._searches(briefly=True))
        return next((found[0][0] for found in floors if found), math.inf)

    def nominal_s(self) -> float:
        """Seconds of the fastest plan at the rates of the machine."""
        return math.inf if self._found is None else self._found.fastest_s

    def plan_s(self) -> float:
        """Seconds of the plan."""
        return math.inf if self.plan is None else self.plan.predicted.step_s

    @cached_property
    def plan(self) -> Plan | None:
        """The plan; None where nothing fits."""
        search = self._found
        outcome = None if search is None else search.find(sure=self.request.assume != "nominal")
        return None if search is None or outcome is None else to_plan(search.space, outcome, self.budgets, self.request)

    @cached_property
    def _found(self) -> ShapeSearch | None:
        """The first search by which something fits."""
        return next((each for each in self._searches(briefly=self.briefly) if each.fastest_s < math.inf), None)

    def _searches(self, *, briefly: bool) -> Iterator[ShapeSearch]:
        """Searches, each to be made only where nothing fits by those before: sensible sizes, overlap, and then host
        memory for all states, are given up."""
        if is_ruled_out(self.space.trace, self.space.setting, self.budgets):
            return
        possible, work = _scenarios(self.space, self.request), BRIEF_WORK if self.briefly else WORK
        for place in dict.fromkeys((self.space, self.space.with_disk(self.budgets))):
            for here in (place,) if briefly else dict.fromkeys((place, place.without_overlap)):
                for number, tier in enumerate(here.tiers(self.request)[: 1 if briefly else None]):
                    key = here.setting, number
                    if key not in self._made:
                        placement = self.request.placement
                        self._made[key] = ShapeSearch(here, self.budgets, tier(), possible, placement, work)
                    yield self._made[key]


def _chosen(ways: Sequence[_Way]) -> _Way:
    """The way to fetch units with which the plan of a variant is made."""
    return fastest(ways, (_Way.compute_s, _Way.floor_s, _Way.nominal_s)) or ways[-1]


def _floor_s(ways: Sequence[_Way]) -> float:
    """Seconds that no way to fetch the units of a variant can beat: compute, if the floor of one is hardly above it."""
    least_s = ways[0].compute_s()
    return least_s if ways[0].floor_s() <= WORTHWHILE * least_s else min(way.floor_s() for way in ways)


_LOOKS: tuple[Callable[[Sequence[_Way]], float], ...] = (
    lambda ways: ways[0].compute_s(),
    _floor_s,
    lambda ways: _chosen(ways).nominal_s(),
    lambda ways: _chosen(ways).plan_s(),
)
"""Looks at a variant of a step, closer and closer."""


def simple_plan(
    trace: StepTrace,
    hardware: HardwareProfile,
    request: SearchRequest,
    *,
    split_number: int = 10,
    allocate_factor: float = 0.6,
    shard_device: Literal["cuda", "cpu"] = "cuda",
) -> Plan:
    """A plan by hand: no search, and a budget is checked only where it is given. See `elixir.search.simple_search`."""
    check_count("split_number", split_number)
    if request.activations is not None:
        raise InputError("a plan by hand chooses no activations; use optimal_search, or leave out activations=")
    if isinstance(allocate_factor, bool) or not isinstance(allocate_factor, (int, float)):
        raise InputTypeError(f"allocate_factor must be a number, got {allocate_factor!r}")
    if not 0 < allocate_factor <= 1:
        raise InputError(f"allocate_factor must be above 0 and at most 1, got {allocate_factor}")
    if shard_device not in ("cuda", "cpu"):
        raise InputError(f"shard_device must be 'cuda' or 'cpu', got {shard_device!r}")
    limits: dict[str, Any] = {} if request.device_memory is not None else {"device_memory": LARGEST_BYTES}
    limits |= {} if request.gives_host else {"host_budget": LARGEST_BYTES}
    asked = Question(trace, hardware, request)
    matrices = setting_for(asked).matrices  # a pass does not say what an embedding looks up
    asked = asked._replace(trace=pass_trace(trace, request.sizes[-1]))
    setting = replace(setting_for(asked), matrices=matrices)
    say_if_network_unknown(hardware, request.world_size, setting.ranks_per_host)
    setting = replace(setting, early_updates=bool(setting.early_updates))
    budgets = resolve_budgets(hardware, replace(request, **limits))

    def way(question: Question) -> tuple[SearchSpace, Candidate]:
        space = SearchSpace(question.trace, hardware, setting)
        size = max(space.table.largest_bytes, -(-space.table.total_bytes // split_number))
        homes = shard_device if request.placement == "auto" else request.placement
        family = families(space, budgets, [size], homes)[0]
        streamed = family.placement.resident.count(False)
        depth = PREFETCH_DEPTH if request.overlap else 0
        blocks = min(max(family.fewest[depth], math.ceil(allocate_factor * streamed)), streamed)
        return space, weigh(family.model, family.placement, blocks, depth, space.cost)

    ways = [way(each) for each in with_units_as_one(asked)]
    space, candidate = next((each for each in ways if _fits(each[1], budgets)), ways[-1])
    possible, nearest = _scenarios(space, request), list[int]()

    def within(budgets: Budgets) -> Plan | None:
        if not _fits(candidate, budgets):
            return None
        return to_plan(space, judge_updates(space, budgets, candidate, possible), budgets, request)

    made = _in_machine(within, budgets, asked, nearest)
    if made is None:
        if nearest:
            budgets = replace(budgets, host_bytes=0, other_bytes=min(nearest) - candidate.need.host_bytes)
        raise _too_large(candidate, budgets)
    taken = made.predicted
    return replace(
        made,
        device_budget_bytes=taken.device_peak_bytes if request.device_memory is None else budgets.device_bytes,
        host_budget_bytes=made.host_budget_bytes if request.gives_host else taken.host_peak_bytes,
    )


def _too_large(candidate: Candidate, budgets: Budgets) -> PlanError:
    need, levers = candidate.need, [Lever("let optimal_search choose", 0)]
    if need.device_bytes > budgets.device_bytes:
        spare = (candidate.schedule.blocks - 1) * candidate.work.packing.block_bytes
        if spare > 0:
            levers.append(Lever("lower allocate_factor, which saves at most all blocks but one", spare))
        needed, available, name = need.device_bytes, budgets.device_bytes, "device"
    else:
        needed, available, name = need.host_bytes + budgets.other_bytes, budgets.given_host_bytes, "host"
    return PlanError(
        f"the plan that was asked for does not fit the {name} memory",
        needed_bytes=needed,
        available_bytes=available,
        levers=levers,
    )


def _scenarios(space: SearchSpace, request: SearchRequest) -> tuple[Scenario, ...]:
    """The scenarios for which a request is planned, the nominal one first."""
    # Of early updates that the user decides on, clipping decides nothing.
    clips = request.clipping is not False and space.setting.clipping and space.setting.early_updates is None
    found = scenarios(space.hardware, clips=clips)
    return found[:1] if request.assume == "nominal" else found


def _fits(candidate: Candidate, budgets: Budgets) -> bool:
    need = candidate.need
    return need.device_bytes <= budgets.device_bytes and need.host_bytes <= budgets.host_bytes


def setting_for(question: Question) -> Setting:
    """The request as it concerns this step on this machine; with replicas to be chosen, in one, which needs least.

    Raises:
        InputError, InputTypeError: they do not go together.
    """
    trace, hardware, request = question
    if not trace.accesses:
        raise InputError(f"the trace of {trace.model_name} uses no parameter; trace a step that runs the model")
    matrices, optimizer = _matrices(trace, request), optimizer_name(request.optimizer_type)
    if request.frozen_weights == "files":
        hardware.rate("disk_read")  # refuses a machine whose disk is not known
    kind = check_kind(request.moments)
    wide = [p for p in trace.parameters if p.trainable and dtype_bytes(p.dtype) > MASTER_BYTES]
    if kind != "float32" and wide:
        raise InputError(
            f"moments in {kind} go with float32 master weights, but {wide[0].name} is of {wide[0].dtype}; leave "
            "moments at "
            "'float32', or train in float32 or less"
        )
    return Setting(
        request.world_size,
        hardware.ranks_per_host(request.world_size),
        state_size(request.optimizer_type, request.moments),
        bool(request.overlap),
        request.accumulation // trace.pass_size,
        moments=kind,
        early_updates=_early_updates(hardware, request),
        copied=is_copied(optimizer, kind),
        matrices=matrices,
        matrix_states=matrix_states(optimizer),
        averages=averages(optimizer),
        # In float16 the loss is scaled, so that each step looks for an overflow.
        clipping=request.clipping is not False or trace.dtype == "float16",
        frozen_weights=request.frozen_weights,
        replicas=request.divisions(1)[0],
        device_kind=hardware.device_kind,
    )


def _matrices(trace: StepTrace, request: SearchRequest) -> frozenset[str]:
    """The parameters that are stepped as whole matrices."""
    family = matrix_family(optimizer_name(request.optimizer_type))
    if family is None:
        if request.matrices:
            raise InputError(f"matrices need an optimizer of matrices such as Muon, found {request.optimizer_type!r}")
        return frozenset()
    able = {p.name: p.shape for p in trace.parameters if p.trainable and len(p.shape) == 2 and p.numel}
    if request.matrices is not None:
        wrong = [name for name in request.matrices if name not in able]
        if wrong:
            raise InputError(f"{few(wrong)} cannot be stepped by {family}, which takes trained matrices of the model")
        return frozenset(request.matrices)
    looked_up = {i for access in trace.accesses if access.operator == "embedding" for i in access.parameters}
    shapes = {trace.parameters[index].shape for index in looked_up}
    return frozenset(name for name, shape in able.items() if shape not in shapes)


def _early_updates(hardware: HardwareProfile, request: SearchRequest) -> bool | None:
    """`SearchRequest.early_updates` as it concerns this machine and optimizer; only an Adam is updated early."""
    optimizer = optimizer_name(request.optimizer_type)
    if not is_adam(optimizer) or matrix_family(optimizer) is not None:
        return False
    # The cores of a CPU that is the device compute backward, so that host updates during it do not come for nothing.
    return False if request.early_updates is None and hardware.device_kind == "cpu" else request.early_updates
