"""The use order: which parameters each part of the step reads, as the runtime will see it too."""

from __future__ import annotations

import bisect
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elixir.access.access_listener import REPLACES_MEMORY, AccessListener, Pins, operator_reads_only_metadata
from elixir.access.autograd import current_node_number, detached
from elixir.access.interception import TrackedView, untrack
from elixir.access.placeholders import storage_of
from elixir.step_trace import Direction, Operation, Phase, Transfer, enclosing, is_inside, unit_runs
from elixir.torch_private import (
    DisableTorchDispatch,
    OpOverload,
    current_autograd_node,
    current_graph_task_id,
    sequence_number,
    tree_leaves,
)
from elixir.tracer.ledger import Ledger
from elixir.tracer.meta import TracedModel
from elixir.tracer.unit_results import UnitResults

_MEMORY_ALONE: ContextVar[bool] = ContextVar("memory_alone", default=False)

COMPILED_BACKWARD, ARRIVAL = "CompiledFunctionBackward", "AccumulateGrad"
"""The operator of the backward of a compiled unit, and of the use without weights in which its gradients arrive."""


@contextmanager
def memory_alone() -> Iterator[None]:
    """Inside of it, calls of a model that is called after it count by their memory alone, not in the order of uses.

    For what comes before a step and not before each: generation, and a second look at what was generated. Outside of a
    trace it does nothing.
    """
    token = _MEMORY_ALONE.set(True)
    try:
        yield
    finally:
        _MEMORY_ALONE.reset(token)


@dataclass(slots=True)
class Use:
    """An access while it is being recorded."""

    phase: Phase
    parameters: list[int]
    module: str
    operator: str
    log_position: int
    pin_until: int
    operations: list[Operation] = field(default_factory=list)
    memory_alone: bool = False
    """See `memory_alone`."""
    kept_position: int = 0
    """The position in the ledger's log at which its bytes kept are read. If a unit has begun since the use before, then
    there. If one has ended, where the next module began: what the unit was called with may be held until it has
    returned."""


@dataclass(slots=True)
class _Scope:
    """Bounds how long weights are in use: the call of a module, an autograd node, or all that is outside of both."""

    module: str = ""
    uses: list[int] = field(default_factory=list)
    parameters: set[int] = field(default_factory=set)
    views: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    """Views of weights that were made in it, and may be alive."""


class UseOrder(AccessListener):
    """The listener of a trace: records uses, knows the running module and the phase.

    On meta, operators that compute a whole layer have no kernel: there is room for no weights at once.

    Args:
        traced: the model that is traced.
        ledger: whose log's length says when something happened.
        units: modules whose forwards are watched, and their names.
    """

    def __init__(self, traced: TracedModel, ledger: Ledger, units: Mapping[nn.Module, str]) -> None:
        self._names = {module: name or type(module).__name__ for module, name in traced.modules.items()}
        self._parameters = traced.parameters
        self._parameter_names = list(traced.names.values())
        self._index = {parameter: index for index, parameter in enumerate(traced.parameters)}
        self._storages = {p.untyped_storage()._cdata: index for p, index in self._index.items()}
        self._log = ledger.log
        self._scopes: list[_Scope] = []
        self._forward_depth = 0  # scopes that were open when backward began
        self._marks: tuple[list[int], list[str]] = ([0], [""])  # sequence numbers at which the module changes
        self._last_place = ("", -1)  # what `place` has found for a node, and the node's number; until the next mark
        self._node, self._node_scope = -1, _Scope()  # number of the node that last asked for a weight
        self._outside = _Scope()  # of forward while no module is running
        self._written: set[int] = set()
        self._choosing: set[str] = set()  # modules that have chosen by values which no trace has
        self._keeping: set[str] = set()  # modules that have kept a view of a weight, beyond what they returned
        self._in_backward = False
        self._backward_grad_mode = False
        self._finished = False
        self._unit_position: int | None = None  # length of the log when a unit began or ended, until the next use
        self._unit_ended = False  # whether it ended, and no module has begun since
        self.uses: list[Use] = []
        self.results = UnitResults(units, ledger, self.uses)
        """Watches what units make in forward."""
        self.calls: list[int] = []
        """Positions of the uses from which on outermost modules ran in forward."""
        self.ran: dict[str, None] = {}
        self._recomputed: dict[int, list[str]] = {}  # names by the node that asked for them
        self.transfers: list[Transfer] = []
        """Copies of activations over the link; accesses are positions of uses."""
        self.grad_use: dict[int, int] = {}
        self.grad_arrivals: dict[int, int] = {}
        self.grad_position: dict[int, int] = {}
        """Length of the ledger's log when autograd had accumulated a gradient."""
        self.backward_position = sys.maxsize
        """Length of the ledger's log when backward began; larger than any if it never did."""

    # --- what runs now -----------------------------------------------------------------------------------------

    def phase(self) -> Phase:
        """Forward; recompute when a module runs inside backward; else backward."""
        running = current_graph_task_id() != -1
        if running != self._in_backward:
            self._in_backward = running
            if running:
                self.backward_position = min(self.backward_position, len(self._log))
                self._forward_depth = len(self._scopes)
                self._backward_grad_mode = _creates_graph()
            else:
                self._end_node()
        if not running:
            return "forward"
        if len(self._scopes) > self._forward_depth:
            return "recompute"
        # A checkpointed function that is no module: gradients are on inside, though this backward builds no graph.
        return "recompute" if torch.is_grad_enabled() and not self._backward_grad_mode else "backward"

    def module(self) -> str:
        """Qualified name of the module that runs now, or whose forward made the autograd node that runs now."""
        return self.place()[1]

    def place(self) -> tuple[Phase, str, int]:
        """Phase, module, and number of the autograd node that runs now: -1 where it runs a module again or none does.

        As `phase` and `module`, at once.
        """
        phase = self.phase()
        if phase != "backward":
            return phase, self._scopes[-1].module if self._scopes else "", -1
        return phase, *self._place_of_node()

    def _place_of_node(self) -> tuple[str, int]:
        """The module whose forward made the autograd node that runs now, and the node's number."""
        node = current_autograd_node()
        if node is None:
            return "", -1
        number: int = node._sequence_nr()
        if number != self._last_place[1]:
            marks, modules = self._marks
            self._last_place = modules[bisect.bisect_right(marks, number) - 1], number
        return self._last_place

    def innermost(self) -> object:
        """An object that stays the same while one call of the innermost module lasts."""
        return self._scopes[-1] if self._scopes else None

    # --- AccessListener ----------------------------------------------------------------------------------------

    claims_saved = True

    def used(self, parameters: list[nn.Parameter], function: str) -> Pins:
        """A function is about to read parameters."""
        phase, module, _ = self.place()
        indices = [self._index[parameter] for parameter in parameters if parameter in self._index]
        position = self._record(phase, indices, module, function)
        scope = self._scope(phase)
        scope.uses.append(position)
        scope.parameters.update(indices)
        return ()

    def reached(self, storages: Sequence[int], operator: OpOverload) -> None:
        """An operator is about to run on storages. Weights there that no torch function has announced are used here.

        TorchScript, `torch.vmap` and compiled extensions call operators so; the runtime sees them through
        `elixir.access.placeholders`.
        """
        if self._finished or self._storages.keys().isdisjoint(storages):
            return
        unseen: dict[int, None] = {}
        for storage in storages:
            index = self._storages.get(storage)
            if index is not None and not self._is_announced(index):
                unseen[index] = None
        if unseen:
            name = operator._schema.name.partition("::")[2]
            if name == REPLACES_MEMORY:  # the first tensor gets other memory, that of the second
                taken = {self._storages.get(storage) for storage in storages[1:]}
                unseen = {index: None for index in unseen if index in taken}
            if unseen and not operator_reads_only_metadata(name):
                self.used([self._parameters[index] for index in unseen], name)

    def parameter_of(self, view: torch.Tensor) -> nn.Parameter | None:
        """Views are recognised by their storage."""
        index = self._storages.get(storage_of(view))
        if index is not None and self._scopes:
            self._scopes[-1].views.append(weakref.ref(view))
        return None if index is None else self._parameters[index]

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether a module that is running, or else the node that is, has read the parameter."""
        index = self._index[parameter]
        if self.phase() == "forward" and not self._scopes:
            return False  # nothing bounds its lifetime
        return self._is_announced(index)

    def writes(self, parameters: list[nn.Parameter], function: str, *, of_weights: bool) -> None:
        """Notes which weights are written to."""
        self._written.update(self._index[parameter] for parameter in parameters if parameter in self._index)

    def wrote(self, parameters: list[nn.Parameter]) -> None:
        """Finds weights that now lie elsewhere: another tensor may get the number of the storage they have left."""
        for parameter in parameters:
            index, storage = self._index[parameter], storage_of(parameter)
            if self._storages.get(storage) != index:
                self._storages = {number: at for number, at in self._storages.items() if at != index}
                self._storages[storage] = index

    def moved(self, tensor: torch.Tensor) -> None:
        """An operator has given a tensor other memory."""
        self.wrote([parameter for parameter in self._parameters if parameter is tensor])

    def entered(self, module: nn.Module) -> None:
        """A module starts."""
        name = self._names.get(module, type(module).__name__)
        before = self.phase()  # notices that backward has begun while the scopes that were open before still count
        if before == "forward":
            if not self._scopes:
                self.calls.append(len(self.uses))
            if not _MEMORY_ALONE.get():  # their accesses are no part of the order
                self.results.entered(module)
        if module in self.results.units or self._unit_ended:
            self._unit_position, self._unit_ended = len(self._log), False
        self._scopes.append(_Scope(name))
        self.ran[name] = None
        if before != "forward" and len(self._scopes) == self._forward_depth + 1:
            self._enter_node()  # a reentrant checkpoint is a separate node
            self._recomputed.setdefault(current_node_number(), []).append(name)
        self._mark(name)

    def left(self, module: nn.Module, output: Any) -> Any:
        """A module returns: its uses end."""
        self.results.left(module, output)
        if module in self.results.units and self.phase() == "forward":
            self._unit_position, self._unit_ended = len(self._log), True
        scope = self._scopes.pop()
        self._end(scope)
        views = scope.views and [view for view in scope.views if view() is not None]
        if views and self._scopes:
            self._scopes[-1].views += views
        if views and self.phase() == "forward":  # what stops a recompute keeps the frames that it ends
            returned = set(map(id, tree_leaves(output)))
            if any(id(view()) not in returned for view in views):
                self._keeping.add(scope.module)
        self._mark(self._scopes[-1].module if self._scopes else "")
        if type(output) is not torch.Tensor:
            untrack(tree_leaves(output))  # at run time a module returns copies of what lies in a block
        return output

    def pack(self, tensor: torch.Tensor) -> Any | None:
        """Claims weights and views of them."""
        index = self._storages.get(storage_of(tensor))
        if index is None:
            self.results.packed()
            return None
        if type(tensor) is not TrackedView:
            return index, detached(tensor)
        with DisableTorchDispatch():  # another tensor, since a node may keep a view, and a module may not
            return index, tensor.detach()

    def unpack(self, handle: Any) -> torch.Tensor:
        """The running node reads a weight; its uses stay until another node asks."""
        index, tensor = handle
        scope = self._scope("backward")
        scope.parameters.add(index)
        last = self.uses[-1]
        if scope.uses and scope.uses[-1] == len(self.uses) - 1 and last.phase == "backward":
            if index not in last.parameters:
                last.parameters.append(index)
        else:
            node = current_autograd_node()
            name = "" if node is None else node.name()
            scope.uses.append(self._record("backward", [index], self._place_of_node()[0], name))
        result: torch.Tensor = tensor
        return result

    # --- costs and gradients -----------------------------------------------------------------------------------

    def cost(self, operation: Operation) -> None:
        """An operator ran since the last use. What runs after the step, such as an optimizer, belongs to no use."""
        if self.uses and not self._finished:
            self.uses[-1].operations.append(operation)

    @property
    def moment(self) -> tuple[int, int]:
        """Position of the last use, and how many operators have run since."""
        last = len(self.uses) - 1
        return (last, len(self.uses[last].operations)) if self.uses else (0, 0)

    def transfer(
        self, direction: Direction, nbytes: int, begun: tuple[int, int] | None = None, *, planned: bool = False
    ) -> None:
        """Compute waits for a copy over the link that has begun at a moment; now if the step makes it itself."""
        if self.uses and not self._finished:
            (begins, after), (ends, ends_after) = begun or self.moment, self.moment
            self.transfers.append(Transfer(direction, nbytes, begins, ends, planned, after, ends_after))

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """Autograd has accumulated (so far) the gradient of a parameter."""
        index = self._index[parameter]
        if self.uses and self.uses[-1].operator == COMPILED_BACKWARD:  # all arrive after the peak inside
            self._record("backward", [], self.uses[-1].module, ARRIVAL)
        self.grad_use[index], self.grad_position[index] = len(self.uses) - 1, len(self._log)
        self.grad_arrivals[index] = self.grad_arrivals.get(index, 0) + 1

    def finish(self) -> None:
        """Closes open uses: the step is over."""
        self._end_node()
        self._finished = True

    def join_units(self, units: Iterable[str]) -> None:
        """Joins successive uses inside a compiled module into one, of all its parameters; after `finish`.

        Eager code stands for compiled code in a trace. At run time weights of such a module come before it starts, or
        with the first of them that its backward asks for, and its gradients arrive when its backward is over.

        Args:
            units: names of the compiled modules.
        """
        units = tuple(units)
        if not units:
            return
        members = {
            unit: [i for i, names in enumerate(self._parameter_names) if any(is_inside(name, unit) for name in names)]
            for unit in units
        }
        for run in unit_runs([(use.phase, use.module) for use in self.uses], units):
            unit, first, last = units[run.unit], run.first, run.last
            positions = range(first, last + 1)
            read = {index: None for position in positions for index in self.uses[position].parameters}
            for position in positions[1:]:
                self.uses[position].parameters = []
            self.uses[first].parameters = list(dict.fromkeys([*members[unit], *read]))  # weights of others may be given
            self.uses[first].pin_until = max(last, *(self.uses[position].pin_until for position in positions))
            for index in members[unit]:
                if first <= self.grad_use.get(index, -1) <= last:
                    self.grad_use[index] = last

    def in_order(self) -> list[int]:
        """The positions of uses that belong to the order: all but those inside of `memory_alone`, of a model, or of
        one of several, that is called outside of it as well."""

        def top(use: Use) -> str:
            return use.module.partition(".")[0]

        called = {top(use) for use in self.uses if not use.memory_alone}
        return [at for at, use in enumerate(self.uses) if not (use.memory_alone and top(use) in called)]

    def chooses(self) -> None:
        """An operator has chosen by scores, such as experts: the running module may read other weights in a run."""
        self._choosing.add(self.module())

    def units_read_piecewise(self, units: Collection[str]) -> set[str]:
        """Units whose weights have to be fetched when they are read, for the reasons of `Unit.fetch`.

        Args:
            units: names of all units.
        """
        found = {enclosing(module, units) for module in self._choosing} | (self._keeping & {*units})
        found |= {*units} - self.ran.keys()  # other code calls what is inside
        # A checkpoint of a part of a unit runs that part again, without what a unit does when it runs.
        found.update(
            unit for names in self._recomputed.values() for name in names if (unit := enclosing(name, units)) != name
        )
        units_of = [{enclosing(name, units) for name in names} for names in self._parameter_names]
        for index in self._written:
            found.update(units_of[index])
        for use in self.uses:
            here = {enclosing(use.module, units)}
            for index in use.parameters:
                found.update(units_of[index] - here)
        return {unit for unit in found if unit is not None}

    def checkpointed(self) -> tuple[str, ...]:
        """The modules that enclose each region that ran again in backward, in forward order."""
        forward = {name: position for position, name in enumerate(self.ran)}
        regions: dict[str, None] = {}
        for names in self._recomputed.values():
            region = _common_prefix(names)
            while region not in forward and "." in region:  # a container that never runs itself
                region = region.rpartition(".")[0]
            regions[region] = None
        return tuple(sorted(regions, key=lambda name: forward.get(name, -1)))

    def _is_announced(self, index: int) -> bool:
        """Whether a running module, or else the node, has announced a parameter."""
        scope = self._scope(self.phase())
        if index in scope.parameters:
            return True
        in_module = bool(self._scopes) and scope is self._scopes[-1]
        return in_module and any(index in each.parameters for each in self._scopes)

    def _scope(self, phase: Phase) -> _Scope:
        """The innermost running module if it bounds how long a use lasts, otherwise the autograd node that runs."""
        if self._scopes and (phase == "forward" or (phase == "recompute" and len(self._scopes) > self._forward_depth)):
            return self._scopes[-1]
        if phase == "forward":
            return self._outside
        self._enter_node()
        return self._node_scope

    def _enter_node(self) -> None:
        """Ends the uses of the previous autograd node once another one runs."""
        sequence = current_node_number()
        if sequence != self._node:
            self._end_node()
            self._node = sequence

    def _end_node(self) -> None:
        """Ends the uses of an autograd node: another one runs, or backward is over, after which a run unpins too."""
        self._end(self._node_scope)
        self._node, self._node_scope = -1, _Scope()

    def _end(self, scope: _Scope) -> None:
        for position in scope.uses:
            self.uses[position].pin_until = len(self.uses) - 1

    def _record(self, phase: Phase, parameters: list[int], module: str, operator: str) -> int:
        position = len(self.uses)
        alone = _MEMORY_ALONE.get()
        here = len(self._log)
        kept = here if self._unit_position is None else self._unit_position
        self._unit_position, self._unit_ended = None, False
        self.uses.append(Use(phase, parameters, module, operator, here, position, [], alone, kept))
        return position

    def _mark(self, module: str) -> None:
        marks, modules = self._marks
        marks.append(sequence_number())
        modules.append(module)
        self._last_place = ("", -1)


def _creates_graph() -> bool:
    """Whether the backward pass that runs now was asked for a graph of itself.

    The grad mode does not tell where the first thing that runs is a checkpoint, which switches it on.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "_engine_run_backward":  # (outputs, *(gradients, retain_graph, create_graph, ...))
            return bool(frame.f_locals["args"][2])
    return torch.is_grad_enabled()


def _common_prefix(names: list[str]) -> str:
    """The innermost module that holds all of `names`: ``a.b`` for ``a.b.c`` and ``a.b.d``."""
    parts = [name.split(".") for name in names]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)
