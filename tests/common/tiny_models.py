"""Tiny members of every model family, for tests that compare numbers or bytes with plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elixir.models.loading import build
from elixir.models.model_shape import ModelShape, describe

_NAMED = {
    "opt": "opt-125m",
    "gpt2": "gpt2",
    "llama": "llama-2-7b",
    "bert": "bert-base",
    "t5": "t5-small",
    "vit": "vit-base",
    "mixtral": "mixtral-8x7b",
}
FAMILIES = tuple(_NAMED)

# Every dropout a family's config has; all are set by `tiny`, so that one number turns all of them on or off.
_DROPOUTS = {
    "opt": ("dropout", "attention_dropout"),
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "llama": ("attention_dropout",),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "t5": ("dropout_rate",),
    "vit": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "mixtral": ("attention_dropout",),
}
_SHARED_KEYS = ("llama", "mixtral")
"""Families whose tiny member has fewer heads for keys and values than for queries."""


def tiny(
    family: str,
    *,
    dropout: float = 0.0,
    dtype: torch.dtype | None = None,
    checkpoint: str = "none",
    device: str = "cpu",
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    vocabulary: int = 128,
    positions: int = 64,
    seed: int = 0,
    **overrides: Any,
) -> nn.Module:
    """A model of `family` in train mode, on the CPU with weights that depend on `seed` alone, or on meta.

    `vocabulary` is the number of classes for ``vit``, whose images have 16 patches of 8 x 8. `overrides` go to the
    transformers config class. The global random state is left as it was.
    """
    shape = tiny_shape(family, layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary, positions=positions)
    options: dict[str, Any] = dict.fromkeys(_DROPOUTS[family], dropout) | overrides
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(shape.changed(**options), dtype=dtype, checkpoint=checkpoint, device=device)


def tiny_shape(
    family: str, *, layers: int = 2, hidden: int = 64, heads: int = 4, vocabulary: int = 128, positions: int = 64
) -> ModelShape:
    """The shape that `tiny` builds."""
    more: dict[str, Any] = {
        "vit": {"image_size": 32, "patch_size": 8},
        "t5": {"d_kv": hidden // heads},
        "gpt2": {"bos_token_id": vocabulary - 1, "eos_token_id": vocabulary - 1},
        "mixtral": {"num_local_experts": 4, "rope_theta": 10000.0},
    }
    return describe(_NAMED[family]).changed(
        name=f"tiny-{family}",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads // 2 if family in _SHARED_KEYS else heads,
        ffn=2 * hidden if family == "mixtral" else 4 * hidden,
        vocabulary=vocabulary,
        positions=positions,
        **more.get(family, {}),
    )
