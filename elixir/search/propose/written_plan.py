"""Writes a candidate down as a plan."""

from __future__ import annotations

import math

from elixir.hardware.scenario import extremes, unmeasured
from elixir.optimizer_states import optimizer_name
from elixir.plan.chunk_plan import ChunkPlan, ParamSlot
from elixir.plan.plan import Plan
from elixir.plan.prediction import CHECKPOINT_PART, Prediction
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.propose.candidate import Candidate
from elixir.search.propose.judge import Outcome
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.request import SearchRequest
from elixir.search.simulator.simulated_cost import SimulatedCost
from elixir.step_trace import StepTrace
from elixir.units import dtype_bytes, parse_bytes


def to_plan(space: SearchSpace, outcome: Outcome, budgets: Budgets, request: SearchRequest) -> Plan:
    """Writes the choice of a search as a `Plan`."""
    trace, best = space.trace, outcome.best
    work, schedule, unknown = best.work, best.schedule, unmeasured(space.hardware)
    streamed = not all(best.placement.resident)
    seconds = [*step_range_s(space, best), *(judged.step_s for judged in outcome.judgements)]
    chunks = _chunk_plans(trace, best)
    spare_bytes = budgets.host_bytes - best.need.host_bytes
    host_parts = best.need.host_parts | _for_checkpoints(space.model(work.packing.capacity_bytes), spare_bytes)
    block_bytes = work.packing.block_bytes if streamed or best.need.grad_blocks else 0
    return Plan(
        model_name=trace.model_name,
        model_fingerprint=trace.model_fingerprint,
        hardware_name=space.hardware.name,
        hardware_fingerprint=space.hardware.fingerprint,
        world_size=space.setting.world_size,
        dtype=trace.dtype,
        optimizer=optimizer_name(request.optimizer_type),
        state_size=space.setting.states,
        overlap=space.setting.overlap,
        placement=request.placement,
        block_numel=block_bytes // dtype_bytes(_common_dtype(best)),
        block_bytes=block_bytes,
        block_count=schedule.blocks,
        prefetch_depth=schedule.prefetch_depth if streamed else 0,
        grad_block_count=best.need.grad_blocks,
        chunks=chunks,
        order=work.order,
        alignment_bytes=space.table.alignment_bytes,
        device_budget_bytes=budgets.device_bytes,
        host_budget_bytes=budgets.host_bytes,
        disk_budget_bytes=budgets.disk_bytes,
        predicted=Prediction(
            device_peak_bytes=best.need.device_bytes,
            device_parts=best.need.device_parts,
            host_peak_bytes=sum(host_parts.values()),
            host_parts=host_parts,
            disk_peak_bytes=best.need.disk_bytes,
            activation_bytes=max((access.live_bytes for access in trace.accesses), default=0),
            moved_bytes=best.moved.by_link,
            loads=best.moved.loads,
            hits=best.moved.hits,
            seconds=dict(best.seconds),
            fastest_s=outcome.fastest_s,
            range_s=(min(seconds), max(seconds)),
            judgements=outcome.judgements,
            regret_if_known={name: regret for name, regret in outcome.regret_if_known.items() if name in unknown},
            flops=trace.flops * space.setting.accumulation,
            peak_flops_per_s=space.hardware.flops_per_s.get(space.cost.dtype),
        ),
        accumulation=space.setting.accumulation * trace.pass_size,
        moments=space.setting.moments,
        may_update_early=space.setting.early_updates,
        clipping=space.setting.clipping,
        device_reserve_bytes=budgets.device_reserve_bytes,
        host_reserve_bytes=budgets.host_reserve_bytes,
        read_budgets=budgets.read,
        host_threads=space.cost.rates.host_threads,
        start_up_s=best.need.host_bytes / (space.hardware.host_pin_bytes_per_s or math.inf),
        device_name=space.hardware.device_name,
        step=trace.step,
        frozen_weights=space.setting.frozen_weights,
        replicas=space.setting.replicas,
        pass_size=trace.pass_size,
        assume=request.assume,
        reserve_bytes=parse_bytes(request.reserve or 0),
    )


def _for_checkpoints(model: MemoryModel, spare_bytes: int) -> dict[str, int]:
    """The part of host memory for copies while a checkpoint is written: what the budget has to spare, at most
    `MemoryModel.copies_bytes`. Nothing but a save depends on it."""
    amount = min(spare_bytes, model.copies_bytes)
    return {CHECKPOINT_PART: amount} if amount > 0 else {}


def step_range_s(space: SearchSpace, best: Candidate) -> tuple[float, float]:
    """The range of the step's seconds, as far as the machine's rates are uncertain."""
    total_s = []
    for scenario, compute_scale in extremes(space.hardware):
        machine = scenario.machine(space.hardware)
        scale = compute_scale * space.compute_scale
        cost = SimulatedCost(space.trace, machine, space.setting, compute_scale=scale, like=space.cost)
        total_s.append(best.seconds_by(cost)["total"])
    fastest, slowest = total_s
    return fastest, slowest


def _common_dtype(best: Candidate) -> str:
    sizes: dict[str, int] = {}
    for chunk in best.work.packing.chunks:
        sizes[chunk.dtype] = sizes.get(chunk.dtype, 0) + chunk.bytes
    return max(sorted(sizes), key=lambda dtype: sizes[dtype])


def _chunk_plans(trace: StepTrace, best: Candidate) -> tuple[ChunkPlan, ...]:
    plans, order = [], _reduce_order(trace, best)
    for index, chunk in enumerate(best.work.packing.chunks):
        itemsize = dtype_bytes(chunk.dtype)
        slots = tuple(
            ParamSlot(trace.parameters[member].name, offset // itemsize, trace.parameters[member].numel)
            for member, offset in zip(chunk.parameters, chunk.offset_bytes, strict=True)
        )
        home = best.placement.homes[index]
        plans.append(
            ChunkPlan(
                dtype=chunk.dtype,
                trainable=chunk.trainable,
                numel=chunk.bytes // itemsize,
                parameters=slots,
                weight_home=home.weight_home,
                state_home=home.states,
                resident=home.resident,
                reduce_order=order.get(index),
                grad_entry=best.work.grad_entry(index),
                update=home.update,
                matrices=best.work.chunks[index].matrices,
            )
        )
    return tuple(plans)


def _reduce_order(trace: StepTrace, best: Candidate) -> dict[int, int]:
    """Chunks that get gradients, by their place in the order in which the last of them arrives."""
    last: dict[int, int] = {}
    for index, chunk in enumerate(best.work.packing.chunks):
        accesses = [trace.parameters[member].grad_access for member in chunk.parameters]
        arrived = [access for access in accesses if access is not None]
        if arrived:
            last[index] = max(arrived)
    order = sorted(last, key=lambda index: (last[index], -index))
    return {index: place for place, index in enumerate(order)}
