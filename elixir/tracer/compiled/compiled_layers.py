"""The compiled layers of a trace, which call generated code in place of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from elixir.errors import TraceError
from elixir.step_trace import Operation, enclosing
from elixir.torch_private import tree_flatten
from elixir.tracer.compiled.generated_code import ATOMS, GeneratedCode, layout_of, tensors_of
from elixir.tracer.ledger import StorageRecord

Kinds = dict[Any, Any]
"""By kind of layer, its `GeneratedCode`."""


class CompiledLayers:
    """Compiled layers of one trace. Until `remove` they call generated code, if inductor compiles all of them.

    Args:
        model: the model that is traced.
        layers: names of the layers -> settings of inductor, empty for those that it has now; None if another compiler
            compiles the layer.
        as_written: whether to trace them as written in any case.
        cost: gets what each kernel costs.
        kinds: code of kinds of layers that traces of the same step have found, to which this one adds.
        capability: compute capability of the CUDA device that is planned for; None for a CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, Mapping[str, Any] | None],
        cost: Callable[[Operation], None],
        kinds: Kinds,
        capability: tuple[int, int] | None,
        *,
        as_written: bool,
    ) -> None:
        known = {name: settings for name, settings in layers.items() if settings is not None}
        as_written = as_written or len(known) < len(layers)
        self._count = len(layers)
        self._cost, self._kinds, self._capability = cost, kinds, capability
        found = {} if as_written else {name: model.get_submodule(name) for name in known}
        self.generated = list(found.values())
        """The layers that call generated code."""
        self.fused_costs = FusedCosts(layers if as_written else ())
        """Costs of operators in layers as written, which a compiler would fuse."""
        numbered: dict[type, set[tuple[str, str]]] = {}
        for name, layer in found.items():
            own = _numbered(layer, name.rpartition(".")[2])
            numbered[type(layer)] = numbered.get(type(layer), own) & own
        self._before = {layer: layer._compiled_call_impl for layer in self.generated}
        for name, layer in found.items():
            flags = tuple(_flags(layer, numbered[type(layer)]))
            kind = repr(known[name]), type(layer), flags, tuple(map(layout_of, tensors_of(layer).values()))
            layer._compiled_call_impl = partial(self._call, layer, known[name], kind)

    def remove(self) -> None:
        """Gives the layers back the calls that they had before."""
        for layer, call in self._before.items():
            layer._compiled_call_impl = call
        for code in self._kinds.values():
            code.forget()

    @property
    def assumption(self) -> tuple[str, ...]:
        """Says what the trace assumes of the layers."""
        if not self._count:
            return ()
        if self.generated:
            return (f"{self._count} compiled modules as the code that inductor generates on this machine",)
        return (
            f"{self._count} compiled modules with the memory that they take uncompiled, and memory-bound operators "
            "fused",
        )

    def _call(
        self, layer: nn.Module, settings: Mapping[str, Any], kind: tuple[Any, ...], *args: Any, **kwargs: Any
    ) -> Any:
        """Runs a layer on meta tensors as its generated code would.

        Raises:
            TraceError: there is no such code for the layer.
        """
        leaves, spec = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = tuple(leaf for leaf in leaves if not isinstance(leaf, torch.Tensor))
        key = kind, str(spec), tuple(map(layout_of, given)), repr(others), torch.is_grad_enabled()
        if key not in self._kinds:
            try:
                self._kinds[key] = GeneratedCode(layer, settings, leaves, spec, self._capability)
            except Exception as error:  # whatever a compiler raises
                said = f"{type(error).__name__}: {error}".split("\n")[0]
                raise TraceError(f"{type(layer).__name__} has no generated code: {said}") from error
        return self._kinds[key](self._cost, [*tensors_of(layer).values(), *given])


def _numbered(layer: nn.Module, number: str) -> set[tuple[str, str]]:
    """The settings of a layer's modules that are its `number` in its list, such as ``layer_idx``."""
    return {
        (name, attribute)
        for name, module in layer.named_modules()
        for attribute, value in vars(module).items()
        if type(value) is int and str(value) == number
    }


def _flags(layer: nn.Module, numbered: set[tuple[str, str]]) -> Iterator[tuple[str, str, Any]]:
    """All by which two layers of a class may differ in code: settings of their modules, and the modules' classes.

    Settings that are `numbered` in all layers of the class are left out, and what runs it compiled.
    """
    for name, module in layer.named_modules():
        yield name, "", type(module)
        for attribute, value in vars(module).items():
            ours = attribute == "_compiled_call_impl" or (name, attribute) in numbered
            if isinstance(value, ATOMS) and not ours:
                yield name, attribute, value


class FusedCosts:
    """The costs of memory-bound operators in compiled layers that are traced uncompiled: a compiler fuses them.

    Between two matrix products, or attention, memory-bound operators are taken for one kernel: it reads each tensor
    that it does not make once, and writes what a product or another layer reads, once. What forward makes so is counted
    as saved for backward: recomputing it would read about as many bytes.

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
