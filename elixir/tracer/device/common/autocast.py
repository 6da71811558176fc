"""`torch.autocast` for meta tensors: the casts that the target device would make.

Autocast is a set of kernels under one dispatch key per device, and meta has none. While a trace runs, entering
`torch.autocast` for the target turns on a spare key in its thread, under which every operator that PyTorch autocasts on
that device gets a kernel that casts its arguments and goes on. Which operators those are is read from the dispatcher;
their policy (run in low precision, run in float32, widest of the arguments) is `autocast_mode.h`'s. Checkpoints see it
as well: they ask for autocast's state and enter it again to recompute.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Literal
from unittest.mock import patch

import torch

from elixir.torch_private import (
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    IncludeDispatchKeyGuard,
    has_kernel,
    operator_names,
    tree_leaves,
    tree_map,
)

_KEY = "AutocastPrivateUse1"
_SPARE_DEVICE = "privateuseone"
_DISPATCHER_KEY = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}

_LOW_PRECISION = frozenset(
    """_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu
    addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention _addmm_activation
    _native_multi_head_attention""".split()
)
_WIDEST = frozenset(
    """addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add cat stack
    index_copy""".split()
)
_SETS_RESULT_DTYPE = frozenset(
    "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum".split()
)
"""On CUDA these read low precision and return float32; on the CPU they have no policy or the float32 one."""


class Autocast:
    """Casts meta tensors as autocast for the target does; the thread of a trace reports when it is entered and left.

    Args:
        kind: of the target device.
    """

    def __init__(self, kind: Literal["cuda", "cpu"]) -> None:
        self._kind = kind
        self._libraries: list[torch.library.Library] = []
        self._dtype = torch.float32
        self._nesting: list[contextlib.ExitStack] = []
        self._cast_weights: dict[torch.Tensor, torch.Tensor] = {}

    def entered(self) -> None:
        """Autocast's state has changed."""
        scope = contextlib.ExitStack()
        was_enabled = torch.is_autocast_enabled(_SPARE_DEVICE)
        enabled = torch.is_autocast_enabled(self._kind)
        scope.callback(setattr, self, "_dtype", self._dtype)
        scope.callback(torch.set_autocast_enabled, _SPARE_DEVICE, was_enabled)
        self._dtype = torch.get_autocast_dtype(self._kind)
        torch.set_autocast_enabled(_SPARE_DEVICE, enabled)
        if enabled:
            if not self._libraries:
                self._register()
            scope.enter_context(IncludeDispatchKeyGuard(getattr(DispatchKey, _KEY)))
        self._nesting.append(scope)

    def left(self) -> None:
        """Back to the state before; the outermost exit drops the cast weights, as PyTorch's cache does."""
        if self._nesting:  # None if it was entered before the trace began
            self._nesting.pop().close()
        if not self._nesting:
            self._cast_weights.clear()

    def close(self) -> None:
        """Takes the kernels away."""
        while self._nesting:
            self.left()
        for library in self._libraries:
            library._destroy()

    def _register(self) -> None:
        library, others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
        self._libraries = [library, others]
        others.fallback(torch.library.fallthrough_kernel, _KEY)
        for name in operator_names():
            if name.startswith("aten::") and has_kernel(name, _DISPATCHER_KEY[self._kind]):
                base, _, overload = name.removeprefix("aten::").partition(".")
                operator = getattr(getattr(torch.ops.aten, base), overload or "default")
                library.impl(name.removeprefix("aten::"), self._kernel(base, operator), _KEY, allow_override=True)

    def _kernel(self, name: str, operator: Any) -> Callable[..., Any]:
        cast = self._policy(name, operator)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with ExcludeDispatchKeyGuard(DispatchKeySet(getattr(DispatchKey, _KEY))):
                args, kwargs = cast(args, kwargs)
                return operator(*args, **kwargs)

        return kernel

    def _policy(self, name: str, operator: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
        if name in _LOW_PRECISION:
            return lambda args, kwargs: tree_map(self._to_low_precision, (args, kwargs))
        if name in _WIDEST:
            return self._to_widest
        names = [argument.name for argument in operator._schema.arguments]
        if name in _SETS_RESULT_DTYPE and self._kind == "cuda" and "dtype" in names:
            position = names.index("dtype")
            return lambda args, kwargs: self._with_result_dtype(position, args, kwargs)
        return lambda args, kwargs: tree_map(_to_float, (args, kwargs))

    def _to_low_precision(self, item: Any) -> Any:
        if not _eligible(item) or item.dtype == self._dtype:
            return item
        is_weight = item.dtype is torch.float32 and item.requires_grad and item.is_leaf
        if not is_weight or not torch.is_autocast_cache_enabled():
            return item.to(self._dtype)
        if item not in self._cast_weights:
            self._cast_weights[item] = item.to(self._dtype)
        return self._cast_weights[item]

    def _to_widest(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        found = [item for item in tree_leaves((args, kwargs)) if _eligible(item)]
        if any(item.dtype is torch.float32 for item in found):
            return tree_map(_to_float, (args, kwargs))  # type: ignore[no-any-return]
        return args, kwargs

    @staticmethod
    def _with_result_dtype(position: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = args[position] if len(args) > position else kwargs.get("dtype")
        if given is not None or not _eligible(args[0]):
            return args, kwargs
        return args[:position], {**kwargs, "dtype": torch.float32}


def _to_float(item: Any) -> Any:
    return item.float() if _eligible(item) else item


def _eligible(item: Any) -> bool:
    if not isinstance(item, torch.Tensor) or not item.is_meta:
        return False
    return item.is_floating_point() and item.dtype is not torch.float64


ASKED_BY_DEVICE = (
    ("torch", "is_autocast_enabled"),
    ("torch", "get_autocast_dtype"),
    ("torch", "set_autocast_enabled"),
    ("torch", "set_autocast_dtype"),
    ("torch.amp", "is_autocast_available"),
    ("torch.amp.autocast_mode", "is_autocast_available"),
)
"""Functions whose first argument is the type of a device: module and name. `torch.autocast` calls them as well."""


@contextlib.contextmanager
def autocast_asked_for_meta(kind: Literal["cuda", "cpu"]) -> Iterator[None]:
    """While open, questions about autocast on meta are answered for the target device.

    PyTorch refuses them below every mode, so the functions are replaced. Only calls that name meta differ.
    """

    def answering(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def answer(*args: Any, **kwargs: Any) -> Any:
            if args[:1] == ("meta",):
                args = (kind, *args[1:])
            if kwargs.get("device_type") == "meta":
                kwargs["device_type"] = kind
            return function(*args, **kwargs)

        return answer

    with contextlib.ExitStack() as replaced:
        for module, name in ASKED_BY_DEVICE:
            owner = sys.modules[module]
            replaced.enter_context(patch.object(owner, name, answering(getattr(owner, name))))
        yield


@contextlib.contextmanager
def warnings_heard() -> Iterator[None]:
    """While open, two warnings are not shown in this thread.

    That kernels are replaced is the purpose. That there is no CUDA for an autocast tells of one that is meant for the
    target: PyTorch would switch it off, and a trace must not.
    """
    heard = _Heard(threading.get_ident())
    filters = warnings.filters
    entry: Any = ("ignore", heard, Warning, None, 0)
    filters.insert(0, entry)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        heard.thread = 0
        # Another thread may have put a copy of the list in its place meanwhile.
        for present in {id(found): found for found in (filters, warnings.filters)}.values():
            present[:] = [item for item in present if item is not entry]  # type: ignore[index]


class _Heard:
    """The pattern object of a filter of warnings."""

    def __init__(self, thread: int) -> None:
        self.thread = thread

    def match(self, text: str) -> bool:
        if self.thread != threading.get_ident():
            return False
        if "CUDA is not available" in text and "autocast" in text:
            caller: FrameType | None = sys._getframe(1)
            while caller is not None and caller.f_code is not torch.autocast.__init__.__code__:
                caller = caller.f_back
            if caller is not None:
                caller.f_locals["self"].__class__ = _AutocastOfTarget
                return True
        return "previously registered kernel" in text


class _AutocastOfTarget(torch.autocast):
    """One that PyTorch has switched off for want of a device."""

    def __enter__(self) -> Any:
        self._enabled = True
        return super().__enter__()  # type: ignore[no-untyped-call]
