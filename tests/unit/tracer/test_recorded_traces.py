"""Traces of small steps on every kind of device are those that were recorded, operator by operator.

A commit that means to change traces records them anew and says why:

    python -m tests.unit.tracer.test_recorded_traces

Other tests hold peaks against real ones, which the CPU alone can show, and which say nothing of all that is below them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from elixir.artifact import digest
from elixir.errors import TraceError
from elixir.hardware.profile import preset
from elixir.tracer.trace import trace_step
from tests.common.tracing import Step, kernels_not_run, sum_step
from tests.unit.search.test_recorded_plans import rounded
from tests.unit.tracer.test_tracer_memory import MODELS, STEPS, mlp, x

RECORDED = Path(__file__).with_suffix(".json")
RELEASE = torch.__version__.rpartition(".")[0]
"""Other releases of torch run other operators."""
TARGETS = {"h200": torch.bfloat16, "cpu": torch.float32, "a100": torch.float32, "t4": torch.float16}


class Heads(nn.Module):
    """Causal attention of four heads, with as many keys and values or fewer, and a residual connection."""

    def __init__(self, width: int, keys: int, masked: bool) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(64, 4 * width), nn.Linear(4 * width, 64)
        self.key, self.value = nn.Linear(64, keys * width), nn.Linear(64, keys * width)
        self._keys, self._masked = keys, masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            part.unflatten(-1, (count, -1)).transpose(1, 2)
            for part, count in ((self.query(x), 4), (self.key(x), self._keys), (self.value(x), self._keys))
        ]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril() if self._masked else None
        shared = self._keys < 4
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=mask is None, enable_gqa=shared)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Layers(nn.Module):
    """Repeated layers, each checkpointed or not, between an embedding and the head that has its weight."""

    def __init__(self, *, reentrant: bool | None, width: int = 16, keys: int = 4, masked: bool = False) -> None:
        super().__init__()
        self.embed, self.reentrant = nn.Embedding(96, 64), reentrant
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), Heads(width, keys, masked), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU())
            for _ in range(3)
        )
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            recomputed = self.reentrant is not None
            hidden = checkpoint(layer, hidden, use_reentrant=self.reentrant) if recomputed else layer(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Each token goes to two of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(64, 4), nn.ModuleList(mlp() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros(len(x), 8, device=x.device, dtype=x.dtype)
        for number, expert in enumerate(self.experts):
            rows, rank = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, rows, expert(x[rows]) * share[rows, rank, None])
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(16, 32, 2, batch_first=True), nn.GRU(32, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)[0])[0]  # type: ignore[no-any-return]


def tokens() -> dict[str, Any]:
    return {"x": torch.arange(256).view(2, 128) * 7 % 96}


def in_low_precision(model: nn.Module, inp: dict[Any, Any]) -> None:
    with torch.autocast(inp["x"].device.type, torch.bfloat16):
        loss = model(inp["x"]).float().logsumexp(-1).mean()
    loss.backward()


def many_operators_in_low_precision(model: nn.Module, inp: dict[Any, Any]) -> None:
    with torch.autocast(inp["x"].device.type, torch.bfloat16):
        low = model(inp["x"])
        wide = inp["x"][:, : low.shape[1]]
        results = [
            low.softmax(-1), low.log_softmax(-1), low.cumsum(0), low.sum(0), low.prod(0), low.exp(), low.norm(),
            F.layer_norm(low, low.shape[1:]), F.mse_loss(low, wide), F.smooth_l1_loss(low, wide), F.gelu(low),
            torch.cat([low, wide]), torch.stack([low, wide]), torch.addcmul(low, low, wide), low @ wide.t(),
            torch.bmm(low[None], wide.t()[None]), low.cumsum(0, dtype=torch.float32), low.pow(2),
        ]  # fmt: skip
        loss = torch.stack([result.float().mean() for result in results]).sum()
    loss.backward()


CASES: dict[str, tuple[Any, Step]] = {
    **{name: (make, sum_step) for name, make in MODELS.items()},
    **{step.__name__: (lambda: (mlp(), x(64, 64)), step) for step in STEPS},
    "layers": (lambda: (Layers(reentrant=None), tokens()), sum_step),
    "checkpointed layers": (lambda: (Layers(reentrant=False), tokens()), sum_step),
    "checkpointed layers, reentrant": (lambda: (Layers(reentrant=True), tokens()), sum_step),
    "wide heads": (lambda: (Layers(reentrant=None, width=160), tokens()), sum_step),
    "heads that share keys": (lambda: (Layers(reentrant=None, keys=2), tokens()), sum_step),
    "heads of 96 with a mask": (lambda: (Layers(reentrant=None, width=96, masked=True), tokens()), sum_step),
    "experts": (lambda: (Experts(), x(64, 64)), sum_step),
    "recurrent": (lambda: (Recurrent(), x(4, 8, 16)), sum_step),
    "autocast over many operators": (lambda: (mlp(), x(64, 64)), many_operators_in_low_precision),
    "autocast": (lambda: (Layers(reentrant=False), tokens()), in_low_precision),
}


def outcome(name: str) -> dict[str, Any]:
    """The traces of one case."""
    make, step = CASES[name]
    return traced(make, step, list(TARGETS)[: 1 if step in STEPS else 2 if name in MODELS else 4])


def traced(make: Callable[[], Any], step: Step, targets: Iterable[str], **options: Any) -> dict[str, Any]:
    """The traces of one step: two numbers of each and the digest of all of it, or the error."""
    found: dict[str, Any] = {}
    for target in targets:
        torch.manual_seed(0)
        try:
            with kernels_not_run():
                trace = trace_step(*make(), step, dtype=TARGETS[target], hardware=preset(target), **options)
        except TraceError as error:
            found[target] = str(error).partition(": ")[2]  # without the place in this repository
            continue
        left_out = ("fingerprint", "version", "created", "trace_s")
        data = json.loads(trace.to_json())
        kept = {name: value for name, value in data.items() if not any(word in name for word in left_out)}
        found[target] = [trace.operators, trace.step_peak_bytes, digest(rounded(kept))]
    return found


@pytest.mark.skipif(RELEASE != "2.13", reason="recorded with torch 2.13")
@pytest.mark.parametrize("name", CASES)
def test_a_trace_is_as_recorded(name: str) -> None:
    assert outcome(name) == json.loads(RECORDED.read_text())[name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = [f" {json.dumps(name)}: {json.dumps(outcome(name))}" for name in CASES]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
