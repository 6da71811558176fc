"""The step that a plan for generation is made for: the prompt, then the last token with a full key-value cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from elixir.errors import InputError
from elixir.models.step import input_to_trace, max_positions

Step = Callable[[nn.Module, Mapping[str, Any]], None]


def generation_input(model: nn.Module, *, batch: int, prompt: int, new: int) -> dict[str, torch.Tensor]:
    """Prompts of (batch, prompt) tokens, int64: real tensors, or on meta if they are very large.

    Args:
        model: a causal language model of transformers, on meta or real.
        batch: samples that are generated at once.
        prompt: tokens of each prompt.
        new: tokens to generate for each.

    Raises:
        InputError: the model is no causal language model of `transformers`, or `prompt` and `new` exceed its positions
            together.
    """
    name = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) or not hasattr(model, "generate"):
        raise InputError(
            f"generate= plans for causal language models of transformers, found {name}; give inp= and a step_fn= that "
            "runs one forward with its cache, and optimizer_type=None"
        )
    inputs = input_to_trace(model, batch=batch, seq=prompt)
    limit = max_positions(model)
    if limit is not None and prompt + new > limit:
        raise InputError(
            f"{prompt} + {new} tokens are more than the {limit} positions of {name}; generate fewer, or give it as "
            f"many: --positions {prompt + new} for a model by name, max_position_embeddings in its config otherwise"
        )
    return {"input_ids": inputs["input_ids"]}


def generation_step(prompt: int, new: int) -> Step:
    """A step of two calls of the model: the prompt, and the last new token after all others are in the cache.

    Each is as in the loop of `transformers`: the logits of one position, in float32.
    """

    def step(model: nn.Module, inp: Mapping[str, Any]) -> None:
        ids = inp["input_ids"]
        cache = _next_token(model, ids, None)
        if new > 1:
            _lengthen(cache, prompt + new - 2, model)
            _next_token(model, ids[:, -1:], cache)

    return step


def _next_token(model: nn.Module, ids: torch.Tensor, cache: Any) -> Any:
    """Runs the model on new tokens; returns its cache."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    output = model(input_ids=ids, past_key_values=cache, use_cache=True, **last)
    output.logits[:, -1, :].to(dtype=torch.float32, copy=True).argmax(-1)
    return getattr(output, "past_key_values", None)


def _lengthen(cache: Any, tokens: int, model: nn.Module) -> None:
    """Gives each layer of a cache memory for so many tokens, or for those of its window."""
    for layer in getattr(cache, "layers", [None]):
        keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
        if not (isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and keys.dim() == 4):
            raise InputError(
                f"{type(model).__name__} keeps a cache of another kind ({type(layer or cache).__name__}) than keys and "
                "values by token; give inp= and a step_fn= that runs one forward with it, and optimizer_type=None"
            )
        kept = tokens
        if getattr(layer, "is_sliding", False):
            kept, layer.cumulative_length = min(tokens, layer.sliding_window - 1), tokens
        layer.keys = keys.new_empty((*keys.shape[:-2], kept, keys.shape[-1]))
        layer.values = values.new_empty((*values.shape[:-2], kept, values.shape[-1]))
