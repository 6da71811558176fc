"""Packed batches: documents one after the other in one row, as collators of TRL, transformers and Axolotl make them.

Positions restart with each document. Attention with a mask computes all scores of the row; flash attention computes
those inside of documents, from the tokens at which they begin.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from elixir.errors import InputError, InputTypeError, shortened

if TYPE_CHECKING:
    import torch
    from torch import nn

IGNORED = -100
"""Label of tokens that have no part in the loss, such as the first of a document, which no token of it predicts."""
FLASH = "flash"
"""After a colon: attention inside of documents alone, by flash attention."""


class Packing(NamedTuple):
    """The documents of a packed batch, and how attention keeps them apart."""

    documents: int
    """In each sample."""
    flash: bool
    """Whether attention computes each document alone, otherwise all scores of the row and masks them."""

    @classmethod
    def read(cls, value: object) -> Packing:
        """The packing that a number such as 8, or a text such as ``8:flash``, asks for.

        Raises:
            InputTypeError, InputError: it is neither.
        """
        if not isinstance(value, (int, str)) or isinstance(value, bool):
            raise InputTypeError(f"packed is documents in each sample, such as 8 or '8:flash', got {value!r}")
        count, colon, form = str(value).partition(":")
        if not (count.isascii() and count.isdecimal() and int(count[:20])) or (colon and form != FLASH):
            found = shortened(repr(value))
            raise InputError(f"packed is documents in each sample, 1 or more, such as 8 or 8:flash, found {found}")
        return cls(int(count[:20]), bool(colon))

    def __str__(self) -> str:
        return f"{self.documents}:{FLASH}" if self.flash else str(self.documents)


def packed_batch(model: nn.Module, ids: torch.Tensor, documents: int) -> dict[str, Any]:
    """All samples in one row, each cut into documents whose lengths differ by one token at most.

    Args:
        model: a causal language model of transformers.
        ids: (samples, tokens), int64.
        documents: in each sample.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids`` of (1, all tokens); where the model hands them on to its
        attention, the first token of each document (``cu_seq_lens_q`` and ``cu_seq_lens_k``, int32, with the end of the
        row) and the most tokens of one (``max_length_q``, ``max_length_k``). No cache: with one, transformers would let
        documents see each other, as it does with models that make a mask themselves, such as OPT.

    Raises:
        InputError: the model takes no positions, or a sample has fewer tokens than documents.
    """
    import torch  # late, here and below: the command line reads `Packing` without it

    takes = inspect.signature(model.forward).parameters
    if "position_ids" not in takes:
        raise InputError(
            f"{type(model).__name__} takes no position_ids, so no documents can be packed; leave out packed"
        )
    samples, tokens = ids.shape
    if documents > tokens:
        raise InputError(
            f"{documents} documents do not fit into a sample of {tokens} tokens; pack fewer, or give more seq"
        )
    lengths = [tokens // documents + (number < tokens % documents) for number in range(documents)] * samples
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    row = ids.reshape(1, -1)
    batch: dict[str, Any] = {"input_ids": row, "labels": row.masked_fill(positions == 0, IGNORED)}
    batch["position_ids"] = positions
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values()):
        begins = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        batch |= {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins}
        batch |= dict.fromkeys(("max_length_q", "max_length_k"), max(lengths))
    return batch | ({"use_cache": False} if "use_cache" in takes else {})


def documents_in(batch: Any) -> int | None:
    """The documents of a batch by its positions, as transformers finds them; None if nothing is packed."""
    if not isinstance(batch, Mapping) or batch.get("attention_mask") is not None:
        return None
    import torch

    positions = batch.get("position_ids")
    if not isinstance(positions, torch.Tensor) or positions.is_meta or positions.dim() != 2:
        return None
    restarts = int((positions.diff(dim=-1) != 1).sum())
    return len(positions) + restarts if restarts else None
