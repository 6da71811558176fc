"""Traces of models and steps that few people write are those that were recorded, and so are rules of devices.

A commit that means to change them records them anew and says why:

    python -m tests.unit.tracer.test_recorded_odd_traces

Each step has many ways to do one thing: attention of all shapes, copies to the host, values that a step reads.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from elixir.artifact import digest
from elixir.hardware.profile import preset
from elixir.tracer.device import target_for
from elixir.tracer.device.common.attention import Attention
from elixir.tracer.device.cpu.cpu_target import chosen_on_cpu
from elixir.tracer.device.cuda.attention_buffers import held_in_backward
from elixir.tracer.device.cuda.attention_choice import chosen_on_cuda
from tests.common.tracing import Step, sum_step
from tests.unit.tracer.test_recorded_traces import RELEASE, kernels_not_run, traced
from tests.unit.tracer.test_tracer_memory import Fn, Square, mlp, x

RECORDED = Path(__file__).with_suffix(".json")
aten = torch.ops.aten


def attends(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Attention with heads of all widths, shared keys, masks of all kinds, and dropout."""
    found = x.new_zeros(())
    hidden = m.a(x)
    for width, keys, length, mask, dropout, causal in (
        (8, 4, 16, None, 0.0, False), (8, 2, 16, None, 0.0, True), (20, 4, 16, None, 0.1, True),
        (20, 1, 16, "bool", 0.0, False), (64, 4, 12, "bool", 0.0, False), (64, 4, 13, "rows", 0.1, False),
        (96, 4, 16, "float", 0.0, False), (130, 4, 13, "float", 0.0, False), (130, 4, 16, None, 0.25, False),
        (12, 4, 16, "broadcast", 0.0, False), (200, 2, 16, None, 0.0, True), (260, 4, 1, None, 0.0, False),
        (64, 2, 1, None, 0.5, False),
    ):  # fmt: skip
        query = hidden[..., :1].expand(2, 16, 4 * width).unflatten(-1, (4, width)).transpose(1, 2) * 2
        key = hidden[:, :length, :1].expand(2, length, keys * width).unflatten(-1, (keys, width)).transpose(1, 2) * 3
        options: dict[str, Any] = {"dropout_p": dropout, "is_causal": causal, "enable_gqa": keys < 4}
        if mask is not None:
            seen = torch.ones(16, length, dtype=torch.bool, device=x.device).tril()
            bias = torch.zeros(2, 1 if mask == "broadcast" else 4, 16, length, device=x.device, dtype=x.dtype)
            kinds = {"bool": seen, "rows": seen[None, None, :1], "float": bias + hidden[0, 0, 0], "broadcast": bias}
            options["attn_mask"] = kinds[mask]
        found = found + F.scaled_dot_product_attention(query, key, key * 2, **options).sum()
    return found


def drops_and_norms(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Dropout, RMS norm and softmax in all their forms."""
    y = m.a(x)
    for probability, train in ((0.0, True), (0.5, True), (0.5, False), (1.0, True)):
        y = F.dropout(y * 2, probability, train)
    for weight, inner in ((m.norm.weight, (8,)), (None, (8,)), (None, (4, 8))):
        y = F.rms_norm(y.view(-1, 4, 8), inner, weight).view(-1, 8)
    y = F.rms_norm(y, (8,), m.norm.weight.to(y.dtype), 1e-5)
    wide = (F.softmax(y, -1, dtype=torch.float32) + F.log_softmax(y, -1, dtype=torch.float32)).to(y.dtype)
    return y.softmax(-1) + wide + y.log_softmax(0) + F.layer_norm(y, (8,)) + F.mish(y) + F.gelu(y, approximate="tanh")


def many_losses(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    near = y.detach().sigmoid()
    target = torch.arange(len(y), device=y.device) % 8
    found = [F.mse_loss(y, near), F.mse_loss(y, near[:1].expand_as(y), reduction="none").mean(), F.l1_loss(y, near)]
    found += [F.smooth_l1_loss(y, near), F.soft_margin_loss(y, near), F.cross_entropy(y, target, ignore_index=1)]
    found += [F.binary_cross_entropy(y.sigmoid().float(), near.float()).to(y.dtype), y.prod(), y.prod(0).sum(), y.max()]
    found += [F.kl_div(y.log_softmax(-1), near), y.cumprod(0).mean(), y.prod(-1, keepdim=True).mean(), y.min(), y.std()]
    found += [y.t().contiguous().mean(), (y.t() @ y).mean(), y.t().softmax(0).mean(), y.sum(0, keepdim=True).mean()]
    return torch.stack([each.to(y.dtype) for each in found])


def recurrent(kind: type[nn.RNNBase], **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        layers = kind(16, 8, **options)
        return Fn(lambda m, x: m.a(x)[0] * 2, a=layers), x(4, 6, 16)

    return make


def values_of_inputs(model: nn.Module, inp: dict[Any, Any]) -> None:
    """Shapes that follow from values of the input, in every way in which a step reads them."""
    ids, hidden = inp["ids"], model(inp["x"])
    mask = ids > 3
    found = [hidden[mask], hidden.masked_select(mask[:, None]), hidden[mask.nonzero()[:, 0]], hidden[mask, :4]]
    found += [hidden[ids.unique()], hidden[ids.max() :], hidden[: int(ids.sum()) % 7 + 1], hidden[[1, 2, -1]]]
    found += [hidden[np.array([1, 0])], hidden[:, [0, 3]], hidden[..., None, 1], hidden[range(2)], hidden[ids.tolist()]]
    written = ids.clone()
    written[2:] += 1
    written.masked_fill_(mask, 2).clamp_(max=5)
    found += [hidden[written], hidden[torch.bincount(written)], hidden[written.sort()[1]], hidden[written.argmax() :]]
    sizes = torch.tensor([int(ids[0]) + 1, 2], device=ids.device)
    found += [hidden[torch.as_tensor([1, 1], device=ids.device)], hidden[ids.new_tensor([0, 1])], hidden[sizes % 8]]
    found += [hidden.new_zeros(3) * sizes.sum(), torch.asarray([0.5, 2.0], device=hidden.device) * hidden[0, 0]]
    found += [torch.histc(ids.float(), 4)[:2] * hidden[0, 0], ids.float().softmax(0) * hidden[0, 0]]
    found += hidden.split([*ids[:2].add(3).tolist(), len(hidden) - 6 - int(ids[:2].sum())])
    if ids.max() > 5 and not ids.float().isnan().any() and f"{ids[0].item():d}" == f"{ids[0]:d}" and ids[1].item() == 1:
        found.append(hidden * 2)
    torch.stack([each.sum() for each in found]).sum().backward()


def values_of_weights(model: nn.Module, inp: dict[Any, Any]) -> None:
    """Numbers that nobody has: they can be added up and printed, and scores choose."""
    hidden = model(inp["x"])
    loss = hidden.float().mean()
    number = loss.item()
    said = f"{number:.3f} {-number + 2 * number / 3} {abs(number)} {round(number, 2)} {loss} {hidden.argmax().item()}"
    scores = hidden.softmax(-1)
    picks = [scores.topk(2)[1], scores.argmax(-1, keepdim=True), scores.max(-1, keepdim=True)[1], scores.sort()[1]]
    found = [hidden.gather(-1, pick).sum() for pick in picks]
    found += [hidden.gather(0, hidden.topk(3, 0)[1]).sum(), hidden[(scores.argmax(-1) == 1).nonzero()[:, 0]].sum()]
    found += [hidden[:2, scores.multinomial(1)[0, 0]].sum() * len(said), loss * number]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=False)
    if torch.isfinite(loss):
        found.append(loss)
    torch.stack([each.float() for each in found]).sum().backward()


def to_the_host(pinned: bool) -> Step:
    """Copies to the host and back, by the means that there are."""

    def step(model: nn.Module, inp: dict[Any, Any]) -> None:
        y = inp["x"]
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
            hidden = model(y).sigmoid().t().exp()
        kept = hidden.detach().cpu()
        room = torch.empty(hidden.shape, dtype=hidden.dtype, device="cpu", pin_memory=pinned)
        room.copy_(hidden.detach(), non_blocking=True)
        room.add_(kept).mul_(2)
        halved = (kept[:4] * room[:4]).to(torch.float64)
        back = halved.to(hidden.device, hidden.dtype) + room[:4].to(hidden) + kept.to(device=hidden.device)[:4]
        again = torch.empty_like(hidden.detach())
        again.copy_(room)
        norm = hidden.detach().norm().cpu() + y.shape[0]
        total = (hidden[:4] * back).sum() + (hidden * again).sum() * norm.to(hidden.device) + y.cpu().sum().to(y.device)
        total.backward()

    return step


def checkpoints(model: Any, inp: dict[Any, Any]) -> None:
    """Checkpoints in one another, with random numbers of the host, functions of several results, and none kept."""

    def noisy(x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand(x.shape[-1], device="cpu").to(x.device, x.dtype)
        drawn = torch.randn(3, generator=torch.Generator().manual_seed(1)).to(x.device, x.dtype)
        return F.dropout(x * noise, 0.3) * scale, drawn

    def inner(x: torch.Tensor) -> torch.Tensor:
        first, drawn = checkpoint(noisy, x, use_reentrant=False, scale=2.0)
        return first.sum(-1, keepdim=True) * drawn[0] + model.a(x)

    y = inp["x"].clone().requires_grad_()
    for reentrant, preserve in itertools.product((True, False), (True, False)):
        y = checkpoint(inner, y, use_reentrant=reentrant, preserve_rng_state=preserve)
        y = torch.cat([y] * 8, -1)
    model.b(y).sum().backward()


def unusual_uses(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Weights that are read outside of their modules, kept as views, written to, or given to other modules."""
    m.count += 1
    m.total.mul_(0.9).add_(x.detach().mean())
    y = m.a(x) @ m.b.weight.t()[:8] + m.b.bias[:64]
    view = m.a.weight[:4]
    y = F.linear(m.a(y), torch.cat([view, view]).t()) + m.b.weight.sum() + m.total
    y = Square.apply(y[:, :8], m.b.weight[:8, :8]) + torch.func.functional_call(m.a, {"bias": m.extra}, (y,))
    with torch.no_grad():
        m.b.weight[:, 0].zero_()
        m.b.bias.data.clamp_(-1, 1)
    m.kept = m.b.weight * 1.0
    return torch.vmap(lambda row: (row * m.extra).sum())(y) + m.kept.sum()


def unusual() -> Any:
    model = Fn(unusual_uses, a=nn.Linear(64, 8), b=nn.Linear(64, 64), unused=nn.Linear(3, 3))
    model.extra = nn.Parameter(torch.ones(8))
    model.register_buffer("total", torch.zeros(()))
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    return model, x(16, 64)


def small() -> Any:
    return Fn(lambda m, x: m.a(x), a=nn.Linear(64, 8), norm=nn.RMSNorm(8)), x(64, 64)


def with_ids() -> Any:
    ids = torch.tensor([0, 1, 7, 3, 5, 2, 4, 6])
    return nn.Linear(16, 8), {"x": torch.randn(8, 16), "ids": ids}


def with_attention() -> Any:
    return Fn(attends, a=nn.Linear(16, 16)), x(2, 16, 16)


def with_two() -> Any:
    return Fn(lambda m, x: m.a(x), a=nn.Linear(64, 8), b=nn.Linear(64, 64)), x(8, 64)


ALL, TWO = ("h200", "cpu", "a100", "t4"), ("h200", "cpu")
CASES: dict[str, tuple[Callable[[], Any], Step, tuple[str, ...]]] = {
    "attention of all kinds": (with_attention, sum_step, ALL),
    "dropout, norms and softmax": (
        lambda: (Fn(drops_and_norms, **dict(small()[0].named_children())), x(64, 64)),
        sum_step,
        ALL,
    ),
    "losses": (lambda: (Fn(many_losses, a=nn.Linear(64, 8)), x(64, 64)), sum_step, TWO),
    "LSTM, both ways": (recurrent(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.2), sum_step, TWO),
    "LSTM, projected": (recurrent(nn.LSTM, num_layers=2, proj_size=4, dropout=0.2, batch_first=True), sum_step, TWO),
    "GRU, both ways": (recurrent(nn.GRU, num_layers=2, bidirectional=True, dropout=0.2), sum_step, TWO),
    "GRU without biases": (recurrent(nn.GRU, num_layers=3, bias=False, batch_first=True), sum_step, TWO),
    "RNN": (recurrent(nn.RNN, num_layers=2, nonlinearity="relu", dropout=0.2, batch_first=True), sum_step, TWO),
    "values of inputs": (with_ids, values_of_inputs, TWO),
    "values of weights": (with_ids, values_of_weights, TWO),
    "to the host": (lambda: (mlp(), x(64, 64)), to_the_host(False), TWO),
    "to the host, pinned": (lambda: (mlp(), x(64, 64)), to_the_host(True), TWO),
    "checkpoints": (with_two, checkpoints, TWO),
    "unusual uses": (unusual, sum_step, TWO),
}
CAPABILITIES = ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0))
RULES = ("attention that is chosen", "buffers of attention", "buffers of kernels")


def chosen(draw: random.Random) -> dict[str, Any]:
    """The kernels of many calls of attention, by device."""
    calls = []
    for _ in range(4000):
        heads, keys = draw.choice((4, 4, 8)), draw.choice((4, 4, 2, 1, 3))
        width = draw.choice((4, 8, 12, 64, 96, 128, 136, 192, 200, 224, 225, 232, 256, 264))
        value = draw.choice((width, width, width, 128, 64))
        rows, columns = draw.choice((1, 16, 16, 17)), draw.choice((1, 16, 16, 17))
        shapes = [(2, heads, rows, width), (2, keys, columns, width), (2, draw.choice((keys, keys, 4)), columns, value)]
        if draw.random() < 0.05:
            shapes = [shape[1:] for shape in shapes]
        masks = (None, None, (rows, columns), (2, heads, rows, columns), (1, 1, rows, columns), (2, 1, 1, columns))
        options = {
            "dtype": draw.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32, torch.float64)),
            "mask_shape": draw.choice((*masks, (heads, rows, columns), (3, columns))),
            "mask_needs_grad": draw.random() < 0.1,
            "dropout": draw.choice((0.0, 0.0, 0.1, 0.25)),
            "is_causal": draw.random() < 0.3,
            "enable_gqa": draw.random() < 0.7,
            "last_dim_contiguous": draw.random() < 0.95,
            "mask_last_dim_contiguous": draw.random() < 0.95,
        }
        calls.append(Attention(query_shape=shapes[0], key_shape=shapes[1], value_shape=shapes[2], **options))  # type: ignore[arg-type]
    found = {str(each): [chosen_on_cuda(call, each) for call in calls] for each in CAPABILITIES}
    return {name: digest(each) for name, each in (found | {"cpu": [chosen_on_cpu(call) for call in calls]}).items()}


def empty(*shape: int, dtype: torch.dtype = torch.float32, rows: bool = False, device: str = "meta") -> torch.Tensor:
    """A tensor on meta; with `rows`, of heads that are next to each other in a row."""
    if rows:
        return torch.empty(shape[0], shape[2], shape[1], shape[3], dtype=dtype, device=device).transpose(1, 2)
    return torch.empty(shape, dtype=dtype, device=device)


def held(draw: random.Random) -> list[int]:
    """The memory that the backward of attention takes on CUDA."""
    names = ("flash", "cudnn", "efficient")
    funcs = [getattr(aten, f"_scaled_dot_product_{name}_attention_backward").default for name in names]
    found = []
    for _ in range(400):
        batch, heads, rows, columns = (
            draw.randint(1, 3),
            draw.choice((2, 4, 80)),
            draw.choice((1, 100, 128, 300)),
            draw.choice((7, 64, 700)),
        )
        keys = draw.choice((heads, heads, heads // 2))
        width = draw.choice((8, 40, 64, 72, 128, 136, 192, 200, 256))
        value, dtype = draw.choice((width, width, 128)), draw.choice((torch.float16, torch.bfloat16, torch.float32))
        made = lambda *shape: empty(*shape, dtype=dtype, rows=draw.random() < 0.5)  # noqa: E731, B023
        args = (made(batch, heads, rows, value), made(batch, heads, rows, width), made(batch, keys, columns, width),
                made(batch, keys, columns, value), made(batch, heads, rows, value))  # fmt: skip
        found += [
            held_in_backward(func, args, lambda nbytes: -(-nbytes // 512) * 512) for func in (*funcs, aten.mm.default)
        ]
    return found


def transient(threads: int) -> dict[str, list[int]]:
    """The memory that kernels take while they run, by device."""
    f32, f16, f64 = torch.float32, torch.bfloat16, torch.float64
    one, low, long = empty(64, 80), empty(64, 80, dtype=f16), empty(4000, dtype=torch.int64)
    calls: list[tuple[Any, tuple[Any, ...], torch.Tensor]] = [
        (aten.add.Tensor, (one, low), one), (aten.add.Tensor, (low, empty(1, 80)), one), (aten.add.Tensor, (one, one), one),
        (aten.where.self, (one > 0, low, one), one), (aten.mul.Tensor, (empty(64, 80, dtype=f64), low), one),
        (aten.mm.default, (one, one.t()), one), (aten.mm.default, (one[:, ::2], one.t()), one),
        (aten.addmm.default, (one, one, one[::2, ::2]), one), (aten.clone.default, (one.t(),), one.t().contiguous()),
        (aten.clone.default, (one[:50, :50].t(),), one[:50, :50].contiguous()), (aten.clone.default, (one,), one),
        (aten.copy_.default, (empty(80, 64), one.t()), empty(80, 64)), (aten._to_copy.default, (low.t(),), one),
        (aten.clone.default, (empty(200, 300, dtype=torch.uint8).t(),), empty(300, 200, dtype=torch.uint8)),
        (aten.clone.default, (empty(60, 60).t(),), empty(60, 60)), (aten.clone.default, (empty(59, 61).t(),), empty(61, 59)),
        (aten._softmax.default, (one.t(), -1, False), one), (aten._softmax_backward_data.default, (one, one.t(), -1, f32), one),
        (aten._log_softmax_backward_data.default, (low.t(), low.t(), -1, f16), low), (aten._log_softmax.default, (one, 0, False), one),
        (aten.embedding_dense_backward.default, (one.t(), long, 9, -1, False), one),
        (aten.embedding_dense_backward.default, (one, long[:3072], 9, -1, False), one),
        (aten.native_layer_norm_backward.default, (one.t(), one.t(), [64], one, one, None, None, [True] * 3), one),
        (aten.native_batch_norm_backward.default, (one, low, None, None, None, None, None, True, 0.1, [True] * 3), one),
        (aten._ctc_loss_backward.default, (one, one, long, long, long, one, low, 0), one), (aten._safe_softmax.default, (one, -1), one),
    ]  # fmt: skip
    for dtype, rows, columns, layout in itertools.product((f32, f16, f64), (8, 192, 768), (9, 600), (True, False)):
        query, key = empty(2, 4, rows, 16, dtype=dtype), empty(2, 4, columns, 16, dtype=dtype)
        forward = aten._scaled_dot_product_flash_attention_for_cpu.default
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        grad = empty(2, 4, rows, 16, dtype=dtype, rows=layout)
        calls += [
            (forward, (query, key, key, 0.0, False), query),
            (backward, (grad, query, key, key, query, query), query),
        ]
    found: dict[str, list[int]] = {}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with kernels_not_run():
        for name in ALL:
            target = target_for(preset(name))
            found[name] = [target.transient_bytes(func, args, {}, [output]) for func, args, output in calls]
            found[name] += [target.round_bytes(nbytes) for nbytes in (0, 1, 512, 513)]
            found[name] += target.matmul_workspace_bytes(aten.mm.default, (one, one)) or (0,)
    torch.set_num_threads(before)
    return found


def outcome(name: str) -> Any:
    """The traces of one step, or what rules say."""
    if name in CASES:
        return traced(*CASES[name])
    if name == "attention that is chosen":
        return chosen(random.Random(0))
    return digest(held(random.Random(0))) if name == "buffers of attention" else [transient(1), transient(3)]


@pytest.mark.skipif(RELEASE != "2.13", reason="recorded with torch 2.13")
@pytest.mark.parametrize("name", [*CASES, *RULES])
def test_an_odd_trace_or_a_rule_is_as_recorded(name: str) -> None:
    assert outcome(name) == json.loads(RECORDED.read_text())[name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = [f" {json.dumps(name)}: {json.dumps(outcome(name))}" for name in (*CASES, *RULES)]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
