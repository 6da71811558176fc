"""The operators of each unit's forward: what they make, what of it is there when the unit returns, and what would run
again if the unit kept nothing for backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elixir.access.placeholders import storage_of
from elixir.step_trace import Access, Operation, Phase, Unit, UnitForward, UnitOperator, unit_runs
from elixir.torch_private import tree_leaves
from elixir.tracer.ledger import Ledger, StorageRecord
from elixir.tracer.operator_cache import DROPOUT, Traits

_KERNEL = "kernel"


@dataclass(slots=True, eq=False)
class _Made:
    """One operator."""

    operator: Any
    occurrence: int
    access: int
    operation: Operation | None
    storages: list[tuple[int, StorageRecord]]
    repeats: bool
    """Whether it gives the same again by the same name: it draws no random numbers."""
    written: bool = False
    """Whether something wrote to what it made."""
    saved_bytes: int = 0


@dataclass(slots=True)
class _Run:
    unit: str
    module: nn.Module
    first_use: int
    made: list[_Made] = field(default_factory=list)
    calls: Counter[Any] = field(default_factory=Counter)
    writes: bool = False
    """Whether it writes to what others have made, so that it gives something else when it runs again."""
    operators_rerun: int = 0
    accesses_rerun: int = 0


class UnitResults:
    """Watches the forwards of units.

    Args:
        units: the modules and their names.
        ledger: knows which storages are alive.
        uses: those of weights so far.
    """

    def __init__(self, units: Mapping[nn.Module, str], ledger: Ledger, uses: Sized) -> None:
        self.units, self._ledger, self._uses = units, ledger, uses
        self._runs: dict[str, list[_Run]] = {}
        self._makers: dict[int, _Made] = {}
        self.run: _Run | None = None
        """The forward of a unit that runs now."""

    def entered(self, module: nn.Module) -> None:
        """A module starts in forward."""
        unit = self.units.get(module)
        if unit is not None and self.run is None:
            self.run = _Run(unit, module, len(self._uses))

    def left(self, module: nn.Module, output: Any) -> None:
        """A module returns: of what its operators made, what is alive stays for backward, or is its output."""
        run = self.run
        if run is None or run.module is not module:
            return
        self.run = None
        self._runs.setdefault(run.unit, []).append(run)
        result = {storage_of(leaf) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)}
        for made in run.made:
            for storage, record in made.storages:
                if storage not in result and self._ledger.at(storage) is record:
                    made.saved_bytes += record.nbytes

    def made(
        self,
        op: Traits,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
        operation: Operation | None,
    ) -> None:
        """An operator has run."""
        if self.run is None:
            return
        storages = dict[int, StorageRecord]()
        for tensor in tensors:
            record = self._ledger.find(tensor)
            if record is not None and record.index not in self._makers:
                storages[storage_of(tensor)] = record
        # A package's flash attention, which a trace replaces by PyTorch's, has another name when the plan runs.
        repeats = not op.of_documents and (not op.draws or _drops_nothing(op, args, kwargs))
        found = self._add(self.run, op.func, operation, [*storages.items()], repeats)
        for record in storages.values():
            self._makers[record.index] = found

    def ran(self, operation: Operation) -> None:
        """A kernel that a compiler makes of several operators has run."""
        if self.run is not None:
            self._add(self.run, _KERNEL, operation, [], repeats=False)

    def _add(
        self,
        run: _Run,
        operator: Any,
        operation: Operation | None,
        storages: list[tuple[int, StorageRecord]],
        repeats: bool,
    ) -> _Made:
        number = run.calls[operator]
        run.calls[operator] = number + 1
        access = max(len(self._uses) - run.first_use - 1, 0)
        run.made.append(_Made(operator, number, access, operation, storages, repeats))
        return run.made[-1]

    def wrote(self, records: Sequence[StorageRecord]) -> None:
        """An operator writes to storages."""
        for record in records:
            maker = self._makers.get(record.index)
            if maker is not None:
                maker.written = True
            if self.run is not None and maker not in self.run.made:
                self.run.writes = True

    def packed(self) -> None:
        """Autograd saves a tensor: all that has run so far would run again, and no more unless it saves another."""
        run = self.run
        if run is not None:
            run.operators_rerun, run.accesses_rerun = len(run.made), len(self._uses) - run.first_use

    def rerunnable_forwards(
        self, units: Sequence[Unit], accesses: Sequence[Access], numbers: Mapping[int, int]
    ) -> tuple[UnitForward, ...]:
        """The forwards of the units that can run again: they write to nothing that others have made, and all calls of
        one that keep anything for backward do the same. Those that are alike are one.

        Args:
            units: all layers of the model, of which the plain and compiled ones can run again.
            accesses: of the trace, in which each call and its backward must be found again.
            numbers: indices of operations, by the identity of the object.
        """
        names, candidates = [unit.name for unit in units], {unit.name for unit in units if unit.form != "checkpointed"}
        several = any(len(calls) > 1 for calls in self._runs.values())
        runs = Counter[tuple[str, Phase]]()
        if several:
            uses = [(access.phase, access.module) for access in accesses]
            runs.update((names[run.unit], run.phase) for run in unit_runs(uses, names))
        alike: dict[tuple[Any, ...], list[str]] = {}
        for unit, calls in self._runs.items():
            # Under `torch.no_grad` nothing is kept.
            saving = [call for call in calls if call.operators_rerun] or calls[:1]
            found = (runs[unit, "forward"], runs[unit, "backward"]) == (len(calls), len(saving))
            if unit in candidates and (len(calls) == 1 or found) and not any(call.writes for call in calls):
                first, *others = (
                    (tuple(_operator(made, numbers) for made in call.made), call.operators_rerun, call.accesses_rerun)
                    for call in saving
                )
                if all(other == first for other in others):
                    alike.setdefault((len(saving), *first), []).append(unit)
        return tuple(UnitForward(tuple(units), *forward) for (_, *forward), units in alike.items())


def _operator(made: _Made, numbers: Mapping[int, int]) -> UnitOperator:
    return UnitOperator(
        operator=str(made.operator),
        occurrence=made.occurrence,
        access=made.access,
        operation=None if made.operation is None else numbers.get(id(made.operation)),
        made_bytes=sum(record.nbytes for _, record in made.storages),
        saved_bytes=made.saved_bytes,
        keepable=bool(made.storages) and made.operation is not None and made.repeats and not made.written,
    )


def _drops_nothing(op: Traits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that may draw random numbers, and would leave the generator elsewhere for others, draws none
    here: attention without dropout."""
    if op.dropout_at is None:
        return False
    return not (args[op.dropout_at] if op.dropout_at < len(args) else kwargs.get(DROPOUT, 0.0))
