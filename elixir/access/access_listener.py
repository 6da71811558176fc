"""`AccessListener`: the interface through which tracer and runtime learn of uses of parameters; and which torch
functions use one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

Pins = Sequence[int]
"""Chunks that are held for one function."""


class AccessListener(Protocol):
    """Learns of uses of parameters; tracer and runtime each implement it.

    A listener that inherits from this class need not define methods for weights that come and go, if its own stay.
    """

    claims_saved: bool
    """Whether it may claim tensors that autograd saves. Otherwise `pack` and `unpack` are never called, and autograd
    saves tensors without a Python call, as in plain PyTorch."""

    def used(self, parameters: list[nn.Parameter], function: str) -> Pins:
        """Called before `function` reads `parameters` (each once, in argument order). Returns what `give_back` gets
        after it, or nothing if the running module or autograd node bounds how long they are needed."""

    def give_back(self, pins: Pins) -> None:
        """Called with what `used` has returned, when the function has returned or raised."""
        return

    def writes(self, parameters: list[nn.Parameter], function: str, *, of_weights: bool) -> None:
        """Called before `function` writes to `parameters`, and before `used`.

        Args:
            parameters: the parameters, each once.
            function: the name of the function.
            of_weights: whether all its tensors are weights or views of them.
        """

    def wrote(self, parameters: list[nn.Parameter]) -> None:
        """Called when the function of the last `writes` has returned, or ``data`` was set after `replaces`."""

    storages: Iterable[int] = ()
    """Numbers of the storages of weights that come and go, see `storage_of`."""

    def parameter_of(self, view: torch.Tensor) -> nn.Parameter | None:
        """The parameter in whose memory a function's result begins, so that it must be tracked; otherwise None."""

    def used_through(self, parameter: nn.Parameter) -> None:
        """Called before a view is read whose storage has no memory though its parameter is in use: `gathered` shows the
        parameter in other memory."""
        return

    def lends(self, parameter: nn.Parameter, data: torch.Tensor) -> torch.Tensor:
        """The tensor to return instead of `data`: ``parameter.data``, or the ``data`` of a view."""
        return data

    def has_room_for(self, parameters: list[nn.Parameter]) -> bool:
        """Whether one operator may read all of them at once."""
        return False

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether the running module or node has announced `parameter`, so that reading a view of it is no new use."""

    def reads_gradient(self, parameter: nn.Parameter) -> None:
        """Called before ``parameter.grad`` is read."""
        return

    def drops_gradient(self, parameter: nn.Parameter) -> None:
        """Called before ``parameter.grad`` is set to None, or deleted."""
        return

    def replaces(self, parameter: nn.Parameter) -> None:
        """Called before ``parameter.data`` is set to another tensor, or ``parameter.set_`` runs."""
        return

    def entered(self, module: nn.Module) -> None:
        """Called when `module` starts to run."""

    def left(self, module: nn.Module, output: Any) -> Any:
        """Called when `module` has returned `output`, or raised (None). Returns the output to use instead."""

    def pack(self, tensor: torch.Tensor) -> Any | None:
        """A handle that replaces `tensor` until backward if it is (a view of) a weight, otherwise None."""

    def stays(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that `pack` leaves alone is (a view of) a weight, so that no other hooks may move it."""
        return False

    def unpack(self, handle: Any) -> torch.Tensor:
        """The tensor of a handle of `pack`, which the running autograd node is about to read."""

    def again(self, handle: Any) -> torch.Tensor:
        """The tensor of a handle of `pack`, for a function in a checkpoint that runs again and announces its reads."""
        return self.unpack(handle)


# --- what torch functions do -----------------------------------------------------------------------------------------
# Sorts torch functions by what they do to their arguments: read values, write values, or read only metadata.


_METADATA_ATTRIBUTES = frozenset(
    """shape dtype device requires_grad grad grad_fn is_leaf ndim layout is_cuda is_cpu is_meta is_sparse names
    is_nested _version output_nr retains_grad is_quantized itemsize nbytes grad_dtype""".split()
)
_METADATA_METHODS = frozenset(
    """size dim numel nelement element_size is_floating_point is_complex register_hook
    register_post_accumulate_grad_hook get_device requires_grad_ __hash__ __reduce_ex__ ndimension
    is_same_size empty_like zeros_like ones_like full_like rand_like randn_like randint_like
    new_empty new_zeros new_ones new_full new_tensor new_empty_strided stride is_contiguous dim_order""".split()
)
_IN_PLACE_OPERATORS = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ "
    "__ixor__".split()
)
RENORMALISE = frozenset(("embedding", "embedding_bag"))
"""Functions that with ``max_norm`` first write to the requested rows of their second argument, the weight."""
REPLACES_MEMORY = "set_"
"""The operator that gives a tensor other memory, like setting ``data``. PyTorch calls no torch function for it."""


def operator_reads_only_metadata(name: str) -> bool:
    """Whether an operator of this name reads no element of its arguments."""
    return name in _METADATA_METHODS


def reads_only_metadata(func: Any) -> bool:
    """Whether a function reads no element: it reads metadata, or sets an attribute that is no memory."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return name != "__get__" or getattr(getattr(func, "__self__", None), "__name__", "") in _METADATA_ATTRIBUTES
    return name in _METADATA_METHODS


def name_of(func: Any) -> str:
    """The name of a function, for an order of uses or a message."""
    name = getattr(func, "__name__", str(func))
    # A property is named by its getter.
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name == "__get__" else name


def written_arguments(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a function writes to: the first one of an in-place function, and ``out``."""
    if name in RENORMALISE:
        return () if kwargs["max_norm"] is None else args[1:2], {}
    out = {"out": kwargs["out"]} if kwargs.get("out") is not None else {}
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS
    if not in_place:
        return (), out
    return tuple(args[:1]), out if args else kwargs
