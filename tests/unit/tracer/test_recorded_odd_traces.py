"""Traces of models and steps that few people write are those that were recorded.

A commit that means to change them records them anew and says why:

    python -m tests.unit.tracer.test_recorded_odd_traces

Each step has many ways to do one thing: attention of all shapes, copies to the host, values that a step reads.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from elixir.step_trace import INPUT, SAVED, Result, StepShape, UnitActivations
from elixir.tracer.use_order import memory_alone
from elixir.tracer.values.expert_choice import BalancedRouting
from tests.common.tracing import Step, sum_step
from tests.unit.tracer.test_recorded_traces import RELEASE, Experts, Layers, tokens, traced
from tests.unit.tracer.test_tracer_memory import Fn, Square, mlp, x

RECORDED = Path(__file__).with_suffix(".json")
GENERATES = StepShape(forward=True, generate=(2, 3))


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
    found += [y.cumprod(0, dtype=torch.float64).mean(), y.prod(dtype=torch.float64)]
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


def further_copies(model: nn.Module, inp: dict[Any, Any]) -> None:
    """Copies of known values, of views, of other layouts and dtypes, of nothing, and of what was on the host."""
    early = inp["x"].cpu()  # belongs to no use
    ids, hidden = inp["ids"], model(inp["x"])
    device, detached, real = hidden.device, hidden.detach(), torch.arange(8.0) + early.shape[0]
    known, rows, turned = ids.cpu(), detached.cpu(), detached.t().cpu()
    room, pinned = torch.empty_like(rows), torch.empty(8, dtype=torch.int64, pin_memory=True)
    room.copy_(real.expand(8, 8))
    room.copy_(rows.mul(2))
    pinned.copy_(ids)
    nothing = torch.empty(0, 8, pin_memory=True)
    nothing.copy_(detached[:0])
    halves = torch.empty(2, 4, 8, device="cpu", dtype=detached.dtype)
    halves[0].copy_(detached[:4])
    narrow = torch.empty(8, 8, device="cpu", dtype=torch.float16)
    narrow.copy_(detached)
    values = torch.zeros(8, device="cpu", dtype=torch.int64)
    values.copy_(ids)
    again = torch.empty_like(ids)
    again.copy_(known)
    turned.add_(1).mul_(turned)
    for each in (turned, real):
        F.rrelu_(each, training=True)
    found = [
        hidden[known.to(device)],
        hidden[pinned.to(ids)],
        hidden[: int(values[1]) + 1],
        hidden[: int(again[1]) + 1],
    ]
    found += [hidden * each.to(device).float().mean() for each in (rows, turned, room, nothing, halves, narrow)]
    found += [hidden * rows.to(detached).mean(), hidden * rows.to(torch.float64).to(device, hidden.dtype, copy=True)]
    found += [
        hidden * (rows + torch.arange(8, device="cpu")).to(device).to(hidden.dtype),
        hidden[..., rows.shape[0] - 1 :],
    ]
    found += [hidden * detached[:, :1].expand(8, 8).cpu().to(device), hidden * detached[:1, ::2].cpu().to(device).sum()]
    row = torch.empty(8, 1, dtype=detached.dtype, pin_memory=True)
    row.copy_(detached.t()[:, :1])
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        found.append(hidden[:5].sigmoid())
    with torch.autograd.graph.save_on_cpu():
        found.append(hidden[:3].exp())
    torch.stack([each.float().sum() for each in found]).nansum().backward()


def without_gradients(model: Any, inp: dict[Any, Any]) -> None:
    """Attention that keeps nothing for backward: nothing needs a gradient, or gradients are off."""
    plain, trained = inp["x"], model.a(inp["x"])
    for given, grad in ((plain, True), (trained, False), (plain, False)):
        heads = given.unflatten(-1, (2, -1)).transpose(1, 2)
        with torch.set_grad_enabled(grad):
            bias = torch.zeros(2, 2, 16, 16, device=given.device, dtype=given.dtype)
            for options in ({}, {"attn_mask": bias}, {"dropout_p": 0.1}):
                F.scaled_dot_product_attention(heads, heads, heads, **options)
    trained.sum().backward()


def gradients_of_gradients(model: Any, inp: dict[Any, Any]) -> None:
    """Slopes that take part in the loss, and a gradient that the step itself keeps."""
    x = inp["x"].clone().requires_grad_()
    y = model.a(x)
    for weight in (model.norm.weight, None):
        y = y + F.rms_norm(y, (8,), weight) + F.layer_norm(y, (8,)) + F.softmax(y, -1) + F.gelu(y)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    model.norm.weight.grad = torch.autograd.grad(y.sum(), model.norm.weight, retain_graph=True)[0]
    slope.pow(2).sum().backward(inputs=list(model.a.parameters()))


def picks_and_writes(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Functions whose derivatives write into what they have made, and some that could and do not."""
    h = m.a(x).sigmoid()
    rows, few = torch.arange(64, device=x.device) * 7 % 16, torch.arange(16 * 8, device=x.device).view(16, 8) % 16
    found = [
        h.gather(0, few[:9]),
        h.scatter(0, few[:1], h[:1] * 2),
        h.scatter(0, few[:1], 1.0),
        h.index_select(0, rows),
    ]
    for kind, whole in itertools.product(("sum", "prod", "mean", "amax"), (True, False)):
        found.append((h * 2).scatter_reduce(0, few[:9], h[:9] * 3, kind, include_self=whole))
    found += [
        h.scatter_add(0, few[:9], h[:9] * 2),
        h.index_add(0, rows[:5], h[:5] * 2),
        h.index_copy(0, rows[:5], h[:5] * 2),
    ]
    found += [
        h.index_fill(0, rows[:5], 1.0),
        h[rows],
        h.index_put((rows[:5],), h[:5] * 2),
        h.put(rows[:5], h[0, :5] * 2),
    ]
    found += [
        h.take(rows),
        (h * 2).masked_fill(h.detach() > 0.7, 0.0),
        h.masked_scatter(few > 3, h * 2),
        h.cummax(0)[0],
    ]
    found += [h.kthvalue(3, -1)[0], h.median(-1)[0], h.max(-1)[0], h.sort(0)[0], h.logcumsumexp(0), h.unfold(0, 4, 2)]
    weight = torch.ones(8, device=x.device, dtype=x.dtype)
    for options in ({}, {"weight": weight}, {"pos_weight": weight}, {"reduction": "none"}):
        found.append(F.binary_cross_entropy_with_logits(h, h.detach(), **options))
    found.append(F.binary_cross_entropy_with_logits(h * 2, h * 3))
    return torch.stack([each.sum() for each in found])


def sequences(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss over sequences whose lengths are numbers or known tensors; losses of a single number; empty tensors."""
    scores = m.a(x).float().unflatten(0, (8, 2)).log_softmax(-1)
    targets, lengths = torch.ones(2, 3, dtype=torch.long, device=x.device), torch.tensor([3, 2])
    found = [F.ctc_loss(scores, targets, (8, 7), (3, 2)), F.ctc_loss(scores, targets, torch.tensor([8, 7]), lengths)]
    one, other = scores.mean(), scores.detach().sum()
    found += [F.mse_loss(one, other, reduction="none"), F.mse_loss(one, other), F.dropout(scores[:0], 0.5).sum()]
    made = torch.empty(8, 8, device=x.device, dtype=x.dtype)
    with torch.no_grad():
        torch.mm(x[:8, ::2], m.a.weight[:, ::2].t(), out=made)
        torch.mm(x[:8, :32].t().contiguous().t(), x[:8, :32].t(), out=made)
    return torch.stack(
        [*found, made.sum().float(), x.t().contiguous().float().mean(), (x[:1, ::3] @ x[0, ::3]).float().sum()]
    )


def further_values(model: nn.Module, inp: dict[Any, Any]) -> None:
    """Values in further places: masks next to indices, new tensors next to others, copies of known ones."""
    ids, hidden = inp["ids"], model(inp["x"])
    mask, real = ids > 3, torch.ones(2)
    room = torch.zeros(8, dtype=torch.int64)
    for _ in range(2):
        room.copy_(ids)
    found = [hidden[:, mask], hidden[mask, ids[mask]], hidden[mask[:, None].expand(8, 8)], hidden[room]]
    found += [hidden[ids.new_tensor([0, 1], device=ids.device)], hidden[: int(real.new_tensor([3, 2])[0])]]
    found += [hidden[torch.tensor(data=[0, 1], device=ids.device)], hidden[: int(ids.new_tensor([4.0], dtype=None)[0])]]
    found += [hidden[: int(ids.unique()[2])], hidden[: int(mask.nonzero()[0, 0])], hidden[: int(ids[mask][1])]]
    loss = hidden.float().mean()
    said = f"{hidden} {real} {real[0]:.2f} {loss:.2f} {hidden.sum(0)}"
    unknown = torch.tensor([loss, 2.0], device=hidden.device)
    found += [
        hidden * unknown[0],
        hidden * torch.as_tensor([[loss, 1.0]], device=hidden.device)[0, 1],
        hidden * len(said),
    ]
    torch.stack([each.sum() for each in found]).sum().backward()


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


def layers() -> Any:
    return Layers(reentrant=None), tokens()


def sorts_ids() -> Any:
    """Ids of which there are so many that CUDA sorts them for the gradient of their embedding, the last of backward."""
    return nn.Embedding(9, 4), {"x": torch.arange(5000) % 9}


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
    "further copies to the host": (with_ids, further_copies, TWO),
    "checkpoints": (with_two, checkpoints, TWO),
    "unusual uses": (unusual, sum_step, TWO),
    "attention without gradients": (with_attention, without_gradients, ALL),
    "gradients of gradients": (small, gradients_of_gradients, TWO),
    "picks and writes": (lambda: (Fn(picks_and_writes, a=nn.Linear(64, 8)), x(16, 64)), sum_step, TWO),
    "sequences": (lambda: (Fn(sequences, a=nn.Linear(64, 8)), x(16, 64)), sum_step, TWO),
    "further values": (with_ids, further_values, TWO),
    "LSTM, projected, without biases": (recurrent(nn.LSTM, proj_size=4, bias=False, num_layers=2), sum_step, TWO),
}


def moved() -> tuple[UnitActivations, ...]:
    """Inputs that move to the host, all that a layer saves, and results that stay while others are made again."""
    stays = (Result("aten.addmm.default", 0), Result("aten.gelu.default", 0))
    return (
        UnitActivations("layers.0", (), (Result(INPUT, 0),)),
        UnitActivations("layers.1", None, (Result(SAVED, 0),)),
        UnitActivations("layers.2", stays, (Result(INPUT, 0),)),
    )


def looks_twice(model: nn.Module, inp: dict[Any, Any]) -> None:
    """Calls the model before the step, and copies what it says to the host and back."""
    with memory_alone(), torch.no_grad():
        seen = model(inp["x"].repeat(3, 1)).cpu()
    share = seen[:2].to(inp["x"].device).float().mean()
    kept = inp["x"].cpu()
    (model(kept.to(inp["x"].device)) * share).sum().backward()


def calls(*batches: int) -> Step:
    """A step that calls the model with batches of so many times the input."""

    def step(model: nn.Module, inp: dict[Any, Any]) -> None:
        for times in batches:
            model(inp["x"].repeat(times, 1))

    return step


ASKED: dict[str, tuple[Callable[[], Any], Step, tuple[str, ...], dict[str, Any]]] = {
    "activations that a plan moves": (layers, sum_step, TWO, {"shape": StepShape(activations=moved())}),
    "fused optimizer": (layers, sum_step, TWO, {"optimizer": "AdamW", "optimizer_kernel": "fused"}),
    "fused SGD": (sorts_ids, sum_step, TWO, {"optimizer": "SGD", "optimizer_kernel": "fused"}),
    "foreach RMSprop": (layers, sum_step, TWO, {"optimizer": "RMSprop", "optimizer_kernel": "foreach"}),
    "layers that are compiled": (layers, sum_step, TWO, {"compile": True, "generated_code": False}),
    "evaluation": (layers, lambda m, i: m(i["x"]), TWO, {"shape": StepShape(forward=True)}),
    "generation": (layers, calls(3, 1), TWO, {"shape": GENERATES}),
    "generation of three calls": (layers, calls(1, 3, 2), TWO, {"shape": GENERATES}),
    "a look before the step": (layers, looks_twice, TWO, {}),
    "skewed experts": (lambda: (Experts(), x(64, 64)), sum_step, TWO, {"routing": BalancedRouting(0.3)}),
    "without the cache": (layers, sum_step, TWO, {"cache": False}),
}


def outcome(name: str) -> Any:
    """The traces of one step."""
    if name in CASES:
        return traced(*CASES[name])
    make, step, targets, options = ASKED[name]
    return traced(make, step, targets, **options)


@pytest.mark.skipif(RELEASE != "2.13", reason="recorded with torch 2.13")
@pytest.mark.parametrize("name", [*CASES, *ASKED])
def test_an_odd_trace_is_as_recorded(name: str) -> None:
    assert outcome(name) == json.loads(RECORDED.read_text())[name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = [f" {json.dumps(name)}: {json.dumps(outcome(name))}" for name in (*CASES, *ASKED)]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
