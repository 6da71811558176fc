"""Activations that a step itself moves to host memory, as `torch.autograd.graph.save_on_cpu` does, and back.

On meta, a tensor that is on the host of a CUDA device is on meta as well, unless its values are known; the ledger knows
that it is there. Each copy takes the link, and the compute stream stands still for it.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
import torch.autograd.graph

from elixir.torch_private import DisableTorchDispatch, parsed_to, swap_tensors, tree_leaves
from elixir.tracer.device.target import Target
from elixir.tracer.ledger import Ledger
from elixir.tracer.operator_cache import Arguments, Traits
from elixir.tracer.use_order import UseOrder
from elixir.tracer.values.shadows import MAX_COPIED_NUMEL, Shadows

aten = torch.ops.aten

_CAST, _COPY, _EMPTY = aten._to_copy.default, aten.copy_.default, aten.empty.memory_format
_HOOKS_FILE = torch.autograd.graph.__file__


class HostCopies:
    """Follows them.

    Args:
        target: rules of the pretend device.
        ledger: where storages are followed.
        order: where copies are recorded.
        shadows: known values.
    """

    def __init__(self, target: Target, ledger: Ledger, order: UseOrder, shadows: Shadows) -> None:
        self._target, self._ledger, self._order, self._shadows = target, ledger, order, shadows
        self._returns = False
        self.any = False
        """Whether any tensor was on the host so far."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the host of the device."""
        record = self._ledger.find(tensor)
        return record is not None and bool(record.on_host)

    def moved(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator that copies to or from the host, or makes memory for that; else NotImplemented."""
        if func is _CAST and args[0].is_meta and _names_host(kwargs.get("device")):
            return args[0] if self.holds(args[0]) else self._out(func, args, kwargs)
        if func is _EMPTY and kwargs.get("pin_memory"):
            return self._pinned(func, args, kwargs)
        if func is _COPY and self._fill(args[0], args[1]):
            return args[0]
        return NotImplemented

    def computed(self, op: Traits, args: Any, kwargs: Any, arguments: Arguments) -> Any:
        """The result of an operator that runs on the host, where it stays; NotImplemented for all others."""
        several = [tensor for tensor in arguments.tensors if tensor.dim()] or arguments.tensors
        if self._returns or not several or not all(map(self.holds, several)):
            return NotImplemented
        if op.func is _CAST and kwargs.get("device") is not None and not _names_host(kwargs["device"]):
            self._comes_back(args[0])
            return NotImplemented
        result = op.func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and self._ledger.find(tensor) is None:  # it may be a second name
                self._add(tensor, pinned=False)
        return result

    def _out(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """`x.cpu()` of a tensor on the device: a real tensor if its values are known."""
        source = args[0]
        if self._shadows.known(source) is not None:
            made: torch.Tensor = self._shadows.evaluate(func, args, kwargs)
        elif self._target.kind == "cpu":
            return aten.alias.default(source)  # type: ignore[no-any-return]
        else:
            made = func(*args, **{**kwargs, "device": torch.device("meta")})
        if self._target.kind != "cpu":
            self._add(made, pinned=False)
            self._crosses(source, made)
        return made

    def _pinned(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """`torch.empty(..., pin_memory=True)`, which a trace does not pin."""
        plain = {**kwargs, "pin_memory": False, "device": torch.device("cpu")}
        if self._target.kind == "cpu":
            return func(*args, **plain)  # type: ignore[no-any-return]
        made: torch.Tensor = func(*args, **plain | {"device": torch.device("meta")})
        self._add(made, pinned=True)
        self._shadows.derive(func, args, plain, [], [made])
        return made

    def _fill(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """``target.copy_(source)`` where that takes the link, or would give a tensor on the CPU unknown values; whether
        it does."""
        if target.is_meta:
            there, here = self.holds(target), self.holds(source)
            if not there and not here:
                return False
            if there and not here and source.is_meta:
                self._crosses(source, target)
            elif not there:
                self._comes_back(source)
            self._follow(target, source)
            return True
        if not source.is_meta:
            return False
        known = self._shadows.known(source)
        if known is not None:
            with DisableTorchDispatch():
                target.copy_(known.value())
            if self._target.kind != "cpu":
                if self._ledger.find(target) is None:
                    self._add(target, pinned=_would_pin())
                self._crosses(source, target)
            return True
        if target._is_view():
            return False
        with DisableTorchDispatch():
            unknown = torch.empty_strided(target.size(), target.stride(), dtype=target.dtype, device="meta")
        swap_tensors(target, unknown)
        del unknown  # the memory that nobody has written to
        if self._target.kind == "cpu":
            self._ledger.add(target, "activations", self._order.module(), _COPY)
        else:
            self._add(target, pinned=_would_pin())
            self._crosses(source, target)
        return True

    def _follow(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target` (meta) has the values of `source`, where that has known ones."""
        record = self._ledger.find(target)
        if record is None:
            return
        whole = target.nbytes == target.untyped_storage().nbytes()
        is_lasting = source.is_meta or source.numel() <= MAX_COPIED_NUMEL  # of a larger one no copy is kept
        if whole and is_lasting and self._shadows.known(target) is None:
            record.shadow = None
            self._shadows.derive(_CAST, (source,), {"dtype": target.dtype}, [source], [target])
        else:
            self._shadows.mutate(_COPY, (target, source), {}, [target, source], [record])

    def back(self, tensor: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
        """``tensor.to(...)`` of a tensor on the host: on the device if that is where it goes."""
        if args and isinstance(args[0], torch.Tensor):
            device, dtype = None if self.holds(args[0]) else args[0].device, args[0].dtype
        else:
            device, dtype = parsed_to(*args, **{key: value for key, value in kwargs.items() if key != "copy"})[:2]
        if device is not None and device.type != "cpu":
            self._comes_back(tensor)
            known = self._shadows.known(tensor)
            self._returns = True
            try:
                tensor = tensor.clone()
            finally:
                self._returns = False
            if known is not None:
                self._shadows.attach(tensor, known.value())
        return tensor if dtype is None else tensor.to(dtype)

    def _comes_back(self, tensor: torch.Tensor) -> None:
        """A tensor is copied to the device."""
        self._order.transfer("host_to_device", tensor.numel() * tensor.itemsize)

    def send(self, tensor: torch.Tensor) -> TracedMove:
        """Begins to copy a flat tensor to the host, as a plan does (`elixir.access.activations.Mover`)."""
        return TracedMove(self._ledger, self._order, tensor)

    def _add(self, tensor: torch.Tensor, *, pinned: bool) -> None:
        nbytes = tensor.untyped_storage().nbytes()
        if pinned and nbytes:  # as `CachingHostAllocator.h` rounds
            nbytes = 1 << (nbytes - 1).bit_length()
        self._ledger.add_on_host(tensor, nbytes, "pinned" if pinned else "plain", self._order.module())
        self.any = True

    def _crosses(self, source: torch.Tensor, made: torch.Tensor) -> None:
        """A copy of `source` to `made`, on the host, which the device makes dense first if it is not as `made` is
        (`copy_requires_temporaries` in `Copy.cu`)."""
        self._order.transfer("device_to_host", made.numel() * made.itemsize)
        wide = [dim for dim, size in enumerate(made.shape) if size > 1]
        same = source.dtype == made.dtype and source.shape == made.shape
        if not same or [made.stride(dim) for dim in wide] != [source.stride(dim) for dim in wide]:
            self._ledger.touch(made.numel() * made.itemsize, self._order.module(), "copy to the host")


class TracedMove:
    """A flat tensor that a plan moves to the host: like a run's `elixir.chunk.host_buffers.SentTensor`."""

    def __init__(self, ledger: Ledger, order: UseOrder, tensor: torch.Tensor) -> None:
        self._ledger, self._order = ledger, order
        self._host = self._made(tensor)
        self._here: torch.Tensor | None = None
        self._comes = False
        ledger.add_on_host(self._host, tensor.nbytes, "planned", order.module())
        self._begun = order.moment

    def arrived(self) -> None:
        """Compute waits until it is on the host."""
        self._order.transfer("device_to_host", self._host.nbytes, self._begun, planned=True)

    def fetch(self) -> None:
        """It begins to come back, unless it is on the device."""
        if self._here is None:
            self._begun = self._order.moment
            self._here = self._made(self._host)
            self._ledger.add(self._here, "activations", self._order.module(), _COPY)
            self._comes = True

    def tensor(self) -> torch.Tensor:
        """The tensor on the device."""
        self.fetch()
        if self._comes:
            self._comes = False
            self._order.transfer("host_to_device", self._host.nbytes, self._begun, planned=True)
        return cast(torch.Tensor, self._here)

    def forget(self) -> None:
        """Lets go of the device memory."""
        self._here = None

    @staticmethod
    def _made(like: torch.Tensor) -> torch.Tensor:
        with DisableTorchDispatch():
            return torch.empty(like.shape, dtype=like.dtype, device="meta")


def _names_host(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _would_pin() -> bool:
    """Whether `save_on_cpu(pin_memory=True)` is what asks: without a device here it has made memory that is not pinned,
    which it would pin where the step runs."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != _HOOKS_FILE:
        frame = frame.f_back
    return frame is not None and frame.f_locals.get("pin_memory") is True
