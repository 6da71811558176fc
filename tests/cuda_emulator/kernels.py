"""Kernels of the pretended device whose results are not of the CPU's shapes, dtypes or strides.

Layer norm: CUDA keeps statistics in float32, the CPU in the dtype of input and weight. Grouped matrix products: the CPU
has no kernel, and composes them of others. RMS norm: likewise. Softmax: CUDA's reads half precision and writes float32.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.cuda_emulator.host import host, on_device, write

aten = torch.ops.aten


def _layer_norm(
    input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> Any:
    found = aten.native_layer_norm(*_host(input), normalized_shape, *_host(weight, bias), eps)
    accumulated = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    return tuple(
        on_device(tensor, dtype) for tensor, dtype in zip(found, (input.dtype, accumulated, accumulated), strict=True)
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
    return tuple(None if tensor is None else on_device(tensor) for tensor in found)


def _rms_norm(
    input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    axes = tuple(range(-len(normalized_shape), 0))
    accumulated = torch.promote_types(input.dtype, torch.float32)
    x = host(input).to(accumulated)
    factor = (x.square().mean(axes, keepdim=True) + (torch.finfo(input.dtype).eps if eps is None else eps)).rsqrt()
    scaled = x * factor if weight is None else x * factor * host(weight)
    return on_device(scaled, input.dtype), on_device(factor)


def _rms_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: list[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: list[bool],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    axes = tuple(range(-len(normalized_shape), 0))
    grad, x, factor = (host(tensor).to(rstd.dtype) for tensor in (grad_out, input, rstd))
    normed = x * factor
    into = grad if weight is None else grad * host(weight)
    grad_input = factor * (into - normed * (into * normed).mean(axes, keepdim=True))
    rows = tuple(range(input.dim() - len(normalized_shape)))
    grad_weight = None if weight is None else on_device((grad * normed).sum(rows), weight.dtype)
    return on_device(grad_input, input.dtype), grad_weight


def _softmax(operator: Any) -> Any:
    def softmax(input: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        (host,) = _host(input)
        found = operator(host.float() if half_to_float else host, dim, False)
        return on_device(found)

    return softmax


def _softmax_backward(operator: Any) -> Any:
    def backward(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> torch.Tensor:
        found = operator(*_host(grad, output), dim, grad.dtype)
        return on_device(found, input_dtype)

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
    return write(padded, found)


def _host(*tensors: torch.Tensor | None) -> list[Any]:
    return [None if tensor is None else host(tensor) for tensor in tensors]


KERNELS = {
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "_grouped_mm": _grouped_mm,
    "_softmax": _softmax(aten._softmax.default),
    "_softmax_backward_data": _softmax_backward(aten._softmax_backward_data.default),
    "_log_softmax": _softmax(aten._log_softmax.default),
    "_log_softmax_backward_data": _softmax_backward(aten._log_softmax_backward_data.default),
}
