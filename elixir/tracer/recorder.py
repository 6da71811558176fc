"""The dispatch mode of a trace: runs every operator on meta and books what it allocates, costs and knows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from elixir.access.autograd import backward_is_running, current_node_number
from elixir.errors import TraceError
from elixir.step_trace import Operation
from elixir.torch_private import DisableTorchFunction, TorchDispatchMode, tree_leaves, tree_map
from elixir.tracer.compiled import FusedCosts
from elixir.tracer.device.autocast import Autocast
from elixir.tracer.device.autograd_in_place import accumulates_in_place, asks_for_nan, writes_in_place
from elixir.tracer.device.routed_functions import LENGTHS_IN_TENSORS
from elixir.tracer.device.target import Target
from elixir.tracer.host_copies import HostCopies
from elixir.tracer.ledger import Ledger
from elixir.tracer.operation_kinds import attention_of_documents, operation_of, passing
from elixir.tracer.operator_cache import KNOWN_TRAITS, META, Arguments, OperatorCache, Outcome, Traits, traits
from elixir.tracer.step_functions import StepFunctions, replaced_functions, unseen_by_modes
from elixir.tracer.use_order import UseOrder
from elixir.tracer.user_objects import UserObjects
from elixir.tracer.values.expert_choice import Routing, choice_of
from elixir.tracer.values.shadows import MAX_COPIED_NUMEL, SELECTIONS, Shadows, assume_finite, snapshot
from elixir.tracer.values.unknown_number import undecidable, unknown_number, user_location

aten = torch.ops.aten

_ADD = aten.add.Tensor
_CAST = aten._to_copy.default
_READ_NUMBER = aten._local_scalar_dense.default


class Recorder(TorchDispatchMode):
    """Books every operator of a step.

    Args:
        target: rules of the pretend device.
        ledger: where storages are followed.
        order: where uses and costs are recorded, and which knows the running module.
        shadows: known values.
        routing: gives expert choices over unknown scores.
        cache: whether shape propagation is remembered.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: PyTorch would wrap every dispatch in a guard against compilation, which a trace never does."""
        return False

    def __init__(
        self, target: Target, ledger: Ledger, order: UseOrder, shadows: Shadows, routing: Routing, cache: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._target = target
        self._ledger = ledger
        self._log, self._starts = ledger.log, ledger.starts
        self._order = order
        self._shadows = shadows
        self._routing = routing
        self._operators = OperatorCache(target, cache)
        self.host = HostCopies(target, ledger, order, shadows)
        self._around = contextlib.ExitStack()
        self._workspaces = dict(enumerate(ledger.set_aside(2 * target.matrix_libraries, "workspace")))
        """The workspaces of each library, in forward and in backward, for which no product has asked yet."""
        self.fused_costs = FusedCosts(())
        """Costs of operators in compiled layers."""
        self.user_objects = UserObjects()
        """Objects that the step reaches."""

    def __enter__(self) -> Recorder:
        autocast, functions = Autocast(self._target), StepFunctions(self._target.kind, self.host)
        replaced = autocast.replaced() | {("torch.autograd", "_engine_run_backward"): functions.on_in_backward}
        if self._target.counts_host_tensors:
            replaced["torch", "get_rng_state"] = self._counted_state
        self._around.callback(autocast.close)
        for context in (replaced_functions(replaced), unseen_by_modes(), functions):
            self._around.enter_context(context)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._around.__exit__(*error)

    def _counted_state(self, get_state: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The state of the host's generator, which no dispatch shows: a checkpoint keeps one, and another one while its
        region runs again."""
        made = get_state()
        self._ledger.add(made, "activations", self._order.module(), "generator state")
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # In backward the mode of functions is on, and would see every call here.
        if types and any(map(_wraps, types)):
            return NotImplemented  # then the subclass is asked, whose operators come here
        with DisableTorchFunction():
            self._starts.append(len(self._log))
            op = KNOWN_TRAITS.get(id(func)) or traits(func)
            if op.views:  # three of four operators are views
                return func(*args, **kwargs) if kwargs else op.call(*args)
            return self._book(op, func, args, kwargs or {})

    def _book(self, op: Traits, func: Any, args: Any, kwargs: Any) -> Any:
        if op.detours:
            if op.lengths_in_tensors:
                func, args = self._lengths_as_numbers(*LENGTHS_IN_TENSORS[func], args)
                op = traits(func)
            adds = func is _ADD and accumulates_in_place(args)
            if adds or (op.formula_may_write and self._formula_writes(func, args)):
                moved = sum(item.nbytes for item in args if isinstance(item, torch.Tensor))
                self._order.cost(passing(args[0].dtype, 3 * args[0].nbytes if adds else moved))
                return args[0]
            if func is _READ_NUMBER:
                return self._number(args[0])
        arguments = Arguments(args, kwargs)
        self._order.reached(arguments.storages, func)
        if op.detours:
            if (moved := self.host.moved(func, args, kwargs)) is not NotImplemented:
                return moved
            if op.needs_values and (func is not aten.index.Tensor or _indexes_by_mask(args)):
                return self._by_value(func, args, kwargs)
        if not arguments.all_meta and func is aten.native_batch_norm.default:
            self.user_objects.before_write(*args[3:5])
        if not arguments.all_meta and any(t.device.type == "meta" for t in arguments.tensors):
            args, kwargs = self._all_on_meta(args, kwargs)
            arguments = Arguments(args, kwargs)
        if self.host.any and (result := self.host.computed(op, args, kwargs, arguments)) is not NotImplemented:
            return result
        if op.mutates:
            return self._mutate(op, args, kwargs, arguments)
        return self._compute(op, args, kwargs, arguments)

    def _number(self, tensor: torch.Tensor) -> Any:
        value = self._shadows.real(tensor)
        if value is not None:
            return value.item()
        record = self._ledger.find(tensor)
        if record is not None and asks_for_nan(record.operator):
            return False
        return unknown_number(tensor)

    def _compute(self, op: Traits, args: Any, kwargs: Any, arguments: Arguments) -> Any:
        func, (phase, module, node) = op.func, self._order.place()
        if op.matrix_product and self._workspaces and arguments.all_meta:
            self._hold_workspaces(func, args, phase, module)
        outcome = self._operators.recall(op, arguments)
        if outcome is not None:
            result, tensors = self._repeat(func, outcome, module, node)
            real = False
        else:
            result, tensors, outcome = self._operators.run(op, args, kwargs, arguments)
            real = bool(tensors) and tensors[0].device.type != "meta"
            if real and not self._target.counts_host_tensors:
                return result
            for tensor in tensors:
                self._ledger.add(tensor, "activations", module, func).node = node
        if outcome.transient_bytes:
            self._ledger.touch(outcome.transient_bytes, module, func)
        if func is _CAST and self._target.counts_host_tensors:
            self._same_where_the_device_is_the_host(args[0], tensors[0])
        operation = self._of_documents(func, args, kwargs, outcome) if op.of_documents else outcome.operation
        if operation is not None:
            operation = self._cost(operation, arguments.storages, tensors)
        self._order.results.made(op, args, kwargs, tensors, operation)
        if real:
            return result
        if op.exchanges:
            self._shadows.exchange(args)
        if self._may_be_known(op, arguments, tensors):
            self._shadows.derive(func, args, kwargs, arguments.tensors, tensors)
        if op.may_choose or op.checks_finite:
            self._suppose(op, args, kwargs, tensors)
        return result

    def _of_documents(self, func: Any, args: Any, kwargs: Any, outcome: Outcome | None = None) -> Operation:
        """The work of attention inside of documents, whose lengths follow from values."""
        operation = (outcome and outcome.operation) or operation_of(func, args, kwargs, args[0], 1)
        call = attention_of_documents(func, args, kwargs)
        assert operation is not None
        assert call is not None
        begins = None if call.begins is None else self._shadows.real(call.begins)
        return replace(operation, flops=call.flops(begins))

    def _cost(self, operation: Operation, storages: list[int], results: list[torch.Tensor]) -> Operation | None:
        """Books what an operation costs, and gives the operation, if it costs what it does uncompiled."""
        if not self.fused_costs.units:
            self._order.cost(operation)
            return operation
        phase, module, _ = self._order.place()
        reads, makes = map(self._ledger.at, storages), map(self._ledger.find, results)
        whole = None
        for part in self.fused_costs.of(phase, module, operation, reads, makes):
            if part is operation:
                self._order.cost(part)
                whole = part
            else:
                self.kernel(part)
        return whole

    def kernel(self, operation: Operation) -> None:
        """A kernel that a compiler makes of several operators has run."""
        self._order.cost(operation)
        self._order.results.ran(operation)

    def _suppose(self, op: Traits, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        """Gives unknown outcomes the values that they mostly have."""
        if op.checks_finite:
            assume_finite(self._shadows, op.func, args, tensors[0])
        elif (choice := choice_of(op.func, args, kwargs, tensors)) is not None:
            self._order.chooses()
            self._routing.route(self._shadows, self._order.innermost(), choice)

    def _repeat(self, func: Any, outcome: Outcome, module: str, node: int) -> tuple[Any, list[torch.Tensor]]:
        """The result and its tensors as remembered, and booked: the way of nearly all operators that make something."""
        outputs, tensors = [], []
        for output in outcome.outputs:
            if type(output) is tuple:
                size, stride, dtype, held_bytes = output
                tensor = torch.empty_strided(size, stride, dtype=dtype, device=META)
                self._ledger.follow(tensor, held_bytes, module, func, node)
                outputs.append(tensor)
                tensors.append(tensor)
            else:
                outputs.append(output)
        if outcome.container is torch.Tensor:
            return outputs[0], tensors
        return outputs if outcome.container is list else tuple(outputs), tensors

    def _mutate(self, op: Traits, args: Any, kwargs: Any, arguments: Arguments) -> Any:
        written = []
        for position, name in op.written:
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if tensor is None:
                    continue
                self.user_objects.before_write(tensor)
                record = self._ledger.find(tensor)
                if record is not None:
                    written.append(record)
        self._order.results.wrote(written)
        if any(record.shadow is not None for record in written):
            self._shadows.mutate(op.func, args, kwargs, arguments.tensors, written)
        result = self._operators.call(op, args, kwargs, arguments)
        self._follow_new(result, op.func)
        if op.replaces_memory:
            self._order.moved(args[0])
        copies = op.func is aten.copy_.default and args[0].is_meta
        if copies and (nbytes := self._target.transient_bytes(op.func, args, kwargs, [args[0]])):
            self._ledger.touch(nbytes, self._order.module(), op.func)
        if arguments.tensors:
            moved = sum(tensor.nbytes for tensor in arguments.tensors)
            operation = self._of_documents(op.func, args, kwargs) if op.of_documents else None
            operation = operation or self._product(op, args, kwargs) or passing(arguments.tensors[0].dtype, moved)
            self._order.cost(operation)
            self._order.results.made(op, args, kwargs, (), operation)
        return result

    def _product(self, op: Traits, args: Any, kwargs: Any) -> Operation | None:
        """A matrix product that writes to ``out=``, with the memory and work of one that makes its result."""
        out = kwargs.get("out")
        plain = getattr(op.func._overloadpacket, "default", None) if isinstance(out, torch.Tensor) else None
        others = {name: value for name, value in kwargs.items() if name != "out"}
        if plain is None:
            return None
        operation = operation_of(plain, args, others, out, self._target.product_row_bytes)
        if operation is None or not operation.flops:
            return None
        if nbytes := self._target.transient_bytes(plain, args, others, [out]):
            self._ledger.touch(nbytes, self._order.module(), op.func)
        return operation

    def _follow_new(self, result: Any, func: Any) -> None:
        """Further results of an operator that writes to an argument, such as RReLU, which fills in its noise."""
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta and self._ledger.find(tensor) is None:
                self._ledger.add(tensor, "activations", self._order.module(), func)

    def _by_value(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator whose result's shape follows from values: worked out on the known ones."""
        if func in SELECTIONS and self._shadows.real(args[0]) is None:
            counts_first = func is aten.masked_select.default and self._target.kind == "cpu"
            args, taken = self._shadows.picked(func, args)
            if counts_first:  # the CPU sums the mask, cast to int64 (`IndexingUtils.cpp`), and makes no positions
                self._ledger.touch(args[0].numel() * 8, self._order.module(), func)
                taken = 0
            result = self._compute(traits(aten.index.Tensor), args, {}, Arguments(args, {}))
            self._ledger.touch(taken, self._order.module(), func)
            return result
        result = self._shadows.evaluate(func, args, kwargs)
        module = self._order.module()

        def on_meta(item: Any) -> Any:
            if not isinstance(item, torch.Tensor):
                return item
            tensor = torch.empty_strided(item.size(), item.stride(), dtype=item.dtype, device="meta")
            self._ledger.add(tensor, "activations", module, func)
            self._shadows.attach(tensor, item)
            return tensor

        return tree_map(on_meta, result)

    def _lengths_as_numbers(self, func: Any, positions: tuple[int, ...], args: Any) -> Any:
        """The operator that takes lengths as numbers, and its arguments: what it allocates follows from them."""
        lengths = [self._shadows.real(args[position]) for position in positions]
        if any(values is None for values in lengths):
            raise undecidable(f"the lengths that {func} gets")
        numbers = dict(zip(positions, [values.tolist() for values in lengths if values is not None], strict=True))
        return func, tuple(numbers.get(position, value) for position, value in enumerate(args))

    def _all_on_meta(self, args: Any, kwargs: Any) -> Any:
        """CPU tensors among meta ones (an index, a constant) join them, with their values."""

        def on_meta(item: Any) -> Any:
            if not isinstance(item, torch.Tensor) or item.device.type == "meta" or item.dim() == 0:
                return item
            origin = item._base if item._is_view() else item
            if origin is not None and origin.requires_grad:
                raise TraceError(
                    f"{user_location()}: step_fn combines the model it is given with a CPU tensor of shape "
                    f"{tuple(origin.shape)} that needs a gradient and is no weight of that model, the only one that is "
                    "traced and planned for; freeze a second model that is not trained with requires_grad_(False), or "
                    "detach the tensor"
                )
            tensor = torch.empty_like(item, device="meta")
            self._ledger.add(tensor, "activations", "", "copy of a CPU tensor")
            if self._target.counts_host_tensors:
                self._same_where_the_device_is_the_host(item, tensor)
            self._shadows.attach(tensor, snapshot(item))
            return tensor

        return tree_map(on_meta, args), tree_map(on_meta, kwargs)

    def _same_where_the_device_is_the_host(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """``ids.to(x.device)`` of a CPU tensor is that tensor if the device is the CPU, where it is counted already."""
        record = self._ledger.find(after)
        if record is not None and not before.is_meta and after.is_meta and before.dtype == after.dtype:
            record.nbytes = 0
            record.cpu_twin = before

    def _formula_writes(self, func: Any, args: Any) -> bool:
        """Whether autograd's formula would write into its first argument here, as only it holds that."""
        if not args or not isinstance(args[0], torch.Tensor) or not backward_is_running():
            return False
        record = self._ledger.find(args[0])
        if record is None or record.node != current_node_number():
            return False
        if not writes_in_place(func, record.operator):
            return False
        record.shadow = None
        return True

    def _may_be_known(self, op: Traits, arguments: Arguments, outputs: list[Any]) -> bool:
        if not arguments.tensors or op.constant_like:
            return any(not t.is_floating_point() or t.numel() <= MAX_COPIED_NUMEL for t in outputs)
        storages = arguments.storages
        if not arguments.all_meta:
            storages = [at for tensor, at in zip(arguments.tensors, storages, strict=True) if tensor.is_meta]
        return self._ledger.knows(storages)

    def _hold_workspaces(self, func: Any, args: Any, phase: str, module: str) -> None:
        """Counts what libraries keep for a thread: from its first product on, so that later steps begin with it."""
        for library, nbytes in enumerate(self._target.matmul_workspace_bytes(func, args)):
            record = self._workspaces.pop(2 * library + (phase != "forward"), None)
            if record is not None:
                record.nbytes, record.module, record.operator = self._target.round_bytes(nbytes), module, func


@functools.cache
def _wraps(kind: type) -> bool:
    """Whether tensors of a class wrap others."""
    return hasattr(kind, "__tensor_flatten__")


def _indexes_by_mask(args: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
