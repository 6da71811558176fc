"""New states made in backward, for 16 families of models whose norms cross the limit at random; and each of the reasons
for which they are made again from the old ones, rather than accepted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elixir.chunk.lanes import Emulation
from elixir.models.step import default_input
from elixir.wrapper.step.update import Forecast
from tests.common import inside
from tests.common.early import HOMES, attempts, chain, updating_early
from tests.common.parity import ALL, Case, Pair, case, hf_loss
from tests.unit.wrapper.step.test_early_updates import (
    chain_plan,
    settled,
)

SMALL: dict[str, Any] = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "vocab_size": 96, "dropout": 0.0}
HEADS: dict[str, Any] = {
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip


def _bart() -> Case:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(**SMALL, **HEADS, max_position_embeddings=32, forced_eos_token_id=2)
    model = BartForConditionalGeneration(config)
    return Case(model, default_input(model, batch=2, seq=12), hf_loss)


def _whisper() -> Case:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    more: dict[str, Any] = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
    model = WhisperForConditionalGeneration(WhisperConfig(**SMALL, **HEADS, **more))
    inp = {"input_features": torch.randn(2, 8, 32), "labels": torch.randint(3, 96, (2, 6))}
    return Case(model, inp, hf_loss)


def _mamba() -> Case:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4))
    ids = torch.randint(96, (2, 10))
    return Case(model, {"input_ids": ids, "labels": ids, "use_cache": False}, hf_loss)


def _convnext() -> Case:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes: dict[str, Any] = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 16}
    model = ConvNextForImageClassification(ConvNextConfig(**sizes, patch_size=4, num_labels=5))
    return Case(model, {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 3])}, hf_loss)


MORE: dict[str, Callable[[], Case]] = {"bart": _bart, "whisper": _whisper, "mamba": _mamba, "convnext": _convnext}
IN_CI = ("t5", "mamba")


def of_family(name: str) -> Case:
    """A tiny model of a family."""
    if name not in MORE:
        return case(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = MORE[name]()
    made.model.train()
    return made


@pytest.mark.parametrize(
    ("place", "name"),
    [pytest.param(i, n, marks=() if n in IN_CI else pytest.mark.slow) for i, n in enumerate((*ALL, *MORE))],
)
def test_every_family_has_the_bits_of_plain_pytorch_while_norms_cross_the_limit(place: int, name: str) -> None:
    """The limit is drawn next to the norm of each step, so that about half of the steps clip, in no order."""
    chance = random.Random(name)
    it = of_family(name)
    kept, redone = 0, 0
    with Pair(it, updating_early(it, HOMES[place % len(HOMES)])) as pair:
        for limit in (1.5, 1.5, 0.5, 1.5, 1.5, *(chance.choice([None, 0.5, 0.9, 1.1, 2.0]) for _ in range(5))):
            pair.backward()
            norm = float(torch.nn.utils.get_total_norm(p.grad for p in pair.plain.parameters() if p.grad is not None))
            pair.max_norm = pair.optimizer.max_norm = None if limit is None else limit * norm
            pair.step()
            kept += inside.early_counts(pair.module)[1]
            redone += inside.early_counts(pair.module)[0] - inside.early_counts(pair.module)[1]
        pair.assert_same_weights()
        check_states(pair)
    assert kept
    assert redone


def check_states(pair: Pair) -> None:
    """States are plain PyTorch's, counts of steps included."""
    mine, plain = pair.optimizer.state_dict()["state"], pair.plain_optimizer.state_dict()["state"]
    for number, state in plain.items():
        for kind, value in state.items():
            assert torch.equal(mine[number][kind].cpu(), value.cpu()), (number, kind)


@pytest.mark.parametrize("homes", HOMES)
@pytest.mark.parametrize("early", [True, False])
def test_closing_between_backward_and_step_leaves_the_old_weights(homes: str, early: bool) -> None:
    it = chain()
    pair = Pair(it, chain_plan(it, homes), max_norm=1e9, emulation=Emulation(delay_s=0 if early else 3e-3))
    pair.train(2)
    pair.backward()
    assert attempts(pair.module)
    if early:
        settled(pair)
    model = pair.module.module
    pair.module.close()
    for name, value in pair.plain.state_dict().items():
        assert torch.equal(model.state_dict()[name].cpu(), value.cpu()), name


# --- the forecast ---------------------------------------------------------------------------------------------------


def test_the_first_step_is_tried() -> None:
    assert Forecast().expects_to_keep(1.0)
