"""Costs of memory-bound operators in compiled layers that are traced uncompiled: a compiler fuses them.

Between two matrix products, or attention, memory-bound operators are taken for one kernel: it reads each tensor that it
does not make once, and writes what a product or another layer reads, once. What forward makes so is counted as saved
for backward: recomputing it would read about as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from elixir.step_trace import Operation, enclosing
from elixir.tracer.ledger import StorageRecord


class FusedCosts:
    """The costs of one trace.

    Args:
        units: names of the compiled modules.
    """

    def __init__(self, units: Iterable[str]) -> None:
        self.units = frozenset(units)
        self._unit_of: dict[str, str | None] = {}
        self._run: tuple[str, str] | None = None
        self._made: dict[int, int] = {}  # bytes by the record of what the kernels of this run have made
        self._written: set[int] = set()
        self._read: set[int] = set()  # by the kernel that runs now
        self._last: tuple[Operation, int] | None = None  # the last memory-bound operator, and the record of its result

    def of(
        self,
        phase: str,
        module: str,
        operation: Operation,
        reads: Iterable[StorageRecord | None],
        makes: Iterable[StorageRecord | None],
    ) -> Iterator[Operation]:
        """Yields what one operator costs, and what a layer has left to write when another begins."""
        if module not in self._unit_of:
            self._unit_of[module] = enclosing(module, self.units)
        unit = self._unit_of[module]
        run = None if unit is None else (phase, unit)
        if run != self._run:
            if self._last is not None and self._last[1] not in self._written:
                yield replace(self._last[0], moved_bytes=self._made[self._last[1]])
            self._run, self._made, self._written, self._read, self._last = run, {}, set(), set(), None
        if run is None:
            yield operation
            return
        inputs = {record.index: record.nbytes for record in reads if record is not None}
        if operation.flops:
            unwritten = [index for index in inputs if index in self._made and index not in self._written]
            if unwritten and self._last is not None:
                yield replace(self._last[0], moved_bytes=sum(map(self._made.__getitem__, unwritten)))
            self._written.update(unwritten)
            self._read.clear()
            yield operation
            return
        held = self._made.keys() - self._written
        missing = [index for index in inputs if index not in self._read and index not in held]
        self._read.update(missing)
        results = {record.index: record.nbytes for record in makes if record is not None}
        self._made.update(results)
        if results:
            self._last = operation, max(results, key=results.__getitem__)
        if moved := sum(map(inputs.__getitem__, missing)):
            yield replace(operation, moved_bytes=moved)
