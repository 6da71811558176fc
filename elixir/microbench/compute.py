"""Seconds of what a transformer computes, by dtype: matrix products, memory-bound operators, attention; and of an Adam
step by number of elements, on a device and on the host by thread count."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn import functional as F

from elixir.hardware.host_share import host_share, host_view, rank_threads, use_threads
from elixir.microbench.bench import Bench, Effort, Job, Run, Workload, walking, windows
from elixir.microbench.fitting import Series, threads_text
from elixir.units import MIB, dtype_name

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GROWTH = 1.5
"""Growth of a matrix's or a sequence's length from one amount to the next."""
_ROUND = 32
_FEW_TOKENS = 16
_MOST_WEIGHTS = 64

SHAPES: dict[str, tuple[str, Callable[[int], tuple[int, int, int]]]] = {
    "square": ("n x n x n", lambda size: (size, size, size)),
    "tall": ("8n x n x n", lambda size: (8 * size, size, size)),
    "deep": ("n x 8n x n", lambda size: (size, 8 * size, size)),
    "skinny": (f"{_FEW_TOKENS} x 4n x 4n", lambda size: (_FEW_TOKENS, 4 * size, 4 * size)),
    "unaligned": ("the three of n tokens of size n with n + 1 classes", lambda size: (size, size, size + 1)),
}
"""Class -> text, and (rows, inner, columns) of a product of a size. With t tokens and hidden size h: ``square`` is a
projection where t is about h; ``tall`` one where t is much larger, as long batches through a small model are; ``deep``
the weight gradient of the latter, which sums over the tokens; ``skinny`` a projection of few tokens, which is bound by
reading the weight; ``unaligned``, on CUDA alone, the three products of logits over an odd number of classes, whose rows
start anywhere."""
_SMALLEST = {"cpu": 128, "cuda": 512}
_LARGEST = {"cpu": 4096, "cuda": 16384}

_ROW = 1024
"""Length of what softmax and layer norm reduce over: a hidden size, or a row of attention scores."""
_LARGEST_TENSOR_BYTES = {"cpu": 16 * MIB}
"""Size of the largest tensor on a CPU: beyond 32 MiB the C library gives every result fresh pages, which cost more than
the operator."""
_HEADS, _HEAD_DIM = 16, 64
_TOKENS = {"cpu": 1, "cuda": 8192}
"""Tokens of a batch of attention at least, since a device computes many short sequences together."""
_BACKWARD_PRODUCTS = 2.5
"""Products in backward of attention over those in forward, as PyTorch counts FLOPs."""
SMALLEST_NUMEL = 2**16


_OPERATORS: dict[str, tuple[str, int, Callable[[torch.Tensor, torch.Tensor], object]]] = {
    "elementwise": ("residual add x + y", 3, torch.add),
    "activation": ("GELU", 2, lambda x, y: F.gelu(x)),
    "reduction": (
        f"softmax, then layer norm, over rows of {_ROW}",
        4,
        lambda x, y: (torch.softmax(x.view(-1, _ROW), -1), F.layer_norm(x.view(-1, _ROW), (_ROW,))),
    ),
}
"""Family of keys -> its memory-bound operators, how often they move a tensor of their input's size, and their call."""


def compute_jobs(bench: Bench, dtypes: tuple[torch.dtype, ...] = DTYPES) -> list[Workload]:
    """Matrix products of every class, memory-bound operators and attention, each in every dtype.

    A quick look at a CPU measures only square products in fp16, in which few CPUs can multiply and nobody trains.
    """
    jobs: list[Workload] = []
    cuda = bench.device.type == "cuda"
    for dtype in dtypes:
        if bench.quick and not cuda and dtype == torch.float16:
            jobs.append(matmul_work(bench, dtype))
            continue
        jobs += [matmul_work(bench, dtype, shape) for shape in SHAPES if cuda or shape != "unaligned"]
        jobs += [_operator_work(bench, family, dtype) for family in _OPERATORS]
        jobs += [attention_work(bench, dtype, backward=backward) for backward in ((False, True) if cuda else (False,))]
    return jobs


def matmul_work(bench: Bench, dtype: torch.dtype, shape: str = "square") -> Workload:
    """Products of growing size, as large as time and memory allow: some dtypes are a thousand times slower.

    The weights come one after the other, so that none is in a cache. TF32 is used for fp32 only where the caller's
    torch settings allow it, as in a training step.
    """
    plan, kind, name = bench.effort(), bench.device.type, dtype_name(dtype)
    text, dims = SHAPES[shape]
    products, prepare = (3, _logits) if shape == "unaligned" else (1, _product)

    def fits(size: int) -> bool:
        rows, inner, columns = dims(size)
        return 4 * inner * columns <= plan.buffer_bytes and 4 * rows * (inner + columns) <= plan.buffer_bytes

    def begin() -> Callable[[int], Run]:
        return lambda size: prepare(bench, plan, dtype, *dims(size))

    def flops(size: int) -> float:
        return 2.0 * products * math.prod(dims(size))

    title, key = f"{shape} matrix products, {name}", f"matmul.{name}.{shape}"
    how = f"torch.mm, {shape} ({text}), {name} on {bench.device}"
    sizes = [*itertools.takewhile(fits, _growing(_SMALLEST[kind], _LARGEST[kind]))]
    return Workload(title, (key,), bench, how, sizes, begin, flops, plan.longest_s)


def _operator_work(bench: Bench, family: str, dtype: torch.dtype) -> Workload:
    """A memory-bound operator over growing tensors, which come one after the other; results are new tensors."""
    most, name, (what, passes, run) = bench.effort().buffer_bytes, dtype_name(dtype), _OPERATORS[family]
    largest = min(most // 2, _LARGEST_TENSOR_BYTES.get(bench.device.type, most))
    row_bytes = _ROW * dtype.itemsize
    sizes = bench.sizes(256 * row_bytes, row_bytes, largest // row_bytes * row_bytes)

    def begin() -> Callable[[int], Run]:
        return walking(run, [random_tensor((most // 4 // _ROW * _ROW,), dtype, bench.device, seed) for seed in (0, 1)])

    title, key = f"{family} operators, {name}", f"{family}.{name}"
    how = f"{what}, {name} on {bench.device}, tensors up to {sizes[-1] / MIB:.3g} MiB"
    return Workload(title, (key,), bench, how, sizes, begin, lambda size: float(passes * size))


def attention_work(bench: Bench, dtype: torch.dtype, *, backward: bool = False) -> Workload:
    """Causal ``scaled_dot_product_attention``, growing sequences; the kernel is the one PyTorch picks.

    FLOPs are those of the scores on and below the diagonal, as the tracer counts them: causal kernels skip the others.
    """
    plan, kind, name = bench.effort(), bench.device.type, dtype_name(dtype)
    products = _BACKWARD_PRODUCTS if backward else 1.0

    def samples(length: int) -> int:
        return max(1, _TOKENS[kind] // length)

    def prepare(length: int) -> Run:
        shape = (samples(length), _HEADS, length, _HEAD_DIM)
        q, k, v, slope = (random_tensor(shape, dtype, bench.device, seed).requires_grad_(backward) for seed in range(4))
        if not backward:
            return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return lambda: torch.autograd.grad(out, (q, k, v), slope, retain_graph=True)

    def flops(length: int) -> float:
        return 2.0 * products * _HEADS * _HEAD_DIM * samples(length) * length * (length + 1)

    title, key = f"attention{', backward' * backward}, {name}", f"attention{'_backward' * backward}.{name}"
    way = "backward" if backward else "forward"
    how = f"causal attention, {way}, {_HEADS} heads of {_HEAD_DIM}, {name} on {bench.device}"
    sizes = _growing(_SMALLEST[kind], _LARGEST[kind])
    return Workload(title, (key,), bench, how, sizes, lambda: prepare, flops, plan.longest_s)


def _logits(bench: Bench, plan: Effort, dtype: torch.dtype, tokens: int, features: int, classes: int) -> Run:
    """Logits, and in backward the slopes of what came in and of the weight."""
    shapes = (tokens, features), (classes, features), (tokens, classes)
    hidden, weight, slope = (random_tensor(shape, dtype, bench.device, seed) for seed, shape in enumerate(shapes))
    return lambda: (torch.mm(hidden, weight.t()), torch.mm(slope, weight), torch.mm(slope.t(), hidden))


def _product(bench: Bench, plan: Effort, dtype: torch.dtype, rows: int, inner: int, columns: int) -> Run:
    tokens = random_tensor((rows, inner), dtype, bench.device, 0)
    out = torch.empty(rows, columns, dtype=dtype, device=bench.device)
    count = max(1, min(_MOST_WEIGHTS, plan.buffer_bytes // (inner * columns * dtype.itemsize)))
    first = random_tensor((inner, columns), dtype, bench.device, 1)
    weights = itertools.cycle([first, *(first.clone() for _ in range(count - 1))])
    return lambda: torch.mm(tokens, next(weights), out=out)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Random numbers, since zeros draw less power and let a GPU clock higher than it does on real weights."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=generator).to(dtype)


def _growing(smallest: int, largest: int) -> list[int]:
    count = 1 + int(math.log(largest / smallest, _GROWTH))
    return [round(smallest * _GROWTH**step / _ROUND) * _ROUND for step in range(count)]


def host_adam(bench: Bench, dtype: torch.dtype, threads: int, cores: Sequence[int] | None = None) -> Job:
    """Adam on the host, on a separate thread with a number of OpenMP threads, as in training.

    Args:
        bench: says how thoroughly.
        dtype: of the states.
        threads: of OpenMP; torch's number of threads for others does not reach that thread.
        cores: that it is bound to; None: any.
    """
    work = adam_work(bench.on("cpu"), dtype, threads)

    def series() -> list[Series]:
        with ThreadPoolExecutor(1, "elixir adam", use_threads, (threads, cores)) as worker:
            return worker.submit(work.series).result()

    return Job(work.title, work.keys, measure=series)


def adam_jobs(bench: Bench) -> list[Job]:
    """The host by thread count and dtype of the states, then the device where it is not the host.

    By several ranks as they run it in training: on the host each with its part of the cores, with float32 states.
    """
    on_cpu, dtypes = bench.device.type == "cpu", [torch.float32]
    if bench.ranks.size == 1:
        dtypes += [torch.bfloat16]
        jobs = [host_adam(bench, dtype, threads) for threads in thread_counts() for dtype in dtypes]
    else:
        share = host_share(bench.ranks.exchange(host_view()), bench.ranks.rank)
        threads, cores = rank_threads(share, torch.get_num_threads() if on_cpu else 0)
        # On machines that differ all measure what the smallest rank has: they share one key.
        jobs = [host_adam(bench, torch.float32, int(bench.ranks.least(threads)), cores)]
    return jobs if on_cpu else [*jobs, *(adam_work(bench, dtype) for dtype in dtypes)]


def thread_counts() -> list[int]:
    """1, 2, 4, ... up to the cores that this process may use, which are always among them; and torch's number.

    The most are not what ``OMP_NUM_THREADS`` says, which torchrun sets to 1: the runtime's Adam does not follow that
    either.
    """
    most = host_share([host_view()], 0).all_cores
    return sorted({2**power for power in range(most.bit_length()) if 2**power < most} | {most, compute_threads()})


def compute_threads() -> int:
    """Number of threads of updates if the CPU is the device: torch's number, but no more than there are cores."""
    return min(torch.get_num_threads(), host_share([host_view()], 0).all_cores)


def adam_work(bench: Bench, dtype: torch.dtype, threads: int | None = None) -> Workload:
    """``torch.optim.AdamW(fused=True)`` over one flat parameter, its gradient and both moments of `dtype`.

    The step of a sharded optimizer looks like this: a long flat buffer, nothing to launch twice. With fp32 it reads and
    writes 28 bytes per element, with bf16 14, so it is bound by memory unless cores are slow.

    Args:
        bench: says on which device.
        dtype: of all four tensors.
        threads: of the host's Adam; None: the device's.
    """
    sizes = bench.sizes(SMALLEST_NUMEL, SMALLEST_NUMEL, bench.effort().adam_numel)

    def prepare(numel: int) -> Run:
        weights, gradients = (torch.full(sizes[-1:], value, dtype=dtype, device=bench.device) for value in (1.0, 1e-3))
        steps: list[Callable[[], object]] = []
        for piece, gradient in zip(windows(weights, numel), windows(gradients, numel), strict=True):
            parameter = torch.nn.Parameter(piece)
            parameter.grad = gradient
            steps.append(torch.optim.AdamW([parameter], lr=1e-3, fused=True).step)
            steps[-1]()  # makes the states, whose pages are then there
        turns = itertools.cycle(steps)
        return lambda: next(turns)()

    name = dtype_name(dtype)
    how = (
        f"torch AdamW(fused=True) on {bench.device}, {name} parameter, gradient and states, "
        f"{sizes[0] / 1e6:.2g} to {sizes[-1] / 1e6:.3g} M elements"
    )
    family = "device_adam" if threads is None else f"host_adam.{threads}"
    key = family + ("" if dtype == torch.float32 else f".{name}") + bench.all_ranks
    where = f"on {bench.device}" if threads is None else f"on the host, {threads_text(threads)}"
    return Workload(f"Adam {where}, {name} states", (key,), bench, how, sizes, lambda: prepare)
