"""Calls of a step in Python, seen by a mode of its thread; some functions of torch are others in this thread.

A dispatch mode sees operators only. Some of what a trace must know is decided above them: values of lists in an index
(PyTorch makes them a tensor on meta, below every dispatch mode), how a number is printed, whether autocast is on.

A mode is off while it handles a function. `backward` runs the user's code, again where it is checkpointed, so the mode
is put back when the engine starts.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from elixir.torch_private import DisableTorchFunction, checks_of_checkpoints
from elixir.tracer.host_copies import HostCopies
from elixir.tracer.values.unknown_number import printable

_UNKNOWN = (torch.SymInt, torch.SymFloat, torch.SymBool)
NAMES_CUDA = "a tensor is moved to cuda, and a trace runs on no device"
"""The error of a step that names the device, on a machine with one."""


_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


@contextlib.contextmanager
def replaced_functions(replaced: Mapping[tuple[str, str], Callable[..., Any]]) -> Iterator[None]:
    """While open, functions of torch are others in this thread. What somebody else has replaced meanwhile stays.

    Args:
        replaced: by module and name of a function: what is called instead, with the function before its arguments.
            Some are private; one that a version of PyTorch has not is left out, and a test notices.
    """
    here: int | None = threading.get_ident()

    def of_thread(before: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            return ours(before, *args, **kwargs) if threading.get_ident() == here else before(*args, **kwargs)

        return chosen

    try:
        with contextlib.ExitStack() as stack:
            for (module, name), ours in replaced.items():
                owner = sys.modules.get(module)
                before = getattr(owner, name, None)
                if before is not None:
                    chosen = of_thread(before, ours)
                    stack.callback(_put_back, owner, name, before, chosen)
                    setattr(owner, name, chosen)
            yield
    finally:
        here = None  # somebody may have kept one of them


def _put_back(owner: object, name: str, before: object, ours: object) -> None:
    if getattr(owner, name) is ours:
        setattr(owner, name, before)


class StepFunctions(TorchFunctionMode):
    """The functions of a step that need more than their operators.

    Args:
        kind: of the target device, ``cuda`` or ``cpu``.
        host: brings tensors back from the host.
    """

    def __init__(self, kind: str, host: HostCopies) -> None:
        super().__init__()
        self._kind = kind
        self._host = host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(self, func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def on_in_backward(self, run_backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the function that starts autograd's engine, with the mode on."""
        with self:
            return run_backward(*args, **kwargs)

    def device(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``x.device`` is meta, but code that asks for its type because of autocast gets the target's."""
        caller = sys._getframe(2)
        device = func(*args, **kwargs)
        if device.type != "meta" or not _asks_type_for_autocast(caller.f_code, caller.f_lasti):
            return device
        return torch.device(self._kind)

    def to(self, func: Any, args: Any, kwargs: Any) -> Any:
        """On meta, a tensor on the host and its copy on the device have the same device."""
        tensor, *rest = args
        if self._host.any and tensor.is_meta and self._host.holds(tensor):
            return self._host.back(
                tensor, rest or ([torch.device("meta")] if func is torch.Tensor.cuda else []), kwargs
            )
        try:
            return func(*args, **kwargs)
        except NotImplementedError as error:  # a machine without a device refuses in other words
            if func is torch.Tensor.cuda or any(map(_is_cuda, (*rest, *kwargs.values()))):
                raise NotImplementedError(NAMES_CUDA) from error
            raise

    def gradient(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An optimizer of the user's that the step calls finds no gradients, and neither steps nor clears any: a trace
        ends with backward, and adds its own optimizer."""
        caller = sys._getframe(2)
        if isinstance(caller.f_locals.get("self"), torch.optim.Optimizer):
            return None
        return func(*args, **kwargs)


def _is_cuda(value: object) -> bool:
    return isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == "cuda"


def unseen_by_modes() -> Any:
    """Makes checkpoints ask the tensors that a region saves for their metadata unseen, which is quicker."""

    def unseen(check: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        with DisableTorchFunction():
            return check(tensor)

    checks = {name: functools.partial(unseen, check) for name, check in checks_of_checkpoints.items()}
    return patch.dict(checks_of_checkpoints, checks)


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
    """Whether an instruction is part of ``x.device.type`` in a function that speaks of autocast, or of checkpoint's.

    Checkpoint's list of devices with random numbers is left out: a meta tensor is on no device that has any.
    """
    checkpoints = code.co_filename == _CHECKPOINT_FILE and code.co_name != "add_device_ids"
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
    torch.Tensor.device.__get__: StepFunctions.device,
    torch.Tensor.to: StepFunctions.to,
    torch.Tensor.cuda: StepFunctions.to,
    torch.Tensor.grad.__get__: StepFunctions.gradient,  # type: ignore[union-attr]
}
"""Function -> what handles it instead, called with the mode first."""
