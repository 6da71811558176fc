"""From a trace to a plan: checks what was asked, searches, and writes the outcome down."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Literal, get_args

from elixir.errors import InputError, InputTypeError, Lever, PlanError
from elixir.hardware import HardwareProfile
from elixir.moments import check_kind
from elixir.plan import MASTER_BYTES, ChunkPlan, Home, ParamSlot, Plan, PlanPrediction, check_step_in_backward
from elixir.search.budgets import disk_budget, resolve_budgets
from elixir.search.candidate import Candidate, everything_resident, settle, weigh
from elixir.search.homes import PlacementBuilder
from elixir.search.memory import MemoryModel, Setting, Spill
from elixir.search.optimal import Outcome, find_best
from elixir.search.rates import say_if_network_unknown
from elixir.search.shortage import Case, shortage
from elixir.search.space import Budgets, SearchSpace
from elixir.search.states import optimizer_name, state_size
from elixir.tracer.step_trace import StepTrace
from elixir.units import dtype_bytes

logger = logging.getLogger(__name__)

HomeChoice = Literal["auto", "cuda", "cpu"]
SearchName = Literal["optimal", "minimum_waste"]
UNLIMITED_BYTES = 1 << 62
MOST_RANKS = 1 << 20
"""More than any machine has; with more, the padding that makes shards equal would outgrow the models."""
PREFETCH_DEPTH = 1
"""Chunks fetched ahead with overlap: one hides a transfer behind the use before it, and each takes a block."""


def plan_from_trace(
    trace: StepTrace,
    hardware: HardwareProfile,
    world_size: int,
    *,
    optimizer_type: str = "Adam",
    overlap: bool = True,
    device_memory: str | int | None = None,
    host_memory: str | int | None = None,
    placement: HomeChoice = "auto",
    search: SearchName = "optimal",
    accumulation: int = 1,
    disk_memory: str | int | None = None,
    moments: str = "float32",
    step_in_backward: bool = False,
) -> Plan:
    """The fastest plan within the budgets, by the time model; the same plan in every process.

    Args:
        trace: what one step of one rank needs.
        hardware: the machine, by whose rates candidates are compared.
        world_size: number of ranks, one device each; `hardware.devices_per_host` of them share a machine.
        optimizer_type: family whose states are counted, such as ``Adam`` or ``SGD``.
        overlap: transfers run beside compute, with prefetch. Where only that makes it too large, the plan does without.
        device_memory: budget of one device in bytes or as text such as ``"80GiB"``; see `resolve_budgets` for None.
        host_memory: budget of one machine, all its ranks together.
        placement: ``cuda`` keeps weights and states of every chunk on the device, ``cpu`` all of them on the host.
        search: ``optimal`` tries several chunk sizes, ``minimum_waste`` only the one that pads least.
        accumulation: batches per optimizer step, each as large as the trace's.
        disk_memory: of the disk of one machine, bytes or text. Where nothing fits device and host, as many states go there
            as the host lacks room for; None: none do. `ElixirModule` does not run such a plan yet.
        moments: how Adam's are kept: ``float32``, ``bfloat16`` or ``8bit`` (`elixir.kernels.moments`).
        step_in_backward: the host updates chunks while backward still runs. For steps of one backward, without clipping
            and without loss scaling; docs/runtime.md says what else cannot be done between backward and step.

    Raises:
        InputError, InputTypeError: an argument makes no sense, the model has no trainable parameters, or the machine's
            disk is unknown and `disk_memory` is given.
        PlanError: nothing fits; carries what would, and what to change.
    """
    setting, budgets = _prepare(
        trace, hardware, world_size, optimizer_type, moments, overlap, device_memory, host_memory, placement
    )
    _check_count("accumulation", accumulation)
    if step_in_backward:
        _check_step_in_backward(trace, accumulation)
    setting = replace(setting, accumulation=accumulation, step_in_backward=bool(step_in_backward))
    if search not in get_args(SearchName):
        raise InputError(f"search must be one of {list(get_args(SearchName))}, got {search!r}")
    budgets = replace(budgets, disk_bytes=disk_budget(hardware, disk_memory))
    space = SearchSpace(trace, hardware, setting)
    found, least_host_bytes = _search(space, budgets, placement, search)
    if found is None and budgets.disk_bytes and least_host_bytes < UNLIMITED_BYTES:
        setting = replace(setting, spill=Spill(budgets.host_bytes, budgets.disk_bytes))
        found, least_host_bytes = _search(SearchSpace(trace, hardware, setting), budgets, placement, search)
    if found is None:
        raise shortage(Case(trace, hardware, setting, placement, search == "optimal"), budgets, least_host_bytes)
    return to_plan(*found, budgets, optimizer_name(optimizer_type), placement)


def simple_plan(
    trace: StepTrace,
    hardware: HardwareProfile,
    world_size: int,
    *,
    split_number: int = 10,
    allocate_factor: float = 0.6,
    shard_device: Literal["cuda", "cpu"] = "cuda",
    optimizer_type: str = "Adam",
    overlap: bool = True,
    device_memory: str | int | None = None,
    host_memory: str | int | None = None,
    placement: HomeChoice = "auto",
    moments: str = "float32",
    step_in_backward: bool = False,
) -> Plan:
    """A plan by hand: no search, and a budget is checked only where it is given. For tests and for people who know.

    Args:
        split_number: about so many chunks; fewer where the largest parameter needs larger ones.
        allocate_factor: share of the streamed chunks that have an rCache block, above 0 and at most 1.
        shard_device: home of all weights and states. With one rank ``cuda`` makes every chunk resident.
        placement: ``cuda`` and ``cpu`` take the place of `shard_device`.

    The other arguments and the errors are those of `plan_from_trace`.
    """
    _check_count("split_number", split_number)
    if isinstance(allocate_factor, bool) or not isinstance(allocate_factor, (int, float)):
        raise InputTypeError(f"allocate_factor must be a number, got {allocate_factor!r}")
    if not 0 < allocate_factor <= 1:
        raise InputError(f"allocate_factor must be above 0 and at most 1, got {allocate_factor}")
    if shard_device not in ("cuda", "cpu"):
        raise InputError(f"shard_device must be 'cuda' or 'cpu', got {shard_device!r}")
    home: HomeChoice = shard_device if placement == "auto" else placement
    setting, budgets = _prepare(
        trace,
        hardware,
        world_size,
        optimizer_type,
        moments,
        overlap,
        UNLIMITED_BYTES if device_memory is None else device_memory,
        UNLIMITED_BYTES if host_memory is None else host_memory,
        home,
    )
    if step_in_backward:
        _check_step_in_backward(trace, accumulation=1)
        setting = replace(setting, step_in_backward=True, every_in_backward=True)
    space = SearchSpace(trace, hardware, setting)
    size = max(space.table.largest_bytes, -(-space.table.total_bytes // split_number))
    model = space.model(size)
    builder = _everything(model, home)
    depth = PREFETCH_DEPTH if overlap else 0
    schedule = model.work.schedule(builder.placement().residents, depth)
    wanted = math.ceil(allocate_factor * builder.streamed)
    blocks = min(max(schedule.min_blocks, wanted), builder.streamed)
    candidate = weigh(model, builder.placement(), blocks, depth, space.cost)
    if not _fits(candidate, budgets):
        raise _too_large(candidate, budgets)
    given = Budgets(
        candidate.need.device_bytes if device_memory is None else budgets.device_bytes,
        candidate.need.host_bytes if host_memory is None else budgets.host_bytes,
    )
    return to_plan(space, candidate, given, optimizer_name(optimizer_type), placement)


def _too_large(candidate: Candidate, budgets: Budgets) -> PlanError:
    need, levers = candidate.need, [Lever("let optimal_search choose", 0)]
    if need.device_bytes > budgets.device_bytes:
        spare = (candidate.schedule.blocks - 1) * candidate.work.packing.block_bytes
        if spare > 0:
            levers.append(Lever("lower allocate_factor, which saves at most all blocks but one", spare))
        needed, available, name = need.device_bytes, budgets.device_bytes, "device"
    else:
        needed, available, name = need.host_bytes, budgets.host_bytes, "host"
    return PlanError(
        f"the plan that was asked for does not fit the {name} memory",
        needed_bytes=needed,
        available_bytes=available,
        levers=levers,
    )


def _search(
    space: SearchSpace, budgets: Budgets, placement: HomeChoice, search: SearchName
) -> tuple[tuple[SearchSpace, Candidate] | None, int]:
    """The best candidate; sensible sizes, and then overlap, are given up only where nothing fits otherwise.

    With it the least host bytes of all that fit the device, at most `UNLIMITED_BYTES`.
    """
    least_host_bytes = UNLIMITED_BYTES
    settings = [space.setting]
    if space.setting.overlap:
        settings.append(replace(space.setting, overlap=False))
    for setting in settings:
        here = space if setting is space.setting else SearchSpace(space.trace, space.hardware, setting)
        depth = PREFETCH_DEPTH if setting.overlap else 0
        for tier, sizes in enumerate(here.tiers(placement, all_sizes=search == "optimal")):
            if placement == "auto":
                classic = search == "optimal" and tier == 0
                outcome = find_best(here, budgets, sizes(), depth, classic=classic)
                logger.debug("overlap %s, tier %d: %d candidates", setting.overlap, tier, outcome.candidates)
            else:
                outcome = _forced(here, budgets, placement, sizes(), depth)
            if outcome.best is not None:
                return (here, outcome.best), least_host_bytes
            if outcome.least_host is not None:
                least_host_bytes = min(least_host_bytes, outcome.least_host.need.host_bytes)
    return None, least_host_bytes


def _forced(space: SearchSpace, budgets: Budgets, placement: HomeChoice, sizes: tuple[int, ...], depth: int) -> Outcome:
    found: list[Candidate] = []
    for model in (space.model(size) for size in sizes):
        proposals = [settle(model, _everything(model, placement), depth, budgets.device_bytes, space.cost)]
        if placement == "cuda":
            proposals.append(everything_resident(model, budgets.device_bytes, space.cost))
        found.extend(candidate for candidate in proposals if candidate is not None)
    best = min((c for c in found if _fits(c, budgets)), key=lambda candidate: candidate.rank, default=None)
    return Outcome(best, len(found), min(found, key=lambda candidate: candidate.need.host_bytes, default=None))


def _everything(model: MemoryModel, placement: HomeChoice) -> PlacementBuilder:
    """Every chunk where `placement` says, whatever it takes."""
    builder = PlacementBuilder(model, 0)
    if placement == "cuda":
        single = model.setting.world_size == 1
        builder.move_all(range(len(model.work.chunks)), state=True, resident=single, budget_bytes=UNLIMITED_BYTES)
    return builder


def _fits(candidate: Candidate, budgets: Budgets) -> bool:
    need = candidate.need
    return need.device_bytes <= budgets.device_bytes and need.host_bytes <= budgets.host_bytes


def _prepare(
    trace: StepTrace,
    hardware: HardwareProfile,
    world_size: int,
    optimizer_type: str,
    moments: str,
    overlap: bool,
    device_memory: str | int | None,
    host_memory: str | int | None,
    placement: str,
) -> tuple[Setting, Budgets]:
    _check_count("world_size", world_size)
    if world_size > MOST_RANKS:
        raise InputError(f"world_size must be at most {MOST_RANKS:,}, got {world_size:,}")
    if not isinstance(trace, StepTrace):
        raise InputTypeError(f"trace must be a StepTrace, got {type(trace).__name__}")
    if not isinstance(hardware, HardwareProfile):
        raise InputTypeError(
            f"hardware must be a HardwareProfile, such as elixir.hardware.preset('h200'), got {hardware!r}"
        )
    if placement not in get_args(HomeChoice):
        raise InputError(f"placement must be one of {list(get_args(HomeChoice))}, got {placement!r}")
    if not any(param.trainable for param in trace.parameters):
        raise InputError(
            f"{trace.model_name} has no trainable parameters, so there is no step to plan; "
            "set requires_grad on what is to be trained"
        )
    if not trace.accesses:
        raise InputError(f"the trace of {trace.model_name} uses no parameter; trace a step that runs the model")
    ranks_per_host = hardware.ranks_per_host(world_size)
    states = state_size(optimizer_type, moments)
    kind = check_kind(moments)
    wide = [p for p in trace.parameters if p.trainable and dtype_bytes(p.dtype) > MASTER_BYTES]
    if kind != "float32" and wide:
        raise InputError(
            f"moments in {kind} go with float32 master weights, but {wide[0].name} is of {wide[0].dtype}; leave moments at "
            "'float32', or train in float32 or less"
        )
    setting = Setting(world_size, ranks_per_host, states, bool(overlap), moments=kind)
    say_if_network_unknown(hardware, world_size, ranks_per_host)
    return setting, resolve_budgets(hardware, ranks_per_host, device_memory, host_memory)


def _check_step_in_backward(trace: StepTrace, accumulation: int) -> None:
    check_step_in_backward(trace.dtype, accumulation)
    phases = [event.phase == "forward" for event in trace.accesses]
    if any(later and not earlier for earlier, later in itertools.pairwise(phases)):
        raise InputError(
            f"the step of {trace.model_name} runs forward again after a backward, so gradients are whole after the last "
            "backward only; plan with step_in_backward=False"
        )


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputTypeError(f"{name} must be a whole number, got {value!r}")
    if value < 1:
        raise InputError(f"{name} must be 1 or larger, got {value}")


def to_plan(space: SearchSpace, best: Candidate, budgets: Budgets, optimizer: str, placement: HomeChoice) -> Plan:
    """The candidate as a `Plan`."""
    trace, work, schedule = space.trace, best.work, best.schedule
    streamed = not all(best.placement.resident)
    block_bytes = work.packing.block_bytes if streamed or best.need.grad_blocks else 0
    return Plan(
        model_name=trace.model_name,
        model_fingerprint=trace.model_fingerprint,
        hardware_name=space.hardware.name,
        hardware_fingerprint=space.hardware.fingerprint,
        world_size=space.setting.world_size,
        dtype=trace.dtype,
        optimizer=optimizer,
        state_size=space.setting.states,
        overlap=best.overlap,
        placement=placement,
        block_numel=block_bytes // dtype_bytes(_common_dtype(best)),
        block_bytes=block_bytes,
        block_count=schedule.blocks,
        prefetch_depth=schedule.prefetch_depth if streamed else 0,
        grad_block_count=best.need.grad_blocks,
        chunks=_chunk_plans(trace, best, _in_backward(space, best)),
        order=work.order,
        device_budget_bytes=budgets.device_bytes,
        host_budget_bytes=budgets.host_bytes,
        disk_budget_bytes=budgets.disk_bytes,
        predicted=PlanPrediction(
            device_peak_bytes=best.need.device_bytes,
            device_parts=best.need.device_parts,
            host_peak_bytes=best.need.host_bytes,
            host_parts=best.need.host_parts,
            disk_peak_bytes=best.need.disk_bytes,
            moved_bytes={
                "host_to_device": best.moved.fetched_bytes,
                "device_to_host": best.moved.offloaded_bytes,
                "network": best.moved.network_bytes,
                "disk_read": best.moved.disk_bytes,
                "disk_write": best.moved.disk_bytes,
            },
            loads=schedule.loads,
            hits=schedule.hits,
            seconds=dict(best.seconds),
        ),
        accumulation=space.setting.accumulation,
        moments=space.setting.moments,
        may_step_in_backward=space.setting.step_in_backward,
    )


def _common_dtype(best: Candidate) -> str:
    sizes: dict[str, int] = {}
    for chunk in best.work.packing.chunks:
        sizes[chunk.dtype] = sizes.get(chunk.dtype, 0) + chunk.bytes
    return max(sorted(sizes), key=lambda dtype: sizes[dtype])


def _in_backward(space: SearchSpace, best: Candidate) -> frozenset[int]:
    return space.cost.in_backward(best.work, best.placement, best.schedule, overlap=best.overlap)


def _chunk_plans(trace: StepTrace, best: Candidate, in_backward: Collection[int]) -> tuple[ChunkPlan, ...]:
    home: Callable[[bool], Home] = lambda on_device: "device" if on_device else "host"  # noqa: E731
    plans, ranks = [], _grad_ranks(trace, best)
    for index, chunk in enumerate(best.work.packing.chunks):
        itemsize = dtype_bytes(chunk.dtype)
        slots = tuple(
            ParamSlot(trace.parameters[member].name, offset // itemsize, trace.parameters[member].numel)
            for member, offset in zip(chunk.parameters, chunk.offset_bytes, strict=True)
        )
        weight = best.placement.weight_on_device[index]
        plans.append(
            ChunkPlan(
                dtype=chunk.dtype,
                trainable=chunk.trainable,
                numel=chunk.bytes // itemsize,
                parameters=slots,
                weight_home=home(weight),
                state_home="disk"
                if index in best.placement.state_on_disk
                else home(best.placement.state_on_device[index] if chunk.trainable else weight),
                resident=best.placement.resident[index],
                grad_rank=ranks.get(index),
                grad_entry=best.work.grad_entry(index),
                steps_in_backward=index in in_backward,
            )
        )
    return tuple(plans)


def _grad_ranks(trace: StepTrace, best: Candidate) -> dict[int, int]:
    """Chunks that get gradients, by their place in the order in which the last of them arrives."""
    last: dict[int, int] = {}
    for index, chunk in enumerate(best.work.packing.chunks):
        events = [trace.parameters[member].grad_event for member in chunk.parameters]
        arrived = [event for event in events if event is not None]
        if arrived:
            last[index] = max(arrived)
    order = sorted(last, key=lambda index: (last[index], -index))
    return {index: rank for rank, index in enumerate(order)}
