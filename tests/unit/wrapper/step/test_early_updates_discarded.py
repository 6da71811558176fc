"""New states made in backward, for 16 families of models whose norms cross the limit at random; and each of the reasons
for which they are made again from the old ones, rather than accepted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from elixir.api import dry_run
from elixir.chunk.lanes import Emulation
from elixir.errors import InputError
from elixir.kernels import HybridAdam
from elixir.models.step import default_input
from elixir.optimizer_states import is_copied
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.step.states import States
from elixir.wrapper.step.update import LONGEST_PAUSE_STEPS, REFUSALS, Forecast
from tests.common import gpu, inside
from tests.common.debug import debugged
from tests.common.early import HOMES, attempts, chain, needs_kernel, updating_early
from tests.common.parity import ALL, Case, Pair, case, hf_loss, rehomed
from tests.unit.wrapper.step.test_early_updates import (
    chain_plan,
    make_ordinary,
    settled,
    steps,
)

SMALL: dict[str, Any] = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "vocab_size": 96, "dropout": 0.0}
HEADS: dict[str, Any] = {
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip


def _plain(kind: Any, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Makes an optimizer of a model."""
    return lambda model: kind(model.parameters(), lr=1e-3, **options)  # type: ignore[no-any-return]


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


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("homes", HOMES)
@pytest.mark.parametrize(("before", "given"), [(None, 1e-3), (None, 1e9), (1e-3, 1e9), (1e9, 1e-3), (1e9, 2e-3)])
def test_a_limit_that_is_given_between_backward_and_step(before: float | None, given: float, homes: str) -> None:
    """Frameworks call `clip_grad_norm_` there, with the limit that their user has set."""
    it = chain()
    with Pair(it, chain_plan(it, homes), max_norm=1e9) as pair:
        pair.train(2)
        pair.optimizer.max_norm = before
        pair.backward()
        settled(pair)
        begun = attempts(pair.module)
        assert begun
        pair.max_norm = least = min(given, before or given)
        pair.optimizer.clip_grad_norm_(given)
        pair.step()
        assert inside.early_counts(pair.module)[1] == (len(begun) if least > 1 else 0)
        pair.assert_same_weights()
        check_states(pair)


@pytest.mark.parametrize("homes", HOMES)
def test_a_loss_scale_that_changes_between_backward_and_step(homes: str) -> None:
    """A checkpoint may bring another scale: gradients are divided by the one they were multiplied by."""
    plan = chain_plan(chain(), homes, unified_dtype="float16")
    ends = []
    for each in (plan, make_ordinary(plan)):
        it = chain()
        module = ElixirModule(it.model, each, device=gpu.DEVICE, **debugged({}, poison=True))
        optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=1e-3), initial_scale=2.0**10)
        scale = inside.loss_scale(module)
        for step in range(5):
            optimizer.backward(it.loss(module, gpu.there(it.inp, module.device)))
            if step % 2:
                assert bool(attempts(module)) == each.has_early_updates
                scale.load({**scale.state(), "value": 2.0 ** (8 + step)})
            optimizer.step()
            optimizer.zero_grad()
        ends.append((module.state_dict(), optimizer.state_dict()["state"]))
        module.close()
    (mine, mine_states), (plain, plain_states) = ends
    assert all(torch.equal(mine[name], plain[name]) for name in plain)
    for number, state in plain_states.items():
        assert all(torch.equal(mine_states[number][kind], value) for kind, value in state.items())


@pytest.mark.parametrize("homes", HOMES)
@pytest.mark.parametrize("early", [True, False])
def test_a_gradient_that_comes_late(homes: str, early: bool) -> None:
    """A layer of a chunk gets its gradient in a second backward, when new states without it are there, or begun."""
    it = chain(4)
    plan = replace(updating_early(it, homes, split_number=2), accumulation=1)
    with Pair(it, plan, max_norm=1e9, emulation=Emulation(delay_s=0 if early else 3e-3)) as pair:
        pair.train(1)
        for skipped in ({"skip": 1}, {"skip": 2}):
            pair.backward({**it.inp, **skipped})
            if early:
                settled(pair)
        pair.step()
        pair.assert_same_weights()
        check_states(pair)
        pair.train(2)


@pytest.mark.parametrize("homes", HOMES)
@pytest.mark.parametrize("early", [True, False])
def test_another_plan_comes_only_once_new_states_are_given_up(homes: str, early: bool) -> None:
    it = chain()
    plan = chain_plan(it)
    with Pair(it, plan, max_norm=1e9, emulation=Emulation(delay_s=0 if early else 3e-3)) as pair:
        pair.train(1)
        pair.backward()
        if early:
            settled(pair)
        assert attempts(pair.module)
        other = rehomed(make_ordinary(plan), homes)
        with pytest.raises(InputError, match="between zero_grad"):
            pair.module.rehome(other)
        pair.optimizer.zero_grad()
        pair.plain_optimizer.zero_grad()
        pair.module.rehome(other)
        pair.train(2)
        pair.assert_same_weights()
        check_states(pair)


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


@needs_kernel
@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        (_plain(torch.optim.AdamW), {}, "AdamW (for-loop)"),
        (_plain(torch.optim.AdamW, foreach=True), {}, "AdamW (foreach)"),
        (_plain(torch.optim.NAdam), {}, "Adam (for-loop)"),  # keeps as much
        (_plain(torch.optim.Adam, fused=True), {}, "Adam"),
        (_plain(HybridAdam), {}, "AdamW"),
        (_plain(torch.optim.AdamW), {"use_fused_kernels": {"cross_entropy": "plain"}}, "AdamW"),
    ],
)
def test_a_plan_knows_whether_states_are_copied(
    make: Any, options: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run copies the old states before it makes new ones if, and only if, the plan that it asks for counts on
    that."""
    monkeypatch.setenv("ELIXIR_COMPILE", "wait")
    it = chain()
    how = {"step_fn": lambda model, inp: it.loss(model, inp).backward(), "hardware": "cpu", "host_budget": "1GiB"}
    plan = dry_run(it.model, make(it.model), inp=it.inp, **how, **options)
    assert plan.optimizer == expected
    copied: list[object] = []
    copy = States.copy_from
    monkeypatch.setattr(States, "copy_from", lambda mine, other: (copied.append(mine), copy(mine, other)))
    _, kept = steps(it, chain_plan(it), [1e9, 1e9, 1e9], dict(options), make)
    assert kept[-1]
    assert bool(copied) == is_copied(plan.optimizer, plan.moments)


def test_optimizers_of_which_one_copies() -> None:
    it = chain()
    first, second = it.model.layers[:2].parameters(), it.model.layers[2:].parameters()  # type: ignore[index]
    optimizers = [torch.optim.AdamW(first, fused=True), torch.optim.AdamW(second)]
    how = {"step_fn": lambda model, inp: it.loss(model, inp).backward(), "hardware": "cpu", "host_budget": "1GiB"}
    assert dry_run(it.model, optimizers, inp=it.inp, **how).optimizer == "AdamW (for-loop)"


# --- the forecast ---------------------------------------------------------------------------------------------------


def stepped(forecast: Forecast, *, clipped: bool = False, made: int = 1, kept: int | None = None) -> None:
    kept = made * (not clipped) if kept is None else kept
    forecast.stepped(other_factor=clipped, scale=1.0, started=made, kept=kept)


def test_the_first_step_is_tried() -> None:
    assert Forecast().expects_to_keep(1.0)


def test_a_run_that_clips_in_every_step_pays_for_two_of_them() -> None:
    forecast, made = Forecast(), 0
    for _ in range(100):
        tried = forecast.expects_to_keep(1.0)
        made += tried
        stepped(forecast, clipped=True, made=int(tried))
    assert made == REFUSALS


def test_a_run_that_ceases_to_clip_is_noticed_after_one_step() -> None:
    forecast = Forecast()
    for _ in range(10):
        stepped(forecast, clipped=True, made=0)
    assert not forecast.expects_to_keep(1.0)
    stepped(forecast, made=0)
    assert forecast.expects_to_keep(1.0)


def test_one_clipped_step_changes_nothing() -> None:
    forecast = Forecast()
    for clipped in (False, True, False, True):
        stepped(forecast, clipped=clipped)
        assert forecast.expects_to_keep(1.0)


def test_a_scale_that_has_grown_may_overflow() -> None:
    forecast = Forecast()
    stepped(forecast)
    assert not forecast.expects_to_keep(2.0)
    forecast.stepped(other_factor=False, scale=2.0, started=0, kept=0)
    assert forecast.expects_to_keep(2.0)


def test_options_that_change_after_every_backward_are_tried_ever_more_rarely() -> None:
    forecast, tries = Forecast(), []
    for step in range(600):
        tried = forecast.expects_to_keep(1.0)
        tries += [step] * tried
        stepped(forecast, made=int(tried), kept=0)
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert pauses == sorted(pauses)
    assert [each > 1 for each in pauses[:REFUSALS]] == [False] * (REFUSALS - 1) + [True]
    assert LONGEST_PAUSE_STEPS <= pauses[-1] <= LONGEST_PAUSE_STEPS + 1
    stepped(forecast)  # kept once
    for _ in range(LONGEST_PAUSE_STEPS):
        stepped(forecast, made=0)
    assert forecast.expects_to_keep(1.0)
