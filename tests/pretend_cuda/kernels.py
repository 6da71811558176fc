"""Kernels of the pretended device whose results are not of the CPU's shapes, dtypes or strides.

Layer norm: CUDA keeps statistics in float32, the CPU in the dtype of input and weight. Grouped matrix products: the CPU
has no kernel, and composes them of others. RMS norm: likewise. Softmax: CUDA's reads half precision and writes float32.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

_library: torch.library.Library | None = None


def implement() -> None:
    """Give the operators kernels for CUDA tensors."""
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        _library.impl("native_layer_norm", _layer_norm, "CUDA")
        _library.impl("native_layer_norm_backward", _layer_norm_backward, "CUDA")
        _library.impl("_grouped_mm", _grouped_mm, "CUDA")
        _library.impl("_fused_rms_norm", _rms_norm, "CUDA")
        _library.impl("_fused_rms_norm_backward", _rms_norm_backward, "CUDA")
        for name in ("_softmax", "_log_softmax"):
            _library.impl(name, _softmax(getattr(aten, name).default), "CUDA")
            _library.impl(
                f"{name}_backward_data", _softmax_backward(getattr(aten, f"{name}_backward_data").default), "CUDA"
            )


def _layer_norm(
    input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> Any:
    found = aten.native_layer_norm(*_host(input), normalized_shape, *_host(weight, bias), eps)
    accumulated = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    return tuple(
        torch.empty(tensor.shape, dtype=dtype, device="cuda").copy_(tensor)
        for tensor, dtype in zip(found, (input.dtype, accumulated, accumulated), strict=True)
    )


def _layer_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: list[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_mask: list[bool],
) -> Any:
    mixed = weight is not None and weight.dtype != input.dtype
    statistics = [tensor if mixed else tensor.to(input.dtype) for tensor in _host(mean, rstd)]
    found = aten.native_layer_norm_backward(
        *_host(grad_out, input), normalized_shape, *statistics, *_host(weight, bias), output_mask
    )
    return tuple(None if tensor is None else tensor.contiguous().to("cuda") for tensor in found)


def _rms_norm(
    input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    axes = tuple(range(-len(normalized_shape), 0))
    accumulated = torch.promote_types(input.dtype, torch.float32)
    x = input.cpu().to(accumulated)
    factor = (x.square().mean(axes, keepdim=True) + (torch.finfo(input.dtype).eps if eps is None else eps)).rsqrt()
    scaled = x * factor if weight is None else x * factor * weight.cpu()
    return scaled.to(input.dtype).cuda(), factor.cuda()


def _rms_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: list[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: list[bool],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    axes = tuple(range(-len(normalized_shape), 0))
    grad, x, factor = (tensor.cpu().to(rstd.dtype) for tensor in (grad_out, input, rstd))
    normed = x * factor
    into = grad if weight is None else grad * weight.cpu()
    grad_input = factor * (into - normed * (into * normed).mean(axes, keepdim=True))
    rows = tuple(range(input.dim() - len(normalized_shape)))
    grad_weight = None if weight is None else (grad * normed).sum(rows).to(weight.dtype).cuda()
    return grad_input.to(input.dtype).cuda(), grad_weight


def _softmax(operator: Any) -> Any:
    def softmax(input: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        (host,) = _host(input)
        found = operator(host.float() if half_to_float else host, dim, False)
        return torch.empty(found.shape, dtype=found.dtype, device="cuda").copy_(found)

    return softmax


def _softmax_backward(operator: Any) -> Any:
    def backward(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> torch.Tensor:
        found = operator(*_host(grad, output), dim, grad.dtype)
        return torch.empty(found.shape, dtype=input_dtype, device="cuda").copy_(found)

    return backward


def _grouped_mm(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    found = aten._grouped_mm(*_host(first, second, offs, bias), out_dtype)
    columns = found.shape[-1]
    row = -(-columns * found.itemsize // 16) * 16 // found.itemsize  # rows begin at multiples of 16 bytes
    padded = torch.empty(*found.shape[:-1], row, dtype=found.dtype, device="cuda")[..., :columns]
    return padded.copy_(found)


def _host(*tensors: torch.Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.cpu() for tensor in tensors]
