"""Calls of a step in Python, seen by a mode of its thread, so that nothing of torch is replaced.

A dispatch mode sees operators only. Some of what a trace must know is decided above them: values of lists in an index
(PyTorch makes them a tensor on meta, below every dispatch mode), how a number is printed, whether autocast is on.

A mode is off while it handles a function. `backward` runs the user's code again where it is checkpointed, so there the
mode is put back before the engine starts.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import numpy as np
import torch

# `torch.autocast` reports to modes of this kind, and to no other, that it is entered and left.
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

from elixir.torch_private import enter_autocast, exit_autocast, pop_function_mode, push_function_mode
from elixir.tracer.checkpointed_regions import CHECKPOINT_FILE, CheckpointedRegions
from elixir.tracer.device.common.autocast import Autocast
from elixir.tracer.host_copies import HostCopies
from elixir.tracer.values.unknown_number import printable

_UNKNOWN = (torch.SymInt, torch.SymFloat, torch.SymBool)
NAMES_CUDA = "a tensor is moved to cuda, and a trace runs on no device"
"""The error of a step that names the device, on a machine with one."""


class StepFunctions(PreDispatchTorchFunctionMode):
    """The functions of a step that need more than their operators.

    Args:
        kind: of the target device, ``cuda`` or ``cpu``.
        autocast: is called when autocast is entered and left.
        regions: is called when a checkpointed region begins.
        host: brings tensors back from the host.
    """

    def __init__(self, kind: str, autocast: Autocast, regions: CheckpointedRegions, host: HostCopies) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._kind = kind
        self._autocast = autocast
        self._regions = regions
        self._host = host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(self, func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def begin_backward(self, func: Any, args: Any, kwargs: Any) -> None:
        """``loss.backward()`` is `torch.autograd.backward` of one tensor."""
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        tensor, gradient = given.pop("self"), given.pop("gradient", None)
        self.differentiate(torch.autograd.backward, (tensor, gradient), given)

    def differentiate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A backward pass, with the mode put back for what it runs again."""
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        starts, gradients = ("tensors", "grad_tensors") if "tensors" in given else ("outputs", "grad_outputs")
        if given.get("grad_variables") is not None:  # the old name, which PyTorch refuses next to the new one
            given[gradients] = given.pop("grad_variables")
        if not isinstance(given[starts], (torch.Tensor, torch.autograd.graph.GradientEdge)):
            given[starts] = tuple(given[starts])
        entering = _Entering(self, given[starts], given.get(gradients))
        try:
            return func(**given | {gradients: entering})
        finally:
            entering.leave()

    def device(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``x.device`` is meta, but code that asks for its type because of autocast gets the target's."""
        caller = sys._getframe(2)
        device = func(*args, **kwargs)
        if device.type != "meta" or not _asks_type_for_autocast(caller.f_code, caller.f_lasti):
            return device
        if caller.f_code.co_filename == CHECKPOINT_FILE:
            self._regions.begins(caller)
        return torch.device(self._kind)

    def to(self, func: Any, args: Any, kwargs: Any) -> Any:
        """On meta, a tensor on the host and its copy on the device have the same device."""
        tensor, *rest = args
        if self._host.any and tensor.is_meta and self._host.holds(tensor):
            return self._host.back(
                tensor, rest or ([torch.device("meta")] if func is torch.Tensor.cuda else []), kwargs
            )
        if func is not torch.Tensor.cuda and not any(_is_cuda(each) for each in (*rest, *kwargs.values())):
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except NotImplementedError as error:  # a machine without a device refuses in other words
            raise NotImplementedError(NAMES_CUDA) from error

    def gradient(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An optimizer of the user's that the step calls finds no gradients, and neither steps nor clears any: a trace
        ends with backward, and adds its own optimizer."""
        caller = sys._getframe(2)
        if isinstance(caller.f_locals.get("self"), torch.optim.Optimizer):
            return None
        return func(*args, **kwargs)

    def autocast_entered(self, func: Any, args: Any, kwargs: Any) -> None:
        """Autocast is on from now on."""
        self._autocast.entered()

    def autocast_left(self, func: Any, args: Any, kwargs: Any) -> None:
        """Autocast is as it was before."""
        self._autocast.left()


def _is_cuda(value: object) -> bool:
    return isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == "cuda"


class _Entering:
    """The gradients that a backward pass begins with; to ask for them enters a mode.

    PyTorch asks after it has looked for modes, and before it calls the engine, which runs everything as it was then.
    """

    def __init__(self, mode: StepFunctions, starts: Any, gradients: Any) -> None:
        self._mode = mode
        self._entered = False
        if gradients is None:
            self._gradients: tuple[Any, ...] = (None,) * (len(starts) if isinstance(starts, tuple) else 1)
        else:
            self._gradients = (gradients,) if isinstance(gradients, torch.Tensor) else tuple(gradients)

    def __iter__(self) -> Iterator[Any]:
        if not self._entered:
            self._entered = True
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        return iter(self._gradients)

    def leave(self) -> None:
        """The mode is off again if it was on. A ``with torch.device(...)`` around the step has come on top of it, since
        PyTorch puts that back after the call."""
        above: list[Any] = []
        while self._entered and (innermost := pop_function_mode()) is not self._mode:
            above.append(innermost)
        while above:
            push_function_mode(above.pop())


def _index(mode: StepFunctions, func: Any, args: Any, kwargs: Any) -> Any:
    """``x[:, [-1, 0]]`` goes by way of a tensor on the CPU, whose values are known."""
    tensor, index, *value = args
    if tensor.is_meta:
        index = tuple(_as_tensor(item) for item in index) if type(index) is tuple else _as_tensor(index)
    return func(tensor, index, *value, **kwargs)


def _as_tensor(item: Any) -> Any:
    if isinstance(item, np.ndarray) and item.dtype.kind in "biu":
        return torch.tensor(item, device="cpu")
    if isinstance(item, (list, tuple, range)) and item and all(type(entry) in (int, bool) for entry in item):
        return torch.tensor(item, device="cpu")
    return item


def _format(mode: StepFunctions, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if not tensor.is_meta or tensor.dim():
        return func(*args, **kwargs)
    value = tensor.item()
    return "unknown" if isinstance(value, _UNKNOWN) else format(value, *args[1:], **kwargs)


def _item(mode: StepFunctions, func: Any, args: Any, kwargs: Any) -> Any:
    return printable(func(*args, **kwargs))


def _make(mode: StepFunctions, func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.tensor([1, 2], device=x.device)`` is made on the CPU, and copied with its values.

    PyTorch reads numbers out of tensors in a list, ``torch.tensor([height, width])``, below every dispatch mode: here
    they are known ones, or nothing is known of the result.
    """
    device = kwargs.get("device")
    goes_to_meta = device is not None and torch.device(device).type == "meta"
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    unknown: list[torch.Tensor] = []
    if isinstance(data, (list, tuple)):
        data = [_on_host(item, unknown) for item in data]
        args, kwargs = (data, *args[1:]), {key: value for key, value in kwargs.items() if key not in ("data", "obj")}
    if isinstance(data, torch.Tensor) or not (goes_to_meta or unknown):
        return func(*args, **kwargs)
    wants_gradient = kwargs.get("requires_grad", False)
    made = func(*args, **{key: value for key, value in kwargs.items() if key != "requires_grad"} | {"device": "cpu"})
    moved = torch.empty_like(made, device="meta") if unknown else made.to("meta")
    return moved.requires_grad_(wants_gradient)


def _on_host(item: Any, unknown: list[torch.Tensor]) -> Any:
    """The same data without meta tensors; those whose values nobody knows are zero, and put down."""
    if isinstance(item, (list, tuple)):
        return [_on_host(inner, unknown) for inner in item]
    if not isinstance(item, torch.Tensor) or not item.is_meta:
        return item
    if item.dim():
        return [_on_host(inner, unknown) for inner in item.unbind()]
    value = item.item()
    if isinstance(value, _UNKNOWN):
        unknown.append(item)
        value = 0
    return torch.tensor(value, dtype=item.dtype)


def _make_like(mode: StepFunctions, func: Any, args: Any, kwargs: Any) -> Any:
    like, *rest = args
    given = {name: value for name, value in kwargs.items() if value is not None}
    return _make(mode, torch.tensor, tuple(rest), {"dtype": like.dtype, "device": like.device} | given)


@functools.lru_cache(maxsize=4096)
def _asks_type_for_autocast(code: CodeType, position: int) -> bool:
    """Whether an instruction is part of ``x.device.type`` in a function that speaks of autocast, or of checkpoint's."""
    checkpoints = code.co_filename == CHECKPOINT_FILE
    if not checkpoints and not any("autocast" in name for name in (*code.co_names, *code.co_freevars)):
        return False
    instructions = dis.get_instructions(code)
    for one, following in itertools.pairwise(instructions):
        if one.offset == position:
            return following.opname.startswith("LOAD_") and following.argval == "type"
    return False


_HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__getitem__: _index,
    torch.Tensor.__setitem__: _index,
    torch.Tensor.__format__: _format,
    torch.Tensor.item: _item,
    torch.Tensor.new_tensor: _make_like,
    torch.tensor: _make,
    torch.as_tensor: _make,
    torch.asarray: _make,
    torch.Tensor.backward: StepFunctions.begin_backward,
    torch.autograd.backward: StepFunctions.differentiate,
    torch.autograd.grad: StepFunctions.differentiate,
    torch.Tensor.device.__get__: StepFunctions.device,
    torch.Tensor.to: StepFunctions.to,
    torch.Tensor.cuda: StepFunctions.to,
    torch.Tensor.grad.__get__: StepFunctions.gradient,  # type: ignore[union-attr]
    enter_autocast: StepFunctions.autocast_entered,
    exit_autocast: StepFunctions.autocast_left,
}
"""Function -> what handles it instead, called with the mode first."""
