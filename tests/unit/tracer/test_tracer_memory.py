"""Predicted bytes against real ones on the CPU, for models that are no language model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmark.observe import observe, observe_step
from elixir.errors import TraceError
from tests.common.tracing import H200, Step, cpu_trace, predicted_bytes, sum_step, trace_step

SCALARS_BYTES = 64
"""Python scalars that autograd keeps as 0-dim tensors, 8 bytes each."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Steps are tiny: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Fn(nn.Module):
    """Modules by name, and a forward of the test's own."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], torch.Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


def lora(inside: int, outside: int) -> nn.Module:
    model = Fn(
        lambda m, x: m.base(x) + m.up(m.down(x)),
        base=nn.Linear(inside, outside).requires_grad_(False),
        down=nn.Linear(inside, 4, bias=False),
        up=nn.Linear(4, outside, bias=False),
    )
    return model


def tied() -> nn.Module:
    model = Fn(
        lambda m, x: m.out(m.mid(m.mid(m.embed(x)).relu())),
        embed=nn.Embedding(500, 32),
        mid=nn.Linear(32, 32),
        out=nn.Linear(32, 500, bias=False),
    )
    model.out.weight = model.embed.weight
    return model


def writes_in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x).mul_(2).add_(1).relu_()
    z = m.b(y)
    z += y
    z[:, :4] = 0
    return F.gelu(z).masked_fill_(z > 0, 1.0)


class Square(torch.autograd.Function):
    """(x w)^2, with a backward in Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w) ** 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        inner = 2 * (x @ w) * grad
        return inner @ w.t(), x.t() @ inner


def summed_thrice(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    result: torch.Tensor = h.mul(2).sum(-1) + h.mul(3).sum(-1) + h.mul(4).sum(-1)
    return result


def recomputed_function(reentrant: bool) -> nn.Module:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        def body(x: torch.Tensor) -> torch.Tensor:
            return F.linear(F.gelu(F.linear(x, m.a.weight, m.a.bias)), m.b.weight, m.b.bias)

        return m.c(checkpoint(body, x.requires_grad_(), use_reentrant=reentrant))

    return Fn(run, a=nn.Linear(64, 256), b=nn.Linear(256, 64), c=nn.Linear(64, 8))


def mlp(hidden: int = 128) -> nn.Module:
    return nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 8))


def encoder(dropout: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(norm(nn.Linear(32, 64)), nn.ReLU(), nn.Linear(64, 8))


def attention(need_weights: bool) -> nn.Module:
    return Fn(lambda m, x: m.a(x, x, x, need_weights=need_weights)[0], a=nn.MultiheadAttention(32, 4))


def x(*shape: int) -> dict[str, Any]:
    return {"x": torch.randn(shape)}


TOKENS = {"x": torch.arange(64).view(4, 16) * 7 % 500}
MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "cnn with batch norm": lambda: (cnn(), x(4, 3, 16, 16)),
    "batch norm over rows": lambda: (
        nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8)), x(128, 32)),
    "transformer encoder": lambda: (encoder(0.0), x(4, 16, 32)),
    "transformer encoder with dropout": lambda: (encoder(0.1), x(4, 16, 32)),
    "attention": lambda: (attention(False), x(16, 4, 32)),
    "attention that gives its weights": lambda: (attention(True), x(16, 4, 32)),
    "weight norm": lambda: (normed(nn.utils.parametrizations.weight_norm), x(64, 32)),
    "spectral norm": lambda: (normed(nn.utils.parametrizations.spectral_norm), x(64, 32)),
    "frozen base with adapters": lambda: (nn.Sequential(lora(64, 128), nn.GELU(), lora(128, 8)), x(64, 64)),
    "tied weights": lambda: (tied(), TOKENS),
    "writes in place": lambda: (Fn(writes_in_place, a=nn.Linear(64, 64), b=nn.Linear(64, 64)), x(64, 64)),
    "backward in Python": lambda: (Fn(lambda m, x: m.c(Square.apply(x, m.a.weight)), a=nn.Linear(64, 64), c=mlp()),
                                   x(64, 64)),
    "recomputed function": lambda: (recomputed_function(False), x(64, 64)),
    "recomputed function, reentrant": lambda: (recomputed_function(True), x(64, 64)),
    "gradients that the engine adds up": lambda: (Fn(summed_thrice, a=nn.Linear(16, 512)), x(256, 16)),
    "vmap": lambda: (Fn(lambda m, x: torch.vmap(m.a)(x), a=mlp()), x(64, 64)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_predicted_peak_is_the_real_one(name: str) -> None:
    torch.manual_seed(0)
    model, inp = MODELS[name]()
    predicted = predicted_bytes(model, inp, sum_step)
    real = observe_step(model, inp, sum_step).peak_bytes
    assert abs(predicted - real) <= min(SCALARS_BYTES, 0.002 * real), f"predicted {predicted}, real {real}"


def test_buffers_of_each_thread_count() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    model, inp = attention(False), x(64, 2, 32)
    predicted = predicted_bytes(model, inp, sum_step)
    assert abs(predicted - observe_step(model, inp, sum_step).peak_bytes) <= SCALARS_BYTES
    torch.set_num_threads(1)
    assert predicted_bytes(model, inp, sum_step) < predicted


def accumulates(model: nn.Module, inp: dict[str, Any]) -> None:
    for part in inp["x"].chunk(4):
        (model(part).sum() / 4).backward()


def backward_twice(model: nn.Module, inp: dict[str, Any]) -> None:
    y = model(inp["x"])
    y.sum().backward(retain_graph=True)
    y.mean().backward()


def penalises_gradient(model: nn.Module, inp: dict[str, Any]) -> None:
    x = inp["x"].clone().requires_grad_()
    y = model(x).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    (y + slope.pow(2).sum()).backward()


def clips(model: nn.Module, inp: dict[str, Any]) -> None:
    sum_step(model, inp)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def saves_on_cpu(model: nn.Module, inp: dict[str, Any]) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = model(inp["x"]).sum()
    loss.backward()


def own_hooks(model: nn.Module, inp: dict[str, Any]) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(torch.bfloat16), lambda t: t.to(torch.float32)):
        model(inp["x"]).sum().backward()


def with_functional_call(model: nn.Module, inp: dict[str, Any]) -> None:
    torch.func.functional_call(model, dict(model.named_parameters()), (inp["x"],)).sum().backward()


def to_a_target_made_in_the_step(model: nn.Module, inp: dict[str, Any]) -> None:
    F.mse_loss(model(inp["x"]), torch.zeros(64, 8)).backward()


def classifies(model: nn.Module, inp: dict[str, Any]) -> None:
    F.cross_entropy(model(inp["x"]), torch.arange(64) % 8, label_smoothing=0.1).backward()


def picks_by_a_known_mask(model: nn.Module, inp: dict[str, Any]) -> None:
    model(inp["x"])[torch.arange(64) > 40].sum().backward()


def detects_anomalies(model: nn.Module, inp: dict[str, Any]) -> None:
    with torch.autograd.set_detect_anomaly(True):
        model(inp["x"]).sum().backward()


STEPS: list[Step] = [
    accumulates, backward_twice, penalises_gradient, clips, saves_on_cpu, own_hooks, with_functional_call,
    to_a_target_made_in_the_step, classifies, picks_by_a_known_mask, detects_anomalies,
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_predicted_peak_of_an_unusual_step_is_the_real_one(step: Step) -> None:
    torch.manual_seed(0)
    model, inp = mlp(), x(64, 64)
    predicted = predicted_bytes(model, inp, step)
    real = observe_step(model, inp, step).peak_bytes
    assert abs(predicted - real) <= min(SCALARS_BYTES, 0.002 * real), f"predicted {predicted}, real {real}"


OPTIMIZERS = [
    *[("AdamW", {"lr": 0.1}, kernel) for kernel in ("for-loop", "foreach", "fused")],
    *[("SGD", {"lr": 0.1, "momentum": 0.9}, kernel) for kernel in ("for-loop", "foreach", "fused")],
    *[("RMSprop", {"lr": 0.1}, kernel) for kernel in ("for-loop", "foreach")],
    *[("Adagrad", {"lr": 0.1}, kernel) for kernel in ("for-loop", "foreach", "fused")],
]


STEADY = ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta")


@pytest.mark.parametrize("kernel", ["for-loop", "foreach"])
@pytest.mark.parametrize("name", STEADY)
def test_peak_of_a_real_optimizer_step(name: str, kernel: Any) -> None:
    """The second step: states exist, temporaries come and go."""
    model = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 64))
    inp = x(2, 256)
    options = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(model.parameters(), foreach=kernel == "foreach", **options)
    for _ in range(2):
        optimizer.zero_grad()
        sum_step(model, inp)
        optimizer.step()
    sum_step(model, inp)
    temporaries = observe(optimizer.step).peak_bytes

    trace = cpu_trace(model, inp, sum_step, optimizer=name, optimizer_kernel=kernel)
    resting = trace.resting_bytes + trace.grad_bytes + trace.optimizer_bytes
    assert abs(trace.step_peak_bytes - max(resting + temporaries, trace.backward_peak_bytes + trace.optimizer_bytes)) \
        <= 0.002 * trace.step_peak_bytes  # fmt: skip


def test_a_step_that_leaves_the_model_out_is_refused() -> None:
    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        inp["x"].clone().requires_grad_().sum().backward()

    with pytest.raises(TraceError, match="step_fn used no parameter of the model it was given; it must run the model"):
        trace_step(nn.Linear(4, 4), {"x": torch.ones(2, 4)}, step, hardware=H200)
