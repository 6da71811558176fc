"""The choice of an attention kernel on CUDA, with PyTorch's default settings."""

from __future__ import annotations

import os

import torch

from elixir.tracer.device.common.attention import HALF, Attention, AttentionKernel

_MAX_FLASH_HEAD_DIM = 256
_MAX_CUDNN_HEAD_DIM = 128
_CUDNN_WIDE_HEADS = (192, 128)
"""Widths of queries and values beyond that which cuDNN takes as well."""
_CUDNN_DROPOUT_STEPS = 16
"""cuDNN drops by multiples of 1/16; from 2.12 on PyTorch sends it no other probability (pull request 174245)."""


def chosen_on_cuda(call: Attention, capability: tuple[int, int]) -> AttentionKernel:
    """cuDNN first on data-centre Hopper and Blackwell, then flash, memory-efficient, math.

    Source: `sdp_utils.cpp` (CUDA) of PyTorch 2.11 to 2.14, with the cuDNN (> 9.15) its wheels bring.
    """
    if len(call.query_shape) != 4 or call.dtype is torch.float64 or not call.last_dim_contiguous:
        return "math"
    if call.broadcasts or not call.mask_last_dim_contiguous:
        return "math"
    half = call.dtype in HALF
    if half and _prefers_cudnn(capability) and _cudnn_takes(call):
        return "cudnn"
    if call.key_shape[1] != call.value_shape[1]:
        return "math"
    head_dims = {call.query_shape[-1], call.key_shape[-1], call.value_shape[-1]}
    head_dim = call.query_shape[-1]
    square = call.query_shape[-2] == call.key_shape[-2]
    flash = half and capability >= (8, 0) and not call.has_mask and len(head_dims) == 1
    if (
        flash
        and head_dim <= _MAX_FLASH_HEAD_DIM
        and (square or not call.is_causal)
        and not _no_wide_heads(call, capability)
    ):
        return "flash"
    alignment = 8 if half else 4
    aligned = all(dim % alignment == 0 for dim in (call.query_shape[-1], call.value_shape[-1]))
    known_dtype = half or call.dtype is torch.float32
    if call.dtype is torch.bfloat16 and capability < (8, 0):
        known_dtype = False
    # From 2.14 on it takes keys and values that heads share (pull request 191085).
    takes_heads = _torch_release() >= (2, 14) or call.key_shape[1] == call.query_shape[1]
    return "efficient" if aligned and known_dtype and takes_heads else "math"


def _prefers_cudnn(capability: tuple[int, int]) -> bool:
    datacenter = capability in ((9, 0), (10, 0), (10, 3))
    return datacenter and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0") != "1"


def _no_wide_heads(call: Attention, capability: tuple[int, int]) -> bool:
    """Consumer Ampere to Blackwell lack the shared memory for flash's backward with wide heads."""
    if capability not in ((8, 6), (8, 9), (12, 0), (12, 1)):
        return False
    head_dim = call.query_shape[-1]
    return head_dim > 192 and (head_dim <= 224 or call.dropout > 0)


def _cudnn_takes(call: Attention) -> bool:
    """Whether cuDNN takes a call in half precision (`can_use_cudnn_attention`)."""
    *_, queries, width = call.query_shape
    keys, value_width = call.key_shape[-2], call.value_shape[-1]
    narrow = width <= _MAX_CUDNN_HEAD_DIM and value_width <= _MAX_CUDNN_HEAD_DIM
    if width % 8 or value_width % 8 or not (narrow or (width, value_width) == _CUDNN_WIDE_HEADS):
        return False
    if keys == 1 or (call.dropout and queries == 1):
        return False
    if call.dropout * _CUDNN_DROPOUT_STEPS % 1 and _torch_release() >= (2, 12):
        return False
    mask = call.mask_shape
    if mask is None:
        return True
    full = (*call.query_shape[:2], queries, keys)[-len(mask) :]
    fits = len(mask) in (2, 4) and all(size in (1, whole) for size, whole in zip(mask, full, strict=True))
    return fits and not call.mask_needs_grad


def _torch_release() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])
