"""Over PyTorch's own samples of every operator, and where it could go wrong: what is remembered is what would be
run."""

from __future__ import annotations

import importlib.util
import random
import sys
import types
import unittest
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from elixir.tracer.device import target_for
from elixir.tracer.ledger import Ledger
from elixir.tracer.operator_cache import Arguments, OperatorCache, traits
from elixir.tracer.recorder import Recorder
from elixir.tracer.use_order import UseOrder
from elixir.tracer.values.shadows import Shadows
from tests.common.tracing import CPU, on_meta_now

if importlib.util.find_spec("expecttest") is None:
    # PyTorch's samples come with its test classes, which only derive from one of that package.
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
SAMPLES = 6
"""Cases of each operator and dtype; the first few have the common shapes, the last ones the odd ones."""
SEED = 20240611
QUICK_OPERATORS = 10


def on_meta(item: Any) -> Any:
    """A tensor of the same shape, strides and dtype without values."""
    if not isinstance(item, torch.Tensor):
        return item
    twin = torch.empty_strided(item.size(), item.stride(), dtype=item.dtype, device="meta")
    if item.is_conj():
        twin = twin.conj()
    if item.is_neg():
        twin = torch._neg_view(twin)
    return twin.requires_grad_(item.requires_grad)


def described(items: list[Any]) -> list[Any]:
    """Everything of results but values: types, shapes, strides, dtypes, and who shares whose memory."""
    storages: dict[int, int] = {}
    found = []
    for item in items:
        if not isinstance(item, torch.Tensor):
            # Nobody knows what a meta tensor holds, so a number read from one is known by its type alone.
            found.append(
                type(item) if isinstance(item, (float, complex, torch.SymFloat, torch.SymInt, torch.SymBool)) else item
            )
            continue
        storage = item.untyped_storage()
        alias = storages.setdefault(storage._cdata, len(storages))
        place = (item.storage_offset(), storage.nbytes(), alias)
        found.append((item.device.type, item.dtype, item.size(), item.stride(), *place, item.is_conj(), item.is_neg()))
    return found


def recorder(cache: bool, hardware: Any = CPU) -> tuple[Recorder, Ledger]:
    target = target_for(hardware)
    ledger = Ledger(target.round_bytes)
    order = UseOrder(on_meta_now(nn.Linear(1, 1, device="meta")), ledger, {})
    return Recorder(target, ledger, order, Shadows(ledger), None, cache), ledger


def run_twice(call: Callable[..., Any], sample: tuple[Any, ...], cache: bool, backward: bool) -> list[Any]:
    """Results, arguments afterwards, gradients and peak of two calls, of which the second may be remembered."""
    found: list[Any] = []
    book, ledger = recorder(cache)
    for _ in range(2):
        given, args, kwargs = tree_map(on_meta, sample)
        try:
            with book:
                made = call(given, *args, **kwargs)
                tensors = [t for t in tree_leaves(made) if isinstance(t, torch.Tensor)]
                starts = [t for t in tensors if t.requires_grad]
                if backward and starts:
                    torch.autograd.backward(starts, [torch.empty_like(t) for t in starts])
        except Exception as error:
            found.append((type(error), str(error).split("\n")[0][:80]))
            continue
        found.append((type(made), *(type(item) for item in made)) if isinstance(made, (tuple, list)) else type(made))
        inputs = tree_leaves((given, args, kwargs))
        gradients = [t.grad for t in inputs if isinstance(t, torch.Tensor) and t.is_leaf and t.grad is not None]
        found.append(described([*inputs, *tree_leaves(made), *gradients]))
        del made, tensors, starts, given, args, kwargs, inputs, gradients
    found.append([int(ledger.curve().total.max(initial=0)), len(ledger.starts)])
    return found


def is_dense(sample: tuple[Any, ...]) -> bool:
    """Whether it can be put on meta here: a trace refuses other layouts."""
    return all(item.layout is torch.strided for item in tree_leaves(sample) if isinstance(item, torch.Tensor))


def calls_of(op: OpInfo) -> dict[str, Callable[..., Any]]:
    found = {"function": op.get_op(), "method": op.get_method(), "in place": op.get_inplace()}
    return {name: call for name, call in found.items() if call is not None}


def differences(op: OpInfo) -> list[str]:
    """The cases in which remembering changes anything: operator, form, dtype, number of the sample."""
    found = []
    for dtype in DTYPES:
        if dtype not in op.dtypes:
            continue
        backward = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
        torch.manual_seed(0)
        try:
            samples = list(op.sample_inputs("cpu", dtype, requires_grad=False))
        except Exception:  # of a library that is not installed
            continue
        samples = [sample for sample in samples if is_dense((sample.input, sample.args, sample.kwargs))]
        for number, sample in enumerate([*samples[:SAMPLES], *samples[SAMPLES:][-2:]]):
            for form, call in calls_of(op).items():
                inputs: Any = sample.input
                if backward and form != "in place":
                    inputs = tree_map(lambda t: t.clone().requires_grad_() if wants_gradient(t) else t, inputs)
                given = (inputs, sample.args, sample.kwargs)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    plain = run_twice(call, given, False, backward)
                    cached = run_twice(call, given, True, backward)
                if plain != cached:
                    found.append(f"{op.name} {op.variant_test_name} {form} {dtype} {number}: {plain} != {cached}")
    return found


def wants_gradient(item: Any) -> bool:
    dense = isinstance(item, torch.Tensor) and item.layout is torch.strided
    return dense and (item.is_floating_point() or item.is_complex())


def chosen() -> list[Any]:
    names = sorted({(op.name, op.variant_test_name) for op in op_db})
    quick = set(random.Random(SEED).sample(names, QUICK_OPERATORS))
    quick |= {("linalg.cholesky", ""), ("unsqueeze", ""), ("t", "")}
    return [
        pytest.param(
            op,
            marks=[] if (op.name, op.variant_test_name) in quick else [pytest.mark.slow],
            id=f"{op.name}-{op.variant_test_name}",
        )
        for op in op_db
    ]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("op", chosen())
def test_the_cache_is_transparent_for_samples_of(op: OpInfo) -> None:
    assert differences(op) == []


def run_on(book: OperatorCache, func: Any, *args: Any, **kwargs: Any) -> Any:
    op = traits(func)
    run = book.call if op.mutates else book.run
    return run(op, args, kwargs, Arguments(args, kwargs))


def test_what_a_key_does_not_tell_is_not_remembered() -> None:
    book = OperatorCache(target_for(CPU))
    ones = torch.empty(4, device="meta")
    # The default dtype, which `true_divide` of integers takes.
    numbers = torch.empty(4, dtype=torch.int64, device="meta")
    assert run_on(book, aten.div.Tensor, numbers, numbers)[0].dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert run_on(book, aten.div.Tensor, numbers, numbers)[0].dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    # A foreach operator whose lists do not go together.
    with pytest.raises(RuntimeError, match="same number"):
        run_on(book, aten._foreach_add.List, [ones] * 4, [ones])
    # A foreach operator changes each of some real tensors, not one for all.
    changed = [torch.ones(2), torch.ones(2)]
    run_on(book, aten._foreach_add_.Scalar, changed, 1)
    assert [each.tolist() for each in changed] == [[2, 2], [2, 2]]
    # A conjugated view, which has the same shape and strides as what it shows.
    waves = torch.empty(3, dtype=torch.complex64, device="meta")
    assert [run_on(book, aten.clone.default, item)[0].is_conj() for item in (waves, waves.conj())] == [
        aten.clone.default(item).is_conj() for item in (waves, waves.conj())
    ]
