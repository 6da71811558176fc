"""Kernels of other people's libraries, each from one function that gives it or says why it cannot be used.

None of these libraries is needed. Each may be absent, of a version without the function, or broken in ways that only
its import shows (a missing Triton, an extension built for another PyTorch), so whatever an import raises counts as
absent. Signatures are those of NVIDIA Apex (source build of 2025), Liger-Kernel from 0.5 on and xformers 0.0.2x.

A library's kernel is no torch function, so it would not be seen reading a streamed parameter, and before the chunk has
come its memory is a placeholder. Parameters therefore go through `announced`: a view, which is a torch function of the
parameter, brings the chunk in and leaves an ordinary tensor that lies in the block; autograd leads its gradient to the
parameter.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from elixir.access.interception import untrack
from elixir.kernels.model.fused_ops import outline_rms_norm, silu_mul

_reported: set[str] = set()


class Unavailable(Exception):
    """A library cannot be used here; the text says why."""

    def __init__(self, library: str, reason: str) -> None:
        super().__init__(reason)
        self.first = library not in _reported
        """Whether this library has not been reported yet."""
        _reported.add(library)


def announced(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's present memory as an ordinary tensor that leads gradients to it, until the running module
    returns."""
    view = parameter.view_as(parameter)
    untrack([view])
    return view


def liger_layer_norm() -> Callable[..., torch.Tensor]:
    """Liger-Kernel's layer norm.

    Raises:
        Unavailable: it is not there, or has no such kernel.
    """
    function = _liger("liger_layer_norm")
    return _outlined(
        lambda x, weight, bias, eps: function(x, announced(weight), announced(bias), eps), _plain_layer_norm
    )


def liger_rms_norm() -> Callable[..., torch.Tensor]:
    """Liger-Kernel's RMS norm.

    Raises:
        Unavailable: as `liger_layer_norm`.
    """
    # in_place would write the input's gradient over the output's, which hooks and other uses may still read.
    function = partial(_liger("liger_rms_norm"), offset=0.0, casting_mode="llama", in_place=False)
    return _outlined(lambda x, weight, eps: function(x, announced(weight), eps), outline_rms_norm)


def liger_swiglu() -> Callable[..., torch.Tensor]:
    """Liger-Kernel's product of SwiGLU's two factors.

    Raises:
        Unavailable: as `liger_layer_norm`.
    """
    # Both keep the two factors and work out the rest anew, so ours has the memory of theirs.
    return _outlined(_liger("liger_swiglu"), silu_mul)


def liger_rotary() -> Callable[..., Any]:
    """Liger-Kernel's rotation of queries and keys.

    Raises:
        Unavailable: as `liger_layer_norm`.
    """
    function = _liger("liger_rope")

    def rotary(plain: Callable[..., Any], q: Any, k: Any, cos: Any, sin: Any, *rest: Any, **named: Any) -> Any:
        # The kernel reads (batch, heads, tokens, head) and tables of the same width; all else is the model's own.
        fits = not rest and not named and q.dim() == k.dim() == 4 and cos.dim() == sin.dim() == 3
        if not fits or q.is_meta or cos.shape[-1] != q.shape[-1]:
            return plain(q, k, cos, sin, *rest, **named)
        return function(q, k, cos, sin)

    return rotary


def apex_rms_norm() -> Callable[..., torch.Tensor]:
    """NVIDIA Apex' fused RMS norm.

    Raises:
        Unavailable: it is not there, was built without the extension, or is the other project of that name.
    """
    function = _apex("fused_rms_norm_affine")
    return _outlined(lambda x, weight, eps: function(x, announced(weight), tuple(weight.shape), eps), outline_rms_norm)


def apex_layer_norm() -> Callable[..., torch.Tensor]:
    """NVIDIA Apex' fused layer norm.

    Raises:
        Unavailable: as `apex_rms_norm`.
    """
    function = _apex("fused_layer_norm_affine")

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Any:
        return function(x, announced(weight), announced(bias), tuple(weight.shape), eps)

    return _outlined(norm, _plain_layer_norm)


def xformers_swiglu() -> Callable[..., torch.Tensor]:
    """xformers' SwiGLU: the two projections, the product and the last projection in one operator.

    Raises:
        Unavailable: it is not there, or has no such operator.
    """
    function = _function("xformers", "xformers.ops", "swiglu")

    def block(x: torch.Tensor, gate: Any, up: Any, down: Any) -> torch.Tensor:
        weights = [announced(layer.weight) for layer in (gate, up, down)]
        biases = [None if layer.bias is None else announced(layer.bias) for layer in (gate, up, down)]
        if x.is_meta:
            inner = silu_mul(F.linear(x, weights[0], biases[0]), F.linear(x, weights[1], biases[1]))
            return F.linear(inner, weights[2], biases[2])
        pairs = [item for pair in zip(weights, biases, strict=True) for item in pair]
        output: torch.Tensor = function(x, *pairs)
        return output

    return block


def _outlined(kernel: Callable[..., Any], outline: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`kernel`, and on meta `outline`, which takes the memory that the kernel takes."""

    def either(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        output: torch.Tensor = (outline if x.is_meta else kernel)(x, *rest)
        return output

    return either


def _plain_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _liger(name: str) -> Any:
    return _function("liger", "liger_kernel.transformers.functional", name)


def _apex(name: str) -> Any:
    if not _is_nvidia_apex():
        raise Unavailable("apex", "the package named apex here is another project; NVIDIA's is built from its sources")
    function = _function("apex", "apex.normalization.fused_layer_norm", name)
    try:
        importlib.import_module("fused_layer_norm_cuda")  # which Apex itself looks for at the first call only
    except Exception as error:
        raise Unavailable("apex", f"it was built without its CUDA extensions ({_text(error)})") from error
    return function


def _is_nvidia_apex() -> bool:
    """False where a package of that name is there and is not NVIDIA's, which is found out without running its code."""
    try:
        spec = importlib.util.find_spec("apex")
    except (ImportError, ValueError):
        return True  # loaded by hand, or not there: importing it will tell
    if spec is None or spec.submodule_search_locations is None:
        return spec is None
    folders = list(spec.submodule_search_locations)
    inside = importlib.machinery.PathFinder.find_spec("apex.normalization", folders)
    return not folders or inside is not None


def _function(library: str, module_name: str, name: str) -> Any:
    """A function of an optional library.

    Raises:
        Unavailable: whatever the import raises, or it has no such function.
    """
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        top = module_name.partition(".")[0]
        reason = f"{top} is not installed" if error.name == top else f"its import failed ({_text(error)})"
        raise Unavailable(library, reason) from error
    except Exception as error:
        raise Unavailable(library, f"its import failed ({_text(error)})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise Unavailable(library, f"this version has no {module_name}.{name}")
    return function


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
