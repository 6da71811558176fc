"""A quantised tensor as libraries write them: a subclass that holds others, one of which holds others itself."""

from __future__ import annotations

from typing import Any

import torch

from elixir.torch_private import tree_map

aten = torch.ops.aten


class _Holding(torch.Tensor):
    """Applies views, copies and the like to the tensors inside."""

    inside: tuple[str, ...] = ()

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.inside), None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(*inner.values())

    def each(self, function: Any) -> Any:
        return type(self)(*(function(getattr(self, name)) for name in self.inside))


class Scales(_Holding):
    """A scale and a shift for each row."""

    inside = ("scale", "shift")

    @staticmethod
    def __new__(cls: Any, scale: torch.Tensor, shift: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, scale.shape, dtype=scale.dtype, device=scale.device)

    def __init__(self, scale: torch.Tensor, shift: torch.Tensor) -> None:
        self.scale, self.shift = scale, shift

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].each(lambda inner: func(inner, *args[1:], **(kwargs or {})))


class ScaledTensor(_Holding):
    """Whole numbers with a scale and a shift for each row; operators compute with the product."""

    inside = ("numbers", "inner")

    @staticmethod
    def __new__(cls: Any, numbers: torch.Tensor, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=inner.dtype, device=numbers.device)

    def __init__(self, numbers: torch.Tensor, inner: Scales) -> None:
        self.numbers, self.inner = numbers, inner

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.numbers.to(dtype) * self.inner.scale.to(dtype) + self.inner.shift.to(dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.t.default, aten.detach.default, aten.clone.default, aten.alias.default):
            return args[0].each(lambda inner: func(inner, *args[1:], **(kwargs or {})))
        if func is aten._to_copy.default:  # which may not change the numbers' dtype
            moved = {key: value for key, value in (kwargs or {}).items() if key != "dtype"}
            return args[0].each(lambda inner: func(inner, **moved))
        dtype = next(each.dtype for each in args if isinstance(each, torch.Tensor) and not isinstance(each, cls))
        return func(*tree_map(lambda each: each.dequantised(dtype) if isinstance(each, cls) else each, args))


def scaled(weight: torch.Tensor) -> ScaledTensor:
    """The weight in eight bits."""
    shift = weight.mean(1, keepdim=True)
    scale = (weight - shift).abs().amax(1, keepdim=True) / 127
    return ScaledTensor(((weight - shift) / scale).round().to(torch.int8), Scales(scale, shift))
