"""A step on the pretended CUDA device takes to the byte what its trace says.

Its allocator sees every tensor, with the lifetimes that autograd gives it on a CUDA device, and the buffers that
attention allocates. It does not see what kernels hold otherwise: `Seen` leaves that out of the prediction, operator by
operator.
"""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmark.proof.memory import MemoryCase, observe_cuda, predict
from benchmark.proof.place import Place
from elixir.step_trace import StepTrace
from elixir.tracer.trace import trace_step
from elixir.units import parse_dtype
from tests.common.gpu import needs_pretended_gpu
from tests.common.tracing import H200
from tests.cuda_emulator.target import Seen

pytestmark = needs_pretended_gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def only_what_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elixir.tracer.trace.target_for", Seen)
    gc.collect()


def predicted(trace: StepTrace) -> dict[str, int]:
    """Peaks of a step whose optimizer has its states from before."""
    return {"backward": trace.backward_peak_bytes + trace.curve[0].optimizer, "step": trace.step_peak_bytes}


ATTENTION_BYTES = 1024
"""Buffers of the backward of attention outside of cuDNN are counted by one rule for all masks: two blocks off at most."""


def compare(expected: dict[str, int], seen: dict[str, int], within_bytes: int) -> None:
    """Both peaks are as expected, or differ by so many bytes at most."""
    assert {
        name: seen[name] if abs(seen[name] - peak) > within_bytes else peak for name, peak in expected.items()
    } == expected


# Models -------------------------------------------------------------------------------------------------------------

SMALL = {"hidden": 64, "heads": 4, "ffn": 256, "positions": 256}


def model(name: str, how: str = "none", kernel: Any = "fused", dtype: str = "bf16", **more: Any) -> MemoryCase:
    """Two layers of a named model; with few words its blocks set the peak, with many the loss."""
    words, kv_heads = more.pop("words", 32), more.pop("kv_heads", 4)
    changes = {**SMALL, "vocabulary": words, "kv_heads": kv_heads}
    seq: int | None = more.pop("seq", 128)
    if name.startswith("vit"):
        del changes["positions"]
        seq = None
    return MemoryCase(name, 2, how, kernel, parse_dtype(dtype), 4, seq, tuple(changes.items()), **more)


MODELS = (
    model("opt-125m", words=512),
    model("opt-1.3b", "reentrant", "foreach", "fp16", mask=True),
    model("opt-1.3b", "non-reentrant", "foreach", seq=16),
    model("opt-1.3b", "non-reentrant", "for-loop", seq=16),
    model("opt-125m", "none", "foreach", "fp32", autocast="bf16"),
    model("gpt2-medium", "non-reentrant", "foreach"),
    model("gpt2-medium", "none", "fused", "fp32", words=512, autocast="fp16"),
    model("llama-3-8b", "none", "foreach", kv_heads=2, mask=True),
    model("llama-3-8b", "non-reentrant", "fused", "fp32", kv_heads=2, autocast="bf16"),
    model("llama-3-8b", "none", "fused", "fp32", kv_heads=2),
    model("bert-large", mask=True),
    model("bert-large", "non-reentrant", "foreach", "fp32", words=512, dropout=0.0),
    model("vit-large", "non-reentrant", "fused", "fp16"),
    model("t5-large", "none", "fused", "fp32", words=512, autocast="bf16", mask=True),
    model("t5-large", "non-reentrant", "foreach"),
    model("mixtral-8x7b", kv_heads=2),
    model("mixtral-8x7b", "non-reentrant", "foreach", kv_heads=2, mask=True),
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.label, marks=[pytest.mark.slow] if i % 4 else []) for i, case in enumerate(MODELS)],
)
def test_steps_of_models_take_what_is_predicted(case: MemoryCase, tmp_path: Path) -> None:
    place = Place(tmp_path)
    observed, choices = observe_cuda(case, place)
    trace = predict(case, place, choices)
    biased = case.model.startswith("t5")  # positions are a mask that is learned, which cuDNN does not take
    compare(predicted(trace), observed, ATTENTION_BYTES if biased else 0)


# Parts of models ----------------------------------------------------------------------------------------------------


def measured(
    module: nn.Module, inp: dict[str, torch.Tensor], step: Any, optimizer_of: str | None, options: dict[str, Any]
) -> dict[str, int]:
    """Peaks of the third step on the device, above what is there before the module."""
    before = torch.cuda.memory_allocated()
    module = module.cuda()
    inp = {name: value.cuda() for name, value in inp.items()}
    optimizer = getattr(torch.optim, optimizer_of)(module.parameters(), **options) if optimizer_of else None
    for _ in range(3):
        module.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        step(module, inp)
        found = {"backward": torch.cuda.max_memory_allocated() - before}
        if optimizer is not None:
            optimizer.step()
        found["step"] = torch.cuda.max_memory_allocated() - before
    return found


def check(
    make: Any,
    inp: dict[str, torch.Tensor],
    step: Any,
    optimizer: str | None = None,
    *,
    within_bytes: int = 0,
    **options: Any,
) -> None:
    """Both peaks of a step, predicted and measured, are the same, or differ by so many bytes at most."""
    kernel = "fused" if options.get("fused") else "foreach" if options.get("foreach", True) else "for-loop"
    chosen = {"optimizer": optimizer, "optimizer_kernel": kernel if optimizer else None}
    trace = trace_step(make(), inp, step, hardware=H200, **chosen)  # type: ignore[arg-type]
    compare(predicted(trace), measured(make(), inp, step, optimizer, options), within_bytes)


def squares(module: nn.Module, inp: dict[str, torch.Tensor]) -> None:
    module(inp["x"]).square().mean().backward()


WIDTH, LENGTH = 64, 128


class Block(nn.Module):
    """Attention and a feed-forward part, with what attention can be asked for."""

    def __init__(
        self, heads: int = 4, kv_heads: int = 4, width: int = WIDTH, dropout: float = 0.0, mask: str = "", how: str = ""
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.each, self.dropout, self.mask, self.how = (
            heads, kv_heads, width // heads, dropout, mask, how,
        )  # fmt: skip
        self.norm = nn.LayerNorm(width)
        self.inward = nn.Linear(width, (heads + 2 * kv_heads) * self.each)
        self.outward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.bias = nn.Parameter(torch.zeros(1, heads, LENGTH, LENGTH)) if mask == "learned" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.how:
            return self.attend(x)
        return checkpoint(self.attend, x, use_reentrant=self.how == "reentrant")

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.inward(self.norm(x)).split([n * self.each for n in (self.heads, self.kv_heads, self.kv_heads)], -1)
        query, key, value = (part.view(batch, length, -1, self.each).transpose(1, 2) for part in parts)
        mask = self.made_mask(x)
        found = F.scaled_dot_product_attention(
            query, key, value, mask, self.dropout, is_causal=mask is None, enable_gqa=self.heads != self.kv_heads
        )
        return x + self.outward(found.transpose(1, 2).reshape(batch, length, width))

    def made_mask(self, x: torch.Tensor) -> torch.Tensor | None:
        batch, length, _ = x.shape
        if self.mask == "causal":
            return torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        if self.mask == "additive":
            return torch.zeros(batch, 1, length, length, dtype=x.dtype, device=x.device)
        if self.mask == "three axes":
            return torch.zeros(1, length, length, dtype=x.dtype, device=x.device)
        if self.mask == "cut":
            return torch.zeros(1, length, length + 4, dtype=x.dtype, device=x.device)[..., :length]
        if self.mask == "keys":
            return torch.ones(batch, 1, 1, length, dtype=torch.bool, device=x.device)
        if self.mask == "whole rows":
            return torch.ones(length, 1, dtype=torch.bool, device=x.device).expand(length, length)
        return None if self.bias is None else self.bias[..., :length, :length].to(x.dtype)


BLOCKS: tuple[dict[str, Any], ...] = (
    {},
    {"dropout": 0.1},
    {"dropout": 0.125},
    {"kv_heads": 2},
    {"kv_heads": 2, "mask": "keys", "dropout": 0.1},
    {"mask": "causal"},
    {"mask": "additive"},
    {"mask": "three axes"},
    {"mask": "whole rows"},
    {"mask": "learned"},
    {"mask": "learned", "how": "non-reentrant"},
    {"dropout": 0.1, "how": "reentrant"},
    {"heads": 2, "kv_heads": 2, "width": 60},
    {"heads": 1, "kv_heads": 1, "width": 160},
    {"heads": 1, "kv_heads": 1, "width": 264},
)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("options", BLOCKS, ids=str)
def test_attention_takes_what_is_predicted(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Every kernel, the masks and widths that decide which, what each saves and holds."""
    width = options.get("width", WIDTH)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), Block(**options), Block(**options)).to(dtype)

    check(make, {"x": torch.randn(4, LENGTH, width).to(dtype)}, squares, within_bytes=ATTENTION_BYTES)


@pytest.mark.parametrize("mask", ["causal", "additive", "three axes", "learned", "cut"])
@pytest.mark.parametrize("length", [LENGTH, LENGTH - 28])
def test_masks_are_padded_where_their_layout_asks_for_it(mask: str, length: int) -> None:
    """A part of a larger mask has rows that begin where the larger one's do."""
    x = torch.randn(4, length, WIDTH)
    model = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(mask=mask))  # noqa: E731
    check(model, {"x": x}, squares, within_bytes=ATTENTION_BYTES)


LOSSES: dict[str, Any] = {
    "mean squared error": lambda found, wanted: F.mse_loss(found, wanted),
    "binary cross entropy": lambda found, wanted: F.binary_cross_entropy(
        found.float().sigmoid(), wanted.float().sigmoid()
    ),
    "cross entropy": lambda found, wanted: F.cross_entropy(found, wanted.argmax(-1)),
    "cross entropy, smoothed": lambda found, wanted: F.cross_entropy(found, wanted.argmax(-1), label_smoothing=0.1),
    "softmax into float32": lambda found, wanted: (found.softmax(-1, dtype=FP32) * wanted).sum(),
    "log-softmax into float32": lambda found, wanted: F.nll_loss(found.log_softmax(-1, dtype=FP32), wanted.argmax(-1)),
}


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_take_what_is_predicted(name: str, dtype: torch.dtype) -> None:
    def step(module: nn.Module, inp: dict[str, torch.Tensor]) -> None:
        LOSSES[name](module(inp["x"]), inp["wanted"]).backward()

    inp = {"x": torch.randn(512, WIDTH).to(dtype), "wanted": torch.randn(512, WIDTH).to(dtype)}
    check(lambda: nn.Linear(WIDTH, WIDTH).to(dtype), inp, step)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    "layer", [nn.SiLU(), nn.Mish(), nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)], ids=str
)
def test_layers_take_what_is_predicted(layer: nn.Module, dtype: torch.dtype) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), copy.deepcopy(layer), nn.Linear(WIDTH, WIDTH)).to(dtype)

    check(make, {"x": torch.randn(512, WIDTH).to(dtype)}, squares)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("optimizer", ["AdamW", "Adagrad", "SGD"])
def test_optimizers_take_what_is_predicted(optimizer: str, options: dict[str, Any]) -> None:
    if optimizer == "SGD":
        options = options | {"lr": 1e-3, "momentum": 0.9}
    check(perceptron, {"x": torch.randn(8, WIDTH)}, squares, optimizer, **options)


def test_sums_of_gradients_take_what_is_predicted() -> None:
    """A step of two micro-batches, clipped."""

    def step(module: nn.Module, inp: dict[str, torch.Tensor]) -> None:
        for part in inp["x"].chunk(2):
            module(part).square().mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)

    check(perceptron, {"x": torch.randn(512, WIDTH)}, step, "AdamW", foreach=True)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("cached", [True, False])
def test_autocast_takes_what_is_predicted(dtype: torch.dtype, cached: bool) -> None:
    """Two uses of the same weights, which autocast casts once if it keeps them."""

    def step(module: nn.Module, inp: dict[str, torch.Tensor]) -> None:
        with torch.autocast("cuda", dtype, cache_enabled=cached):
            loss = sum(module(part).square().mean() for part in inp["x"].chunk(2))
        loss.backward()

    check(perceptron, {"x": torch.randn(512, WIDTH)}, step, "AdamW", foreach=True)
