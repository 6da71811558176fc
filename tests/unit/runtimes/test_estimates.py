"""One call says what a step takes, whether it fits, and what would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import elixir
from elixir.errors import InputError, InputTypeError, PlanError
from tests.common.command_line import fails, run
from tests.common.own_step import OWN_INPUT, OWN_MODEL, OWN_STEP
from tests.common.tiny_models import tiny

MIB = 2**20


def batch_of(samples: int, seq: int = 64) -> dict[str, torch.Tensor]:
    ids = torch.arange(samples * seq).reshape(samples, seq) % 64
    return {"input_ids": ids, "labels": ids}


def test_it_is_what_the_step_takes_and_leaves_the_model_as_it_is() -> None:
    model = tiny("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = elixir.estimate(model, batch_of(4), torch.optim.AdamW(model.parameters(), fused=True), hardware="h200")
    assert found.peak_bytes == found.trace.step_peak_bytes == sum(found.parts.values())
    assert found.trace.optimizer == "AdamW (fused)"
    assert found.when in ("forward", "backward", "optimizer")
    assert found.fits("80GiB")
    assert not found.fits(found.peak_bytes)
    assert found.fits(found.needed_bytes)
    assert "one step takes" in str(found)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_step_of_the_users_counts_as_it_is() -> None:
    model, batch = tiny("llama"), batch_of(4)

    def twice(model: Any, batch: dict[str, torch.Tensor]) -> None:
        (model(**batch).loss + model(**batch).loss).backward()

    once, both = (elixir.estimate(model, batch, "SGD", step_fn=step, hardware="h200") for step in (None, twice))
    assert both.peak_bytes > once.peak_bytes
    assert elixir.estimate(model, batch, None, hardware="cpu").device_kind == "cpu"


def test_a_guard_lets_pass_what_fits_and_names_what_would() -> None:
    model, optimizer = tiny("llama"), torch.optim.AdamW
    model.train()
    found = elixir.guard(model, batch_of(64), optimizer, memory="80GiB", hardware="h100")
    resting = found.needed_bytes - found.parts["activations"]
    with pytest.raises(PlanError) as caught:
        elixir.guard(model, batch_of(64), optimizer, memory=resting + found.parts["activations"] // 3, hardware="h100")
    actions = " ".join(lever.action for lever in caught.value.levers)
    assert "micro-batches of" in actions
    assert "activation checkpointing" in actions
    assert caught.value.needed_bytes == found.needed_bytes
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    assert (hooks, model.is_gradient_checkpointing) == (0, False)
    assert all(lever.saves_bytes > 0 for lever in caught.value.levers)


def test_a_guard_names_a_plan_where_states_are_too_much() -> None:
    model = tiny("llama", layers=4, hidden=512)
    found = elixir.estimate(model, batch_of(1), "AdamW", hardware="h100")
    with pytest.raises(PlanError, match=r"elixir\.wrap\(") as caught:
        elixir.guard(model, batch_of(1), "AdamW", memory=found.needed_bytes - 64 * MIB, hardware="h100")
    lever = next(each for each in caught.value.levers if "elixir.wrap(" in each.action)
    assert lever.saves_bytes > 64 * MIB


def test_a_tuple_is_cut_as_a_dict_is() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 8))

    def step(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        torch.nn.functional.mse_loss(model(batch[0]), batch[1]).backward()

    batch = (torch.ones(4096, 64), torch.ones(4096, 8))
    needed = elixir.estimate(model, batch, "SGD", step_fn=step, hardware="h100").needed_bytes
    with pytest.raises(PlanError, match="micro-batches of 2048"):
        elixir.guard(model, batch, "SGD", step_fn=step, memory=needed - 8 * MIB, hardware="h100")


def test_what_is_no_optimizer_of_torch_is_refused() -> None:
    class Mine(torch.optim.Optimizer):
        pass

    with pytest.raises(InputError, match="Mine"):
        elixir.estimate(tiny("llama"), batch_of(1), Mine, hardware="h200")
    with pytest.raises(InputTypeError, match="int"):
        elixir.estimate(tiny("llama"), batch_of(1), 3, hardware="h200")


ASKED = ("opt-125m", "--hardware", "h100", "--host-memory", "256GiB", "--batch", "2", "--seq", "128")


def test_a_plan_for_a_runtime_lists_settings_and_writes_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "fsdp.yaml"
    words = ("--world-size", "2", "--runtime", "fsdp2", "--write-config", str(out))
    status, text, _ = run(capsys, "plan", *ASKED, *words)
    assert status == 0
    assert "FSDP2 keep, 1 x 2" in text
    assert "of Elixir's plan" in text
    assert "num_processes: 2" in out.read_text()
    assert "OPTDecoderLayer" in out.read_text()


def test_all_runtimes_stand_in_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--hardware", "h100", "--batches", "2", "--seq", "128", "--runtime", "all", "--json")
    status, text, _ = run(capsys, "sweep", "opt-125m", *words)
    assert status == 0
    rows = json.loads(text)["rows"]
    assert [row["runtime"] for row in rows] == ["ddp", "fsdp2", "deepspeed", "elixir"]
    assert all(row["fits"] and row["tokens_per_s"] > 0 for row in rows)


def test_accumulation_and_a_models_own_step_count_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--hardware", "h100", "--host-memory", "64GiB", "--runtime", "all", "--json")
    once, four = (
        {
            row["setting"]: row
            for row in json.loads(run(capsys, "plan", *ASKED[:1], *ASKED[5:], *words, *more)[1])["rows"]
        }
        for more in ((), ("--accumulation", "4"))
    )
    assert "DDP, 4 x 2" in four
    assert four["Elixir"]["tokens_per_s"] == pytest.approx(once["Elixir"]["tokens_per_s"], rel=0.7)
    own = ("plan", OWN_MODEL, "--inp", OWN_INPUT, "--step", OWN_STEP, *words)
    rows = json.loads(run(capsys, *own)[1])["rows"]
    assert {row["runtime"] for row in rows} == {"ddp", "fsdp2", "deepspeed", "elixir"}
    assert all(row["fits"] and row["tokens_per_s"] is None for row in rows)


def test_a_fit_takes_the_fewest_devices_that_suffice(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--hardware", "t4,h100", "--world-sizes", "1,2", "--batch", "1", "--seq", "128", "--runtime", "ddp")
    status, text, _ = run(capsys, "fit", "opt-1.3b", *asked, "--json")
    assert status == 0
    rows = json.loads(text)["rows"]
    assert [(row["machine"], row["world_size"], row["fits"]) for row in rows] == [("h100", 1, True), ("t4", 2, False)]
    assert "lacks" in rows[1]["why"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--runtime", "all", "--write-config", "x.yaml"), "name it with --runtime"),
        (("--write-config", "x.yaml"), "--write-config writes what a runtime reads"),
        (("--runtime", "ddp", "--moments", "8bit"), "--moments is for a plan of Elixir"),
        (("--runtime", "ddp", "--optimizer", "sgd"), "predicts Adam"),
        (("--runtime", "ddp", "--activation-checkpointing", "non-reentrant:1"), "all layers or none"),
        (("--runtime", "ddp", "--device-memory", "1GiB", "--write-config", "x.yaml"), "no setting of ddp fits"),
    ],
)
def test_what_cannot_be_written_is_said(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in fails(capsys, "plan", *ASKED, *words)
