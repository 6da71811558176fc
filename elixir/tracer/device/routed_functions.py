"""Sends composite functions, for meta tensors and for the time of a trace, where the target device would send them.

Attention and dropout are composed of other operators before any dispatch mode sees them, and on meta they fall back to
forms no GPU would run. An implementation under the `AutogradMeta` key comes earlier, and is in force on the engine's
threads and inside checkpoint's recompute as well, where a function mode would not be. If a compiler records them for a
graph, all are composed of operators that it knows.

Products with packed weights are composed of what their kernels do, and operators for which PyTorch has no meta kernel
get one.

PyTorch takes some derivatives in a quicker way once it has looked at values, which on meta it cannot. A trace supposes
the usual case: no factor of a product is zero, no largest value is NaN. Source: `prod_backward`, `cumprod_backward`,
`evenly_distribute_backward` in `FunctionsManual.cpp`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from elixir.torch_private import below_autograd, is_recorded
from elixir.tracer.device.target import Attention, AttentionKernel, Target

aten = torch.ops.aten

_Formula = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_OPERATORS: dict[AttentionKernel, Any] = {
    "math": aten._scaled_dot_product_attention_math.default,
    "cpu_flash": aten._scaled_dot_product_flash_attention_for_cpu.default,
    "cudnn": aten._scaled_dot_product_cudnn_attention.default,
    "flash": aten._scaled_dot_product_flash_attention.default,
    "efficient": aten._scaled_dot_product_efficient_attention.default,
}
_ATTENTION = {kernel: (found, {each.name for each in found._schema.arguments}) for kernel, found in _OPERATORS.items()}
"""Kernel -> its operator, which names its arguments as the others do, and their names."""
_FLASH_WIDTH = 8
"""Flash takes heads of multiples of it, to which others are padded."""
_EFFICIENT_BIAS_ALIGNMENT = 8
_BLOCK_OF_SCALES = 256

LENGTHS_IN_TENSORS: dict[Any, tuple[Any, tuple[int, ...]]] = {
    aten._ctc_loss.Tensor: (aten._ctc_loss.default, (2, 3)),
    aten._ctc_loss_backward.Tensor: (aten._ctc_loss_backward.default, (3, 4)),
}
"""Operator -> the same with lengths as numbers, and which arguments the lengths are."""


@contextlib.contextmanager
def routed(target: Target) -> Iterator[None]:
    """While open, meta tensors take the target's attention and dropout.

    PyTorch warns that kernels are replaced: that is the purpose, and undone at the end.
    """
    library = torch.library.Library("aten", "IMPL")
    quantised = torch.library.Library("bitsandbytes", "IMPL")
    try:
        for name, kernel in quantised_kernels().items():
            quantised.impl(name, kernel, "AutogradMeta", allow_override=True)
        for name, function in functions_of(target).items():
            library.impl(name, function, "AutogradMeta", allow_override=True)
        for name, kernel in KERNELS.items():
            library.impl(name, kernel, "Meta", allow_override=True)
        yield
    finally:
        quantised._destroy()
        library._destroy()


def functions_of(target: Target) -> dict[str, Callable[..., Any]]:
    """Name in `aten` -> what the target runs for it, with its derivative."""
    found: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": _attention(target),
        "mish_backward": _mish_backward,
        "cumprod": _cumprod,
        "prod": _prod,
        "prod.dim_int": _prod_dim,
    }
    if target.kind == "cpu":  # on CUDA their derivatives read no values
        return found | {name: _extreme(getattr(aten, name).default) for name in ("max", "min", "median")}
    found |= {"softmax.int": _softmax(aten._softmax), "log_softmax.int": _softmax(aten._log_softmax)}
    if hasattr(aten, "_fused_rms_norm"):
        found["_fused_rms_norm"] = _fused_rms_norm
    return found | {"dropout": _dropout}


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Runs dropout as `at::dropout` does on CUDA, whose kernel keeps a bool mask."""
    if p == 0 or not train or not input.numel():
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    output: torch.Tensor = torch.native_dropout(input, p, train)[0]
    return output


def _mish_backward(grad_output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    if is_recorded(input):
        bounded = F.softplus(input).tanh()
        return grad_output * (bounded + input * input.sigmoid() * (1 - bounded * bounded))
    return torch.empty_like(input)


def _fused_rms_norm(
    input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm as the one kernel that it is on CUDA."""
    if is_recorded(input):
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        axes = tuple(range(-len(normalized_shape), 0))
        least = torch.finfo(wide.dtype).eps if eps is None else eps
        factor = (wide.square().mean(axes, keepdim=True) + least).rsqrt()
        normed = wide * factor
        return (normed if weight is None else normed * weight).to(input.dtype), factor
    result: tuple[torch.Tensor, torch.Tensor] = _FusedRmsNorm.apply(input, normalized_shape, weight, eps)  # type: ignore[no-untyped-call]
    return result


class _FusedRmsNorm(torch.autograd.Function):
    """RMS norm with the allocations of one kernel: the input, and a factor per row, of half precision in float32."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None, eps: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output = torch.empty(input.shape, dtype=input.dtype, device=input.device)
        rows = input.shape[: input.dim() - len(normalized_shape)]
        wide = torch.promote_types(input.dtype, torch.float32)
        factor = torch.empty(rows + (1,) * len(normalized_shape), dtype=wide, device=input.device)
        ctx.save_for_backward(input, weight, factor)
        ctx.mark_non_differentiable(factor)
        ctx.axes = tuple(range(-len(normalized_shape), 0))
        return output, factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, factor = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is composed of other operators, as on the device
            factor = (input.square().mean(ctx.axes, keepdim=True) + 1).rsqrt()
            normed, scaled = input * factor, gradient if weight is None else gradient * weight
            of_input = factor * (scaled - normed * (scaled * normed).mean(ctx.axes, keepdim=True))
            of_weight = None if weight is None else (gradient * normed).sum_to_size(weight.shape)
        else:
            of_input = torch.empty_like(input)
            of_weight = torch.empty_like(weight) if ctx.needs_input_grad[2] else None
        return of_input, None, of_weight, None


def _softmax(fused: Callable[[torch.Tensor, int, bool], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Gives the softmax of a device whose kernel reads float16 and writes float32 (`at::softmax`)."""

    def softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if input.dtype is torch.float16 and dtype is torch.float32:
            return fused(input, dim, True)
        return fused(input if dtype is None else input.to(dtype), dim, False)

    return softmax


def _attention(target: Target) -> Callable[..., torch.Tensor]:
    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        call = Attention(
            dtype=query.dtype,
            query_shape=tuple(query.shape),
            key_shape=tuple(key.shape),
            value_shape=tuple(value.shape),
            mask_shape=None if attn_mask is None else tuple(attn_mask.shape),
            mask_needs_grad=attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled(),
            dropout=dropout_p,
            is_causal=is_causal,
            enable_gqa=enable_gqa,
            last_dim_contiguous=query.stride(-1) == key.stride(-1) == value.stride(-1) == 1,
            mask_last_dim_contiguous=attn_mask is None or attn_mask.stride(-1) == 1,
        )
        kernel, width = target.attention_kernel(call), query.shape[-1]
        bias = _additive(attn_mask, query.dtype)
        saves = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        padding = -width % _FLASH_WIDTH if kernel == "flash" else 0
        if padding:
            query, key, value = (F.pad(t, (0, padding)) for t in (query, key, value))
        if kernel == "flash" and scale is None:
            scale = width**-0.5
        if kernel == "efficient" and bias is not None:
            bias = _aligned(bias).expand(*query.shape[:3], key.shape[-2])
        given = {
            "attn_mask": bias, "attn_bias": bias, "compute_log_sumexp": saves, "dropout_p": dropout_p,
            "is_causal": is_causal, "return_debug_mask": False, "scale": scale, "enable_gqa": enable_gqa,
        }  # fmt: skip
        operator, names = _ATTENTION[kernel]
        output: torch.Tensor = operator(query, key, value, **{name: given[name] for name in given if name in names})[0]
        return output[..., :width] if padding else output

    return scaled_dot_product_attention


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A bool mask as a summand of the scores: a separate tensor in the query's dtype."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.full((), float("-inf"), dtype=dtype, device=mask.device))


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """The memory-efficient kernel wants rows that begin at multiples of 8: padded, then cut, if they do not.

    As PyTorch pads them: by a whole 8 where only the layout is in the way.
    """
    if all(stride % _EFFICIENT_BIAS_ALIGNMENT == 0 for stride in bias.stride()[:-1]):
        return bias
    length = bias.shape[-1]
    padding = _EFFICIENT_BIAS_ALIGNMENT - length % _EFFICIENT_BIAS_ALIGNMENT
    return F.pad(bias, (0, padding))[..., :length]


class _WithFormula(torch.autograd.Function):
    """An operator whose derivative is a formula of its input, its result and their gradient."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, operator: Any, formula: _Formula) -> torch.Tensor:
        with below_autograd():
            output: torch.Tensor = operator(input)
        ctx.save_for_backward(input, output)
        ctx.formula = formula
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, output = ctx.saved_tensors
        return ctx.formula(input, output, gradient), None, None


def _run(input: torch.Tensor, dtype: torch.dtype | None, operator: Any, formula: _Formula) -> torch.Tensor:
    cast = input if dtype is None else input.to(dtype)
    output: torch.Tensor = _WithFormula.apply(cast, operator, formula)  # type: ignore[no-untyped-call]
    return output


def _extreme(operator: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def of_input(input: torch.Tensor, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        mask = input == output
        zeros = torch.zeros_like(input)
        return zeros.masked_fill_(mask, gradient / mask.sum())

    return lambda input: _run(input, None, operator, of_input)


def _cumprod(self: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    def of_input(input: torch.Tensor, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        weighted = output * gradient
        is_zero = input == 0
        found = _reversed_cumsum(weighted, dim).div(input)
        del is_zero  # it is alive while the gradient is computed
        return found

    return _run(self, dtype, lambda input: aten.cumprod(input, dim), of_input)


def _reversed_cumsum(weighted: torch.Tensor, dim: int) -> torch.Tensor:
    flipped = weighted.flip(dim)
    summed = flipped.cumsum(dim)
    return summed.flip(dim)  # both operands are alive, as temporaries of one expression in C++


def _product(dim: int | None, operator: Any) -> Callable[..., torch.Tensor]:
    def of_input(input: torch.Tensor, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if dim is not None and output.dim() < input.dim():
            gradient, output = gradient.unsqueeze(dim), output.unsqueeze(dim)
        is_zero = input == 0
        counts = is_zero.sum(() if dim is None else dim, keepdim=True)
        found = gradient * (output / input)
        del is_zero, counts  # they are alive while the gradient is computed
        return found

    return lambda input, dtype: _run(input, dtype, operator, of_input)


def _prod(self: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _product(None, aten.prod)(self, dtype)


def _prod_dim(self: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    whole = keepdim or not self.dim()
    return _product(None if whole else dim, lambda input: aten.prod(input, dim, keepdim))(self, dtype)


def quantised_kernels() -> dict[str, Callable[..., Any]]:
    """Name in the namespace `bitsandbytes` -> what runs it in a trace; empty where the library is not loaded."""
    return {"gemm_4bit": _gemm_4bit} if hasattr(torch.ops.bitsandbytes, "gemm_4bit") else {}


def _gemm_4bit(  # noqa: PLR0913 - the operator's own arguments
    inp: torch.Tensor,
    packed: torch.Tensor,
    shape: Sequence[int],
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """Unpacks the weight and multiplies by it.

    So does the CPU always, and a GPU from some hundred rows on, at the latest from 1,537; with fewer rows its kernel
    may unpack in registers, and then takes less memory than is counted here (bitsandbytes 0.50,
    ``backends/cuda/ops.py``).
    """
    library = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        scales = library.dequantize_blockwise.default(absmax_8bit, absmax, absmax_code, _BLOCK_OF_SCALES, torch.float32)
        absmax = scales + absmax_offset
    weight = library.dequantize_4bit.default(packed, absmax, blocksize, quant_type, shape, inp.dtype)
    return F.linear(inp, weight, bias)


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates a loss per sample and a row of alphas per moment (`ctc_loss_allocate_outputs` in `LossCTC.cpp`)."""
    moments, samples = log_probs.shape[0], log_probs.shape[1]
    alphas = 2 * max(target_lengths, default=0) + 1
    return log_probs.new_empty(samples), log_probs.new_empty(samples, moments, alphas)


def _ctc_loss_backward(  # noqa: PLR0913 - the operator's own arguments
    gradient: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    loss: torch.Tensor,
    log_alpha: torch.Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


KERNELS: dict[str, Callable[..., Any]] = {"_ctc_loss": _ctc_loss, "_ctc_loss_backward": _ctc_loss_backward}
"""Name in `aten` -> meta kernel."""
