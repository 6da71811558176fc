"""Rules of the pretend devices, row by row."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elixir.hardware.profile import preset
from elixir.step_trace import StepTrace
from elixir.tracer import operation_kinds
from elixir.tracer.device import target_for
from elixir.tracer.device.target import Attention
from elixir.tracer.trace import trace_step
from tests.common import inside
from tests.common.tracing import H200, Seen, sum_step

MASK = (2, 1, 128, 128)
HALF = Attention(
    dtype=torch.bfloat16,
    query_shape=(2, 8, 128, 64),
    key_shape=(2, 8, 128, 64),
    value_shape=(2, 8, 128, 64),
    mask_shape=None,
    mask_needs_grad=False,
    dropout=0.0,
    is_causal=True,
    enable_gqa=False,
)


def heads(query: int, key: int, value: int | None = None, **changes: Any) -> Attention:
    """Head widths."""
    shapes = {"query_shape": query, "key_shape": key, "value_shape": key if value is None else value}
    return dataclasses.replace(HALF, **{name: (2, 8, 128, width) for name, width in shapes.items()}, **changes)


def having(**changes: Any) -> Attention:
    return dataclasses.replace(HALF, **changes)


FEWER_KEY_HEADS: dict[str, Any] = {"key_shape": (2, 2, 128, 64), "value_shape": (2, 2, 128, 64)}
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
EFFICIENT_WITH_GROUPS = "efficient" if TORCH >= (2, 14) else "math"
ATTENTION = [
    # machine, call, kernel
    ("h200", HALF, "cudnn"),
    ("h200", having(dropout=0.1), "flash" if TORCH >= (2, 12) else "cudnn"),
    ("h200", having(dropout=0.125), "cudnn"),
    ("h200", having(dropout=0.125, query_shape=(2, 8, 1, 64), is_causal=False), "flash"),
    ("h200", having(key_shape=(2, 8, 1, 64), value_shape=(2, 8, 1, 64), is_causal=False), "flash"),
    ("h200", having(mask_shape=(128, 1)), "cudnn"),
    ("h200", having(mask_shape=(2, 128, 128)), "efficient"),
    ("h200", having(mask_shape=MASK, mask_last_dim_contiguous=False), "math"),
    ("h200", heads(64, 64, 32), "cudnn"),
    ("h200", heads(192, 192, 128), "cudnn"),
    ("h200", heads(192, 192), "flash"),
    ("h200", having(enable_gqa=True, key_shape=(2, 2, 128, 64), value_shape=(2, 4, 128, 64)), "cudnn"),
    ("a100", having(enable_gqa=True, key_shape=(2, 2, 128, 64), value_shape=(2, 4, 128, 64)), "math"),
    ("h200", having(mask_shape=MASK), "cudnn"),
    ("h200", having(mask_shape=MASK, mask_needs_grad=True), "efficient"),
    ("h200", having(dtype=torch.float32), "efficient"),
    ("h200", having(dtype=torch.float64), "math"),
    ("h200", heads(256, 256), "flash"),
    ("h200", heads(512, 512), "efficient"),
    ("h200", having(enable_gqa=True, **FEWER_KEY_HEADS), "cudnn"),
    ("h200", having(**FEWER_KEY_HEADS), "math"),
    ("h200", having(key_shape=(1, 8, 128, 64)), "math"),
    ("h200", having(last_dim_contiguous=False), "math"),
    ("h200", having(query_shape=(8, 128, 64), key_shape=(8, 128, 64), value_shape=(8, 128, 64)), "math"),
    ("h200", having(dtype=torch.float32, enable_gqa=True, **FEWER_KEY_HEADS), EFFICIENT_WITH_GROUPS),
    ("a100", having(mask_shape=MASK, enable_gqa=True, **FEWER_KEY_HEADS), EFFICIENT_WITH_GROUPS),
    ("a100", HALF, "flash"),
    ("a100", having(dtype=torch.float16), "flash"),
    ("a100", having(mask_shape=MASK), "efficient"),
    ("a100", having(query_shape=(2, 8, 16, 64)), "efficient"),
    ("a100", having(query_shape=(2, 8, 16, 64), is_causal=False), "flash"),
    ("a100", heads(64, 64, 32), "efficient"),
    ("a100", heads(64, 64, 33), "math"),
    ("a100", heads(256, 256, dropout=0.1), "flash"),
    ("v100", HALF, "math"),
    ("v100", having(dtype=torch.float16), "efficient"),
    ("v100", having(dtype=torch.float32), "efficient"),
    ("v100", heads(30, 30, dtype=torch.float16), "math"),
    ("rtx4090", HALF, "flash"),
    ("rtx4090", heads(256, 256), "flash"),
    ("rtx4090", heads(256, 256, dropout=0.1), "efficient"),
    ("rtx4090", heads(224, 224), "efficient"),
    ("cpu", HALF, "cpu_flash"),
    ("cpu", having(dtype=torch.float64), "cpu_flash"),
    ("cpu", having(mask_shape=MASK), "cpu_flash"),
    ("cpu", having(mask_shape=MASK, mask_needs_grad=True), "math"),
    ("cpu", having(dropout=0.1), "math"),
    ("cpu", heads(64, 64, 32), "math"),
    ("cpu", having(**FEWER_KEY_HEADS), "math"),
]


@pytest.mark.parametrize(
    ("machine", "call", "kernel"), ATTENTION, ids=lambda value: value if isinstance(value, str) else ""
)
def test_attention_kernel(machine: str, call: Attention, kernel: str) -> None:
    assert target_for(preset(machine)).attention_kernel(call) == kernel


def test_cudnn_can_be_put_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert target_for(H200).attention_kernel(HALF) == "flash"


class Attends(nn.Module):
    """Attention over a projection, with a mask where told; `ran` tells which kernels its copies took as well."""

    ran: Seen

    def __init__(self, dropout: float = 0.0, mask: bool = False, width: int = 64) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)
        self.dropout = dropout
        self.mask = mask
        Attends.ran = Seen()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.project(x)
        mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).tril() if self.mask else None
        y = F.scaled_dot_product_attention(x, x, x, mask, self.dropout)
        Attends.ran.append(y.grad_fn.name())  # type: ignore[union-attr]
        return y


def operators_at_peak(trace: StepTrace) -> set[str]:
    return {contributor.operator for contributor in trace.peak_contributors}


@pytest.mark.parametrize(
    ("machine", "dtype", "mask", "kernel"),
    [
        ("h200", torch.bfloat16, False, "CudnnAttention"),
        ("a100", torch.bfloat16, False, "FlashAttention"),
        ("a100", torch.bfloat16, True, "EfficientAttention"),
        ("v100", torch.float32, False, "EfficientAttention"),
        ("cpu", torch.float32, True, "FlashAttentionForCpu"),
    ],
)
def test_the_chosen_kernel_is_what_runs(machine: str, dtype: torch.dtype, mask: bool, kernel: str) -> None:
    inp = {"x": torch.ones(2, 4, 256, 64)}
    model = Attends(mask=mask)
    trace = trace_step(model, inp, sum_step, hardware=preset(machine), dtype=dtype)
    assert list(model.ran) == [f"ScaledDotProduct{kernel}Backward0"]
    # None of them keeps the scores.
    scores = 2 * 4 * 256 * 256 * dtype.itemsize
    kept = sum(c.bytes for c in trace.peak_contributors if c.kind == "activations" and "softmax" in c.operator)
    assert kept < scores


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_all(p: float) -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x * self.scale, p)

    trace = trace_step(Drops(), {"x": torch.ones(4, 8)}, sum_step, hardware=H200)
    assert "native_dropout" not in " ".join(operators_at_peak(trace))


def test_the_engine_still_sums_in_place_what_nobody_else_holds() -> None:
    from elixir.tracer.device.autograd_in_place import references_when_alone

    assert references_when_alone() > (0, 0), "no sum of gradients passed the probe"


def attending(heads: int, kv_heads: int) -> StepTrace:
    """A step of attention alone over leaves, in bfloat16, 2 x 128 tokens, heads of 64, causal."""

    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"query": heads, "key": kv_heads, "value": kv_heads}
            for name, count in sizes.items():
                setattr(self, name, nn.Parameter(torch.zeros(2, 128, count, 64, dtype=torch.bfloat16)))

        def forward(self) -> torch.Tensor:
            query, key, value = (part.transpose(1, 2) for part in (self.query, self.key, self.value))
            found: torch.Tensor = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=heads != kv_heads
            )
            return found

    def step(module: nn.Module, inp: dict[str, torch.Tensor]) -> None:
        module().sum().backward()

    return trace_step(Leaves(), {}, step, hardware=H200, optimizer=None)


QUERIES = 2 * 8 * 128 * 64  # elements
ROWS = 2 * 8 * 128


@pytest.mark.parametrize(
    ("kernel", "kv_heads", "per_head"),
    [("cudnn", 8, 0), ("cudnn", 2, 0), ("flash", 8, 0), ("flash", 2, 2 * 2 * QUERIES)],
)
def test_attention_accumulates_in_float32_during_backward(
    kernel: str, kv_heads: int, per_head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and a sum per row; a copy of the gradient, which a sum's expanded one is; for flash shared keys per head."""
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", str(int(kernel == "flash")))
    trace = attending(8, kv_heads)
    workspace = sum(part.bytes for part in trace.peak_contributors if part.kind == "workspace")
    assert kernel in trace.peak_operator
    assert workspace == 4 * (QUERIES + ROWS) + 2 * QUERIES + per_head


@pytest.mark.parametrize("takes_groups", [True, False])
def test_attention_whose_heads_share_keys_costs_as_if_they_did_not(
    takes_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a PyTorch whose formulas refuse shared heads, as that of 2.11."""

    def refuses(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        shapes = [item.shape for item in args[:4] if isinstance(item, torch.Tensor) and item.dim() == 4]
        assert len({shape[1] for shape in shapes}) == 1, "query/key/value shapes are incompatible"
        return 7 * sum(map(math.prod, shapes))

    if not takes_groups:
        inside.count_attention_without_groups(monkeypatch, refuses)
    elif not inside.attention_is_counted_with_groups():
        pytest.skip("this PyTorch does not take groups")
    flops = [attending(8, kv_heads).flops for kv_heads in (8, 2, 1)]
    assert flops[0] > 0
    assert flops == flops[:1] * 3


@pytest.mark.parametrize("kernel", ["cudnn", "efficient", "flash", "flash_for_cpu"])
def test_causal_attention_counts_the_scores_that_a_query_sees(kernel: str) -> None:
    name = f"_scaled_dot_product_{kernel.replace('flash_for_cpu', 'flash')}_attention"
    func = getattr(torch.ops.aten, name + "_for_cpu" * kernel.endswith("cpu")).default
    query, key = (torch.empty(2, 4, length, 8, device="meta") for length in (6, 4))
    # An efficient or cuDNN kernel takes a mask, and is asked whether to keep what backward needs.
    rest = (None, True) if kernel in ("cudnn", "efficient") else ()
    counted = [
        operation_kinds.count_flops(func, (query, key, key, *rest, 0.0, causal), {}, (torch.empty_like(query),))
        for causal in (False, True)
    ]
    assert counted == [4 * 2 * 4 * 8 * 6 * 4, 4 * 2 * 4 * 8 * (1 + 2 + 3 + 4 + 4 + 4)]
