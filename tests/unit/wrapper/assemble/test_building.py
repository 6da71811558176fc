"""A model built on meta is filled chunk by chunk: from its own initialisation, a state dict, or safetensors."""

from __future__ import annotations

import copy
import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from elixir.errors import InputError
from elixir.plan.plan import Plan
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from elixir.wrapper.assemble.weight_source import OwnInitialisation, WeightSource
from tests.common import gpu
from tests.common.parity import Case, Pair, case, hf_loss, make_plan, take_step
from tests.common.tiny_models import FAMILIES, tiny


def wrapped(model: nn.Module, plan: Plan, **options: Any) -> ElixirModule:
    """Wraps a model on the CPU, whatever this machine has."""
    return ElixirModule(model, plan, device=gpu.DEVICE, debug=Debug(poison=True), **options)


def meta_case(family: str) -> tuple[Case, nn.Module]:
    """A real model and the same one on meta."""
    return case(family), tiny(family, device="meta")


@pytest.mark.sampled
@pytest.mark.parametrize("family", FAMILIES)
def test_initialises_itself_as_on_the_cpu(family: str) -> None:
    real, meta = meta_case(family)
    identity = list(meta.parameters())
    module = wrapped(meta, make_plan(real, "streamed"))
    assert all(mine is before for mine, before in zip(module.module.parameters(), identity, strict=True))
    state, theirs = module.state_dict(), real.model.state_dict()
    assert list(state) == list(theirs)
    for name, expected in theirs.items():
        found = state[name].float()
        assert torch.isfinite(found).all(), name
        if not expected.is_floating_point() or expected.std() == 0 or expected.numel() < 2:
            assert torch.equal(found, expected.float()), name
        else:  # drawn anew: five standard errors of a standard deviation
            spread = 5 / (2 * expected.numel()) ** 0.5
            assert abs(found.std() / expected.std() - 1) < 2 * spread, name
    for (name, mine), theirs_ in zip(module.module.named_buffers(), real.model.buffers(), strict=True):
        assert torch.equal(mine.cpu(), theirs_), name
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    losses = []
    for _ in range(3):
        loss = hf_loss(module, real.inp)
        take_step(optimizer, loss)
        losses.append(loss.item())
    assert losses[2] < losses[0]


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["state dict", "file", "folder"])
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_takes_given_weights(family: str, how: str, tmp_path: Path) -> None:
    real, meta = meta_case(family)
    state = real.model.state_dict()
    weights: Any = state
    if how != "state dict":
        unshared = {
            name: value.contiguous() for name, value in state.items() if name in dict(real.model.named_parameters())
        }
        names = sorted(unshared)
        for part in (0, 1) if how == "folder" else (slice(None),):
            some = names[part::2] if isinstance(part, int) else names
            save_file(
                {name: unshared[name] for name in some},
                tmp_path / f"model-{part if how == 'folder' else 0}.safetensors",
            )
        weights = tmp_path if how == "folder" else tmp_path / "model-0.safetensors"
    plain = copy.deepcopy(real)
    with Pair(Case(meta, real.inp, hf_loss), make_plan(real, "mixed"), plain=plain.model, weights=weights) as pair:
        pair.assert_same_weights()
        pair.train(3)


def test_wrong_weights_are_refused(tmp_path: Path) -> None:
    real, _ = meta_case("opt")
    state, plan = real.model.state_dict(), make_plan(real, "streamed")
    key = "model.decoder.layers.0.fc1.weight"

    def refused(weights: Any, match: str) -> None:
        with pytest.raises(InputError, match=match):
            wrapped(tiny("opt", device="meta"), plan, weights=weights)

    refused({name: value for name, value in state.items() if name != key}, f"missing {key}")
    refused(state | {"more": torch.zeros(1)}, "unexpected more")
    refused(state | {key: torch.zeros(2)}, r"must have shape \[256, 64\]")
    refused(state | {key: torch.zeros(256, 64, device="meta")}, "on meta themselves")
    refused(tmp_path / "none.safetensors", "no safetensors at")
    refused(tmp_path, "no safetensors at")
    (tmp_path / "bad.safetensors").write_text("no tensors here")
    refused(tmp_path, "cannot be read")
    with pytest.raises(TypeError, match="paths of safetensors"):
        wrapped(tiny("opt", device="meta"), plan, weights=7)


class Bare(nn.Module):
    """A weight and a buffer that only the constructor knows the values of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.gain + self.shift


def test_nothing_is_guessed() -> None:
    real = Case(Bare(), {"x": torch.randn(2, 4)}, lambda model, inp: model(**inp).square().mean())
    plan = make_plan(real, "streamed")
    with torch.device("meta"):
        bare, other = Bare(), Bare()
    bare.shift = torch.ones(4)
    with pytest.raises(InputError, match=r"gain is on meta.*weights="):
        wrapped(bare, plan)
    with pytest.raises(InputError, match="buffers shift"):
        wrapped(other, plan, weights=real.model.state_dict())


def test_values_on_meta_follow_from_the_seed_and_the_name_alone() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    torch.manual_seed(1)
    made = {
        (seed, name): OwnInitialisation(model, seed).parameter(name)
        for seed in (0, 1)
        for name in ("0.weight", "1.weight")
    }
    torch.manual_seed(2)
    assert torch.equal(OwnInitialisation(model, 1).parameter("0.weight"), made[1, "0.weight"])
    assert len({tuple(values.flatten().tolist()) for values in made.values()}) == 4


def test_adapters_on_meta_begin_as_peft_makes_them() -> None:
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        base = tiny("opt")
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]))
    own = OwnInitialisation(model, 0)
    values = {name: own.parameter(name) for name, each in model.named_parameters() if each.requires_grad}
    assert values
    for name, value in values.items():
        begins_as_zero = "lora_B" in name or "lora_embedding_A" in name
        assert bool(value.any()) != begins_as_zero, name
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["k_proj"], init_lora_weights="pissa_niter_4"), "other")
    with pytest.raises(InputError, match="lora_A.*is on meta"):
        OwnInitialisation(model, 0).parameter(
            "base_model.model.model.decoder.layers.0.self_attn.k_proj.lora_A.other.weight"
        )


@pytest.mark.parametrize("given", [True, False])
def test_whole_modules_that_peft_trains_begin_as_the_frozen_ones(given: bool) -> None:
    from peft import LoraConfig, get_peft_model

    values = {name: value + 1 for name, value in tiny("opt").state_dict().items()}
    model = get_peft_model(
        tiny("opt", device="meta"), LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["fc1"])
    )
    source = WeightSource(model, values if given else None, strict=False)
    names = [name for name, each in model.named_parameters() if "modules_to_save" in name and each.requires_grad]
    assert len(names) == 4
    for name in names:
        frozen = name.replace("modules_to_save.default", "original_module")
        value = source.parameter(name)
        assert torch.equal(value, source.parameter(frozen)), name
        own = frozen.removeprefix("base_model.model.").replace(".original_module", "")
        assert torch.equal(value, values[own]) == given


# --- made elsewhere -------------------------------------------------------------------------------------------------


def made_elsewhere(plan: Plan, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings when a model is made_elsewhere under `plan` and trained for a step."""
    it = case("opt", layers=1)
    with caplog.at_level(logging.WARNING):
        module = ElixirModule(it.model, plan, device="cpu")
        optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters()))
        optimizer.backward(it.loss(module, it.inp))
        optimizer.step()
        module.close()
    return [record.getMessage() for record in caplog.records]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(case("opt", layers=1), "streamed")


def test_a_plan_for_another_machine_of_the_same_kind(plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    (said,) = made_elsewhere(dataclasses.replace(plan, hardware_name="lab", device_name="Acme 9000, 64 cores"), caplog)
    assert "made for 1 x lab (Acme 9000, 64 cores), but it runs on cpu" in said


def test_a_plan_that_needs_more_memory_than_there_is(plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    parts = dict.fromkeys(plan.predicted.host_parts, 0) | {"weights": 2**50}
    larger = dataclasses.replace(plan.predicted, host_parts=parts, host_peak_bytes=2**50)
    (said,) = made_elsewhere(dataclasses.replace(plan, predicted=larger), caplog)
    assert "it needs 1024.00 TiB of host memory, of which this machine has" in said
