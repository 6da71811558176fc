"""Adapters over a frozen model by name, whose weights may be quantised: as peft and bitsandbytes build them.

Neither library is needed. Names, shapes and bytes are theirs, so a plan made here runs a model that they have built.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elixir.errors import InputError, unknown_name

QUANTISED_FORMS = ("nf4", "nf4-double")
"""Forms of quantised weights by name: bitsandbytes' normal floats of 4 bits, and with quantised scales."""
_BLOCK = 64
"""Weights that share a scale, as bitsandbytes has it by default (0.50, `Params4bit`)."""
_NESTED_BLOCK = 256
"""Scales that share a scale where scales are quantised, too (bitsandbytes 0.50, `quantize_4bit`)."""
_ADAPTER = "default"
"""peft's name of an adapter that has none."""


@dataclass(eq=False)
class _QuantState:
    """The tensors that unpack a weight, by the names of bitsandbytes' `QuantState`."""

    absmax: torch.Tensor
    code: torch.Tensor
    shape: tuple[int, ...] = ()
    quant_type: str = "nf4"
    offset: torch.Tensor | None = None
    state2: _QuantState | None = None


@torch.library.custom_op("elixir::unpack", mutates_args=())
def _unpack(packed: torch.Tensor, scales: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Packed numbers as floating ones; on meta alone."""
    raise NotImplementedError("weights quantised by name are on meta, to be planned; load a model with bitsandbytes")


@_unpack.register_fake
def _(packed: torch.Tensor, scales: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return packed.new_empty(shape, dtype=dtype)


def _unpacked(packed: torch.Tensor, state: _QuantState, dtype: torch.dtype) -> torch.Tensor:
    scales = state.absmax
    if state.state2 is not None:
        nested = state.state2.absmax
        scales = torch.ops.elixir.unpack(scales, nested, list(scales.shape), nested.dtype) + state.offset
    unpacked: torch.Tensor = torch.ops.elixir.unpack(packed, scales, list(state.shape), dtype)
    return unpacked


class _PackedProduct(torch.autograd.Function):
    """A product with a weight that is unpacked in forward and again in backward, as bitsandbytes' `MatMul4Bit`."""

    @staticmethod
    def forward(
        ctx: Any, inp: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, state: _QuantState
    ) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.state = state
        return F.linear(inp, _unpacked(packed, state, inp.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        grad = torch.matmul(grads[0], _unpacked(packed, ctx.state, grads[0].dtype))
        return grad, None, None, None


class PackedLinear(nn.Module):
    """A linear layer whose frozen weight has 4 bits a number, on meta."""

    def __init__(self, in_features: int, out_features: int, bias: nn.Parameter | None, form: str) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        numel = in_features * out_features
        packed = torch.empty(((numel + 1) // 2, 1), dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.weight.quant_state = _state((out_features, in_features), form)  # type: ignore[attr-defined]
        self.bias = bias

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Returns (..., out_features) of an input of (..., in_features)."""
        state = self.weight.quant_state  # type: ignore[attr-defined]
        packed = self.weight.view(-1, 1)
        if not (torch.is_grad_enabled() and inp.requires_grad):
            return F.linear(inp, _unpacked(packed, state, inp.dtype), self.bias)
        product: torch.Tensor = _PackedProduct.apply(inp, packed, self.bias, state)  # type: ignore[no-untyped-call]
        return product


def _state(shape: tuple[int, int], form: str) -> _QuantState:
    def floats(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.float32, device="meta")

    scales = math.ceil(math.prod(shape) / _BLOCK)
    if form == "nf4":
        return _QuantState(floats(scales), floats(16), shape)
    nested = _QuantState(floats(math.ceil(scales / _NESTED_BLOCK)), floats(256))
    absmax = torch.empty(scales, dtype=torch.uint8, device="meta")
    return _QuantState(absmax, floats(16), shape, "nf4", floats(), nested)


class AdaptedLinear(nn.Module):
    """A linear layer with a product of two narrow matrices added to it, under the names of peft's."""

    def __init__(self, base: nn.Module, in_features: int, out_features: int, rank: int) -> None:
        super().__init__()
        self.base_layer = base
        self.scaling = 1.0
        like: dict[str, Any] = {"bias": False, "device": base.weight.device}
        self.lora_A = nn.ModuleDict({_ADAPTER: nn.Linear(in_features, rank, **like)})
        self.lora_B = nn.ModuleDict({_ADAPTER: nn.Linear(rank, out_features, **like)})

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Returns (..., out_features) of an input of (..., in_features)."""
        result: torch.Tensor = self.base_layer(inp)
        if isinstance(self.base_layer, PackedLinear):
            result = result.clone()  # as peft does over 4 bits
        narrow = self.lora_A[_ADAPTER](inp)
        added: torch.Tensor = self.lora_B[_ADAPTER](narrow) * self.scaling
        return result + added


class AdaptedModel(nn.Module):
    """A frozen model whose linear layers have adapters, under the names of peft's `PeftModel`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": model})  # peft has a module of this name around the model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["base_model"]["model"], name)  # type: ignore[index]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model does."""
        return self.base_model["model"].forward(*args, **kwargs)


def adapted(model: nn.Module, *, lora: int | None = None, quantised: str | None = None) -> nn.Module:
    """The model with its linear layers quantised, with adapters over them, or both.

    Both leave out the layer that gives the logits, as transformers and peft's ``target_modules="all-linear"`` do.
    Everything but the adapters is frozen.

    Args:
        model: on meta; it is changed.
        lora: rank of the adapters; None: none.
        quantised: one of `QUANTISED_FORMS`; None leaves the weights as they are.

    Raises:
        InputError: the form is unknown, the rank below 1, or the model has no linear layer.
    """
    if quantised is not None and quantised not in QUANTISED_FORMS:
        raise unknown_name("form of quantised weights", quantised, QUANTISED_FORMS)
    if lora is not None and lora < 1:
        raise InputError(f"lora must be the rank of the adapters, 1 or more, found {lora}")
    found = list(_linear_layers(model))
    if not found:
        raise InputError(f"{type(model).__name__} has no linear layers for adapters or quantised weights")
    model.requires_grad_(False)
    for name, layer, (in_features, out_features) in found:
        made: nn.Module = layer
        if quantised is not None:
            made = PackedLinear(in_features, out_features, layer.bias, quantised)  # type: ignore[arg-type]
        if lora is not None:
            made = AdaptedLinear(made, in_features, out_features, lora)
        model.set_submodule(name, made)
    if lora is None:
        return model
    # The input of a step follows from the class's name and the signature of forward.
    forward = wraps(type(model).forward)(AdaptedModel.forward)
    holder: nn.Module = type(f"Peft{type(model).__name__}", (AdaptedModel,), {"forward": forward})(model)
    return holder.train(model.training)


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[int, int]]]:
    """Name, layer, and its features of input and output, but for the layer of the logits."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    output = [model, *model.children()][-1] if output is None else output
    for name, layer in model.named_modules():
        transposed = type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")
        if layer is not output and (transposed or type(layer) is nn.Linear):
            rows, columns = map(int, layer.weight.shape)
            yield name, layer, (rows, columns) if transposed else (columns, rows)
