"""A plan back in the forms of the search: its packing of a trace, and the homes of its chunks."""

from __future__ import annotations

from elixir.errors import InputError
from elixir.optimizer_states import averages, is_copied, matrix_states
from elixir.plan.plan import Plan
from elixir.search.problem.activation_trace import with_inputs_on_host
from elixir.search.problem.coarse_trace import joined_trace, pass_trace
from elixir.search.problem.packed_step import PackedStep, StepFacts
from elixir.search.problem.packing import PackedChunk, Packing
from elixir.search.problem.placement import Placement, Setting
from elixir.step_trace import StepTrace
from elixir.units import dtype_bytes


def trace_under(plan: Plan, trace: StepTrace) -> StepTrace:
    """The step as it runs under a plan: its units fetched as the plan says, in passes, with the inputs of layers on the
    host if the search put them there."""
    moving = [each.unit for each in plan.step.activations if each.swap]
    if plan.pass_size > 1 and trace.pass_size == 1 and not trace.step.swap_bytes:
        trace = with_inputs_on_host(trace, moving)
    return joined_trace(pass_trace(trace, plan.pass_size), plan.step.fetched_whole)


def packed_step_of(plan: Plan, trace: StepTrace) -> PackedStep:
    """The plan's packing of the trace, from which its order follows again.

    Raises:
        InputError: the plan is of another model, or of another order of use.
    """
    if plan.model_fingerprint != trace.model_fingerprint:
        raise InputError(
            f"the plan is for {plan.model_name} ({plan.model_fingerprint}), the trace of {trace.model_name} "
            f"({trace.model_fingerprint}); simulate the trace that the plan was made from"
        )
    trace = trace_under(plan, trace)
    index_of = {param.name: index for index, param in enumerate(trace.parameters)}
    chunks = []
    for number, chunk in enumerate(plan.chunks):
        itemsize = dtype_bytes(chunk.dtype)
        missing = [slot.name for slot in chunk.parameters if slot.name not in index_of]
        if missing:
            raise InputError(
                f"chunk {number} of the plan has {missing[0]!r:.200}, which the trace of {trace.model_name} lacks"
            )
        chunks.append(
            PackedChunk(
                parameters=tuple(index_of[slot.name] for slot in chunk.parameters),
                offset_bytes=tuple(slot.offset * itemsize for slot in chunk.parameters),
                bytes=chunk.weight_bytes,
                dtype=chunk.dtype,
                trainable=chunk.trainable,
                outsized=chunk.weight_bytes > plan.block_bytes,
                matrices=bool(chunk.matrices),
            )
        )
    if sum(len(chunk.parameters) for chunk in chunks) != len(trace.parameters):
        raise InputError(
            f"the trace of {trace.model_name} has {len(trace.parameters)} parameters, the plan others; plan again"
        )
    work = PackedStep(StepFacts(trace), Packing(max(plan.block_bytes, 1), tuple(chunks)))
    if work.order != plan.order:
        raise InputError(
            f"the trace of {trace.model_name} uses its parameters in another order than the plan's; simulate the trace "
            "that the plan was made from, or plan again"
        )
    return work


def setting_of(plan: Plan, ranks_per_host: int, device_kind: str) -> Setting:
    """The setting, which was the same for all candidates when it was searched; the kind of device only matters for
    memory."""
    return Setting(
        plan.world_size,
        ranks_per_host,
        plan.state_size,
        plan.overlap,
        plan.passes,
        moments=plan.moments,
        early_updates=plan.may_update_early,
        copied=is_copied(plan.optimizer, plan.moments),
        matrices=frozenset(plan.matrices),
        matrix_states=matrix_states(plan.optimizer),
        averages=averages(plan.optimizer),
        clipping=plan.clipping,
        frozen_weights=plan.frozen_weights,
        replicas=plan.replicas,
        device_kind=device_kind,
    )


def placement_of(plan: Plan) -> Placement:
    """Homes of its chunks."""
    return Placement(tuple(chunk.home for chunk in plan.chunks))
