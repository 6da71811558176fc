"""Kernels of Liger-Kernel, each from one function that gives it or says why it cannot be used.

Nothing needs the library. It may be absent, of a version without the function, or broken in ways that only its import
shows (a missing Triton), so whatever an import raises counts as absent. Signatures are those from version 0.5 on.

A library's kernel is no torch function, so it would not be seen reading a streamed parameter, and before the chunk has
come its memory is a placeholder. Parameters therefore go through `announced`: a view, which is a torch function of the
parameter, brings the chunk in and leaves an ordinary tensor that lies in the block; autograd leads its gradient to the
parameter.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from elixir.access.interception import untrack
from elixir.kernels.model.fused_ops import outline_rms_norm, silu_mul


class Unavailable(Exception):
    """Liger-Kernel cannot be used here; the text says why."""


def announced(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's present memory as an ordinary tensor that leads gradients to it, until the running module
    returns."""
    view = parameter.view_as(parameter)
    untrack([view])
    return view


def liger_rms_norm() -> Callable[..., torch.Tensor]:
    """Liger-Kernel's RMS norm.

    Raises:
        Unavailable: it is not there, or has no such kernel.
    """
    # in_place would write the input's gradient over the output's, which hooks and other uses may still read.
    function = partial(_liger("liger_rms_norm"), offset=0.0, casting_mode="llama", in_place=False)
    return _outlined(lambda x, weight, eps: function(x, announced(weight), eps), outline_rms_norm)


def liger_swiglu() -> Callable[..., torch.Tensor]:
    """Liger-Kernel's product of SwiGLU's two factors.

    Raises:
        Unavailable: as `liger_rms_norm`.
    """
    # Both keep the two factors and work out the rest anew, so ours has the memory of theirs.
    return _outlined(_liger("liger_swiglu"), silu_mul)


def liger_rotary() -> Callable[..., Any]:
    """Liger-Kernel's rotation of queries and keys.

    Raises:
        Unavailable: as `liger_rms_norm`.
    """
    function = _liger("liger_rope")

    def rotary(plain: Callable[..., Any], q: Any, k: Any, cos: Any, sin: Any, *rest: Any, **named: Any) -> Any:
        # The kernel reads (batch, heads, tokens, head) and tables of the same width; all else is the model's own.
        fits = not rest and not named and q.dim() == k.dim() == 4 and cos.dim() == sin.dim() == 3
        if not fits or q.is_meta or cos.shape[-1] != q.shape[-1]:
            return plain(q, k, cos, sin, *rest, **named)
        return function(q, k, cos, sin)

    return rotary


def _outlined(kernel: Callable[..., Any], outline: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`kernel`, and on meta `outline`, which takes the memory that the kernel takes."""

    def either(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        output: torch.Tensor = (outline if x.is_meta else kernel)(x, *rest)
        return output

    return either


def _liger(name: str) -> Any:
    """A function of Liger-Kernel.

    Raises:
        Unavailable: its import raises anything, or it has no such function.
    """
    try:
        module = importlib.import_module("liger_kernel.transformers.functional")
    except ModuleNotFoundError as error:
        if error.name == "liger_kernel":
            raise Unavailable("liger_kernel is not installed") from error
        raise Unavailable(f"its import failed ({_text(error)})") from error
    except Exception as error:
        raise Unavailable(f"its import failed ({_text(error)})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise Unavailable(f"this version has no {module.__name__}.{name}")
    return function


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
