"""Operators are told apart by what bounds them, and costs are kept one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count
from transformers import AttentionInterface

from elixir.errors import InputError, TraceError
from elixir.hardware.profile import preset
from elixir.models.flash_attention import attend_by_document
from elixir.models.step import default_input, default_step
from elixir.step_trace import StepTrace
from elixir.tracer.operation_kinds import AttentionOfDocuments, causal_scores, operation_of, product_class
from elixir.tracer.trace import trace_step
from tests.common.tiny_models import tiny
from tests.common.tracing import H200, cpu_trace


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.wide = nn.Linear(128, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.wide(self.norm(x))) + 1.0


def block_trace() -> StepTrace:
    return cpu_trace(Block(), {"x": torch.ones(256, 128)}, lambda model, inp: model(inp["x"]).sum().backward())


@pytest.mark.parametrize("hardware", ["h200", "cpu"])
def test_backward_of_attention_is_a_kind_of_its_own(hardware: str) -> None:
    def step(model: nn.Module, inp: dict[str, torch.Tensor]) -> None:
        x = model(inp["x"]).unflatten(-1, (4, 32)).transpose(1, 2)
        nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()

    trace = trace_step(
        nn.Linear(128, 128), {"x": torch.ones(2, 64, 128)}, step, hardware=preset(hardware), dtype=torch.bfloat16
    )
    attention = {operation.kind: operation.flops for operation in trace.operations if "attention" in operation.kind}
    assert attention["attention_backward"] == 2.5 * attention["attention"] > 0


def test_allocations_cost_nothing() -> None:
    def step(model: nn.Module, inp: dict[str, torch.Tensor]) -> None:
        torch.empty(10**6, device=inp["x"].device)
        model(inp["x"]).sum().backward()

    more = cpu_trace(Block(), {"x": torch.ones(256, 128)}, step)
    assert more.operations == block_trace().operations


def attention_of(trace: StepTrace) -> list[tuple[str, int]]:
    """Kind and FLOPs of each call of attention."""
    called = [trace.operations[index] for access in trace.accesses for index in access.operations]
    return [(operation.kind, operation.flops) for operation in called if operation.kind.startswith("attention")]


def counted(*lengths: int, heads: int, width: int, causal: bool = True) -> list[tuple[str, int]]:
    """The same of one layer that attends inside of documents of these lengths, by torch's formulas."""
    shapes = [[(1, heads, length, width)] * 4 for length in lengths]
    share = [causal_scores(n, n) / n**2 if causal else 1.0 for n in lengths]
    forward = sum(sdpa_flop_count(*each[:3]) * part for each, part in zip(shapes, share, strict=True))
    backward = sum(sdpa_backward_flop_count(*each) * part for each, part in zip(shapes, share, strict=True))
    return [("attention", round(forward)), ("attention_backward", round(backward))]


@pytest.mark.parametrize("names_begins", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2", "kernels-community/flash-attn2", "by document"])
def test_packed_documents_cost_what_their_attention_computes(attention: str, names_begins: bool) -> None:
    """A mask hides scores that were computed; flash attention computes none between documents. No package is needed."""
    functions = dict(AttentionInterface())
    model = tiny("llama", layers=1, device="meta", positions=1024)
    if attention == "by document":
        attend_by_document(model)
    elif attention != "sdpa":
        AttentionInterface.register(attention, AttentionInterface()["flash_attention_2"])
        model.config._attn_implementation_internal = attention
    packed = default_input(model, batch=2, seq=1024, packed=3)
    if not names_begins:  # as transformers' collator leaves them out unless asked
        packed = {name: value for name, value in packed.items() if not name.startswith(("cu_", "max_"))}

    def traced(batch: dict[str, object]) -> StepTrace:
        return trace_step(model, batch, default_step, hardware=H200, dtype=torch.bfloat16, optimizer=None)

    lengths = [2048] if attention == "sdpa" else [342, 341, 341] * 2
    trace = traced(packed)
    assert attention_of(trace) == counted(*lengths, heads=4, width=16, causal=attention != "sdpa")
    assert (trace.step.packed, trace.step.samples, trace.step.tokens) == ("6", 1, 2048)
    apart = traced(default_input(model, batch=2, seq=1024) | {"use_cache": False})
    assert attention_of(apart) == counted(1024, 1024, heads=4, width=16)
    assert apart.step.packed is None
    scores = 2048 * 2048  # each a byte of the mask, and two of the summand that attention makes of it
    large = [each.bytes for each in trace.peak_contributors if each.kind == "activations" and each.bytes >= scores]
    assert sum(large) == (3 * scores if attention == "sdpa" else 0)
    kept = [each.operator for unit in trace.forwards for each in unit.operators if each.keepable]
    assert "aten._flash_attention_forward.default" not in kept  # packages have other names for it
    known = AttentionInterface()
    assert all(known[name] is function for name, function in functions.items())
    if attention != "sdpa":
        with pytest.raises(TraceError, match="has no kernel for a CPU; trace for a CUDA device, or give the model"):
            cpu_trace(model, packed, default_step, dtype=torch.bfloat16)
        with pytest.raises(InputError, match="computes in bfloat16 or float16, found float32"):
            trace_step(model, packed, default_step, hardware=H200, dtype=torch.float32, optimizer=None)


def test_attention_of_documents_by_torch_itself() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    lengths = [5, 20, 7]
    begins = torch.tensor([0, 5, 25, 32], dtype=torch.int32)

    def step(model: nn.Module, inp: dict[str, torch.Tensor]) -> None:
        x = model(inp["x"]).unflatten(-1, (4, 32))
        varlen(x, x, x, inp["begins"], inp["begins"], 20, 20, window_size=(-1, 0)).sum().backward()

    inp = {"x": torch.ones(32, 128), "begins": begins}
    trace = trace_step(nn.Linear(128, 128), inp, step, hardware=H200, dtype=torch.bfloat16)
    assert attention_of(trace) == counted(*lengths, heads=4, width=32)


def test_scores_inside_of_windows_and_after_a_cache() -> None:
    """Counted one by one: flash attention puts the last token next to the last key."""
    for tokens, more, before, after, causal in [(9, 0, -1, -1, True), (9, 0, 3, 0, False), (9, 0, 20, 0, True),
                                                (4, 6, -1, -1, True), (4, 6, 2, 0, True), (1, 8, -1, -1, True),
                                                (6, 0, -1, -1, False)]:  # fmt: skip
        query, key = torch.empty(1, tokens, 1, 1), torch.empty(1, tokens + more, 1, 1)
        call = AttentionOfDocuments("attention", query, key, key, None, tokens, causal, (before, after))
        at, keys = torch.arange(tokens)[:, None] + more, torch.arange(tokens + more)[None]
        seen = (keys <= at) if causal or after == 0 else torch.ones(tokens, tokens + more, dtype=torch.bool)
        seen &= (at - keys <= before) | (before < 0)
        assert call.flops() == 4 * int(seen.sum())


@pytest.mark.parametrize(
    ("first", "second", "result", "each"),
    [
        ((64, 8), (4, 8, 32), (64, 32), (16, 8, 32)),
        ((8, 512), (512, 32), (4, 8, 32), (8, 128, 32)),
        ((4, 8, 16), (16, 512), (8, 512), (8, 16, 128)),
        ((4, 512, 512), (4, 512, 512), (4, 512, 512), (512, 512, 512)),
    ],
)
def test_a_grouped_product_is_the_products_of_its_groups(
    first: tuple[int, ...], second: tuple[int, ...], result: tuple[int, ...], each: tuple[int, int, int]
) -> None:
    made = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in (first, second, result)]
    found = operation_of(torch.ops.aten._grouped_mm.default, tuple(made[:2]), {}, made[2], 1)
    rows, inner, columns = each
    assert found is not None
    assert found.flops == 4 * 2 * rows * inner * columns
    assert found.kind == product_class(*each)


def test_experts_in_one_product_have_the_work_of_experts_one_by_one() -> None:
    traces = []
    for how in ("eager", "grouped_mm"):
        model = tiny("mixtral", device="meta", experts_implementation=how)
        traces.append(trace_step(model, default_input(model, batch=2, seq=32), default_step, hardware=preset("h200")))
    assert traces[0].flops == traces[1].flops
