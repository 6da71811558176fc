"""Peaks of a traced step: of activations, of forward and backward, and of the whole step, and what is alive at them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from elixir.step_trace import Contributor, CurveSample
from elixir.tracer.ledger import KINDS, Curve, Int64Array, Ledger, StorageRecord
from elixir.tracer.use_order import UseOrder

MAX_STEP_SAMPLES = 896
"""Samples of the curve in `step_fn`. Enough for any picture; each keeps the highest moment of its stretch."""
MAX_OPTIMIZER_SAMPLES = 128
"""Samples of the optimizer's part; separate, since its length depends on how it was traced and would shift the
others."""
MAX_CONTRIBUTORS = 64


@dataclass(frozen=True)
class Peaks:
    """Bytes at the highest moments of a step."""

    activations: Int64Array
    """Live bytes after every log entry of forward and backward, (entries,): all but parameters, gradients, buffers and
    optimizer states."""
    backward_bytes: int
    """Peak of forward and backward, without the optimizer states of a steady step."""
    step_bytes: int
    """Peak of the whole step, these states included."""
    alive: list[StorageRecord]
    """Storages at `backward_bytes`, oldest first."""

    @property
    def activation_bytes(self) -> int:
        """The most of `activations`."""
        return int(self.activations.max(initial=0))

    @property
    def module(self) -> str:
        """The module in which the peak of forward and backward is reached."""
        return self.alive[-1].module if self.alive else ""

    @property
    def operator(self) -> str:
        """The same for the operator."""
        return operator_name(self.alive[-1].operator) if self.alive else ""


def find_peaks(ledger: Ledger, curve: Curve, end: int, state_bytes: int) -> Peaks:
    """The peaks of a step.

    Args:
        ledger: what was alive.
        curve: its live bytes.
        end: length of the ledger's log when the step, without its optimizer, had ended.
        state_bytes: optimizer states of a steady step.
    """
    total = curve.total
    peak = int(np.argmax(total[:end]))
    backward = int(total[peak])
    # A steady step has its states from the start; in the trace, which is a first step, they come one by one.
    optimizer = state_bytes + int(curve.without("optimizer")[end:].max(initial=0))
    return Peaks(
        activations=curve.without("parameters", "gradients", "buffers", "optimizer")[:end],
        backward_bytes=backward,
        step_bytes=max(backward + state_bytes, optimizer),
        alive=ledger.alive_at(peak),
    )


def samples(curve: Curve, order: UseOrder, step_begin: int, step_end: int, state_bytes: int) -> tuple[CurveSample, ...]:
    """The curve, thinned to the highest moment of each stretch; a steady step has its states from the start."""
    total = curve.total
    entries = len(total)
    begin = max(step_begin - 1, 0)  # earlier entries only list resting memory
    end = min(step_end, entries)
    bounds = np.union1d(_stretches(begin, end, MAX_STEP_SAMPLES), _stretches(end, entries, MAX_OPTIMIZER_SAMPLES))
    operators = np.searchsorted(curve.starts, np.arange(entries), side="right") - 1
    highest = [int(low + total[low:high].argmax()) for low, high in itertools.pairwise(bounds)]
    uses = np.searchsorted([use.log_position for use in order.uses], highest, side="right") - 1
    taken = []
    hosts = curve.host[highest].tolist()
    for at, use, live, host in zip(highest, uses, curve.by_kind[:, highest].T.tolist(), hosts, strict=True):
        by_kind = dict(zip(KINDS, live, strict=True)) | {"optimizer": state_bytes}
        phase: Literal["forward", "recompute", "backward", "optimizer"] = order.uses[max(int(use), 0)].phase
        if at >= step_end:
            phase = "optimizer"
        elif phase == "forward" and at >= order.backward_position:
            phase = "backward"  # the gradient of the loss, before any weight is read
        taken.append(CurveSample(operator=max(int(operators[at]), 0), phase=phase, **by_kind, host=host))
    return tuple(taken)


def _stretches(begin: int, end: int, most: int) -> Int64Array:
    """Bounds of at most so many ranges of about equal length."""
    bounds: Int64Array = np.unique(np.linspace(begin, end, min(end - begin, most) + 1).astype(np.int64))
    return bounds


def contributors(alive: list[StorageRecord]) -> tuple[Contributor, ...]:
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
    if operator is None:
        return ""
    return str(operator)
