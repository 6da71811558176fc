"""The dispatch mode of a trace: runs every operator on meta and books what it allocates, costs and knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from elixir.errors import TraceError
from elixir.tracer.accumulation import accumulates_in_place
from elixir.tracer.indexing import SELECTIONS, picked, python_values_known
from elixir.tracer.ledger import Ledger, StorageRecord
from elixir.tracer.operators import Arguments, Category, OperatorCache, Traits, traits
from elixir.tracer.order import UseOrder
from elixir.tracer.shadows import CONSTANTS_LIKE, MAX_EAGER_SHADOW_NUMEL, Shadows, snapshot
from elixir.tracer.step_trace import Kind
from elixir.tracer.targets import Target
from elixir.tracer.unknowns import unknown_number, user_location

aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Books every operator of a step.

    Args:
        target: rules of the pretend device.
        ledger: where storages are followed.
        order: where uses and costs are recorded, and which knows the running module.
        shadows: known values.
        routing: gives expert choices for `topk` over unknown scores.
        cache: whether shape propagation is remembered.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: PyTorch would wrap every dispatch in a guard against compilation, which a trace never does."""
        return False

    def __init__(
        self, target: Target, ledger: Ledger, order: UseOrder, shadows: Shadows, routing: Any, cache: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._target = target
        self._ledger = ledger
        self._order = order
        self._shadows = shadows
        self._routing = routing
        self._operators = OperatorCache(target, cache)
        self._workspaces: dict[bool, StorageRecord] = {}
        self.caches = cache
        self.new_kind: Kind = "activations"
        """Kind of what operators allocate from now on."""
        self.copies: Mapping[torch.Size, int] = {}
        """How many tensors one of a shape stands for; one where it is not listed."""

    def __enter__(self) -> Recorder:
        self._python_values = python_values_known()
        self._python_values.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._python_values.__exit__(None, None, None)

    @property
    def signatures(self) -> int:
        """Distinct operator signatures met."""
        return self._operators.signatures

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._ledger.begin_operator()
        op = traits(func)
        if op.category is Category.VIEW:
            # Autograd detaches a weight that it gets back in backward: not a use that a runtime would see.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is aten.add.Tensor and accumulates_in_place(args, depth=1):
            self._order.cost(0, 3 * args[0].nbytes)
            return args[0]
        if func is aten._local_scalar_dense.default:
            value = self._shadows.real(args[0])
            return unknown_number(args[0]) if value is None else value.item()
        arguments = Arguments(args, kwargs)
        if func is aten._to_copy.default and args[0].device.type == "meta" and _names_host(kwargs.get("device")):
            return self._to_host(func, args, kwargs)
        if op.needs_values and (func is not aten.index.Tensor or _indexes_by_mask(args)):
            return self._by_value(func, args, kwargs)
        if not arguments.all_meta and any(t.device.type == "meta" for t in arguments.tensors):
            args, kwargs = self._all_on_meta(args, kwargs)
            arguments = Arguments(args, kwargs)
        if op.category is Category.MUTATES:
            return self._mutate(op, args, kwargs, arguments)
        return self._compute(op, args, kwargs, arguments)

    def _compute(self, op: Traits, args: Any, kwargs: Any, arguments: Arguments) -> Any:
        func = op.func
        result, tensors, cost = self._operators.run(op, args, kwargs, arguments)
        real = bool(tensors) and tensors[0].device.type != "meta"
        if real and not self._target.counts_host_tensors:
            return result
        phase = self._order.phase()
        module = self._order.module(phase)
        if op.matrix_product:
            self._hold_workspace(phase == "forward", module, func)
        for tensor in tensors:
            self._ledger.add(
                tensor, self.new_kind, module, func, self.copies.get(tensor.shape, 1) if self.copies else 1
            )
        if cost.transient_bytes:
            self._ledger.touch(cost.transient_bytes, module, func)
        self._order.cost(cost.flops, cost.moved_bytes)
        if real:
            return result
        if self._may_be_known(func, arguments, tensors):
            self._shadows.derive(func, args, kwargs, arguments.tensors, tensors)
        elif func is aten.topk.default and self._routing is not None:
            self._routing.route(self._shadows, args[0], tensors[1])
        return result

    def _mutate(self, op: Traits, args: Any, kwargs: Any, arguments: Arguments) -> Any:
        written = []
        for position, name in op.written:
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                record = None if tensor is None else self._ledger.find(tensor)
                if record is not None:
                    written.append(record)
        if any(record.shadow is not None for record in written):
            self._shadows.mutate(op.func, args, kwargs, arguments.tensors, written)
        result = self._operators.run_in_place(op, args, kwargs, arguments)
        moved = sum(tensor.nbytes for tensor in arguments.tensors)
        self._order.cost(0, moved)
        return result

    def _by_value(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator whose result's shape follows from values: worked out on the known ones."""
        if func in SELECTIONS and self._shadows.real(args[0]) is None:
            args, taken = picked(self._shadows, func, args)
            result = self._compute(traits(aten.index.Tensor), args, {}, Arguments(args, {}))
            self._ledger.touch(taken, self._order.module(self._order.phase()), func)
            return result
        result = self._shadows.evaluate(func, args, kwargs)
        phase = self._order.phase()
        module = self._order.module(phase)

        def on_meta(item: Any) -> Any:
            if not isinstance(item, torch.Tensor):
                return item
            tensor = torch.empty_strided(item.size(), item.stride(), dtype=item.dtype, device="meta")
            self._ledger.add(tensor, self.new_kind, module, func)
            self._shadows.attach(tensor, item)
            return tensor

        return tree_map(on_meta, result)

    def _to_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A copy to the CPU: real where the values are known, else a tensor that takes no device memory."""
        if self._shadows.of(args[0]) is not None:
            return self._shadows.evaluate(func, args, kwargs)
        if self._target.kind == "cpu":
            return aten.alias.default(args[0])
        return func(*args, **{**kwargs, "device": torch.device("meta")})

    def _all_on_meta(self, args: Any, kwargs: Any) -> Any:
        """CPU tensors among meta ones (an index, a constant) join them, with their values."""

        def on_meta(item: Any) -> Any:
            if not isinstance(item, torch.Tensor) or item.device.type == "meta" or item.dim() == 0:
                return item
            origin = item._base if item._is_view() else item
            if origin is not None and origin.requires_grad:
                raise TraceError(
                    f"{user_location()}: step_fn combines the traced model with a CPU tensor that needs a gradient; it "
                    "must run the model it is given, not one from outside, and make new tensors on the input's device"
                )
            tensor = torch.empty_like(item, device="meta")
            record = self._ledger.add(tensor, self.new_kind, "", "copy of a CPU tensor")
            if self._target.counts_host_tensors:
                record.nbytes = 0  # the CPU tensor itself is counted
            self._shadows.attach(tensor, snapshot(item))
            return tensor

        return tree_map(on_meta, args), tree_map(on_meta, kwargs)

    def _may_be_known(self, func: Any, arguments: Arguments, outputs: list[Any]) -> bool:
        if not arguments.tensors or func in CONSTANTS_LIKE:
            return any(not t.is_floating_point() or t.numel() <= MAX_EAGER_SHADOW_NUMEL for t in outputs)
        for tensor in arguments.tensors:
            if tensor.device.type == "meta":
                record = self._ledger.find(tensor)
                if record is None or record.shadow is None:
                    return False
        return True

    def _hold_workspace(self, forward: bool, module: str, func: Any) -> None:
        if forward not in self._workspaces:
            nbytes = self._target.matmul_workspace_bytes()
            self._workspaces[forward] = self._ledger.add_bytes(nbytes, "workspace", module, func)


def _names_host(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _indexes_by_mask(args: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
