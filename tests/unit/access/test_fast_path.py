"""The fast paths of `nn.TransformerEncoder` and attention in evaluation, over streamed weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.common import gpu
from tests.common.parity import MODES, Case, Pair, make_plan, square_loss


class Encoder(nn.Module):
    """An encoder that makes nested tensors of padded input, a single layer, and attention alone."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, activation="gelu")
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.layer(self.encoder(x, src_key_padding_mask=mask))
        return x + self.attention(x, x, x, need_weights=False)[0]


def _case() -> Case:
    torch.manual_seed(0)
    return Case(Encoder(), {"x": torch.randn(2, 6, 32)}, square_loss)


def _evaluated(model: nn.Module, inp: dict[str, Any]) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(**inp)
    model.train()
    return found


MASK = torch.tensor([[False] * 4 + [True] * 2, [False] * 6])


@gpu.not_pretended("no nested tensors")
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("mode", MODES)
def test_evaluation_has_the_bits_of_plain_pytorch(mode: str) -> None:
    it = _case()
    with Pair(it, make_plan(it, mode, allocate_factor=0.6, split_number=4)) as pair:
        for more in ({}, {"mask": MASK}):
            pair.train(2)
            inp = gpu.there({**pair.case.inp, **more}, pair.module.device)
            assert torch.equal(_evaluated(pair.module, inp), _evaluated(pair.plain, inp))


def test_a_hook_of_the_users_is_called_as_in_plain_pytorch() -> None:
    it = _case()
    with Pair(it, make_plan(it, "streamed", allocate_factor=0.6, split_number=4)) as pair:
        calls: list[str] = []
        for name, model in (("mine", pair.module.module), ("plain", pair.plain)):
            model.layer.linear1.register_forward_hook(lambda *_, name=name: calls.append(name))
        assert torch.equal(_evaluated(pair.module, pair.case.inp), _evaluated(pair.plain, pair.case.inp))
        assert calls == ["mine", "plain"]
