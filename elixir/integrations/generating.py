"""The traced step of a Trainer that makes its batches itself, as TRL's GRPO does: it generates, scores, then trains."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from elixir.models.samples import planning_batch
from elixir.models.step import generation_step
from elixir.tracer.use_order import memory_alone

_METRICS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"nanmin": torch.amin, "nanmax": torch.amax}
"""Functions of TRL's module -> functions of the same shape that ask for no value."""


def rows_of(trainer: Any, loader: Any) -> Any:
    """The batch to plan for: the longest samples; for a trainer that generates, each as often as it will be there."""
    rank_rows = trainer.args.train_batch_size
    per_sample = getattr(trainer, "num_generations", None)
    if per_sample is None:
        return planning_batch(loader, batch_size=rank_rows)
    rows = rank_rows * (getattr(trainer.args, "steps_per_generation", None) or 1)
    samples = planning_batch(loader, batch_size=-(-rows // per_sample))
    return [dict(samples[number // per_sample % len(samples)]) for number in range(rows)]


@contextmanager
def generation_traced(trainer: Any, model: nn.Module) -> Iterator[None]:
    """While open, `model` generates the most tokens that it may in two calls, and rewards are zeros.

    A trace knows no token that follows from weights, so it cannot run the loop; rewards are functions of the user's,
    which may be slow or write somewhere.
    """

    def generate(input_ids: torch.Tensor, *, generation_config: Any, **_: Any) -> torch.Tensor:
        new = generation_config.max_new_tokens
        generation_step(input_ids.shape[1], new)(model, {"input_ids": input_ids})
        ends = set(getattr(trainer, "eos_token_ids", ()))
        token = next(number for number in range(len(ends) + 1) if number not in ends)
        return torch.cat([input_ids, torch.full_like(input_ids[:, :1], token).expand(-1, new)], dim=1)

    def rewards(inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(len(inputs), len(trainer.reward_funcs))

    with ExitStack() as patched:
        patched.enter_context(patch.object(model, "generate", generate))
        if hasattr(trainer, "_calculate_rewards"):
            patched.enter_context(patch.object(trainer, "_calculate_rewards", rewards))
        yield


def batch_made(trainer: Any, samples: Any, model: nn.Module) -> dict[str, Any]:
    """The batch that the trainer makes of samples, where the traced model is; calls of the model for it count by their
    memory."""
    with memory_alone(), generation_traced(trainer, model):
        batch = trainer._prepare_inputs(samples)
    device = next(model.parameters()).device
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


@contextmanager
def twin_shown(trainer: Any, models: dict[str, nn.Module]) -> Iterator[None]:
    """While open, the trainer's attributes of these names are the traced models, in a step of a whole accumulation.

    The least and the most of metrics, which TRL finds by asking for values, are those of tensors without NaN.
    """
    shown: dict[str, Any] = {**models, "current_gradient_accumulation_steps": trainer.args.gradient_accumulation_steps}
    with ExitStack() as patched:
        patched.enter_context(patch.multiple(trainer, create=True, **shown))
        for name, least in _METRICS.items():
            for owner in {kind.__module__ for kind in type(trainer).__mro__} & sys.modules.keys():
                if hasattr(sys.modules[owner], name):
                    patched.enter_context(patch.object(sys.modules[owner], name, least))
        yield
