"""`torch.autocast` for meta tensors: the casts that the target device would make.

Autocast is a set of kernels under one dispatch key per device, and meta has none. While a trace runs, entering
`torch.autocast` for the target turns on a spare key, under which every operator that PyTorch autocasts on that device
gets a kernel that casts its arguments and goes on. Which operators those are is read from the dispatcher; their policy
(run in low precision, run in float32, widest of the arguments) is `autocast_mode.h`'s. Checkpoints see it as well:
they ask for autocast's state and enter it again to recompute.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves, tree_map

from elixir.tracer.targets import Target

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
"""On CUDA these read low precision and are told to give float32; on the CPU they have no policy or the float32 one."""


@contextlib.contextmanager
def autocast_emulated(target: Target) -> Iterator[None]:
    """While open, `torch.autocast` for the target's kind (or for ``meta``) acts on meta tensors."""
    emulation = _Emulation(target.kind)
    cls = torch.autocast
    originals = (cls.__init__, cls.__enter__, cls.__exit__)
    queries = [(torch, "is_autocast_enabled"), (torch, "get_autocast_dtype"), (torch.amp, "is_autocast_available")]
    answers = [getattr(module, name) for module, name in queries]

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        device_type = target.kind if device_type == "meta" else device_type
        enabled = kwargs.get("enabled", args[1] if len(args) > 1 else True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch finds no such device here and switches itself off
            originals[0](self, device_type, *args, **kwargs)
        if device_type == target.kind:
            self._enabled = bool(enabled)

    def enter(self: Any) -> Any:
        result = originals[1](self)  # type: ignore[no-untyped-call]
        emulation.entered(torch.get_autocast_dtype(target.kind))
        return result

    def leave(self: Any, *exception: Any) -> Any:
        emulation.left()
        return originals[2](self, *exception)

    def of_target(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *device: function(*(target.kind if kind == "meta" else kind for kind in device))

    cls.__init__, cls.__enter__, cls.__exit__ = init, enter, leave  # type: ignore[method-assign]
    for (module, name), answer in zip(queries, answers, strict=True):
        setattr(module, name, of_target(answer))
    try:
        yield
    finally:
        cls.__init__, cls.__enter__, cls.__exit__ = originals  # type: ignore[method-assign]
        for (module, name), answer in zip(queries, answers, strict=True):
            setattr(module, name, answer)
        emulation.close()


class _Emulation:
    """The kernels, the weights cast so far, and how deep autocast is nested."""

    def __init__(self, kind: Literal["cuda", "cpu"]) -> None:
        self._kind = kind
        self._libraries: list[torch.library.Library] = []
        self._dtype = torch.float32
        self._nesting: list[contextlib.ExitStack] = []
        self._cast_weights: dict[torch.Tensor, torch.Tensor] = {}

    def entered(self, dtype: torch.dtype) -> None:
        """Autocast's state has changed."""
        scope = contextlib.ExitStack()
        was_enabled = torch.is_autocast_enabled(_SPARE_DEVICE)
        enabled = torch.is_autocast_enabled(self._kind)
        scope.callback(setattr, self, "_dtype", self._dtype)
        scope.callback(torch.set_autocast_enabled, _SPARE_DEVICE, was_enabled)
        self._dtype = dtype
        torch.set_autocast_enabled(_SPARE_DEVICE, enabled)
        if enabled:
            if not self._libraries:
                self._register()
            scope.enter_context(torch._C._IncludeDispatchKeyGuard(getattr(torch._C.DispatchKey, _KEY)))
        self._nesting.append(scope)

    def left(self) -> None:
        """Back to the state before; the outermost exit drops the cast weights, as PyTorch's cache does."""
        self._nesting.pop().close()
        if not self._nesting:
            self._cast_weights.clear()

    def close(self) -> None:
        """Take the kernels away."""
        while self._nesting:
            self.left()
        for library in self._libraries:
            library._destroy()

    def _register(self) -> None:
        library, others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
        self._libraries = [library, others]
        others.fallback(torch.library.fallthrough_kernel, _KEY)
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("aten::") and has_kernel(name, _DISPATCHER_KEY[self._kind]):
                base, _, overload = name.removeprefix("aten::").partition(".")
                operator = getattr(getattr(torch.ops.aten, base), overload or "default")
                library.impl(name.removeprefix("aten::"), self._kernel(base, operator), _KEY, allow_override=True)

    def _kernel(self, name: str, operator: Any) -> Callable[..., Any]:
        cast = self._policy(name, operator)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))):
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
