"""Fused kernels in a model somebody else wrote: which of its modules take one, put there per instance, and undone.

A module is recognised by what it has and by what its class computes: its forward is run once on a few numbers, with
stand-ins for what it holds, and must give what the kernel gives. A Gemma norm, which multiplies by one plus its weight,
or an MLP with another activation is left alone that way without a list of names. Nothing of a class or of a library is
changed: the new forward is an attribute of the one instance, and `remove` takes it off again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import update_wrapper, wraps
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elixir.kernels.model.deferred_logits import deferring_forward, deferring_layer, last_layer_of
from elixir.kernels.model.registry import KINDS, ChosenKernel, Kernel, choose, wishes

_PROBE_TOLERANCE = 1e-5


class FusedKernels:
    """The fused kernels in one model, until `remove`.

    Args:
        model: its modules get new forwards where a kernel is taken for them.
        use_fused_kernels: True for the best present; providers by kind to choose (`elixir.kernels.model.registry`);
            False for nothing at all.
        device_type: where the model will run: ``cuda`` or ``cpu``. For a model on meta, where it is traced for.

    Raises:
        InputError, InputTypeError: a kind or provider is asked for that does not exist.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> fused = FusedKernels(model, True, "cpu")
        >>> str(fused)
        'no fused kernels'
        >>> fused.remove()
    """

    def __init__(self, model: nn.Module, use_fused_kernels: bool | Mapping[str, str], device_type: str) -> None:
        self._replaced: list[tuple[nn.Module, Any]] = []
        self.counts: dict[str, tuple[str, int]] = {}
        """Kind -> its provider and the number of modules; only kinds that some module has."""
        asked = wishes(use_fused_kernels)
        if asked is None:
            return
        for kind in KINDS:
            choice = choose(kind, device_type, asked.get(kind))
            if choice.kernel is None:
                continue
            count = sum(self._fuse(module, choice, choice.kernel) for module in model.modules())
            if count:
                self.counts[kind] = (choice.name, count)

    def remove(self) -> None:
        """Gives every module its own forward back."""
        while self._replaced:
            module, forward = self._replaced.pop()
            if vars(module).get("forward") is forward:  # another forward may have replaced this one
                del module.forward

    def __str__(self) -> str:
        parts = (
            f"{kind} by {name} in {count} module{'s' * (count > 1)}" for kind, (name, count) in self.counts.items()
        )
        return "fused kernels: " + ", ".join(parts) if self.counts else "no fused kernels"

    def _fuse(self, module: nn.Module, choice: ChosenKernel, kernel: Kernel) -> bool:
        """Puts a kernel into a module if it takes one of this kind."""
        if choice.kind == "cross_entropy":
            layer = last_layer_of(module)
            if layer is None:
                return False
            self._set(layer, deferring_layer(layer, kernel))
            self._set(module, deferring_forward(module))
            return True
        if "forward" in vars(module):  # another library, or another kind, has replaced it
            return False
        forward = _FORWARDS[choice.kind](module, kernel, choice)
        if forward is not None:
            self._set(module, forward)
        return forward is not None

    def _set(self, module: nn.Module, forward: Any) -> None:
        module.forward = forward
        self._replaced.append((module, forward))


def _rms_norm_forward(module: nn.Module, kernel: Kernel, choice: ChosenKernel) -> Any:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if len(list(module.parameters())) != 1 or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return None
    if not isinstance(eps, float) or not _is_rms_norm(type(module)):
        return None
    plain = type(module).forward

    @wraps(plain)
    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        if hidden_states.dtype != self.weight.dtype:  # families differ in the dtype of the result
            return plain(self, hidden_states)
        return kernel(hidden_states, self.weight, self.variance_epsilon)

    return MethodType(forward, module)


def _layer_norm_forward(module: nn.Module, kernel: Kernel, choice: ChosenKernel) -> Any:
    if type(module) is not nn.LayerNorm or module.bias is None or len(module.normalized_shape) != 1:
        return None
    plain = nn.LayerNorm.forward

    @wraps(plain)
    def forward(self: nn.LayerNorm, input: torch.Tensor) -> torch.Tensor:
        if input.dtype != self.weight.dtype:
            return plain(self, input)
        output: torch.Tensor = kernel(input, self.weight, self.bias, self.eps)
        return output

    return MethodType(forward, module)


def _swiglu_forward(module: nn.Module, kernel: Kernel, choice: ChosenKernel) -> Any:
    projections = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(isinstance(layer, nn.Module) for layer in projections) or not _is_swiglu(module):
        return None
    if choice.whole_block:
        # The projections are not called, so what is more than a linear layer, or is listened to, would be left out.
        if any(type(p) is not nn.Linear or p._forward_hooks or p._forward_pre_hooks for p in projections):
            return None

        def forward(self: Any, x: torch.Tensor) -> Any:
            return kernel(x, self.gate_proj, self.up_proj, self.down_proj)
    else:

        def forward(self: Any, x: torch.Tensor) -> Any:
            gate, up = self.gate_proj(x), self.up_proj(x)
            return self.down_proj(kernel(gate, up) if gate.dtype == up.dtype else F.silu(gate) * up)

    return MethodType(wraps(type(module).forward)(forward), module)


def _rotary_forward(module: nn.Module, kernel: Kernel, choice: ChosenKernel) -> Any:
    """The class's forward with another `apply_rotary_pos_emb` among its global names, for this instance alone."""
    forward, name = type(module).forward, "apply_rotary_pos_emb"
    plain = inspect.unwrap(forward)
    if not isinstance(plain, FunctionType) or name not in plain.__code__.co_names:
        return None
    function = plain.__globals__.get(name)
    if not isinstance(function, FunctionType) or not _is_rotary(function):
        return None

    def rotary(q: Any, k: Any, cos: Any, sin: Any, *rest: Any, **named: Any) -> Any:
        return kernel(function, q, k, cos, sin, *rest, **named)

    copied = _reading(forward, name, rotary)
    return None if copied is None else MethodType(copied, module)


def _reading(function: Callable[..., Any], name: str, value: Any) -> Callable[..., Any] | None:
    """A copy of a function that reads `value` for one global name.

    A decorator, such as transformers' `deprecate_kwarg`, is copied with the function that it calls. None if its closure
    does not hold that function.
    """
    if not isinstance(function, FunctionType):
        return None
    names, closure, inner = function.__globals__, function.__closure__, getattr(function, "__wrapped__", None)
    reading: Any = function
    if inner is None:
        names = {**names, name: value}
    else:
        reading = _reading(inner, name, value)
        if reading is None or not any(cell.cell_contents is inner for cell in closure or ()):
            return None
        closure = tuple(CellType(reading) if cell.cell_contents is inner else cell for cell in closure or ())
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(copy, function).__wrapped__ = reading
    return copy


_FORWARDS: dict[str, Callable[[nn.Module, Kernel, ChosenKernel], Any]] = {
    "layer_norm": _layer_norm_forward,
    "rms_norm": _rms_norm_forward,
    "rotary": _rotary_forward,
    "swiglu": _swiglu_forward,
}


# --- what a class computes -----------------------------------------------------------------------------------------


def _numbers(*shape: int, seed: float = 1.0) -> torch.Tensor:
    """Numbers without a pattern that a wrong formula could fit; no random generator is touched."""
    count = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32, device="cpu")
    return (count * count * seed).sin().view(shape)


def _computes(call: Callable[[], Any], expected: torch.Tensor) -> bool:
    """Whether `call` gives `expected`. Any error means no: stand-ins lack attributes that other forwards need."""
    try:
        with torch.no_grad():
            found = call()
        return (
            isinstance(found, torch.Tensor)
            and found.shape == expected.shape
            and bool(torch.allclose(found, expected, rtol=_PROBE_TOLERANCE, atol=_PROBE_TOLERANCE))
        )
    except Exception:
        return False


def _is_rms_norm(cls: type[nn.Module]) -> bool:
    x, weight, eps = _numbers(3, 4), _numbers(4, seed=0.7), 0.1
    expected = weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return _computes(lambda: cls.forward(SimpleNamespace(weight=weight, variance_epsilon=eps), x), expected)


def _is_swiglu(module: nn.Module) -> bool:
    x = _numbers(3, 4)
    layers = [_numbers(4, 4, seed=seed) for seed in (0.3, 0.5, 0.9)]
    holds = {
        name: (lambda y, w=w: y @ w) for name, w in zip(("gate_proj", "up_proj", "down_proj"), layers, strict=True)
    }
    activation = getattr(module, "act_fn", None)
    if isinstance(activation, nn.Module) and next(activation.parameters(), None) is not None:
        return False
    stand_in = SimpleNamespace(**holds, act_fn=activation, config=getattr(module, "config", None))
    expected = (F.silu(x @ layers[0]) * (x @ layers[1])) @ layers[2]
    return _computes(lambda: type(module).forward(stand_in, x), expected)


def _is_rotary(function: Callable[..., Any]) -> bool:
    q, cos, sin = _numbers(1, 2, 3, 4), _numbers(1, 3, 4, seed=0.3), _numbers(1, 3, 4, seed=0.6)
    turned = torch.cat((-q[..., 2:], q[..., :2]), dim=-1)
    expected = q * cos.unsqueeze(1) + turned * sin.unsqueeze(1)
    return _computes(lambda: torch.stack(function(q, q * 2, cos, sin)), torch.stack((expected, expected * 2)))
