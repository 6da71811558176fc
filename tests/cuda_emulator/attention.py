"""Attention of the pretended device: flash, memory-efficient and cuDNN's, none of which the CPU has.

What they give, and what they save for backward, has the shapes, dtypes, strides and devices of PyTorch's CUDA kernels
(`ATen/native/transformers/cuda`: `attention.cu`, `attention_backward.cu`, `flash_attn/flash_api.cpp`; `cudnn/MHA.cpp`);
so have the buffers that they allocate for the time of their backward, cuDNN's as far as its frontend asks for them
(what its engines take in addition is not public). The values come from the plain formula, in float32 on the host.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.cuda_emulator.host import host, on_device, write

_FLASH_ROWS = 128  # sequences are rounded up to this in the buffers of flash attention's backward
_EFFICIENT_LSE_ROWS = 32


class _Formula:
    """Scores and weights of one call, on the host; forward and backward make the same from the same seed."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        dropout: float,
        is_causal: bool,
        scale: float | None,
        seed: int,
    ) -> None:
        self.query = host(query).float()
        self.groups = query.shape[1] // key.shape[1], query.shape[1] // value.shape[1]
        self.key, self.value = (
            host(tensor).float().repeat_interleave(groups, 1)
            for tensor, groups in zip((key, value), self.groups, strict=True)
        )
        self.scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = self.query @ self.key.mT * self.scale
        if bias is not None:
            scores += host(bias).float()
        if is_causal:
            scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        self.log_sum = scores.logsumexp(-1)
        self.weights = scores.softmax(-1).nan_to_num(0.0)
        self.kept: torch.Tensor | float = 1.0
        if dropout:
            drawn = torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed))
            self.kept = (drawn >= dropout) / (1 - dropout)

    def output(self) -> torch.Tensor:
        return (self.weights * self.kept) @ self.value

    def gradients(self, grad_output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Shapes of query, key, value and scores."""
        grad_output = host(grad_output).float()
        grad_weights = grad_output @ self.value.mT * self.kept
        grad_scores = self.weights * (grad_weights - (grad_weights * self.weights).sum(-1, keepdim=True))
        grad_query = grad_scores @ self.key * self.scale
        grad_key = grad_scores.mT @ self.query * self.scale
        grad_value = (self.weights * self.kept).mT @ grad_output
        grad_key, grad_value = (
            grad.unflatten(1, (-1, groups)).sum(2)
            for grad, groups in zip((grad_key, grad_value), self.groups, strict=True)
        )
        return grad_query, grad_key, grad_value, grad_scores


def _seed(dropout: float) -> int:
    return int(torch.randint(2**31, ())) if dropout else 0


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    seed = _seed(dropout_p)
    formula = _Formula(query, key, value, None, dropout_p, is_causal, scale, seed)
    output = torch.empty_like(query)
    log_sum = on_device(formula.log_sum, torch.float32)
    random_state = on_device(torch.tensor([seed, 0], dtype=torch.uint64))
    unused = torch.empty((), dtype=torch.uint64, device="cuda")
    write(output, formula.output())
    no_mask = torch.empty(0, dtype=query.dtype, device="cuda")
    return output, log_sum, None, None, query.shape[2], key.shape[2], random_state, unused, no_mask


def _flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> Any:
    batch, heads, rows, width = query.shape
    formula = _Formula(query, key, value, None, dropout_p, is_causal, scale, int(host(philox_seed)[0]))
    contiguous = [tensor.transpose(1, 2).contiguous() for tensor in (grad_out, out)]
    grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
    row_sums = torch.empty(batch, heads, _rounded(rows, _FLASH_ROWS), device="cuda")
    wide = _rounded(width, 32) if width <= 192 else 256
    accumulated = torch.empty(batch, _rounded(rows, _FLASH_ROWS), heads, wide, device="cuda")
    shared = formula.groups[0] > 1
    per_head = [
        torch.empty(batch, key.shape[2], heads, width, dtype=key.dtype, device="cuda") for _ in range(2 * shared)
    ]
    for grad, found in zip(grads, formula.gradients(grad_out), strict=False):
        write(grad, found)
    del contiguous, row_sums, accumulated, per_head
    return tuple(grads)


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    batch, heads, rows, _ = query.shape
    seed = _seed(dropout_p)
    formula = _Formula(query, key, value, attn_bias, dropout_p, is_causal, scale, seed)
    output = torch.empty(batch, rows, heads, value.shape[3], dtype=query.dtype, device="cuda").transpose(1, 2)
    kept_rows = _rounded(rows, _EFFICIENT_LSE_ROWS) if compute_log_sumexp else 0
    log_sum = torch.empty(batch, heads, kept_rows, device="cuda")
    if compute_log_sumexp:
        write(log_sum[..., :rows], formula.log_sum)
    write(output, formula.output())
    return output, log_sum, torch.tensor(seed), torch.tensor(0)  # on the host, unless a graph is being captured


def _efficient_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    batch, heads, rows, _ = query.shape
    formula = _Formula(query, key, value, attn_bias, dropout_p, is_causal, scale, int(philox_seed))
    by_rows = grad_out.transpose(1, 2).contiguous()
    grads = [torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format) for t in (query, key, value)]
    grad_bias = None
    if attn_bias is not None and grad_input_mask[3]:
        columns = attn_bias.shape[-1]
        shape = (*attn_bias.shape[:-1], _rounded(columns, 16))
        grad_bias = torch.empty(shape, dtype=attn_bias.dtype, device="cuda")[..., :columns]
    if query.dtype is torch.float32:  # in half precision the kernel works them out
        products = by_rows * out.transpose(1, 2)
        sums = products.sum(-1)
        row_sums = sums.transpose(-2, -1).contiguous()
        del products, sums
    else:
        row_sums = torch.empty(batch, heads, rows, device="cuda")
    workspace = torch.empty(
        _efficient_workspace_bytes(query, key, value, dropout_p > 0), dtype=torch.uint8, device="cuda"
    )
    *found, found_bias = formula.gradients(grad_out)
    for grad, values in zip(grads, found, strict=True):
        write(grad, values.transpose(1, 2))
    if grad_bias is not None:
        write(grad_bias, found_bias)
    del by_rows, row_sums, workspace
    return (*(grad.transpose(1, 2) for grad in grads), grad_bias)


def _efficient_workspace_bytes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, drops: bool) -> int:
    """`Params::workspace_size` of `kernel_backward.h`, for the kernels from compute capability 8.0 on
    (`cutlassB.h`)."""
    batch, heads, rows, width = query.shape
    half = query.dtype is not torch.float32
    widest = max(width, value.shape[3])
    block_rows = 64 if widest <= 64 else 128
    block_columns = 128 if half and 64 < widest <= 128 else 64
    tiles = -(-rows // block_rows) * -(-width // block_columns)
    elements = tiles * (block_rows * block_columns + 4)  # each with a lock, a counter and padding
    if half and widest > block_rows:  # gradients of keys and values do not fit the registers
        splits = max(1, min(-(-key.shape[2] // block_columns), 200 // (batch * heads)))
        elements += splits * block_columns * sum(_rounded(t.shape[3], block_rows) for t in (query, value))
    return batch * heads * _rounded(elements, 4) * 4


def _cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    seed = _seed(dropout_p)
    formula = _Formula(query, key, value, attn_bias, dropout_p, is_causal, scale, seed)
    random_state = [on_device(torch.tensor(number), torch.int64) for number in (seed, 0)]
    log_sum = on_device(formula.log_sum, torch.float32) if compute_log_sumexp else None
    shape = (*query.shape[:3], value.shape[3])
    inner_to_outer = sorted(range(4), key=lambda axis: query.stride(axis))
    output = torch.empty_permuted(shape, inner_to_outer[::-1], dtype=query.dtype, device="cuda")
    write(output, formula.output())
    return output, log_sum, None, None, query.shape[2], key.shape[2], *random_state, None


def _cudnn_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    attn_bias: torch.Tensor | None,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Any:
    formula = _Formula(query, key, value, attn_bias, dropout_p, is_causal, scale, int(host(philox_seed)))
    grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
    same_layout = grad_out if grad_out.stride() == out.stride() else torch.empty_like(out)
    workspace = torch.empty(
        _rounded(query[..., 0].numel() * 4, 16) + query.numel() * 4, dtype=torch.uint8, device="cuda"
    )
    for grad, found in zip(grads, formula.gradients(grad_out), strict=False):
        write(grad, found)
    del same_layout, workspace
    return tuple(grads)


KERNELS = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
}
