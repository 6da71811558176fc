"""`FastPath`: lets modules take PyTorch's fast paths of attention in evaluation.

`nn.TransformerEncoderLayer`, `nn.TransformerEncoder` and `nn.MultiheadAttention` compute a layer in one operator, which
rounds differently, if no gradient is wanted, no weight has a torch function and no module inside has a hook. Tracked
weights would prevent it, yet need not announce themselves: the operator meets marked placeholders.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch
from torch import nn

from elixir.access.access_listener import AccessListener
from elixir.torch_private import DisableTorchFunctionSubclass

HAVE_FAST_PATHS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class FastPath:
    """Replaces the forward of a module that has a fast path, until `remove`.

    Args:
        module: one of `HAVE_FAST_PATHS`.
        listener: knows whether all weights of a layer fit at once.
    """

    def __init__(self, module: nn.Module, listener: AccessListener) -> None:
        self._module, self._listener = module, listener
        self._own = vars(module).get("forward")
        self._forward: Callable[..., Any] = module.forward
        self._attached = True
        update_wrapper(self, self._forward)  # code may inspect its signature
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        evaluates = self._attached and not (self._module.training or torch.is_grad_enabled())
        if not (evaluates and self._may_be_taken(args, kwargs)):
            return self._forward(*args, **kwargs)
        with DisableTorchFunctionSubclass():
            return self._forward(*args, **kwargs)

    def remove(self) -> None:
        """Restores the module's forward, unless another replacement wraps this one and still calls it."""
        self._attached = False
        if vars(self._module).get("forward") is self:
            del self._module.forward
            if self._own is not None:
                self._module.forward = self._own

    def _may_be_taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = tuple(item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor))
        if torch.overrides.has_torch_function(given):
            return False
        whole = isinstance(self._module, nn.TransformerEncoder)
        layers = self._module.layers if whole else [self._module]
        return all(self._listener.has_room_for(list(layer.parameters())) for layer in layers)  # type: ignore[union-attr]
