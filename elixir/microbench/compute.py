"""Seconds of what a transformer computes, by dtype: matrix products, memory-bound operators, attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from elixir.errors import InputError
from elixir.microbench.bench import Bench, Effort
from elixir.microbench.fitting import Job, Series, geometric, in_turns, sweep
from elixir.units import MIB, dtype_name

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GROWTH = 1.5
"""Growth of a matrix's or a sequence's length from one amount to the next."""
_ROUND = 32
_FEW_TOKENS = 16
_MOST_WEIGHTS = 64
_UNIT = 1000
"""A size that is no multiple of anything else here, to write shapes down with."""

SHAPES: dict[str, Callable[[int], tuple[int, int, int]]] = {
    "square": lambda size: (size, size, size),
    "tall": lambda size: (8 * size, size, size),
    "deep": lambda size: (size, 8 * size, size),
    "skinny": lambda size: (_FEW_TOKENS, 4 * size, 4 * size),
    "unaligned": lambda size: (size, size, size + 1),
}
"""Class -> (rows, inner, columns) of a product. With t tokens and hidden size h: ``square`` is a projection where t is
about h; ``tall`` one where t is much larger, as long batches through a small model are; ``deep`` the weight gradient of
the latter, which sums over the tokens; ``skinny`` a projection of few tokens, which is bound by reading the weight;
``unaligned``, on CUDA alone, the three products of logits over an odd number of classes, whose rows start anywhere."""
_SMALLEST = {"cpu": 128, "cuda": 512}
_LARGEST = {"cpu": 4096, "cuda": 16384}

_ROW = 1024
"""Length of what softmax and layer norm reduce over: a hidden size, or a row of attention scores."""
_LARGEST_CPU_TENSOR_BYTES = 16 * MIB
"""Size of the largest tensor on a CPU: beyond 32 MiB the C library gives every result fresh pages, which cost more than
the operator."""
_HEADS, _HEAD_DIM = 16, 64
_TOKENS = {"cpu": 1, "cuda": 8192}
"""Tokens of a batch of attention at least, since a device computes many short sequences together."""
_ATTENTION = {False: "attention", True: "attention_backward"}
_BACKWARD_PRODUCTS = 2.5
"""Products in backward of attention over those in forward, as PyTorch counts FLOPs."""


@dataclass(frozen=True)
class _Operator:
    """Memory-bound operators of one key: what they do, and how often they move a tensor of their input's size."""

    family: str
    how: str
    passes: int
    run: Callable[[torch.Tensor, torch.Tensor], object]


_OPERATORS = (
    _Operator("elementwise", "residual add x + y", 3, torch.add),
    _Operator("activation", "GELU", 2, lambda x, y: F.gelu(x)),
    _Operator(
        "reduction",
        f"softmax, then layer norm, over rows of {_ROW}",
        4,
        lambda x, y: (torch.softmax(x.view(-1, _ROW), -1), F.layer_norm(x.view(-1, _ROW), (_ROW,))),
    ),
)


def compute_jobs(bench: Bench, dtypes: tuple[torch.dtype, ...] = DTYPES) -> list[Job]:
    """Matrix products of every class, memory-bound operators and attention, each in every dtype.

    A quick look at a CPU measures only square products in fp16, in which few CPUs can multiply and nobody trains.
    """
    jobs = []
    for dtype in dtypes:
        name = dtype_name(dtype)
        if bench.quick and bench.device.type == "cpu" and dtype == torch.float16:
            jobs.append(_matmul_job(bench, dtype, "square"))
            continue
        cuda = bench.device.type == "cuda"
        jobs += [_matmul_job(bench, dtype, shape) for shape in SHAPES if cuda or shape != "unaligned"]
        for operator in _OPERATORS:
            run = partial(operator_series, bench, operator, dtype)
            jobs.append(Job(f"{operator.family} operators, {name}", (f"{operator.family}.{name}",), run))
        for backward in (False, True) if cuda else (False,):
            family = _ATTENTION[backward]
            run = partial(attention_series, bench, dtype, backward=backward)
            jobs.append(Job(f"{family.replace('_', ', ')}, {name}", (f"{family}.{name}",), run))
    return jobs


def _matmul_job(bench: Bench, dtype: torch.dtype, shape: str) -> Job:
    name, run = dtype_name(dtype), partial(matmul_series, bench, dtype, shape)
    return Job(f"{shape} matrix products, {name}", (f"matmul.{name}.{shape}",), run)


def matmul_series(bench: Bench, dtype: torch.dtype, shape: str = "square") -> Series:
    """Products of growing size, as large as time and memory allow: some dtypes are a thousand times slower.

    The weights come one after the other, so that none is in a cache. TF32 is used for fp32 only where the caller's
    torch settings allow it, as in a training step.

    Raises:
        InputError: this device cannot multiply matrices of `dtype`, or there is no such class.
    """
    if shape not in SHAPES:
        raise InputError(f"matrix products come in the classes {', '.join(SHAPES)}; found {shape!r}")
    plan = bench.effort()
    kind = bench.device.type

    def cases() -> Iterator[tuple[float, Callable[[], Callable[[], object]]]]:
        for size in _growing(_SMALLEST[kind], _LARGEST[kind]):
            rows, inner, columns = SHAPES[shape](size)
            if 4 * inner * columns > plan.buffer_bytes or 4 * rows * (inner + columns) > plan.buffer_bytes:
                return
            products, prepare = (3, _logits) if shape == "unaligned" else (1, _product)
            yield 2.0 * products * rows * inner * columns, partial(prepare, bench, plan, dtype, (rows, inner, columns))

    how = f"torch.mm, {_shape_text(shape)}, {dtype_name(dtype)} on {bench.device}"
    key = f"matmul.{dtype_name(dtype)}.{shape}"
    try:
        return sweep(bench, plan, key, "FLOP", how, cases(), longest_s=plan.longest_s)
    except (RuntimeError, NotImplementedError) as error:
        raise InputError(f"{bench.device} cannot multiply {dtype_name(dtype)} matrices: {error}") from None


def operator_series(bench: Bench, operator: _Operator, dtype: torch.dtype) -> Series:
    """A memory-bound operator over growing tensors, which come one after the other; results are new tensors."""
    plan = bench.effort()
    largest = plan.buffer_bytes // 2
    if bench.device.type == "cpu":
        largest = min(largest, _LARGEST_CPU_TENSOR_BYTES)
    row_bytes = _ROW * dtype.itemsize
    sizes = geometric(256 * row_bytes, largest // row_bytes * row_bytes, plan.amounts, row_bytes)
    first, second = (_random((plan.buffer_bytes // 4 // _ROW * _ROW,), dtype, bench.device, seed) for seed in (0, 1))

    how = f"{operator.how}, {dtype_name(dtype)} on {bench.device}, tensors up to {sizes[-1] / MIB:.3g} MiB"
    cases = [
        (float(operator.passes * size), partial(in_turns, operator.run, size // dtype.itemsize, first, second))
        for size in sizes
        if size // dtype.itemsize <= first.numel()
    ]
    return sweep(bench, plan, f"{operator.family}.{dtype_name(dtype)}", "bytes", how, cases)


def attention_series(bench: Bench, dtype: torch.dtype, *, backward: bool = False) -> Series:
    """Causal ``scaled_dot_product_attention``, growing sequences; the kernel is the one PyTorch picks.

    FLOPs are those of the scores on and below the diagonal, as the tracer counts them: causal kernels skip the others.
    """
    plan, kind, family = bench.effort(), bench.device.type, _ATTENTION[backward]

    def samples(length: int) -> int:
        return max(1, _TOKENS[kind] // length)

    def prepare(length: int) -> Callable[[], object]:
        shape = (samples(length), _HEADS, length, _HEAD_DIM)
        q, k, v, slope = (_random(shape, dtype, bench.device, seed) for seed in range(4))
        if not backward:
            return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        inputs = [each.requires_grad_() for each in (q, k, v)]
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return lambda: torch.autograd.grad(out, inputs, slope, retain_graph=True)

    products = _BACKWARD_PRODUCTS if backward else 1.0
    each = 2.0 * products * _HEADS * _HEAD_DIM
    lengths = _growing(_SMALLEST[kind], _LARGEST[kind])
    cases = ((each * samples(length) * length * (length + 1), partial(prepare, length)) for length in lengths)
    way = "backward" if backward else "forward"
    how = f"causal attention, {way}, {_HEADS} heads of {_HEAD_DIM}, {dtype_name(dtype)} on {bench.device}"
    return sweep(bench, plan, f"{family}.{dtype_name(dtype)}", "FLOP", how, cases, longest_s=plan.longest_s)


def _logits(bench: Bench, plan: Effort, dtype: torch.dtype, dims: tuple[int, int, int]) -> Callable[[], object]:
    """Logits, and in backward the slopes of what came in and of the weight."""
    tokens, features, classes = dims
    hidden, weight, slope = (
        _random(shape, dtype, bench.device, seed)
        for seed, shape in enumerate(((tokens, features), (classes, features), (tokens, classes)))
    )
    return lambda: (torch.mm(hidden, weight.t()), torch.mm(slope, weight), torch.mm(slope.t(), hidden))


def _product(bench: Bench, plan: Effort, dtype: torch.dtype, dims: tuple[int, int, int]) -> Callable[[], object]:
    rows, inner, columns = dims
    tokens = _random((rows, inner), dtype, bench.device, 0)
    out = torch.empty(rows, columns, dtype=dtype, device=bench.device)
    count = max(1, min(_MOST_WEIGHTS, plan.buffer_bytes // (inner * columns * dtype.itemsize)))
    first = _random((inner, columns), dtype, bench.device, 1)
    weights = itertools.cycle([first, *(first.clone() for _ in range(count - 1))])
    return lambda: torch.mm(tokens, next(weights), out=out)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Random numbers, since zeros draw less power and let a GPU clock higher than it does on real weights."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=generator).to(dtype)


def _growing(smallest: int, largest: int) -> Iterator[int]:
    size = float(smallest)
    while size <= largest:
        yield round(size / _ROUND) * _ROUND
        size *= _GROWTH


def _shape_text(shape: str) -> str:
    if shape == "unaligned":
        return "the three products of n tokens of size n with n + 1 classes"
    lengths = " x ".join(
        str(_FEW_TOKENS) if length == _FEW_TOKENS else ("n" if length == _UNIT else f"{length // _UNIT}n")
        for length in SHAPES[shape](_UNIT)
    )
    return f"{shape} ({lengths})"
