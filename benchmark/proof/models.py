"""Models for the timed parts: built in a moment, with random weights that take next to no memory.

Drawing billions of normal numbers on the host would take longer than what is to be timed. All weights are therefore
views of one random buffer as large as the largest; matrix products take as long as on any random weights.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from elixir.models.loading import build
from elixir.models.model_shape import ModelShape, describe
from elixir.models.step import default_input
from elixir.wrapper.assemble.weight_source import OwnInitialisation

INITIAL_STD = 0.02
"""Vocabulary sizes of GPT-2 and OPT (Radford et al. 2019; Zhang et al. 2022)."""

Batch = dict[str, torch.Tensor]


def shape_of(options: dict[str, Any]) -> ModelShape:
    """``{"model": a name, "changes": fields that are other}`` as a shape."""
    return describe(options["model"]).changed(**options.get("changes", {}))


def numel_of(shape: ModelShape) -> int:
    """Number of parameter elements; each layer after the first adds as many."""
    if shape.parameters is not None:
        return shape.parameters
    one, two = (_built_numel(json.dumps(dict(shape.changed(layers=layers).config))) for layers in (1, 2))
    return one + (shape.layers - 1) * (two - one)


@functools.cache
def _built_numel(config: str) -> int:
    return sum(parameter.numel() for parameter in build(json.loads(config)).parameters())


def on_meta(options: dict[str, Any], dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model of a job, without memory."""
    return build(shape_of(options), dtype=dtype, checkpoint=options.get("checkpoint", "none"))


def micro_batches(model: nn.Module, options: dict[str, Any], micro: int, device: torch.device | str) -> list[Batch]:
    """The batch of one optimizer step in parts of `micro` samples; the same for every contender."""
    whole = default_input(model, batch=options["batch"], seq=options["seq"])
    cut = range(0, options["batch"], micro)
    return [{key: value[start : start + micro].to(device) for key, value in whole.items()} for start in cut]


def random_weights(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A value for every parameter by its first name: biases 0, norms 1, matrices random."""
    generator = torch.Generator().manual_seed(0)
    parameters = dict(model.named_parameters())
    pool = torch.empty(max(parameter.numel() for parameter in parameters.values()), dtype=dtype)
    pool.normal_(0.0, INITIAL_STD, generator=generator)
    values = {}
    for name, parameter in parameters.items():
        if parameter.dim() > 1:
            values[name] = pool[: parameter.numel()].view(parameter.shape)
        else:
            values[name] = torch.full(parameter.shape, 0.0 if name.endswith("bias") else 1.0, dtype=dtype)
    return values


class Filling:
    """Gives a model on meta real weights, part by part.

    Args:
        model: on meta; its buffers become real at once.
        device: of the weights and buffers.
        dtype: of the weights.
    """

    def __init__(self, model: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
        self._values = random_weights(model)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._made: dict[nn.Parameter, nn.Parameter] = {}
        self._device, self._dtype = device, dtype
        OwnInitialisation(model, seed=0).fill_buffers()

    def fill(self, part: nn.Module, buffers_on: torch.device | str) -> None:
        """Everything in `part` that is on meta still."""
        for module in part.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    if parameter not in self._made:
                        value = self._values[self._names[parameter]]
                        real = torch.empty(value.shape, dtype=self._dtype, device=self._device).copy_(value)
                        self._made[parameter] = nn.Parameter(real)
                    module._parameters[name] = self._made[parameter]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(buffers_on)


def blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The repeated blocks: the longest list of modules in the model."""
    return max((module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len)
