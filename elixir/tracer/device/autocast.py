"""`torch.autocast` for meta tensors: the casts that the target device would make.

Autocast is a set of kernels under one dispatch key per device, and meta has none. While autocast for the target is on
in the thread of a trace, a spare key is on as well. Under it, every operator that PyTorch autocasts on that device has
a kernel that casts its arguments and goes on. Which operators those are is read from the dispatcher; their policy (run
in low precision, run in float32, widest of the arguments) is `autocast_mode.h`'s. Checkpoints see it as well: they ask
for autocast's state and enter it again to recompute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from elixir.torch_private import (
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    dispatch_key,
    has_kernel,
    include_key,
    operator_names,
    tree_leaves,
    tree_map,
)
from elixir.tracer.device.target import Target

_KEY = dispatch_key("AutocastPrivateUse1")
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


_ASKED_BY_DEVICE = (
    ("torch", "is_autocast_enabled"),
    ("torch", "get_autocast_dtype"),
    ("torch", "set_autocast_dtype"),
    ("torch.amp", "is_autocast_available"),
    ("torch.amp.autocast_mode", "is_autocast_available"),
)
"""Functions whose first argument is the type of a device: module and name. `torch.autocast` calls them as well."""


class Autocast:
    """Casts meta tensors as autocast for the target does, in the thread of a trace.

    Args:
        target: rules of the pretend device.
    """

    def __init__(self, target: Target) -> None:
        self._kind, self._capability = target.kind, target.capability
        self._libraries: list[torch.library.Library] = []
        self._cast_weights: dict[torch.Tensor, torch.Tensor] = {}
        self._nesting = _nesting()

    def replaced(self) -> dict[tuple[str, str], Callable[..., Any]]:
        """Functions of torch that a trace replaces, and what is called instead: see `replaced_functions`.

        PyTorch refuses questions about autocast on meta below every mode: they are answered for the target. Autocast
        for a CUDA device is not switched off for want of one.
        """
        found: dict[tuple[str, str], Callable[..., Any]] = dict.fromkeys(_ASKED_BY_DEVICE, self._asked_for_meta)
        found["torch", "set_autocast_enabled"] = self._switch
        found["torch", "clear_autocast_cache"] = self._clear
        if (capability := self._capability) is not None:
            found["torch.cuda.amp.common", "amp_definitely_not_available"] = lambda _: False
            found["torch.cuda", "is_bf16_supported"] = lambda _, including_emulation=True: (
                including_emulation or capability >= (8, 0)
            )
        return found

    def _asked_for_meta(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args[:1] == ("meta",):
            args = (self._kind, *args[1:])
        if kwargs.get("device_type") == "meta":
            kwargs["device_type"] = self._kind
        return function(*args, **kwargs)

    def _switch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._asked_for_meta(function, *args, **kwargs)
        self._casts(torch.is_autocast_enabled(self._kind), function)

    def _clear(self, function: Callable[[], None]) -> None:
        self._cast_weights.clear()
        function()

    def _casts(self, casts: bool, switch: Callable[[str, bool], None]) -> None:
        """Puts the spare key on or off."""
        if casts and not self._libraries:
            self._register()
        switch(_SPARE_DEVICE, casts)
        include_key(_KEY, casts)

    def close(self) -> None:
        """Takes the kernels away, and leaves what the step has not left."""
        while _nesting() > self._nesting:
            torch.autocast_decrement_nesting()
        if self._libraries:
            self._casts(False, torch.set_autocast_enabled)
        while self._libraries:
            self._libraries.pop()._destroy()
        self._cast_weights.clear()

    def _register(self) -> None:
        library, others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
        self._libraries = [library, others]
        others.fallback(torch.library.fallthrough_kernel, _KEY.name)
        for name in operator_names():
            if name.startswith("aten::") and has_kernel(name, _DISPATCHER_KEY[self._kind]):
                base, _, overload = name.removeprefix("aten::").partition(".")
                operator = getattr(getattr(torch.ops.aten, base), overload or "default")
                library.impl(name.removeprefix("aten::"), self._kernel(base, operator), _KEY.name, allow_override=True)

    def _kernel(self, name: str, operator: Any) -> Callable[..., Any]:
        cast = self._policy(name, operator)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with ExcludeDispatchKeyGuard(DispatchKeySet(_KEY)):
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
        if not _eligible(item) or item.dtype == (dtype := torch.get_autocast_dtype(self._kind)):
            return item
        is_weight = item.dtype is torch.float32 and item.requires_grad and item.is_leaf
        if not is_weight or not torch.is_autocast_cache_enabled():
            return item.to(dtype)
        if item not in self._cast_weights:
            self._cast_weights[item] = item.to(dtype)
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


def _nesting() -> int:
    """How many contexts of autocast are open: with the last one PyTorch forgets cast weights."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _to_float(item: Any) -> Any:
    return item.float() if _eligible(item) else item


def _eligible(item: Any) -> bool:
    if not isinstance(item, torch.Tensor) or not item.is_meta:
        return False
    return item.is_floating_point() and item.dtype is not torch.float64
