"""Rules of devices and of operators say of many calls what was recorded.

A commit that means to change them records them anew and says why:

    python -m tests.unit.tracer.test_recorded_rules
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir.artifact import digest
from elixir.hardware.profile import preset
from elixir.torch_private import operator_names
from elixir.tracer.device import target_for
from elixir.tracer.device.cpu_target import chosen_on_cpu
from elixir.tracer.device.cuda_target import chosen_on_cuda, held_by_sum, held_in_backward
from elixir.tracer.device.target import Attention
from elixir.tracer.operation_kinds import product_class
from elixir.tracer.operator_cache import Traits
from tests.common.tracing import kernels_not_run
from tests.unit.tracer.test_recorded_traces import RELEASE, TARGETS

RECORDED = Path(__file__).with_suffix(".json")
aten = torch.ops.aten

CAPABILITIES = ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0))


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
        (aten.mm.default, (one[::2, ::2][:1, :1], one[:1]), one), (aten.mm.default, (one[:1, ::2], one[:40, :1]), one),
        (aten.clone.default, (empty(60, 60).t(),), empty(60, 60).t()), (aten._to_copy.default, (empty(90, 60).t(),), empty(60, 90)),
        (aten.mse_loss.default, (one.t(), one), one), (aten._safe_softmax.default, (one[:0], -1), one[:0]),
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
    vector = one[0]
    products: Any = (
        (aten.mm.default, (one, one)),
        (aten.addmm.default, (vector, one, one)),  # with a bias
        (aten.addmm.default, (one, one, one)),
        (aten.addmv.default, (vector, one, vector)),
    )
    found: dict[str, list[int]] = {}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with kernels_not_run():
        for name in TARGETS:
            target = target_for(preset(name))
            found[name] = [target.transient_bytes(func, args, {}, [output]) for func, args, output in calls]
            found[name] += [target.round_bytes(nbytes) for nbytes in (0, 1, 512, 513)]
            for func, args in products:
                found[name] += target.matmul_workspace_bytes(func, args) or (0,)
    torch.set_num_threads(before)
    return found


def sums(draw: random.Random) -> list[list[int]]:
    """The memory that sums take on CUDA, by capability: of a few columns or of as many as there are blocks."""
    # A block is 32 threads wide, each with four columns, and so many blocks fill a device of each capability.
    full = itertools.product(
        (1020, 1024, 1028), [128 * blocks + more for blocks in (640, 1296, 1728, 2112) for more in (0, 128)]
    )
    calls: list[tuple[Any, Any]] = [((2, 1 << 30), (0,)), ((9, 0), (0,)), *((shape, (0,)) for shape in full)]
    for _ in range(300):
        rows, columns = draw.choice((1, 255, 4096, 8192, 100_000)), draw.choice((1, 3, 8, 31, 64, 768, 5000))
        calls.append(((rows, columns), draw.choice(((0,), (1,), (), (0, 1), (-2,)))))
        calls.append(((draw.choice((2, 600)), rows % 7000, columns), draw.choice(((0, 1), (0, 2), (1,), (0,)))))
    tensors = [(empty(*shape, dtype=draw.choice((torch.float32, torch.bfloat16))), dims) for shape, dims in calls]
    tensors += [(tensor.transpose(0, -1), dims) for tensor, dims in tensors[5:]] + [(empty(), ())]
    tensors += [(tensor[..., 1:], dims) for tensor, dims in tensors[5:100]]
    return [[held_by_sum(tensor, dims, each) for tensor, dims in tensors] for each in CAPABILITIES]


def traits_of_operators() -> dict[str, str]:
    """The operators of PyTorch that have each trait, as digests."""
    found: dict[str, list[Any]] = {}
    for name in sorted(operator_names()):
        if name.startswith("aten::"):
            base, _, overload = name.removeprefix("aten::").partition(".")
            func = getattr(getattr(aten, base), overload or "default")
            for trait, value in vars(Traits(func)).items():
                if trait not in ("func", "call") and value:
                    found.setdefault(trait, []).append([name, str(value)])
    return {trait: digest(of) for trait, of in found.items()}


def outcome(name: str) -> Any:
    """The outcome of a rule."""
    draw = random.Random(0)
    if name == "attention that is chosen":
        return chosen(draw)
    if name == "classes of products":
        return digest(
            [product_class(*sizes) for sizes in itertools.product((1, 8, 16, 17, 64, 128, 512, 4096), repeat=3)]
        )
    if name == "traits of operators":
        return traits_of_operators()
    if name == "buffers of kernels":
        return [transient(1), transient(3)]
    return digest(held(draw)) if name == "buffers of attention" else list(map(digest, sums(draw)))


RULES = ("attention that is chosen", "buffers of attention", "buffers of kernels", "buffers of sums", "classes of products",
         "traits of operators")  # fmt: skip


@pytest.mark.skipif(RELEASE != "2.13", reason="recorded with torch 2.13")
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_as_recorded(name: str) -> None:
    assert outcome(name) == json.loads(RECORDED.read_text())[name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = [f" {json.dumps(name)}: {json.dumps(outcome(name))}" for name in RULES]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
