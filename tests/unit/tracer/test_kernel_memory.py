"""Steps whose peak is in a kernel or a derivative that allocates memory: predicted to the byte on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmark.observe import observe_step
from elixir.tracer.device import cpu_target
from tests.common.tracing import cpu_trace, predicted_bytes

SCALARS_BYTES = 64
"""Python scalars that autograd keeps as 0-dim tensors, 8 bytes each."""
ROWS, WIDTH = 512, 64
IDS = torch.arange(300) * 7 % ROWS
COLUMNS = torch.arange(ROWS * 8).view(ROWS, 8) * 5 % WIDTH
MASK = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) % 3 == 0


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Steps are tiny: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Body(nn.Module):
    """A linear layer, and what a test does with its result."""

    def __init__(self, body: Callable[[Any, torch.Tensor], torch.Tensor], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.inner = inner
        self._body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._body(self.inner, self.layer(x))


def step(model: nn.Module, inp: dict[str, Any]) -> None:
    model(inp["x"]).pow(2).mean().backward()


def image(h: torch.Tensor) -> torch.Tensor:
    return h.view(2, 4, WIDTH, WIDTH)


def like(h: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(h)


Build = Callable[[], nn.Module | None]
CASES: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], Build]] = {
    # derivatives that autograd writes in place
    "rows by ids": (lambda _, h: h[IDS.to(h.device)], lambda: None),
    "elements by two ids": (lambda _, h: h[IDS.to(h.device), IDS.to(h.device) % WIDTH], lambda: None),
    "index_select": (lambda _, h: h.index_select(0, IDS.to(h.device)), lambda: None),
    "gather": (lambda _, h: h.gather(1, COLUMNS.to(h.device)), lambda: None),
    "take": (lambda _, h: h.take(IDS.to(h.device)), lambda: None),
    "masked_select": (lambda _, h: h.masked_select(MASK.to(h.device)), lambda: None),
    "max over an axis": (lambda _, h: h.max(1).values, lambda: None),
    "topk": (lambda _, h: h.topk(4, 1).values, lambda: None),
    "binary cross entropy with weights": (
        lambda _, h: F.binary_cross_entropy_with_logits(h, like(h), pos_weight=torch.ones(WIDTH, device=h.device)),
        lambda: None,
    ),
    # derivatives that look at values first
    "cumprod": (lambda _, h: h.cumprod(1), lambda: None),
    "prod": (lambda _, h: h.prod(1), lambda: None),
    "largest of all": (lambda _, h: h.max(), lambda: None),
    # operands of two dtypes
    "product with a bool mask": (lambda _, h: (h * MASK.to(h.device)).tanh(), lambda: None),
    # kernels that allocate memory
    "log_softmax with a transposed gradient": (lambda _, h: h.log_softmax(1).t().contiguous(), lambda: None),
    "softmax of a transposed input": (lambda _, h: h.t().softmax(1).contiguous(), lambda: None),
    "a gradient that is laid out as its weight": (
        lambda m, h: functools.reduce(lambda y, each: y[:, :WIDTH] @ each.weight.t().contiguous(), m, h[:1]),
        lambda: nn.ModuleList(nn.Linear(WIDTH, 16 * WIDTH, bias=False) for _ in range(3))),
    "embedding with a transposed gradient": (
        lambda m, h: m(IDS.view(30, 10).to(h.device)).transpose(0, 1).contiguous() + h.sum(),
        lambda: nn.Embedding(ROWS, WIDTH)),
    "a number in a tensor on the CPU": (lambda _, h: h.masked_fill(MASK.to(h.device), torch.tensor(0.5)), lambda: None),
    "kthvalue": (lambda _, h: h.kthvalue(3, 1).values, lambda: None),
    "matrix exponential": (lambda _, h: torch.linalg.matrix_exp(h.view(8, WIDTH, WIDTH) * 0.1), lambda: None),
    "RReLU": (lambda _, h: F.rrelu(h, training=True).sin(), lambda: None),
    "bilinear": (lambda m, h: m(h, h), lambda: nn.Bilinear(WIDTH, WIDTH, 16)),
    "bags of embeddings": (
        lambda m, h: m(IDS.view(30, 10).to(h.device)) + h.sum(), lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="max")),
    "convolution": (lambda m, h: m(image(h)), lambda: nn.Conv2d(4, 8, 3, padding=1)),
    "patches": (lambda m, h: m(image(h)), lambda: nn.Conv2d(4, 32, 8, stride=8)),
    "depthwise over a permuted image": (
        lambda m, h: m(h.view(2, WIDTH, 4, WIDTH).permute(0, 3, 1, 2)),
        lambda: nn.Conv2d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH)),
    "channels last": (
        lambda m, h: m(image(h).contiguous(memory_format=torch.channels_last)), lambda: nn.Conv2d(4, 8, 3, padding=1)),
    "a convolution after one over channels that come last": (
        lambda m, h: m(image(h).contiguous(memory_format=torch.channels_last)),
        lambda: nn.Sequential(nn.Conv2d(4, 16, 2, stride=2), nn.Conv2d(16, 16, 7, padding=3, groups=16))),
    "groups over time": (
        lambda m, h: m(h.view(2, WIDTH, 256)), lambda: nn.Conv1d(WIDTH, WIDTH, 16, padding=8, groups=4)),
    "transposed convolution": (lambda m, h: m(image(h)), lambda: nn.ConvTranspose2d(4, 8, 2, stride=2)),
}  # fmt: skip


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", CASES)
def test_the_predicted_peak_is_the_real_one(name: str) -> None:
    torch.manual_seed(0)
    body, build = CASES[name]
    model, inp = Body(body, build()), {"x": torch.randn(ROWS, WIDTH)}
    predicted = predicted_bytes(model, inp, step)
    real = observe_step(model, inp, step).peak_bytes
    assert abs(predicted - real) <= SCALARS_BYTES, f"predicted {predicted}, real {real}"
    assert predicted_bytes(model, inp, step, cache=False) == predicted


MOMENTS, SAMPLES, SPOKEN = 64, 8, 12


def convolves(batch: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Conv2d(8, 16, 3, padding=1), {"x": torch.ones(batch, 8, 16, 16)}


def test_what_cannot_be_run_is_said_with_its_share_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inp = convolves(2)
    monkeypatch.setattr(cpu_target, "KERNELS_HERE", {})
    monkeypatch.setattr(cpu_target, "MAX_RUN_FLOPS", 1.0)
    (said,) = cpu_trace(model, inp, step).assumptions
    assert "is not counted" in said
    assert 0 < float(said.rpartition("made ")[2].partition(" %")[0]) <= 100


def test_a_trace_under_a_profiler_goes_without_observations() -> None:
    model, inp = nn.Conv2d(8, 16, 5, padding=2), {"x": torch.ones(2, 8, 16, 16)}
    with torch.autograd.profiler.profile(use_kineto=False):
        (said,) = cpu_trace(model, inp, step).assumptions
    assert "is not counted" in said
    assert cpu_trace(model, inp, step).assumptions == ()


def test_recurrent_layers_are_composed_and_said_to_be() -> None:
    inp = {"x": torch.ones(5, 2, 8)}
    (said,) = cpu_trace(nn.LSTM(8, 8), inp, lambda m, b: m(b["x"])[0].sum().backward()).assumptions
    assert "composed form; what oneDNN" in said
