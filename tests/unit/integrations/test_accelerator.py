"""An ElixirAccelerator's loop gives the numbers of a plain Accelerator's, to the bit, and goes on from its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from elixir.errors import InputError
from elixir.integrations.accelerate import ElixirAccelerator
from elixir.integrations.optimizer_list import OptimizerList
from tests.common.accelerated import Loop, same
from tests.common.trainers import collate, llama, muon_and_adamw, rows

ON_HOST = {"device_memory": "64MiB", "host_budget": "64MiB", "placement": "cpu"}
STREAMED = {"device_memory": "90KiB", "host_budget": "64MiB"}


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    """All Accelerators of a process share a state, which the first one makes."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def test_a_loop_gives_the_same_bits_and_is_resumed(tmp_path: Path) -> None:
    plain = Loop(Accelerator(cpu=True, gradient_accumulation_steps=2))
    ours = Loop(ElixirAccelerator(cpu=True, gradient_accumulation_steps=2, elixir=ON_HOST))
    assert ours.accelerator.elixir.module.plan.accumulation == 2
    assert ours.accelerator.unwrap_model(ours.model).config.model_type == "llama"
    assert ours.epoch() == plain.epoch()
    ours.accelerator.save_state(str(tmp_path / "ours"))
    plain.accelerator.save_state(str(tmp_path / "plain"))
    after = plain.epoch()
    assert ours.epoch() == after
    assert same(plain.weights(), ours.weights())
    for folder in ("ours", "plain"):  # a plain Accelerator's files are taken too
        ours.accelerator.load_state(str(tmp_path / folder))
        assert ours.epoch() == after
        assert same(plain.weights(), ours.weights())
    assert (tmp_path / "elixir_plan.json").exists()
    assert (tmp_path / "ours" / "model.safetensors").exists()


def test_muon_and_adamw_as_one_optimizer(tmp_path: Path) -> None:
    def one(model: torch.nn.Module) -> OptimizerList:
        return OptimizerList(muon_and_adamw(model))

    plain = Loop(Accelerator(cpu=True, gradient_accumulation_steps=2), make=one)
    ours = Loop(ElixirAccelerator(cpu=True, gradient_accumulation_steps=2, elixir=ON_HOST), make=one)
    assert ours.accelerator.elixir.module.plan.optimizer.startswith("Muon + AdamW")
    assert ours.epoch() == plain.epoch()
    ours.accelerator.save_state(str(tmp_path / "ours"))
    plain.accelerator.save_state(str(tmp_path / "plain"))
    after = plain.epoch()
    for folder in ("", "ours", "plain"):
        if folder:
            ours.accelerator.load_state(str(tmp_path / folder))
        assert ours.epoch() == after
        assert same(plain.weights(), ours.weights())
    assert ours.optimizer.step_was_skipped is False


def test_micro_batches_of_a_step_pass_each_layer_together() -> None:
    plain = Loop(Accelerator(cpu=True, gradient_accumulation_steps=2), checkpoint=True)
    accelerator = ElixirAccelerator(cpu=True, gradient_accumulation_steps=2, elixir={**ON_HOST, "pass_size": 2})
    with pytest.raises(InputError, match=r"call prepare\(\) with it"):
        accelerator.one_pass(lambda model, batch: None, [])
    ours = Loop(accelerator, checkpoint=True)
    assert accelerator.elixir.module.plan.pass_size == 2
    for _ in range(2):
        assert ours.epoch_in_passes(2) == plain.epoch()  # the last step has one micro-batch
    assert same(plain.weights(), ours.weights())
    assert accelerator.elixir.module.last_report.demand_loads == 0


@pytest.mark.slow
def test_a_streamed_plan_and_one_that_was_saved(tmp_path: Path) -> None:
    plain = Loop(Accelerator(cpu=True)).epoch()
    accelerator = ElixirAccelerator(cpu=True, elixir=STREAMED)
    ours = Loop(accelerator)
    assert any(not chunk.resident for chunk in accelerator.elixir.module.plan.chunks)
    assert ours.epoch() == plain
    accelerator.elixir.save_plan(tmp_path)
    again = ElixirAccelerator(cpu=True, elixir={"plan": str(tmp_path / "elixir_plan.json")})
    assert Loop(again).epoch() == plain


@pytest.mark.slow
def test_mixed_precision_is_the_dtype_of_the_plan() -> None:
    ours = Loop(ElixirAccelerator(cpu=True, mixed_precision="bf16", elixir=ON_HOST))
    assert ours.accelerator.elixir.module.plan.dtype == "bfloat16"
    assert ours.epoch()[0] == pytest.approx(3.88, abs=0.05)
    other = Accelerator(cpu=True, mixed_precision="bf16")  # what all Accelerators share is as it was
    assert other.native_amp


def test_refusals() -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(InputError, match=r"comes from gradient_accumulation_steps="):
        ElixirAccelerator(cpu=True, elixir={"accumulation": 2})
    with pytest.raises(InputError, match=r"give prepare\(\) the training DataLoader"):
        ElixirAccelerator(cpu=True, elixir=ON_HOST).prepare(model, optimizer)
    with pytest.raises(InputError, match="one model together with its optimizers"):
        ElixirAccelerator(cpu=True, elixir=ON_HOST).prepare(optimizer)
    AcceleratorState._reset_state(True)
    accelerator = ElixirAccelerator(cpu=True, elixir={**ON_HOST, "inp": collate(rows(2, 0))})
    accelerator.prepare(model, optimizer)
    with pytest.raises(InputError, match="by their norm only"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    with pytest.raises(InputError, match="make one for each"):
        accelerator.prepare(llama(), torch.optim.AdamW(llama().parameters()))


@pytest.mark.parametrize("name", ["DEEPSPEED", "FSDP", "MEGATRON_LM"])
def test_other_backends_are_refused_when_they_are_configured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType[name])
    with pytest.raises(InputError, match=rf"{name} is configured .* remove one of the two"):
        ElixirAccelerator.adopt(accelerator, {})


def test_other_precisions_and_kinds_of_parallelism_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    with monkeypatch.context() as changed:
        changed.setattr(Accelerator, "mixed_precision", "fp8")
        with pytest.raises(InputError, match="'fp8' is not known here"):
            ElixirAccelerator.adopt(accelerator, {})
    monkeypatch.setattr(Accelerator, "parallelism_config", SimpleNamespace(total_size=2), raising=False)
    with pytest.raises(InputError, match="data-parallel ranks only"):
        ElixirAccelerator.adopt(accelerator, {})
