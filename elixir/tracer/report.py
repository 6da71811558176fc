"""Makes the `StepTrace` artifact of the facts that a trace observed: peaks, what is alive at them, the curve."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from elixir.step_trace import Access, Contributor, CurveSample, Operation, ParamInfo, StepShape, StepTrace, Transfer
from elixir.tracer.device.target import OptimizerPhase
from elixir.tracer.ledger import KINDS, Curve, Int64Array, Ledger, StorageRecord
from elixir.tracer.meta import TracedModel
from elixir.tracer.use_order import UseOrder
from elixir.units import dtype_name

MAX_STEP_SAMPLES = 896
"""Samples of the curve in `step_fn`. Enough for any picture; each keeps the highest moment of its stretch."""
MAX_CONTRIBUTORS = 64


def assemble(  # noqa: PLR0913 - each fact of a trace once
    traced: TracedModel,
    ledger: Ledger,
    order: UseOrder,
    *,
    span: tuple[int, int],
    optimizer: OptimizerPhase,
    step: StepShape,
    hears_gradients: bool,
    assumptions: tuple[str, ...],
    uncounted: Collection[Any],
    started: float,
    **identity: str,
) -> StepTrace:
    """Peaks, curve, accesses and gates of a finished trace.

    Args:
        traced, ledger, order: of the trace.
        span: lengths of the ledger's log before `step_fn` ran, and when it had returned.
        optimizer: what the optimizer's part of the step gave.
        step: how the step was asked for.
        hears_gradients: whether the device's memory has room again as soon as autograd has handed a gradient over, and
            it is known when that is.
        assumptions: of the numbers.
        uncounted: operators that allocate more than is counted (`Target.uncounted`).
        started: `time.perf_counter()` at the beginning of the trace.
        identity: what the trace is of: fields of `StepTrace` as they are.
    """
    curve = ledger.curve()
    begin, end = span
    state_bytes = sum(record.nbytes for record in ledger.records if record.kind == "optimizer")
    total = curve.total
    peak = int(np.argmax(total[:end]))
    alive, backward_bytes = ledger.alive_at(peak), int(total[peak])
    activations = curve.without("parameters", "gradients", "buffers", "optimizer")[:end]
    # A steady step has its states from the start; in the trace they come after backward.
    optimizer_bytes = state_bytes + int(curve.without("optimizer")[end:].max(initial=0))
    operations, numbers = _distinct(order)
    incomplete, arriving = (each[:end] for each in ledger.gradients())
    accesses = _accesses(order, activations + incomplete, arriving if hears_gradients else None, numbers)
    in_order = order.in_order()
    places = {position: number for number, position in enumerate(in_order)}
    accesses = _in_order(accesses, in_order) if step.generate is None else _last_call(accesses, order.calls[-1])
    return StepTrace(
        **identity,  # type: ignore[arg-type]
        optimizer=optimizer.description,
        parameters=_parameters(traced, order, places, trains=not step.forward),
        param_bytes=sum(parameter.nbytes for parameter in traced.names),
        grad_bytes=sum(p.grad.nbytes for p in traced.names if p.grad is not None),
        optimizer_bytes=optimizer.state_bytes,
        buffer_bytes=sum(buffer.nbytes for buffer, _ in traced.buffers),
        input_bytes=int(curve.by_kind[KINDS.index("inputs"), end - 1]),
        resting_bytes=int(total[begin - 1]),
        workspace_bytes=int(curve.by_kind[KINDS.index("workspace"), end - 1]),
        activation_peak_bytes=int(activations.max(initial=0)),
        backward_peak_bytes=backward_bytes,
        step_peak_bytes=max(backward_bytes + state_bytes, optimizer_bytes),
        peak_module=alive[-1].module if alive else "",
        peak_operator=operator_name(alive[-1].operator) if alive else "",
        peak_contributors=_contributors(alive),
        # A gradient that is still summed up is with autograd; a plan counts it from the event at which it is complete.
        operations=tuple(operations),
        accesses=accesses,
        curve=_samples(
            curve, ledger.starts, order, (begin - 1, end), state_bytes
        ),  # the log begins with the parameters
        operators=len(ledger.starts),
        checkpointed_modules=order.checkpointed(),
        unused_parameters=tuple(
            names[0] for p, names in traced.names.items() if p.requires_grad and p.grad is None and not step.forward
        ),
        unused_modules=_unused_modules(traced, order),
        assumptions=assumptions + _uncounted(uncounted, alive, backward_bytes),
        trace_s=time.perf_counter() - started,
        step=step,
        transfers=_transfers(order, places) if step.generate is None else (),
        host_peak_bytes=ledger.host_peak_bytes(),
        forwards=order.results.rerunnable_forwards(step.units, accesses, numbers),
    )


def _transfers(order: UseOrder, places: Mapping[int, int]) -> tuple[Transfer, ...]:
    """Copies over the link, by accesses; without those in calls that are no part of the order."""
    return tuple(
        replace(each, begins=places[each.begins], ends=places[each.ends])
        for each in order.transfers
        if each.begins in places and each.ends in places
    )


def _distinct(order: UseOrder) -> tuple[dict[Operation, int], dict[int, int]]:
    """Each different operation and its number, and that number by the object's identity.

    What a repeated operator costs is mostly the same object, and an identity is found sooner than four fields.
    """
    operations: dict[Operation, int] = {}
    numbers: dict[int, int] = {}
    for use in order.uses:
        for operation in use.operations:
            if id(operation) not in numbers:
                numbers[id(operation)] = operations.setdefault(operation, len(operations))
    return operations, numbers


def _parameters(
    traced: TracedModel, order: UseOrder, places: Mapping[int, int], *, trains: bool
) -> tuple[ParamInfo, ...]:
    return tuple(
        ParamInfo(
            name=aliases[0],
            aliases=tuple(aliases[1:]),
            shape=tuple(parameter.shape),
            dtype=dtype_name(parameter.dtype),
            trainable=parameter.requires_grad and trains,
            grad_access=places.get(order.grad_use.get(index, -1)),
            grad_arrivals=order.grad_arrivals.get(index, 0),
        )
        for index, (parameter, aliases) in enumerate(traced.names.items())
    )


def _accesses(
    order: UseOrder, other: Int64Array, arriving: Int64Array | None, numbers: Mapping[int, int]
) -> tuple[Access, ...]:
    starts = np.minimum([use.log_position for use in order.uses], len(other) - 1)
    starts[0] = 0  # work before the first use belongs to it
    # A use begins with what the one before left alive, hence one entry earlier.
    begins = np.maximum(starts - 1, 0)
    ends = np.append(starts[1:], len(other))
    # The highest from every first to every second position of a pair; one entry more, as a position must lie inside.
    between = np.stack((begins, ends), axis=1).ravel()
    highest, with_arriving = (
        np.maximum.reduceat(np.append(live, 0), between)[::2].tolist()
        for live in (other, other if arriving is None else other + arriving)
    )
    kept = [use.kept_position - 1 for use in order.uses]  # the log begins with the parameters
    number = numbers.__getitem__
    return tuple(
        Access(
            phase=use.phase,
            parameters=tuple(use.parameters),
            pin_until=use.pin_until,
            module=use.module,
            operator=use.operator,
            operations=tuple(map(number, map(id, use.operations))),
            live_bytes=live,
            kept_bytes=kept_bytes,
            arriving_bytes=None if arriving is None else most - live,
        )
        for use, live, most, kept_bytes in zip(order.uses, highest, with_arriving, other[kept].tolist(), strict=True)
    )


def _in_order(accesses: tuple[Access, ...], positions: list[int]) -> tuple[Access, ...]:
    """The accesses at `positions`; the first takes the memory that those left out have taken."""
    if len(positions) == len(accesses):
        return accesses
    kept = set(positions)
    left_out = (access for at, access in enumerate(accesses) if at not in kept)
    most = max(access.live_bytes for access in left_out)
    found = [
        replace(accesses[at], pin_until=max(number, bisect_right(positions, accesses[at].pin_until) - 1))
        for number, at in enumerate(positions)
    ]
    found[0] = replace(found[0], live_bytes=max(found[0].live_bytes, most))
    return tuple(found)


def _last_call(accesses: tuple[Access, ...], first: int) -> tuple[Access, ...]:
    """The accesses from `first` on, with the memory that earlier calls of the model take in the same places."""
    before, last = accesses[:first], accesses[first:]
    most = max((access.live_bytes for access in before), default=0)
    alike = [access.parameters for access in before] == [access.parameters for access in last]
    earlier = [access.live_bytes for access in before] if alike else [most] * len(last)
    return tuple(
        replace(access, pin_until=access.pin_until - first, live_bytes=max(access.live_bytes, live))
        for access, live in zip(last, earlier, strict=True)
    )


def _unused_modules(traced: TracedModel, order: UseOrder) -> tuple[str, ...]:
    """Modules that hold parameters and neither ran nor had those parameters used by another module."""
    index = {parameter: position for position, parameter in enumerate(traced.parameters)}
    touched = {position for use in order.uses for position in use.parameters}
    return tuple(
        name
        for module, name in traced.modules.items()
        if (name or type(module).__name__) not in order.ran
        and (own := [index[p] for p in module.parameters(recurse=False)])
        and not any(position in touched for position in own)
    )


def _uncounted(operators: Collection[Any], alive: list[StorageRecord], peak_bytes: int) -> tuple[str, ...]:
    """Says which operators may take more than is counted, if any, with the share of the peak that they made."""
    if not operators:
        return ()
    made = sum(record.nbytes for record in alive if record.operator in operators)
    names = ", ".join(sorted(map(operator_name, operators)))
    return (
        f"{names}: what these allocate beyond their results is not counted, as they are too large to be run for a "
        f"number; they made {100 * made / max(peak_bytes, 1):.1f} % of the peak",
    )


def _samples(
    curve: Curve, starts: list[int], order: UseOrder, span: tuple[int, int], state_bytes: int
) -> tuple[CurveSample, ...]:
    """The curve of a step, thinned to the highest moment of each stretch; a steady step has its states from the start.

    Entries before the `span` of `step_fn` only list resting memory; those after it are the optimizer's.
    """
    total, (begin, end) = curve.total, span
    entries = len(total)
    thinned = np.linspace(begin, end, min(end - begin, MAX_STEP_SAMPLES) + 1).astype(np.int64)
    bounds = np.union1d(thinned, np.arange(end, entries + 1))
    operators = np.searchsorted(starts, np.arange(entries), side="right") - 1
    highest = [int(low + total[low:high].argmax()) for low, high in itertools.pairwise(bounds)]
    uses = np.searchsorted([use.log_position for use in order.uses], highest, side="right") - 1
    taken = []
    hosts = curve.host[highest].tolist()
    for at, use, live, host in zip(highest, uses, curve.by_kind[:, highest].T.tolist(), hosts, strict=True):
        by_kind = dict(zip(KINDS, live, strict=True)) | {"optimizer": state_bytes}
        phase: Literal["forward", "recompute", "backward", "optimizer"] = order.uses[max(int(use), 0)].phase
        if at >= end:
            phase = "optimizer"
        elif phase == "forward" and at >= order.backward_position:
            phase = "backward"  # the gradient of the loss, before any weight is read
        taken.append(CurveSample(operator=max(int(operators[at]), 0), phase=phase, **by_kind, host=host))
    return tuple(taken)


def _contributors(alive: list[StorageRecord]) -> tuple[Contributor, ...]:
    """Groups of storages that are alive, by kind, module and operator, the largest first."""
    names = {number: operator_name(found) for number, found in {id(r.operator): r.operator for r in alive}.items()}
    groups: dict[tuple[Any, str, str], list[int]] = defaultdict(list)
    for record in alive:
        groups[record.kind, record.module, names[id(record.operator)]].append(record.nbytes)
    found = [
        Contributor(kind=kind, module=module, operator=operator, count=len(sizes), bytes=sum(sizes))
        for (kind, module, operator), sizes in groups.items()
    ]
    found.sort(key=lambda c: (-c.bytes, c.kind, c.module, c.operator))
    return tuple(found[:MAX_CONTRIBUTORS])


def operator_name(operator: Any) -> str:
    """``aten.mm.default``; empty for what no operator made."""
    return "" if operator is None else str(operator)
