"""Flash attention of models of transformers, by an operator of PyTorch that a trace can follow: inside of documents if
the batch is packed. The package flash-attn need not be there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elixir.errors import InputError
from elixir.models.packing import FLASH

_BY_DOCUMENT = "varlen"
"""Name under which transformers knows `attention_by_document`."""
_FLASH_ATTENTION = torch.ops.aten._flash_attention_forward.default  # noqa: SLF001 - that of `torch.nn.attention.varlen`
_HALF = (torch.float16, torch.bfloat16)


def attend_by_document(model: nn.Module) -> None:
    """Gives a model of transformers the attention of `attention_by_document`.

    Raises:
        InputError: it has no flash attention.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_BY_DOCUMENT, attention_by_document)
    AttentionMaskInterface.register(_BY_DOCUMENT, AttentionMaskInterface()["flash_attention_2"])
    if getattr(model, "_supports_flash_attn", False):
        model.set_attn_implementation(_BY_DOCUMENT)  # type: ignore[operator]
    if getattr(getattr(model, "config", None), "_attn_implementation", None) != _BY_DOCUMENT:
        raise InputError(f"transformers has no flash attention for {type(model).__name__}; leave out :{FLASH}")


@contextmanager
def flash_attention_on_meta() -> Iterator[None]:
    """While open, models of transformers whose attention is flash, of any version or package, run the operator of
    PyTorch that does the same, so that meta tensors go through it; the package need not be there."""
    module = sys.modules.get("transformers.modeling_utils")
    known = getattr(module, "ALL_ATTENTION_FUNCTIONS", None)
    if known is None:
        yield
        return
    before = {name: known[name] for name in known if "flash" in name and "|" not in name}

    def of(original: Any) -> Any:
        def attention(module: Any, query: torch.Tensor, key: Any, value: Any, mask: Any, **options: Any) -> Any:
            # With padding transformers takes it out first, which the original does.
            ours = query.is_meta and mask is None
            return (attention_by_document if ours else original)(module, query, key, value, mask, **options)

        return attention

    shared = type(known)()  # without the functions that this program has put over others
    try:
        for name, original in before.items():
            known[name] = of(original)
        yield
    finally:
        for name, original in before.items():
            if shared.get(name) is original:
                del known[name]
            else:
                known[name] = original


def attention_by_document(  # noqa: PLR0913 - as transformers calls it
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Flash attention of PyTorch as an attention function of transformers: inside of documents if the batch is packed.

    Args:
        module: the layer.
        query, key, value: (samples, heads, tokens, width); keys and values may have fewer heads.
        attention_mask: None; padding is not supported.
        dropout: its probability.
        scaling: of the scores; None: by the width.
        sliding_window: tokens that each token sees, itself included; None: all.
        is_causal: whether tokens see earlier ones alone; None: as the layer says.
        position_ids: (1, tokens), which tell the documents if nothing else does.
        cu_seq_lens_q, cu_seq_lens_k: the first token of each document, then the end.
        max_length_q, max_length_k: tokens of the longest.

    Returns:
        (samples, tokens, heads, width), and None for the scores.

    Raises:
        InputError: there is a mask, or the dtype is neither bfloat16 nor float16.
    """
    if attention_mask is not None:
        raise InputError("flash attention by document takes no attention_mask; leave padding out of packed batches")
    query, key, value = (each.transpose(1, 2) for each in _in_half(module, query, key, value))
    width, wide = value.shape[-1], query.shape[-1]
    if width != wide:
        value = F.pad(value, (0, wide - width))
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = None if sliding_window is None or sliding_window >= key.shape[1] else sliding_window - 1
    if cu_seq_lens_q is None and _restarts(position_ids, len(query)):
        assert position_ids is not None
        begins = (position_ids.reshape(-1) == position_ids.min()).nonzero().view(-1).to(torch.int32)
        end = torch.tensor([position_ids.numel()], dtype=torch.int32, device=begins.device)
        cu_seq_lens_q = cu_seq_lens_k = torch.cat([begins, end])
        max_length_q = max_length_k = int(cu_seq_lens_q.diff().max())
    shape = query.shape
    if cu_seq_lens_q is not None:
        query, key, value = (each.reshape(-1, *each.shape[2:]) for each in (query, key, value))
    output: torch.Tensor = _FLASH_ATTENTION(
        query,
        key,
        value,
        cu_seq_lens_q,
        cu_seq_lens_k,
        max_length_q or shape[1],
        max_length_k or key.shape[-3],
        dropout,
        causal,
        False,
        scale=scaling,
        window_size_left=window,
        window_size_right=window if window is None or not causal else 0,
    )[0]
    return output.view(shape)[..., :width], None


def _in_half(module: nn.Module, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors as flash attention takes them: float32 ones, as norms give, in the dtype of the products around."""
    first = tensors[0]
    if first.dtype is torch.float32:
        kind = first.device.type
        weights = (each.weight.dtype for each in module.modules() if isinstance(each, torch.nn.Linear))
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else next(weights, first.dtype)
        tensors = tuple(each.to(dtype) for each in tensors)
    if tensors[0].dtype not in _HALF:
        found = str(tensors[0].dtype).removeprefix("torch.")
        raise InputError(f"flash attention computes in bfloat16 or float16, found {found}; give such a dtype")
    return tensors


def _restarts(positions: torch.Tensor | None, samples: int) -> bool:
    """Whether the positions of a row begin anew."""
    if positions is None or samples != 1 or positions.shape[-1] == 1:
        return False
    return bool((positions.diff(dim=-1) != 1).any())
