"""``elixir fit`` with methods, and what it says to write: settings that are as good as it says, and code that runs."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir.cli import main
from elixir.plan.plan import Plan
from tests.common.command_line import fails, page_data, run
from tests.common.trainers import llama

SEQ = 16
COMMAND = ("--hardware", "cpu", "--host-memory", "8GiB", "--seq", str(SEQ), "--json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with its tokenizer, as transformers saves them."""
    folder = tmp_path_factory.mktemp("tiny")
    llama().save_pretrained(folder)
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.models.WordLevel({str(number): number for number in range(48)}, unk_token="0")
    kind = {"pad_token": "0", "bos_token": "1", "eos_token": "2"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), **kind).save_pretrained(folder)
    return folder


@functools.cache
def rows(folder: Path, device_memory: str) -> dict[str, dict[str, Any]]:
    """The rows of ``elixir fit`` by method."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main(["fit", str(folder), *COMMAND, "--batch", "4", "--device-memory", device_memory]) == 0
    return {row["method"]: row for row in json.loads(text.getvalue())["rows"]}


def yours(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    """The names that a user has."""
    ids = [[(start + 3 * k) % 47 + 1 for k in range(SEQ)] for start in range(16)]
    samples = [{"input_ids": each, "attention_mask": [1] * SEQ, "labels": each} for each in ids]
    batch = {name: torch.tensor([each[name] for each in samples[: row["batch"]]]) for name in samples[0]}
    return {"folder": str(folder), "dataset": samples, "batch": batch, "lr": 1e-3}


def assert_planned(plan: Plan, row: dict[str, Any], *, own_loss: bool = False) -> None:
    """Whether a run is the one that was announced; TRL computes the loss by itself, in a buffer of a fixed size."""
    step = plan.step
    assert (step.samples, plan.accumulation, plan.moments) == (row["batch"], row["accumulation"], row["moments"])
    assert plan.pass_size == row["pass_size"]
    if own_loss:
        return
    assert step.fused_kernels == row["fused_kernels"]
    assert bool(plan.activations) == bool(row["activations"])
    assert plan.device_budget_bytes == pytest.approx(row["device_budget_bytes"], rel=0.01)
    assert plan.predicted.device_peak_bytes == pytest.approx(row["device_peak_bytes"], rel=0.1)


@pytest.mark.parametrize("part", ["trainer", "trl", "loop"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_the_code_trains_as_it_was_planned(
    method: str,
    part: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for library in {"lora": ["peft"], "qlora": ["peft", "bitsandbytes"]}.get(method, []) + ["trl"] * (part == "trl"):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    row = rows(folder, "4MiB" if part == "trl" else "1MiB")[method]
    names = yours(folder, row)
    if part == "trl":
        names["dataset"] = pytest.importorskip("datasets").Dataset.from_list(
            [{"input_ids": each["input_ids"]} for each in names["dataset"]]
        )
    exec(row["what_to_write"]["model"], names)
    exec(row["what_to_write"][part], names)
    if part == "loop":
        model, optimizer = names["model"], names["optimizer"]
        for _ in range(2):
            for _ in range(row["accumulation"]):
                optimizer.backward(model(**names["batch"]).loss / row["accumulation"])
            optimizer.step()
            optimizer.zero_grad()
        assert_planned(model.plan, row)
        model.close()
        return
    trainer = names["trainer"]
    trainer.args.max_steps, trainer.args.save_strategy = 2, "no"
    trainer.train()
    assert trainer.state.global_step == 2
    assert_planned(trainer.elixir.module.plan, row, own_loss=part == "trl")
    trainer.elixir.module.close()


def test_a_method_or_adapters_that_are_named_are_all_that_is_tried(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["fit", str(folder), *COMMAND, "--device-memory", "1MiB", "--batch", "1"]
    for more, expected in (
        (["--methods", "lora,full"], [("lora", 16, None), ("full", None, None)]),
        (["--lora", "4"], [("lora", 4, None)]),
        (["--lora", "4", "--quantised", "nf4-double"], [("qlora", 4, "nf4-double")]),
    ):
        status, out, _ = run(capsys, *argv, *more)
        found = json.loads(out)["rows"]
        assert status == 0
        assert [(row["method"], row["lora"], row["quantised"]) for row in found] == expected
    assert "double_quant=True" in found[0]["what_to_write"]["model"]
    assert "did you mean lora" in fails(capsys, *argv, "--methods", "lorra")


def test_what_does_not_fit_says_what_suffices_and_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["fit", "opt-125m", "--hardware", "rtx4090", "--seq", "64", "--device-memory", "400MiB", "--methods", "full"]
    status, out, err = run(capsys, *argv, "--host-memory", "2700MiB")
    assert status == 2
    assert "fits no machine that was tried" in err
    (enough,) = re.findall(r"--host-memory (\S+) suffices", out)
    status, out, _ = run(capsys, *argv, "--host-memory", enough)
    assert status == 0
    assert "moments in 8 bits change numbers" in out
    assert "does not fit" in run(capsys, *argv, "--host-memory", enough, "--moments", "float32")[1]


def test_chosen_settings_are_no_slower_than_others_and_a_plan_with_them_is_as_fast(
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = ["opt-125m", "--hardware", "rtx4090", "--seq", "64", "--device-memory", "1GiB", "--host-memory", "8GiB"]
    step += ["--assume", "nominal"]
    status, out, _ = run(capsys, "fit", *step, "--batch", "4", "--methods", "full", "--json")
    assert status == 0
    (row,) = json.loads(out)["rows"]
    assert row["batch"] * row["accumulation"] == 4
    again = ["--batch", str(row["batch"]), "--accumulation", str(row["accumulation"]), "--fused-kernels", "--json"]
    again += ["--activations", "auto"] if row["activations"] else []
    again += ["--moments", row["moments"], "--pass-size", str(row["pass_size"])]
    other = ["--batch", "4", "--fused-kernels", "--activation-checkpointing", "--json"]
    chosen_s, other_s = (
        json.loads(run(capsys, "plan", *step, *more)[1])["predicted"]["seconds"]["total"] for more in (again, other)
    )
    assert row["step_s"] == pytest.approx(chosen_s, rel=0.02)
    assert chosen_s <= 1.05 * other_s


def test_a_plan_ends_with_the_code_that_runs_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    step = ["opt-125m", "--hardware", "rtx4090", "--seq", "64", "--device-memory", "2GiB", "--host-memory", "8GiB"]
    argv = ["plan", *step, "--no-levers", "--batch", "2", "--accumulation", "4", "--activation-checkpointing"]
    status, out, _ = run(capsys, *argv, "--moments", "bfloat16", "--assume", "nominal", "--no-clipping")
    assert status == 0
    code = out[out.index("# what to write") :]
    for words in (
        'options = {"device_memory": "2GiB", "host_memory": "8GiB", "assume": "nominal", "moments": "bfloat16"}',
        "per_device_train_batch_size=2, gradient_accumulation_steps=4",
        'gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, bf16=True',
        "max_grad_norm=0.0",
        'enable_checkpointing(model, "non-reentrant")',
        "elixir.wrap(model, optimizer, inp=batch, dtype=torch.bfloat16, accumulation=4, **options)",
    ):
        assert words in code
    assert "what to write" not in run(capsys, *argv, "--brief")[1]
    assert json.loads(run(capsys, *argv, "--json")[1])["what_to_write"].keys() == {"model", "trainer", "trl", "loop"}
    more = ("--no-levers", "--json", "--plot", str(tmp_path / "plan.html"))
    status, out, _ = run(capsys, "plan", *step, "--forward", *more)
    assert (status, json.loads(out)["what_to_write"]) == (0, {})
    assert page_data(tmp_path / "plan.html")["views"][0]["notes"] == ""
    packed = ("--batch", "2", "--packed", "4:flash", "--optimizer", "adamw + ema")
    code = json.loads(run(capsys, "plan", *step, *packed, *more)[1])["what_to_write"]
    for part, words in (
        ("model", 'attn_implementation="flash_attention_2"'),
        ("model", '"ema": 0.999'),
        ("trainer", "per_device_train_batch_size=8"),
        ("trainer", "data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=True))"),
        ("trl", "per_device_train_batch_size=2"),
        ("trl", "packing=True, max_length=64"),
        ("loop", "optimizer = torch.optim.AdamW(model.parameters(), lr=lr)"),
    ):
        assert words in code[part]
    assert page_data(tmp_path / "plan.html")["views"][0]["notes"].endswith(code["loop"])
