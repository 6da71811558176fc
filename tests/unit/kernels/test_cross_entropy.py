"""`linear_cross_entropy`: the numbers of a linear layer and a cross-entropy, without the logits between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import elixir.kernels.model.linear_cross_entropy as module
from elixir.errors import InputError
from elixir.kernels.model.linear_cross_entropy import linear_cross_entropy
from tests.common import inside

TOKENS, FEATURES, CLASSES = 37, 24, 130


@pytest.fixture(autouse=True)
def _several_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """48 classes at a time: the last slice is a partial one."""
    monkeypatch.setattr(module, "SLICE_BYTES", 1)
    monkeypatch.setattr(module, "MIN_SLICE_COLUMNS", 48)


def example(dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, FEATURES, generator=generator)
    weight = torch.randn(CLASSES, FEATURES, generator=generator)
    offset = torch.randn(CLASSES, generator=generator)
    target = torch.randint(CLASSES, (TOKENS,), generator=generator)
    target[::5] = -100
    leaves = [t.to(dtype).requires_grad_() for t in ((hidden, weight, offset) if bias else (hidden, weight))]
    return (*leaves, target)


def plain(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: Any = None, **options: Any) -> Any:
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target, **options)


def results(function: Any, dtype: torch.dtype, bias: bool, scale: float = 1.0, **options: Any) -> list[torch.Tensor]:
    """Loss and gradients."""
    *leaves, target = example(dtype, bias)
    hidden, weight, *rest = leaves
    loss = function(hidden, weight, target, *rest, **options)
    (loss * scale).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_same_numbers(dtype: torch.dtype, bias: bool, reduction: str) -> None:
    mine = results(linear_cross_entropy, dtype, bias, reduction=reduction)
    theirs = results(plain, dtype, bias, reduction=reduction)
    for found, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found, expected)


class _Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numel, self.products = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor))])
        return result


def test_logits_never_exist_as_a_whole() -> None:
    hidden, weight, bias, target = example()
    hidden = hidden.detach().repeat(20, 1).requires_grad_()
    with _Largest() as seen:
        linear_cross_entropy(hidden, weight, target.repeat(20), bias).backward()
    assert seen.numel < hidden.shape[0] * CLASSES / 2
    assert seen.numel >= hidden.shape[0] * 48


def test_derivatives_by_differences_and_of_what_is_not_frozen() -> None:
    hidden, weight, bias, target = example(torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_cross_entropy(h[:5, :6], w[:, :6], target[:5], b), (hidden, weight, bias), fast_mode=True
    )
    for frozen in range(3):
        given = [each.detach() if at == frozen else each for at, each in enumerate((hidden, weight, bias))]
        asked = [each for each in given if each.requires_grad]
        losses = [each(given[0], given[1], target, given[2]) for each in (linear_cross_entropy, plain)]
        torch.testing.assert_close(*(torch.autograd.grad(loss, asked) for loss in losses))
    with _Largest() as seen:
        linear_cross_entropy(hidden, weight.detach(), target).backward()
    assert seen.products == 3 * 3  # logits twice and the gradient of hidden, for each of three slices


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [range(37), range(5, 37), ()])
def test_ignored_targets_are_as_in_pytorch(ignored: Any, reduction: str) -> None:
    hidden, weight, _bias, target = example()
    target.clamp_(min=8)[list(ignored)] = 7
    options: dict[str, Any] = {"ignore_index": 7, "reduction": reduction}
    found = [f(hidden, weight, target, **options) for f in (linear_cross_entropy, plain)]
    torch.testing.assert_close(*found, equal_nan=True)


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, _bias, target = example()
    loss = linear_cross_entropy(hidden, weight, target)
    with pytest.raises(InputError, match="second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("wrong", [CLASSES, -1])
def test_a_target_that_is_no_class_is_refused_or_gives_no_number(wrong: int) -> None:
    hidden, weight, _bias, target = example()
    target[3] = wrong
    with pytest.raises(InputError, match=rf"target {wrong} is none of the {CLASSES} classes"):
        linear_cross_entropy(hidden, weight, target)
    assert inside.cross_entropy_unchecked(hidden, weight, target).isnan()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden": torch.zeros(2, 3, FEATURES)}, "hidden must be"),
        ({"weight": torch.zeros(CLASSES, 7)}, "hidden must be"),
        ({"weight": torch.zeros(CLASSES, FEATURES, dtype=torch.bfloat16)}, "one floating dtype"),
        ({"target": torch.zeros(TOKENS, dtype=torch.int32)}, "int64"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, "target must be"),
        ({"bias": torch.zeros(3)}, "bias must be"),
        ({"reduction": "none"}, "'mean' or 'sum'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], text: str) -> None:
    hidden, weight, bias, target = example()
    with pytest.raises(InputError, match=text):
        linear_cross_entropy(**({"hidden": hidden, "weight": weight, "target": target, "bias": bias} | change))
